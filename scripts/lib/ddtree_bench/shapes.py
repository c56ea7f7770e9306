"""Models that are a shape only: a config, no weights (load_format="dummy")."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """A Qwen3 target and its DFlash drafter."""

    layers: int
    draft_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    mask_token_id: int
    block_size: int
    max_positions: int
    dtype: str

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Folders of target and drafter below `folder`."""
        target, drafter = folder / "target", folder / "drafter"
        config = {
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
        }
        first = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": self.layers}
        # Spread over the layers, as published drafters have them.
        step = (self.layers - 4) / max(1, self.draft_layers - 1)
        ids = [1 + int(i * step) for i in range(self.draft_layers)]
        second = {
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": self.draft_layers,
            "layer_types": ["full_attention"] * self.draft_layers,
            "block_size": self.block_size,
            "num_target_layers": self.layers,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": ids},
        }
        for path, own in ((target, first), (drafter, second)):
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.json").write_text(json.dumps(config | own))
        return target, drafter


QWEN3_8B = Shape(
    layers=36,
    draft_layers=5,
    hidden=4096,
    intermediate=12288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    mask_token_id=151669,
    block_size=16,
    max_positions=40960,
    dtype="bfloat16",
)
