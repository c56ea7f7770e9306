"""A step of the tree's engine against one of the chain's, both alive on one card, in turn."""

from __future__ import annotations

from itertools import chain as joined
from statistics import mean, median

from ..children import Child
from ..engines import CHAIN, TREE, WORKER, engine_args, engine_name
from ..records import Row
from ..run import Run
from ..shapes import QWEN3_8B

CONTEXTS, BATCHES = (512, 8192, 32768), (1, 4, 8, 32)
QUICK_CONTEXTS, QUICK_BATCHES = (512, 8192), (1, 8)
BURSTS, STEPS = 3, 40
# Longest context and what a request grows while it is measured.
MAX_MODEL_LEN = 32768 + 2048
# Weights (18.6 GiB), activations of 8192 tokens, logits of 32 trees, graphs.
MEMORY_SHARE, OTHER_BYTES = 0.485, 23 << 30
# Of the K/V of a request: what it grows, and the drafts of the two steps under way.
SLACK = 384


def engines(run: Run, tree: int, chain: int) -> list[Child]:
    """The two children, started unless they are there."""
    folders = QWEN3_8B.write(run.work / "qwen3-8b")
    wanted = {}
    ranks = run.tensor_parallel
    for method, tokens in ((TREE, tree), (CHAIN, chain)):
        engine = engine_args(*folders, method, tokens, BATCHES) | {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": MAX_MODEL_LEN,
            "gpu_memory_utilization": 0.4,  # what must be free at the start, no more
        }
        if ranks > 1:
            engine |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
        config = {
            "engine": engine,
            "memory_share": MEMORY_SHARE,
            "other_bytes": OTHER_BYTES,
            "random_drafts": True,
        }
        wanted[engine_name(method, tokens)] = (WORKER, config)
    return run.start(wanted)


def limit(tree: int, chain: int, batch: int, context: int) -> float | None:
    """The bar on tree / chain."""
    if tree == chain:
        return 1.05 if batch <= 8 else 1.08
    return 1.12 if batch == 1 and context <= 8192 else None


def measure(run: Run, tree: int, chain: int) -> None:
    """Every cell, the cheap ones first; bars are those of one card."""
    ranks = run.tensor_parallel
    children = engines(run, tree, chain)
    fits = min(child.call("info")["kv_tokens"] for child in children)
    contexts, batches = (QUICK_CONTEXTS, QUICK_BATCHES) if run.quick else (CONTEXTS, BATCHES)
    if tree != chain:
        batches = tuple(n for n in batches if n <= 8)
    contexts = [n for n in contexts if run.contexts is None or n in run.contexts]
    batches = [n for n in batches if run.batches is None or n in run.batches]
    for context in contexts:
        for batch in batches:
            row = Row(f"step, chain k={chain}", batch, context, tree)
            if ranks == 1:
                row.limit = limit(tree, chain, batch, context)
            else:
                row.work += f", {ranks} ranks"
            needed = batch * (context + SLACK)
            if needed > fits:
                row.limit = None
                row.note = f"K/V of {needed} tokens, {fits} fit beside a second engine"
            else:
                compare(row, *children)
            run.add(row)
    for child in children:
        child.call("stop")


def compare(row: Row, tree: Child, chain: Child) -> None:
    """Fill the row: bursts of steps in turn, the median step of each."""
    for child in (tree, chain):
        child.send("start", batch=row.batch, context=row.context)
    for child in (tree, chain):
        child.receive()
    bursts: dict[Child, list[dict]] = {tree: [], chain: []}
    for i in range(BURSTS):
        for child in (tree, chain) if i % 2 == 0 else (chain, tree):
            bursts[child].append(child.call("run", steps=STEPS))
    ms = {}
    for side, child in (("tree", tree), ("chain", chain)):
        steps = [1000 * s for s in joined.from_iterable(b["seconds"] for b in bursts[child])]
        ms[side] = median(steps)
        row.details[side] = {
            "mean_ms": round(mean(steps), 4),
            "bursts_ms": [round(1000 * median(b["seconds"]), 4) for b in bursts[child]],
            "tokens_per_step": round(mean(b["tokens_per_step"] for b in bursts[child]), 3),
        }
    row.tree_ms, row.chain_ms = ms["tree"], ms["chain"]
    row.ratio = row.tree_ms / row.chain_ms
