"""What the bench has every rank of an engine do (`worker_extension_cls`)."""

from __future__ import annotations

import torch


class Rank:
    """Mixed into vLLM's worker; `LLM.collective_rpc` calls the methods on every rank."""

    def randomize_drafts(self) -> None:
        """From now on propose random tokens, the same on every rank."""
        speculator = self.model_runner.speculator
        propose = speculator.propose
        vocab = self.vllm_config.model_config.get_vocab_size()
        generator = torch.Generator(self.device).manual_seed(0)
        speculator.propose = lambda *args, **options: propose(*args, **options).random_(
            0, vocab, generator=generator
        )
