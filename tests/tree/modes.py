"""The ways an engine runs in these tests; `DDTREE_MODE` names one.

The CPU has its own. A GPU has one for each attention backend, with and without CUDA
graphs, with a KV cache of the model's type and of fp8; `scripts/test.sh gpu` runs each in a
process of its own, with the files listed here. Standard library only: the scripts read this.
"""

import os
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mode:
    """An engine's backend and precision.

    Attributes:
        dtype: of weights and activations. In float32 a row's logits hardly depend on how
            many rows share its batch, and trees must give the very tokens of no speculation.
            In bfloat16 two tokens that nearly tie may change places.
        graphs: FULL CUDA graphs for steps of decoding; else everything runs eagerly.
        compiled: models are compiled, as vLLM does unless told otherwise; with `graphs`, steps
            that no FULL graph was captured for run in piecewise ones.
        files: what `test.sh gpu` runs in it.

    """

    dtype: str
    backend: str | None = None
    kv_cache_dtype: str = "auto"
    graphs: bool = False
    compiled: bool = False
    files: tuple[str, ...] = field(default=(), repr=False)

    @property
    def on_gpu(self) -> bool:
        return self.backend is not None

    @property
    def exact(self) -> bool:
        return self.dtype == "float32" and self.kv_cache_dtype == "auto"

    @property
    def head_dim(self) -> int:
        """Of tiny models: FlashAttention and the CPU's gated delta nets in bfloat16 start at 64.

        The interpreter is faster with less.
        """
        return 64 if self.on_gpu or self.dtype == "bfloat16" else 32

    @property
    def options(self) -> dict[str, Any]:
        """Of `vllm.LLM`."""
        eager = not (self.graphs or self.compiled)
        options: dict[str, Any] = {"dtype": self.dtype, "enforce_eager": eager}
        if self.on_gpu:
            options["attention_backend"] = self.backend
            options["kv_cache_dtype"] = self.kv_cache_dtype
            # Of gated delta nets; the default may have to be compiled first.
            options["additional_config"] = {"gdn_prefill_backend": "triton"}
            # Only looked at before the start, for the KV cache has a size of its own: several
            # processes share the device.
            options["gpu_memory_utilization"] = 0.05
        if self.graphs and not self.compiled:
            options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        return options

    @property
    def speculative_config(self) -> dict[str, Any]:
        # The drafter's backend is a setting of its own.
        return {"attention_backend": self.backend} if self.on_gpu else {}


# Masks, positions, compaction: what differs between backends.
_CORE = ("test_lossless.py", "test_windows.py", "test_poison.py")
# With batches of prompts and trees, chunks, preemption.
_MIXED = (*_CORE, "test_scheduling.py")
# All but test_hybrid.py: upstream's gated delta nets take no float32 on a GPU.
_FLOAT32 = (
    *_MIXED,
    "test_async.py",
    "test_dynamic.py",
    "test_shapes.py",
    "test_dflash2.py",
    "test_distribution.py",
    "test_drafter_context.py",
    "test_features.py",
    "test_fuzz.py",
    "test_gemma.py",
    "test_grammars.py",
    "test_history.py",
    "test_pairing.py",
    "test_parallel.py",
    "test_real_pair.py",
    "test_serve.py",
    "test_sleep.py",
    "test_stops.py",
    "test_targets.py",
    "test_tau.py",
    "test_trace.py",
    "test_warmup.py",
)
_TRITON, _FLASH = "TRITON_ATTN", "FLASH_ATTN"

MODES = {
    "cpu": Mode("float32"),
    "cpu-bf16": Mode("bfloat16"),
    "cpu-compiled": Mode("float32", compiled=True),
    "triton-eager": Mode(
        "float32",
        _TRITON,
        files=(
            *_MIXED,
            "test_async.py",
            "test_drafter_context.py",
            "test_features.py",
            "test_stops.py",
        ),
    ),
    "triton-graphs": Mode("float32", _TRITON, graphs=True, files=_FLOAT32),
    "triton-graphs-bf16": Mode("bfloat16", _TRITON, graphs=True, files=(*_CORE, "test_hybrid.py")),
    "triton-graphs-fp8": Mode("float32", _TRITON, "fp8", graphs=True, files=_CORE),
    "flash-eager": Mode("bfloat16", _FLASH, files=_MIXED),
    "flash-graphs": Mode(
        "bfloat16",
        _FLASH,
        graphs=True,
        files=(
            *_MIXED,
            "test_dynamic.py",
            "test_hybrid.py",
            "test_shapes.py",
            "test_warmup.py",
        ),
    ),
    "triton-compiled": Mode(
        "float32", _TRITON, graphs=True, compiled=True, files=(*_MIXED, "test_dynamic.py")
    ),
    "flash-compiled": Mode(
        "bfloat16",
        _FLASH,
        graphs=True,
        compiled=True,
        files=(*_MIXED, "test_dynamic.py", "test_hybrid.py", "test_warmup.py"),
    ),
    "flash-eager-fp8": Mode("bfloat16", _FLASH, "fp8", files=_CORE),
    "flash-graphs-fp8": Mode("bfloat16", _FLASH, "fp8", graphs=True, files=_CORE),
}


def chosen(has_gpu: bool) -> tuple[str, Mode]:
    """The mode of this process.

    Raises:
        KeyError: `DDTREE_MODE` names none.

    """
    name = os.environ.get("DDTREE_MODE") or ("triton-eager" if has_gpu else "cpu")
    return name, MODES[name]
