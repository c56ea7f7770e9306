"""Host synchronisations and GPU idle time of steady decode steps."""

from __future__ import annotations

from ..children import Child, ChildError
from ..records import COUNT_AT_MOST, Row
from ..run import Run
from ..timeline import render
from . import steps

TREE, CHAIN = 63, 63
CELLS, QUICK_CELLS = ((1, 512), (8, 512), (1, 8192), (8, 8192)), ((1, 512), (8, 8192))
# A stall of the host in one of so many traces is not the engine's.
STEPS, TRACES = 20, 3


def measure(run: Run) -> None:
    """Count, then trace, tree and chain at the same cells."""
    tree, chain = steps.engines(run, TREE, CHAIN)
    for batch, context in QUICK_CELLS if run.quick else CELLS:
        for child in (tree, chain):
            child.call("start", batch=batch, context=context)
        found = tree.call("count_syncs", steps=STEPS)
        row = Row("host synchronisations", batch, context, TREE, limit=0, bound=COUNT_AT_MOST)
        row.count = found["count"]
        row.details = {"steps": STEPS, "chain": chain.call("count_syncs", steps=STEPS)["count"]}
        run.add(row)
        if found["first"]:
            run.explain(f"first synchronisation, {batch} x {context}\n{found['first']}")

        row = Row(f"idle a step, chain k={CHAIN}", batch, context, TREE, limit=1.0)
        try:
            summaries = {
                name: _profile(child) for name, child in (("tree", tree), ("chain", chain))
            }
        except ChildError as err:  # some machines do not let a profiler see kernels
            row.note = str(err).splitlines()[-1]
            run.add(row)
            continue
        for name, found in summaries.items():
            title = f"{name}, {TREE} drafts, {batch} requests, context {context}"
            run.explain(render(title, found))
        row.tree_ms, row.chain_ms = (summaries[n]["idle_ms"] for n in ("tree", "chain"))
        row.ratio = row.tree_ms / max(row.chain_ms, 1e-6)
        row.details = {
            n: {k: round(s[k], 4) for k in ("span_ms", "busy_ms", "launches")}
            for n, s in summaries.items()
        }
        run.add(row)
    for child in (tree, chain):
        child.call("stop")


def _profile(child: Child) -> dict:
    """Of the traces the one whose idle time is the median."""
    traces = [child.call("profile", steps=STEPS) for _ in range(TRACES)]
    return sorted(traces, key=lambda t: t["idle_ms"])[TRACES // 2]
