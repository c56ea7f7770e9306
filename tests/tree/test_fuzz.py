"""Everything a scheduler does, at once and at random: no output may notice.

Requests arrive in bursts with prompts that share prefixes, into a K/V pool too small for them:
prefix caching, chunked prefill, priorities, preemption and resumption, aborts.
"""

import random
from dataclasses import dataclass, field

import pytest

import tiny_models
from conftest import MODE, counters, engine, generate
from planting import Planter, planting

pytestmark = pytest.mark.exact
NUM_REQUESTS = 2000 if MODE.on_gpu else 48
# Steps of one engine whose memory must stay as it is.
NUM_SOAK_STEPS = 10_000
MAX_TOKENS, MAX_MODEL_LEN = 40, 256
DEPTH = 7


@dataclass
class Request:
    """One that arrives `at` a step; aborted once it has `patience` tokens, unless that is None."""

    prompt: list[int]
    num_tokens: int
    temperature: float
    at: int
    priority: int
    patience: int | None
    output: list[int] = field(default_factory=list)

    def params(self, seed: int):
        from vllm import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            seed=seed if self.temperature else None,
            max_tokens=self.num_tokens,
            ignore_eos=True,
            detokenize=False,
        )


def draw(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(3, tiny_models.VOCAB - 1) for _ in range(n)]

    shared = [tokens(n) for n in (32, 64, 96, 128)]
    found, at = [], 0
    for _ in range(count):
        at += rng.choice((0, 0, 0, 0, 1, 4))
        prefix = rng.choice(shared)[: rng.choice((0, 31, 64, 128))]
        found.append(
            Request(
                # Never two alike: answers are looked up by prompt.
                prompt=prefix + tokens(rng.randint(8, 60)),
                num_tokens=rng.randint(1, MAX_TOKENS),
                temperature=rng.choice((0.0, 0.0, 1.0)),
                at=at,
                priority=rng.randrange(3),
                patience=rng.randint(1, 12) if rng.random() < 0.3 else None,
            )
        )
    return found


def run(llm, requests: list[Request]) -> int:
    """Serve them as they arrive; returns the steps it took."""
    core, waiting = llm.llm_engine, list(enumerate(requests))
    running: dict[str, Request] = {}
    step = 0
    while waiting or running:
        while waiting and (waiting[0][1].at <= step or not running):
            i, request = waiting.pop(0)
            prompt = {"prompt_token_ids": request.prompt}
            core.add_request(str(i), prompt, request.params(i), priority=request.priority)
            running[str(i)] = request
        for output in core.step():
            request = running.get(output.request_id)
            if request is None:
                continue
            request.output = list(output.outputs[0].token_ids)
            patience = request.patience
            if output.finished:
                del running[output.request_id]
            elif patience is not None and len(request.output) >= patience:
                del running[output.request_id]
                core.abort_request([output.request_id])
        step += 1
    return step


OPTIONS = dict(max_model_len=MAX_MODEL_LEN)
TREES = OPTIONS | dict(
    enable_prefix_caching=True,
    scheduling_policy="priority",
    # Long prompts come in pieces.
    max_num_batched_tokens=128,
    # A quarter of what eight requests may need.
    num_gpu_blocks_override=1 + 8 * MAX_MODEL_LEN // 32 // 4,
)


@pytest.mark.feature("priority scheduling")
@pytest.mark.parametrize("num_nodes, async_scheduling", [(16, True), (33, False)])
def test_random_traffic_equals_no_speculation(models, num_nodes, async_scheduling):
    requests = draw(num_nodes, NUM_REQUESTS // 2)
    with engine(models.target("qwen3"), **OPTIONS) as llm:
        alone = [r.params(i) for i, r in enumerate(requests)]
        truth = generate(llm, [r.prompt for r in requests], alone)
    planter = Planter({tuple(r.prompt): t for r, t in zip(requests, truth)}, seed=num_nodes)
    options = TREES | dict(async_scheduling=async_scheduling, num_tokens=num_nodes)
    with planting(planter), engine(models.target("qwen3"), models.drafter(DEPTH), **options) as llm:
        preempted = watch_preemption(llm)
        run(llm, requests)
        accepted, metrics = counters(llm)["accepted_tokens"], llm.get_metrics()
    for i, (request, wanted) in enumerate(zip(requests, truth)):
        if request.patience is None:
            assert (i, request.output) == (i, wanted)
        else:
            assert len(request.output) >= min(request.patience, len(wanted))
            assert (i, request.output) == (i, wanted[: len(request.output)])
    # What was to happen did.
    assert preempted and accepted > len(requests)
    hits = next(m.value for m in metrics if m.name == "vllm:prefix_cache_hits")
    assert hits > 0
    assert any(r.patience and len(r.output) < len(t) for r, t in zip(requests, truth))


def watch_preemption(llm) -> list:
    """A list that grows with every preemption."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    seen, preempt = [], scheduler._preempt_request

    def watched(request, *args, **kwargs):
        seen.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = watched
    return seen


@pytest.mark.skipif(not MODE.on_gpu, reason="10,000 steps take the interpreter an hour")
def test_memory_stays_flat(models):
    """An hour's traffic leaves nothing behind."""
    import psutil
    import torch

    options = TREES | {"num_tokens": 31}
    with engine(models.target("qwen3"), models.drafter(DEPTH), **options) as llm:
        process, seen, steps, seed = psutil.Process(), [], 0, 0
        while steps < NUM_SOAK_STEPS:
            steps += run(llm, draw(seed, 200))
            seed += 1
            seen.append((torch.cuda.memory_allocated(), process.memory_info().rss))
        core = llm.llm_engine.engine_core.engine_core
        assert not core.scheduler.requests
        pool = core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    # The first rounds fill caches.
    (device, host), (device_after, host_after) = seen[len(seen) // 4], seen[-1]
    assert device_after <= device + (1 << 20), seen
    assert host_after <= host + (64 << 20), seen
