"""Models that are a shape only: a config, no weights (load_format="dummy")."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """A Qwen3 target and its DFlash drafter.

    With `linear_heads`, of keys and of values, three of four layers of the target are gated delta
    nets, as in Qwen3.5.
    """

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
    draft_heads: tuple[int, int, int] | None = None  # heads, kv_heads, head_dim: the target's
    linear_heads: tuple[int, int] | None = None
    linear_head_dim: int = 128

    @property
    def state_bytes(self) -> int:
        """Of a request without speculation: float32 states and three columns of bfloat16."""
        if self.linear_heads is None:
            return 0
        keys, values = self.linear_heads
        state = 4 * values * self.linear_head_dim**2
        columns = 2 * 3 * (2 * keys + values) * self.linear_head_dim
        return self.layers * 3 // 4 * (state + columns)

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
        if self.draft_heads is not None:
            names = ("num_attention_heads", "num_key_value_heads", "head_dim")
            second |= dict(zip(names, self.draft_heads, strict=True))
        if self.linear_heads is not None:
            kinds = ["linear_attention"] * 3 + ["full_attention"]
            first |= {
                "architectures": ["Qwen3_5ForCausalLM"],
                "model_type": "qwen3_5_text",
                "layer_types": kinds * (self.layers // 4),
                "attn_output_gate": True,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.25,
                },
                "linear_num_key_heads": self.linear_heads[0],
                "linear_num_value_heads": self.linear_heads[1],
                "linear_key_head_dim": self.linear_head_dim,
                "linear_value_head_dim": self.linear_head_dim,
                "linear_conv_kernel_dim": 4,
                "mamba_ssm_dtype": "float32",
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

QWEN36_27B = Shape(
    layers=64,
    draft_layers=5,
    hidden=5120,
    intermediate=17408,
    heads=24,
    kv_heads=4,
    head_dim=256,
    vocab=248320,
    mask_token_id=248070,
    block_size=16,
    max_positions=32768,
    dtype="bfloat16",
    draft_heads=(32, 8, 128),
    linear_heads=(16, 48),
)
