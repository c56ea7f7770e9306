"""The drafter's context: the target's hidden states of the accepted path, in order."""

import pytest
import torch

from conftest import engine, generate, prompts
from planting import Planter, eager_drafter, planting


@pytest.mark.exact
def test_context_is_that_of_the_chain(models, monkeypatch):
    """Losing it costs acceptance only, so that no comparison of outputs would notice."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    context: dict[int, torch.Tensor] = {}
    precompute = DFlashSpeculator._precompute_context_kv

    def spy(self, start, end, dummy_run=False):
        slots = self._context_slot_mappings[0][start:end]
        for row in (slots >= 0).nonzero().flatten().tolist():
            position = int(self.context_positions[start + row])
            context[position] = self.hidden_states[start + row].clone()
        return precompute(self, start, end, dummy_run)

    monkeypatch.setattr(DFlashSpeculator, "_precompute_context_kv", spy)
    (prompt,) = prompts((33,))
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
    target, drafter = models.target("qwen3"), models.drafter(7)
    with eager_drafter(), engine(target, drafter, method="dflash", num_tokens=7) as llm:
        context.clear()  # of what warm-up drafted
        (truth,) = generate(llm, [prompt], params)
        chain = dict(context)
    planter = Planter({tuple(prompt): truth})
    with eager_drafter(), planting(planter, run_drafter=True):
        with engine(target, drafter, num_tokens=16) as llm:
            context.clear()
            planter.planted.clear()
            assert generate(llm, [prompt], params) == [truth]
    assert sum(planter.planted) > len(planter.planted)
    # Every position up to where the last step began, which the two share.
    shared = sorted(chain.keys() & context.keys())
    assert shared == list(range(len(shared))) and len(shared) > 80
    for position in shared:
        torch.testing.assert_close(context[position], chain[position], atol=1e-4, rtol=1e-3)
