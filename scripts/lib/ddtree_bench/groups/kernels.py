"""The tree's own kernels, alone."""

from __future__ import annotations

from ..records import MS_AT_MOST, Row
from ..run import Run

BATCHES, SIZES = (1, 8, 32), (15, 31, 63)
# What a chain's step does not have.
OVERHEAD = ("builder", "scatter", "walk", "compaction")
LIMITS = {(1, 63): 0.060, (32, 63): 0.150}


def measure(run: Run) -> None:
    """A row for each kernel, and one for what a tree adds to a step."""
    (child,) = run.start({"kernels": ("ddtree_bench.workers.kernels", {})})
    for batch in BATCHES:
        for size in SIZES:
            found = child.call("measure", batch=batch, nodes=size)
            for name, ms in found.items():
                run.add(Row(f"kernel, {name}", batch, None, size, tree_ms=ms))
            row = Row(f"kernels, {' + '.join(OVERHEAD)}", batch, None, size, bound=MS_AT_MOST)
            row.tree_ms = sum(found[name] for name in OVERHEAD)
            row.limit = LIMITS.get((batch, size))
            run.add(row)
