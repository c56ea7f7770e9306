"""Start-up leaves nothing of the tree's to compile: no request waits for Triton.

In a process of its own, as `test.sh gpu` gives each file one: a kernel is compiled once a process.
"""

import pytest
import torch

from conftest import MODE, engine, generate, prompts
from test_features import grammar, params

DEPTH, NUM_NODES = 7, 16
# Upstream's, which a chain's first requests wait for too: what is compiled depends on
# parameters that requests share a batch with, and on how many rows it has.
UPSTREAM = {
    # By whether there is a top_k, a top_p or both.
    "_topk_topp_kernel",
    # top_p alone: by parts that a row is split into, which is by their number.
    "_topp_sb_stats_kernel",
    "_topp_sb_step_kernel",
    "_topp_sb_mask_kernel",
    # By how many logprobs are asked for.
    "_topk_log_softmax_kernel",
}


@pytest.fixture
def compiled(monkeypatch):
    """Returns a list that takes what is compiled from its call on, but for `UPSTREAM`."""

    def start() -> list[str]:
        from triton import knobs

        found: list[str] = []

        def note(*, fn, compile, **others):
            if fn.name.split(".")[-1] in UPSTREAM:
                return
            constants = {k: v for k, v in compile["constants"].items() if v is not None}
            found.append(f"{fn.name} {constants} {compile['signature']} {compile.get('configs')}")

        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
        return found

    return start


def batches() -> dict[str, list]:
    """Requests that run together; the second batch joins the first while it decodes."""
    sampled = params(temperature=1.0, seed=3)
    return {
        "greedy": [params()],
        "seeded": [sampled],
        "joining": [params(), params(), sampled],
        "processed": [
            params(temperature=0.8, top_p=0.7, seed=1),
            params(presence_penalty=1.0),
            params(bad_words=["a"]),
        ],
        "mixed": [params(), params(top_k=5, temperature=1.0, seed=2), params(), sampled, params()],
        "logprobs": [params(logprobs=3), params(logprobs=1, prompt_logprobs=1), params()],
        "grammar": [grammar(regex="([a-f]{2}[0-9]){12}"), params()],
    }


def decode(llm, requests) -> None:
    """Prompts of many lengths, one of them longer than a step; each joins those before it."""
    lengths = (5, 64, 33, 130, 1)
    inputs = prompts([lengths[i % len(lengths)] for i in range(len(requests))], seed=4)
    inputs[-1] = prompts([300], seed=5)[0]
    for i, (ids, request) in enumerate(zip(inputs, requests, strict=True)):
        llm.llm_engine.add_request(f"{id(requests)}-{i}", {"prompt_token_ids": ids}, request)
        for _ in range(3):
            llm.llm_engine.step()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


@pytest.mark.gpu
@pytest.mark.skipif(not MODE.graphs, reason="eager engines are not warmed up")
def test_no_request_compiles(models, compiled):
    found = {}
    with engine(
        models.target(),
        models.drafter(DEPTH),
        num_tokens=NUM_NODES,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    ) as llm:
        seen = compiled()
        for name, requests in batches().items():
            decode(llm, requests)
            if seen:
                found[name] = list(seen)
                seen.clear()
    told = "\n".join(f"{name}: {what}" for name, some in found.items() for what in some)
    assert not found, told


def test_start_up_samples_in_every_way_and_changes_nothing(models, monkeypatch):
    from vllm.v1.worker.gpu.spec_decode.ddtree import row_sampler
    from vllm.v1.worker.gpu.spec_decode.ddtree.speculator import DDTreeSpeculator
    from vllm.v1.worker.gpu.spec_decode.ddtree.warmup import warmup_passes
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    limits = dict(max_num_reqs=2, max_num_tokens=40, max_model_len=256)
    passes = warmup_passes(1 + NUM_NODES, 1 + DEPTH, **limits)
    ways = set()

    def note(*args):
        ways.add((args[6], args[7] is not None))
        sample_rows(*args)

    sample_rows = row_sampler.sample_rows
    monkeypatch.setattr(row_sampler, "sample_rows", note)
    if not MODE.on_gpu:
        # On the CPU it is left out, and there is nothing to wait for.
        monkeypatch.setattr(DDTreeSpeculator, "warmup_passes", passes)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    with engine(
        models.target(),
        models.drafter(DEPTH),
        num_tokens=NUM_NODES,
        max_num_seqs=limits["max_num_reqs"],
        max_num_batched_tokens=limits["max_num_tokens"],
        max_model_len=limits["max_model_len"],
    ) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        ids, few = prompts((5, 33)), params(max_tokens=12)
        expected = generate(llm, ids, few)
        # The workers are told who is done with the next step.
        llm.llm_engine.step()
        ways.clear()
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
        # Whether by temperature, and whether some rows of a batch: plain rows alone, plain
        # ones among others, processed ones.
        assert ways == {(True, False), (True, True), (False, False)}
        assert generate(llm, ids, few) == expected
