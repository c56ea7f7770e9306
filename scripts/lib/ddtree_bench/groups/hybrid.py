"""Gated-delta-net hybrids, in the shape of Qwen3.6-27B: steps, kernels, states.

Two engines of 27 billion parameters and a chain's states do not fit a card side by side: engines
run one after the other.
"""

from __future__ import annotations

from statistics import median

from ..engines import CHAIN, TREE, WORKER, engine_args, engine_name
from ..records import COUNT_AT_MOST, MS_AT_MOST, Row
from ..run import Run
from ..shapes import QWEN36_27B

CONTEXT, BATCHES, CHAIN_TOKENS = 512, (1, 8), 15
BURSTS, STEPS = 3, 30
# (nodes, requests): the bar on tree / chain of CHAIN_TOKENS.
STEP_LIMITS = {(15, 1): 0.92, (15, 8): 0.90, (31, 1): 1.00, (31, 8): None, (63, 1): None}
VERIFY_LIMITS, COMMIT_LIMITS = {(31, 1): 1.0}, {1: 0.15, 8: 0.8}


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
            for part in ("conv", "delta rule"):
                run.add(Row(f"{part}, 48 layers", batch, None, nodes, ms[part]))
            for part, limit in (
                ("verify", VERIFY_LIMITS.get((nodes, batch))),
                ("commit", COMMIT_LIMITS[batch] if nodes == 31 else None),
            ):
                run.add(
                    Row(
                        f"{part}, 48 layers",
                        batch,
                        None,
                        nodes,
                        ms[part],
                        limit=limit,
                        bound=MS_AT_MOST,
                    )
                )


def steps(run: Run) -> None:
    """A step of each engine in turn, and the state a request keeps."""
    folders = QWEN36_27B.write(run.work / "qwen36-27b")
    times: dict[tuple[str, int], dict[int, float]] = {}
    state_bytes: dict[str, int] = {}
    sides = [(CHAIN, CHAIN_TOKENS), *((TREE, n) for n in dict.fromkeys(b for b, _ in STEP_LIMITS))]
    for method, tokens in sides:
        engine = engine_args(*folders, method, tokens, BATCHES) | {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 4096,
            "gpu_memory_utilization": 0.9,
            "additional_config": {"gdn_prefill_backend": "triton"},
        }
        name = engine_name(method, tokens)
        (child,) = run.start({name: (WORKER, {"engine": engine, "random_drafts": True})})
        state_bytes[name] = child.call("state_bytes")
        times[method, tokens] = {}
        for batch in BATCHES:
            child.call("start", batch=batch, context=CONTEXT)
            seconds = [s for _ in range(BURSTS) for s in child.call("run", steps=STEPS)["seconds"]]
            times[method, tokens][batch] = 1000 * median(seconds)
        child.call("stop")
    chain = times[CHAIN, CHAIN_TOKENS]
    for (nodes, batch), limit in STEP_LIMITS.items():
        row = Row(f"step, chain k={CHAIN_TOKENS}", batch, CONTEXT, nodes, limit=limit)
        row.tree_ms, row.chain_ms = times[TREE, nodes][batch], chain[batch]
        row.ratio = row.tree_ms / row.chain_ms
        row.note = "engines one after the other"
        run.add(row)
    row = Row("states of a request, bytes, tree / no speculation", B=31, limit=1.05)
    row.ratio = state_bytes[engine_name(TREE, 31)] / QWEN36_27B.state_bytes
    row.details = state_bytes | {"no speculation": QWEN36_27B.state_bytes}
    run.add(row)
