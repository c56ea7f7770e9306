"""What both engines of a comparison are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORKER = "ddtree_bench.workers.engine"
DEPTH = 15  # of the drafters: block_size - 1
TREE, CHAIN = "ddtree", "dflash"


def engine_name(method: str, tokens: int) -> str:
    """For people: 'tree B=63', 'chain k=15'."""
    return f"tree B={tokens}" if method == TREE else f"chain k={tokens}"


def engine_args(
    target: Path, drafter: Path, method: str, tokens: int, batches: tuple[int, ...]
) -> dict[str, Any]:
    """Arguments of `LLM` for speculating `tokens` tokens.

    FULL graphs are captured for exactly these numbers of requests, target and draft: a batch is
    never padded, so that the same rows are compared.

    """
    draft_rows = 1 + (DEPTH if method == TREE else tokens)
    sizes = {n * rows for n in batches for rows in (1 + tokens, draft_rows)}
    return {
        "model": str(target),
        "speculative_config": {
            "method": method,
            "model": str(drafter),
            "num_speculative_tokens": tokens,
        },
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(sizes),
        },
        "async_scheduling": True,
        "enable_prefix_caching": False,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": 8192,
        "seed": 0,
    }
