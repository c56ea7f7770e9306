"""Gated-delta-net hybrids, in the shape of Qwen3.6-27B: steps, kernels, states.

Two engines of 27 billion parameters and a chain's states do not fit a card side by side: engines
run one after the other.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from ..engines import CHAIN, TREE, WORKER, engine_args, engine_name
from ..records import COUNT_AT_MOST, MS_AT_MOST, Row
from ..run import Run
from ..shapes import QWEN36_27B

CONTEXT, BATCHES, CHAIN_TOKENS = 512, (1, 8), 15
BURSTS, STEPS = 3, 30
# (nodes, requests): the bar on tree / chain of CHAIN_TOKENS.
STEP_LIMITS = {(15, 1): 0.92, (15, 8): 0.90, (31, 1): 1.00, (63, 1): None}
VERIFY_LIMITS, COMMIT_LIMITS = {(31, 1): 1.0}, {1: 0.15, 8: 0.8}
# Rows of an accepted path: a drafter's usual one, a good one's, and the longest there is.
PATHS = (4, 8, 16)


def kernels(run: Run) -> None:
    """Verifying and committing in all layers; committed states against decoding."""
    (child,) = run.start({"gated delta nets": ("ddtree_bench.workers.gdn", {})})
    found = child.call("compare", nodes=31)
    row = Row("committed states that differ from decoding", B=31, limit=0, bound=COUNT_AT_MOST)
    row.count, row.details = found["differ"], found
    run.add(row)
    for batch in BATCHES:
        for nodes in (15, 31, 63):
            ms = child.call("measure", batch=batch, nodes=nodes)
            for part in ("conv", "delta rule", "verify"):
                row = Row(f"{part}, 48 layers", batch, None, nodes, ms[part], bound=MS_AT_MOST)
                if part == "verify":
                    row.limit = VERIFY_LIMITS.get((nodes, batch))
                run.add(row)
        for length, ms in zip(PATHS, child.call("commit", batch=batch, lengths=PATHS), strict=True):
            work = f"commit of {length} rows, 48 layers"
            row = Row(work, batch, None, None, ms, bound=MS_AT_MOST)
            row.limit = COMMIT_LIMITS[batch] if length > 4 else None
            run.add(row)


def steps(run: Run) -> None:
    """A step of each engine in turn, and the state a request keeps."""
    folders = QWEN36_27B.write(run.work / "qwen36-27b")
    chain, _ = measure(run, folders, CHAIN, CHAIN_TOKENS)
    for nodes in dict.fromkeys(b for b, _ in STEP_LIMITS):
        tree, state_bytes = measure(run, folders, TREE, nodes)
        for batch in BATCHES:
            row = Row(f"step, chain k={CHAIN_TOKENS}", batch, CONTEXT, nodes)
            row.limit = STEP_LIMITS.get((nodes, batch))
            row.tree_ms, row.chain_ms = tree[batch], chain[batch]
            row.ratio = row.tree_ms / row.chain_ms
            row.note = "engines one after the other"
            run.add(row)
        row = Row("states of a request, bytes, tree / no speculation", B=nodes, limit=1.05)
        row.ratio = state_bytes / QWEN36_27B.state_bytes
        row.details = {"tree": state_bytes, "no speculation": QWEN36_27B.state_bytes}
        run.add(row)


def measure(
    run: Run, folders: tuple[Path, Path], method: str, tokens: int
) -> tuple[dict[int, float], int]:
    """Milliseconds of a step by number of requests, and bytes of a request's states."""
    engine = engine_args(*folders, method, tokens, BATCHES) | {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.9,
        "additional_config": {"gdn_prefill_backend": "triton"},
    }
    config = {"engine": engine, "random_drafts": True}
    (child,) = run.start({engine_name(method, tokens): (WORKER, config)})
    found = {}
    for batch in BATCHES:
        child.call("start", batch=batch, context=CONTEXT)
        seconds = [s for _ in range(BURSTS) for s in child.call("run", steps=STEPS)["seconds"]]
        found[batch] = 1000 * median(seconds)
    state_bytes = child.call("state_bytes")
    child.call("stop")
    return found, state_bytes
