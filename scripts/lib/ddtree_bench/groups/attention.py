"""Attention alone: a layer's trees against the chain's FlashAttention 3."""

from __future__ import annotations

from ..records import Row
from ..run import Run

ROWS = 64
CELLS = tuple((n, context) for context in (512, 8192, 32768) for n in (1, 8))
QUICK_CELLS = ((1, 512), (1, 8192), (8, 8192))
LIMITS = {(1, 8192): 1.10}


def measure(run: Run) -> None:
    """A row for each cell: the faster of the two ways a backend chooses from."""
    (child,) = run.start({"attention": ("ddtree_bench.workers.attention", {})})
    for batch, context in QUICK_CELLS if run.quick else CELLS:
        found = child.call("measure", batch=batch, context=context, rows=ROWS)
        row = Row(f"attention, chain of {ROWS} rows", batch, context, ROWS - 1)
        row.tree_ms, row.chain_ms = min(found["tail"], found["split"]), found["chain"]
        row.ratio = row.tree_ms / row.chain_ms
        row.limit = LIMITS.get((batch, context))
        row.details = {way: round(found[way], 5) for way in ("tail", "split")}
        run.add(row)
