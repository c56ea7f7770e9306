"""The reference pair: tokens a second of trees against the chain, and whether answers are equal."""

from __future__ import annotations

from statistics import mean, median

from ..children import Child
from ..engines import CHAIN, TREE, engine_args, engine_name
from ..records import COUNT_AT_MOST, RATIO_AT_LEAST, Row
from ..run import Run

BATCHES, SIZES, CHAIN_TOKENS = (1, 8, 32), (15, 31, 63), 15
TEMPERATURES = (0.0, 1.0)
# A step in which requests join takes longer: answers are long enough for the others to count.
MAX_TOKENS, REPEATS = 256, 3
LIMITS = {(0.0, 1): 1.20, (0.0, 8): 1.10}
# bf16 keeps 8 bits of a logit: between 16 and 32 it has steps of 0.125. Rows of another batch shape
# may put either of two tokens a step off, in either engine.
NEAR_TIE = 4 * 0.125


def measure(run: Run) -> None:
    """All engines are alive at once: the pair is small."""
    if run.target is None:
        raise ValueError("the target's folder is not known: --target DIR")
    models = run.root / "tests" / "models"
    folders = (run.target, models / "smollm2-135m-dflash-b16")
    wanted = {}
    for method, tokens in [(CHAIN, CHAIN_TOKENS)] + [(TREE, b) for b in SIZES]:
        engine = engine_args(*folders, method, tokens, BATCHES) | {
            # As people serve: compiled, and steps in which requests join in piecewise graphs.
            "compilation_config": {},
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 4 << 30,
            "gpu_memory_utilization": 0.1,  # what must be free at the start, no more
            "disable_log_stats": False,
        }
        config = {"engine": engine, "models": str(models)}
        wanted[f"pair, {engine_name(method, tokens)}"] = ("ddtree_bench.workers.pair", config)
    chain, *trees = run.start(wanted)
    by_size = dict(zip(SIZES, trees, strict=True))
    batches = [n for n in BATCHES if run.batches is None or n in run.batches]
    if run.quick:
        batches = [1, 8]
    for temperature in TEMPERATURES:
        told = [compare(run, temperature, batch, chain, by_size) for batch in batches]
        if temperature:
            continue
        # What another batch does to the chain itself.
        for batch, have in zip(batches[1:], told[1:], strict=True):
            work = f"unequal answers, T=0, chain against chain of {batches[0]}"
            want = told[0] * (len(have) // len(told[0]))
            run.add(unequal(work, batch, None, chain, want, have))


def compare(
    run: Run, temperature: float, batch: int, chain: Child, trees: dict[int, Child]
) -> list[list[int]]:
    """A row for each tree, one for the best and, greedy, one for unequal answers of each.

    Returns:
        the chain's answers.

    """
    ask = {"together": batch, "temperature": temperature, "max_tokens": MAX_TOKENS}
    # A few prompts say little of how much is accepted, and the last of them run alone. Sampled, one
    # at a time, all would take minutes.
    few = max(8, 2 * batch)
    ask["limit"] = few if temperature and batch == 1 else None
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
    told = answers[0][0]["tokens"]
    if not temperature:  # the chain's rejection sampling is equal in distribution only
        for size in trees:
            work, have = "unequal answers, T=0", answers[size][0]["tokens"]
            run.add(unequal(work, batch, size, chain, told, have))
    return told


def step_ms(answers: list[dict]) -> dict[str, float]:
    """Of steps in which requests join and of others: milliseconds, and the former's share."""
    kinds = {
        kind: [s for answer in answers for s in answer["steps"][kind]]
        for kind in ("joining", "other")
    }
    found = {
        f"{kind}_{name}": round(1000 * middle(of), 3)
        for kind, of in kinds.items()
        for name, middle in (("ms", median), ("mean_ms", mean))
        if of
    }
    total = sum(map(sum, kinds.values()))
    return found | {"joining_share": round(sum(kinds["joining"]) / total, 3)}


def token_ms(answer: dict) -> float:
    """Milliseconds a token of one call of `generate`."""
    return 1000 * answer["seconds"] / sum(map(len, answer["tokens"]))


def unequal(work: str, batch: int, size: int | None, chain: Child, want: list, have: list) -> Row:
    """How many answers differ where the two tokens are no near-tie; every difference is listed."""
    row = Row(work, batch, None, size, limit=0, bound=COUNT_AT_MOST)
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
    margins = [d["margin"] for d in differences]
    row.count = sum(margin is None or margin > NEAR_TIE for margin in margins)
    row.details = {"answers": len(want), "differ": differences}
    if differences:
        widest = max(m if m is not None else float("inf") for m in margins)
        row.note = f"{len(differences)} of {len(want)} differ, by {widest:.3g} at most"
    return row
