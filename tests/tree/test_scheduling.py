"""Trees beside everything else a scheduler does."""

import pytest

from conftest import counters, engine, generate, prompts
from lossless import answer, assert_same
from planting import Planter, planting

DEPTH, NUM_NODES = 7, 16


def params(max_tokens: int = 64, **options):
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **options
    )


@pytest.fixture(scope="module")
def target(models):
    return models.target("qwen3")


def truth_of(target, ids, max_tokens=64):
    with engine(target) as llm:
        return answer(llm, ids, params(max_tokens))


@pytest.mark.feature("chunked prefill")
def test_chunked_prefill_while_trees_decode(models, target):
    """Prompts arrive in chunks of 64 tokens between other requests' verify rows."""
    ids = prompts((5, 200, 33, 300, 64, 150))
    truth = truth_of(target, ids)
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    options = dict(num_tokens=NUM_NODES, max_num_batched_tokens=96, max_num_seqs=4)
    with (
        planting(planter, run_drafter=True),
        engine(target, models.drafter(DEPTH), **options) as llm,
    ):
        assert_same(generate(llm, ids, params()), truth)


@pytest.mark.feature("preemption")
def test_preemption_with_few_blocks(models, target):
    """Too few KV blocks for all: requests are preempted in mid-decode and resumed."""
    ids = prompts((100, 90, 80, 70), seed=1)
    truth = truth_of(target, ids, 120)
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    options = dict(num_tokens=NUM_NODES, num_gpu_blocks_override=20, max_model_len=256)
    with (
        planting(planter, run_drafter=True),
        engine(target, models.drafter(DEPTH), **options) as llm,
    ):
        assert_same(generate(llm, ids, params(120)), truth)
        preemptions = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
        assert preemptions[0] > 0


@pytest.mark.feature("aborts")
def test_abort_in_mid_decode(models, target):
    """An aborted request leaves nothing behind that another one could read."""
    ids = prompts((40, 64, 90), seed=2)
    truth = truth_of(target, ids)
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    with planting(planter), engine(target, models.drafter(DEPTH), num_tokens=NUM_NODES) as llm:
        core = llm.llm_engine
        for round_ in range(3):
            finished = {}
            request_ids = [f"{round_}-{i}" for i in range(3)]
            for request_id, prompt in zip(request_ids, ids):
                core.add_request(request_id, {"prompt_token_ids": prompt}, params())
            for step in range(100):
                if step == 3 + round_:
                    core.abort_request([request_ids[round_]])
                finished |= {
                    o.request_id: list(o.outputs[0].token_ids) for o in core.step() if o.finished
                }
                if not core.has_unfinished_requests():
                    break
            others = [i for i in range(3) if i != round_]
            assert_same([finished[request_ids[i]] for i in others], truth.of(*others))


@pytest.mark.feature("prefix caching")
@pytest.mark.exact
def test_prefix_cache_cold_equals_warm(models, target):
    """Blocks filled by accepted paths are what a prefill would have filled."""
    ids = prompts((64, 97), seed=3)
    truth = truth_of(target, ids, 160)
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    options = dict(num_tokens=NUM_NODES, enable_prefix_caching=True)
    with (
        planting(planter, run_drafter=True),
        engine(target, models.drafter(DEPTH), **options) as llm,
    ):
        assert generate(llm, ids, params(160)) == truth
        # The follow-up's prompt is prompt and answer: its prefix was written by trees.
        follow_ups = [p + t[:150] for p, t in zip(ids, truth)]
        planter.continuations |= {tuple(p): t[150:] for p, t in zip(follow_ups, truth)}
        for _ in range(2):
            assert generate(llm, ids, params(160)) == truth
            assert generate(llm, follow_ups, params(10)) == [t[150:] for t in truth]
        hits = [m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits"]
        assert hits[0] > 500


def test_repeated_requests_in_one_engine(models, target):
    """Slots are reused with whatever tree the last request left in them."""
    ids = prompts((7, 33, 50, 64, 20, 31), seed=4)
    truth = truth_of(target, ids, 40)
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    options = dict(num_tokens=NUM_NODES, max_num_seqs=2)
    with (
        planting(planter, run_drafter=True),
        engine(target, models.drafter(DEPTH), **options) as llm,
    ):
        for _ in range(3):
            assert_same(generate(llm, ids, params(40)), truth)
        assert counters(llm)["accepted_tokens"] > 0


def test_parents_accompany_values(models, target, monkeypatch):
    """Where the scheduler holds drafts' values it holds their parents too."""
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.core.sched.scheduler import Scheduler

    seen = []
    schedule = Scheduler.schedule

    def spy(self, *args, **kwargs):
        output = schedule(self, *args, **kwargs)
        seen.append((output.scheduled_spec_decode_tokens, output.scheduled_spec_decode_parents))
        return output

    monkeypatch.setattr(Scheduler, "schedule", spy)
    ids = prompts((9, 12), seed=6)
    grammar = params(12, structured_outputs=StructuredOutputsParams(regex="[a-z]{40}"))
    # Elsewhere it holds values only of what a grammar looks at.
    options = dict(num_tokens=NUM_NODES, async_scheduling=False)
    with engine(target, models.drafter(DEPTH), **options) as llm:
        generate(llm, ids, [params(12), grammar])
        generate(llm, ids, params(12))
    valued = [(t, p) for t, p in seen if any(max(v, default=-1) >= 0 for v in t.values())]
    assert valued and any(len(t) == 2 for t, _ in valued)
    for tokens, parents in valued:
        for request_id, values in tokens.items():
            assert len(parents[request_id]) == len(values)
            assert all(0 <= parent <= row for row, parent in enumerate(parents[request_id]))
    # Placeholders have no parents.
    assert any(t and not p for t, p in seen)
