"""The trace of draft trees says what the engine did, and changes nothing."""

import json
from collections import defaultdict
from itertools import chain, pairwise

import pytest

from conftest import counters, engine, generate, prompts
from planting import Planter, noisy_marginals, planting
from test_async import async_scheduling  # noqa: F401

pytestmark = pytest.mark.exact
DEPTH, NUM_NODES = 7, 16
# Different ones, for they tell requests apart.
LENGTHS = (5, 33, 64)
NUM_TOKENS = 32
# Trees reach past the end of an output.
NUM_KNOWN = NUM_TOKENS + DEPTH + 1
# Where one test ends: the longest prompt's answer just fits.
MAX_MODEL_LEN = LENGTHS[-1] + NUM_TOKENS


def params(max_tokens: int = NUM_TOKENS, **options):
    from vllm import SamplingParams

    options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | options
    return SamplingParams(max_tokens=max_tokens, **options)


@pytest.fixture(scope="module")
def ids():
    return prompts(LENGTHS)


@pytest.fixture(scope="module")
def truth(models, ids):
    with engine(models.target()) as llm:
        return generate(llm, ids, params(NUM_KNOWN))


@pytest.fixture
def run(models, ids, tmp_path):
    """Generate with a trace; its lines by prompt, the outputs and the counters."""

    def run(sampling, policy="best_first", **options):
        path = tmp_path / "trace.jsonl"
        spec = {"draft_tree_trace": str(path), "draft_tree_policy": policy}
        with engine(
            models.target(),
            models.drafter(DEPTH),
            num_tokens=NUM_NODES,
            speculative_config=spec,
            **({"async_scheduling": False} | options),
        ) as llm:
            before = len(path.read_text().splitlines())
            assert before == 1, "start-up has left lines"
            outputs = generate(llm, ids, sampling)
            # Before shutdown: nothing waits in a buffer.
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert lines.pop(0) == {
                "ddtree_trace": 1,
                "method": "ddtree",
                "num_nodes": NUM_NODES,
                "depth": DEPTH,
                "policy": policy,
                "target": models.target(),
                "drafter": models.drafter(DEPTH),
            }
            return by_prompt(lines), outputs, counters(llm)

    return run


def by_prompt(lines: list[dict]) -> list[list[dict]]:
    """The lines of each prompt. A request's first root is the token its prefill gave."""
    requests = defaultdict(list)
    for line in lines:
        requests[line["request"]].append(line)
    first = {steps[0]["position"]: steps for steps in requests.values()}
    assert sorted(first) == sorted(LENGTHS) and len(requests) == len(LENGTHS)
    for steps in requests.values():
        assert [line["step"] for line in steps] == list(range(len(steps)))
    return [first[length] for length in LENGTHS]


def emitted(line: dict) -> list[int]:
    return [line["tokens"][row - 1] for row in line["accepted"]] + [line["bonus"]]


def check(requests: list[list[dict]], outputs: list[list[int]]) -> list[dict]:
    """Each request's trees, one after the other, give its output.

    Returns the lines that came after a request had its whole output, and asserts that
    those before them are at most one verify step longer.
    """
    late = []
    for steps, output, length in zip(requests, outputs, LENGTHS):
        tokens = [steps[0]["root"]]
        for line in steps:
            assert len(line["tokens"]) == len(line["parents"]) == len(line["logprobs"])
            assert all(0 <= parent <= row for row, parent in enumerate(line["parents"]))
            above = 0
            for row in line["accepted"]:
                assert line["parents"][row - 1] == above
                above = row
            # A child with the bonus token would have been accepted.
            assert (line["bonus"], above) not in zip(line["tokens"], line["parents"])
            assert line["root"] == tokens[-1]
            assert line["position"] == length + len(tokens) - 1
            if len(tokens) >= len(output):
                late.append(line)
            tokens += emitted(line)
        # Where the sequence may grow by one token only, its last step has no drafts.
        assert len(tokens) >= len(output) or length + len(output) == MAX_MODEL_LEN
        assert len(tokens) >= len(output) - 1
        assert tokens[: len(output)] == output[: len(tokens)]
    return late


