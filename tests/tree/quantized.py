"""Writes a tiny checkpoint's linear layers in the formats of quantised ones.

The layers inside its decoder are rounded to the nearest; embeddings and head stay as they are.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# The smallest that Marlin, on a GPU, takes.
GROUP = 32
BLOCK = 128
# Where AWQ puts a word's eight values.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_FP8 = torch.float8_e4m3fn

Packed = dict[str, torch.Tensor]


def _compressed_tensors(fmt: str, weights: dict, activations: dict | None) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def _args(num_bits: int, kind: str, strategy: str, dynamic: bool = False, **more) -> dict:
    return {
        "num_bits": num_bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": dynamic,
        **more,
    }


def _int8(weight: torch.Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _nibbles(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in 0..15 around 8, int64 [N, K], and scales [N, K / GROUP]."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2, keepdim=True) / 7
    return ((groups / scale).round() + 8).flatten(1).long(), scale.squeeze(2)


def _words(nibbles: torch.Tensor, places: list[int] | range = range(8)) -> torch.Tensor:
    """Eight values of the last dimension to an int32, value i at place places[i]."""
    shifts = torch.tensor([4 * p for p in places])
    words = (nibbles.unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _w4a16(weight: torch.Tensor) -> Packed:
    nibbles, scale = _nibbles(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _words(nibbles), "weight_scale": scale, "weight_shape": shape}


def _awq(weight: torch.Tensor) -> Packed:
    nibbles, scale = _nibbles(weight)
    zeros = torch.full_like(scale, 8, dtype=torch.int64)
    return {
        "qweight": _words(nibbles.T, _AWQ_PLACES),
        "qzeros": _words(zeros.T, _AWQ_PLACES),
        "scales": scale.T,
    }


def _gptq(weight: torch.Tensor) -> Packed:
    nibbles, scale = _nibbles(weight)
    zeros = torch.full_like(scale, 7, dtype=torch.int64)  # one less, by its convention
    return {
        "qweight": _words(nibbles).T,
        "qzeros": _words(zeros.T),
        "scales": scale.T,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _fp8(weight: torch.Tensor) -> Packed:
    scale = weight.abs().max().float() / torch.finfo(_FP8).max
    return {"weight": (weight / scale).to(_FP8), "weight_scale": scale}


def _fp8_blocks(weight: torch.Tensor) -> Packed:
    blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / torch.finfo(_FP8).max
    packed = (blocks / scale[:, None, :, None]).to(_FP8)
    return {"weight": packed.view(weight.shape), "weight_scale_inv": scale}


FORMATS: dict[str, tuple[Callable[[torch.Tensor], Packed], dict[str, Any]]] = {
    "compressed-tensors W8A8": (
        _int8,
        _compressed_tensors(
            "int-quantized", _args(8, "int", "channel"), _args(8, "int", "token", dynamic=True)
        ),
    ),
    "compressed-tensors W4A16": (
        _w4a16,
        _compressed_tensors("pack-quantized", _args(4, "int", "group", group_size=GROUP), None),
    ),
    "AWQ": (
        _awq,
        {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "GPTQ": (
        _gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "desc_act": False,
            "lm_head": False,
        },
    ),
    "fp8": (_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 in blocks": (
        _fp8_blocks,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    ),
}


def quantize(folder: Path, name: str) -> None:
    """Rewrite the checkpoint in `folder` in one of FORMATS."""
    pack, config = FORMATS[name]
    weights: Packed = {}
    for key, value in load_file(folder / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            packed = pack(value)
            weights |= {key.removesuffix("weight") + k: v for k, v in packed.items()}
        else:
            weights[key] = value
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
