"""The reference pair: tokens a second of trees against the chain, and whether answers are equal."""

from __future__ import annotations

from statistics import median

from ..children import Child
from ..engines import CHAIN, TREE, engine_args, engine_name
from ..records import COUNT_AT_MOST, RATIO_AT_LEAST, Row
from ..run import Run

BATCHES, SIZES, CHAIN_TOKENS = (1, 8, 32), (15, 31, 63), 15
TEMPERATURES = (0.0, 1.0)
# Requests that join are prefilled outside the graphs: answers are long enough for steps to count.
MAX_TOKENS, REPEATS = 256, 3
LIMITS = {(0.0, 1): 1.20, (0.0, 8): 1.10}
# bf16 keeps 8 bits of a logit: two steps of one between 16 and 32 apart, rows of another batch
# shape may choose the other token.
NEAR_TIE = 0.25


def measure(run: Run) -> None:
    """All engines are alive at once: the pair is small."""
    if run.target is None:
        raise ValueError("the target's folder is not known: --target DIR")
    models = run.root / "tests" / "models"
    folders = (run.target, models / "smollm2-135m-dflash-b16")
    wanted = {}
    for method, tokens in [(CHAIN, CHAIN_TOKENS)] + [(TREE, b) for b in SIZES]:
        engine = engine_args(*folders, method, tokens, BATCHES) | {
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 4 << 30,
            "gpu_memory_utilization": 0.1,  # what must be free at the start, no more
            "disable_log_stats": False,
        }
        config = {"engine": engine, "models": str(models)}
        wanted[f"pair, {engine_name(method, tokens)}"] = ("ddtree_bench.workers.pair", config)
    chain, *trees = run.start(wanted)
    batches = [n for n in BATCHES if run.batches is None or n in run.batches]
    for temperature in TEMPERATURES:
        for batch in (1, 8) if run.quick else batches:
            compare(run, temperature, batch, chain, dict(zip(SIZES, trees, strict=True)))


def compare(
    run: Run, temperature: float, batch: int, chain: Child, trees: dict[int, Child]
) -> None:
    """A row for each tree, one for the best and, greedy, one for unequal answers of each."""
    ask = {"together": batch, "temperature": temperature, "max_tokens": MAX_TOKENS}
    # A few prompts say little of how much is accepted; sampled, nothing is held against a bar.
    few = max(8, 2 * batch)
    ask["limit"] = few if temperature else None
    children = {0: chain} | trees
    for child in children.values():
        child.call("generate", **ask | {"limit": few})  # warms up
    answers: dict[int, list[dict]] = {size: [] for size in children}
    for _ in range(REPEATS):
        for size, child in children.items():
            answers[size].append(child.call("generate", **ask))
    ms = {size: median(map(token_ms, found)) for size, found in answers.items()}
    work = f"tokens/s, chain k={CHAIN_TOKENS}, T={temperature:g}"
    rows = []
    for size in trees:
        # Of one round each: the host's speed drifts.
        ratio = median(
            token_ms(chained) / token_ms(treed)
            for chained, treed in zip(answers[0], answers[size], strict=True)
        )
        row = Row(work, batch, None, size, ms[size], ms[0], ratio, bound=RATIO_AT_LEAST)
        row.details = {
            name: {
                "tokens_per_second": round(1000 / ms[s]),
                "tokens_per_step": round(answers[s][0]["tokens_per_step"], 3),
                **step_ms(answers[s]),
            }
            for name, s in (("tree", size), ("chain", 0))
        }
        run.add(row)
        rows.append(row)
    best = max(rows, key=lambda row: row.ratio)
    run.add(
        Row(
            f"{work}, best B",
            batch,
            tree_ms=best.tree_ms,
            chain_ms=best.chain_ms,
            ratio=best.ratio,
            limit=LIMITS.get((temperature, batch)),
            bound=RATIO_AT_LEAST,
            note=f"B={best.B}",
        )
    )
    if temperature:
        return  # the chain's rejection sampling is equal in distribution only
    for size in trees:
        run.add(unequal(batch, size, chain, answers[0][0]["tokens"], answers[size][0]["tokens"]))


def step_ms(answers: list[dict]) -> dict[str, float]:
    """Milliseconds of a step in which requests join and of another, and the former's share."""
    kinds = {
        kind: [s for answer in answers for s in answer["steps"][kind]]
        for kind in ("joining", "other")
    }
    found = {f"{kind}_ms": round(1000 * median(of), 3) for kind, of in kinds.items() if of}
    total = sum(map(sum, kinds.values()))
    return found | {"joining_share": round(sum(kinds["joining"]) / total, 3)}


def token_ms(answer: dict) -> float:
    """Milliseconds a token of one call of `generate`."""
    return 1000 * answer["seconds"] / sum(map(len, answer["tokens"]))


def unequal(batch: int, size: int, chain: Child, want: list, have: list) -> Row:
    """How many answers differ where the two tokens are no near-tie; every difference is listed."""
    row = Row("unequal answers, T=0", batch, None, size, limit=0, bound=COUNT_AT_MOST)
    differences = []
    for prompt, (a, b) in enumerate(zip(want, have, strict=True)):
        if a == b:
            continue
        shorter = min(len(a), len(b))
        at = next((i for i in range(shorter) if a[i] != b[i]), shorter)
        margin = None
        if at < shorter:
            margin = chain.call("margin", prompt=prompt, prefix=a[:at], tokens=[a[at], b[at]])
        differences.append({"prompt": prompt, "token": at, "margin": margin})
    row.count = sum(d["margin"] is None or d["margin"] > NEAR_TIE for d in differences)
    row.details = {"answers": len(want), "differ": differences}
    if differences:
        row.note = f"{len(differences)} of {len(want)} differ, {row.count} beyond a near-tie"
    return row