def spine_accepted(line: dict) -> int:
    """How many tokens were accepted before the path left the likeliest children."""
    at, count = 0, 0
    for row in line["accepted"]:
        if row != 1 + line["parents"].index(at):
            break
        at, count = row, count + 1
    return count


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_give_the_output(models, ids, run, temperature):
    options = [{"temperature": temperature, "seed": i} for i in range(len(ids))]
    with engine(models.target()) as llm:
        truth = generate(llm, ids, [params(NUM_KNOWN, **o) for o in options])
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    with planting(planter, run_drafter=True):
        requests, outputs, counts = run([params(**o) for o in options])
    assert outputs == [t[:NUM_TOKENS] for t in truth]
    assert check(requests, outputs) == []
    lines = list(chain(*requests))
    assert len(lines) == counts["drafts"]
    assert sum(len(line["accepted"]) for line in lines) == counts["accepted_tokens"]
    on_spine = sum(map(spine_accepted, lines))
    assert counts["accepted_spine_tokens"] == on_spine
    assert 0 < on_spine < counts["accepted_tokens"]
    # From the first tree on, when rows go further past the prompt than their depth.
    first = [len(steps[0]["accepted"]) for steps in requests]
    assert sum(first) >= sum(planter.planted[: len(ids)]) > 4
    # Accepts are deep and sideways, and the last one may go on past the output's end.
    assert max(len(line["accepted"]) for line in lines) > 3
    assert any(line["accepted"][:1] > [1] for line in lines)
    assert sum(len(emitted(line)) for line in lines) > len(ids) * (NUM_TOKENS - 1)


@pytest.mark.parametrize("policy", ["best_first", "spine"])
def test_logprobs_are_the_marginals(ids, truth, run, policy):
    with noisy_marginals({tuple(p): t for p, t in zip(ids, truth)}, ranks=[0.6, 0.2, 0.1]):
        requests, outputs, counts = run(params(), policy)
    assert check(requests, outputs) == []
    assert outputs == [t[:NUM_TOKENS] for t in truth]
    assert counts["accepted_tokens"] > counts["drafts"] / 2
    for line in chain(*requests):
        depth, score = [0], [0.0]
        siblings, marginals = defaultdict(list), defaultdict(dict)
        for token, parent, logprob in zip(line["tokens"], line["parents"], line["logprobs"]):
            depth.append(depth[parent] + 1)
            score.append(score[parent] + logprob)
            siblings[parent].append(logprob)
            # One distribution for each depth, whatever the node's ancestors.
            assert marginals[depth[-1]].setdefault(token, logprob) == logprob
        for logprobs in siblings.values():
            assert max(logprobs) <= 0 and logprobs == sorted(logprobs, reverse=True)
        for position in marginals.values():
            assert sum(2.718281828**p for p in position.values()) < 1.001
        # Best first: no node is more probable than one before it.
        spine = DEPTH if policy == "spine" else 0
        rest = score[1 + spine :]
        assert all(b <= a + 1e-3 for a, b in pairwise(rest))
        assert line["parents"][:spine] == list(range(spine))


def test_truncated_trees(ids, truth, run):
    """Where fewer rows than nodes are scheduled, those that were verified are recorded."""
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    with planting(planter, run_drafter=True):
        requests, outputs, counts = run(params(), max_model_len=MAX_MODEL_LEN)
    assert outputs == [t[:NUM_TOKENS] for t in truth]
    assert check(requests, outputs) == []
    lines = list(chain(*requests))
    assert len(lines) == counts["drafts"]
    assert sum(len(line["tokens"]) for line in lines) == counts["draft_tokens"]
    assert min(len(line["tokens"]) for line in lines) < NUM_NODES


def test_chunked_prefill_and_asynchronous_scheduling(ids, truth, run, async_scheduling):  # noqa: F811
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    with planting(planter, run_drafter=True):
        requests, outputs, counts = run(
            params(), max_num_batched_tokens=40, max_num_seqs=2, async_scheduling=True
        )
    assert outputs == [t[:NUM_TOKENS] for t in truth]
    # Scheduled ahead, before the request was known to have ended.
    late = check(requests, outputs)
    assert len(late) <= len(ids)
    assert sum(map(len, requests)) == counts["drafts"] + len(late)


def test_off_leaves_nothing_and_on_changes_nothing(models, ids, truth, run, tmp_path, monkeypatch):
    from vllm.v1.worker.gpu.spec_decode.ddtree.trace import DraftTreeTrace

    continuations = {tuple(p): t for p, t in zip(ids, truth)}
    with monkeypatch.context() as off, planting(Planter(continuations), run_drafter=True):
        off.chdir(tmp_path)
        for name in ("__init__", "set_logprobs", "record"):
            off.setattr(DraftTreeTrace, name, None)
        options = dict(num_tokens=NUM_NODES, async_scheduling=False)
        with engine(models.target(), models.drafter(DEPTH), **options) as llm:
            worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
            assert worker.model_runner.speculator.trace is None
            without = generate(llm, ids, params()), counters(llm)
        assert list(tmp_path.iterdir()) == []
    with planting(Planter(continuations), run_drafter=True):
        requests, *with_trace = run(params())
    assert tuple(with_trace) == without and check(requests, without[0]) == []
