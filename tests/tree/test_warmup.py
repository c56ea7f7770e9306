"""Start-up leaves nothing to compile: no request waits for Triton.

In a process of its own, as `test.sh gpu` gives each file one: a kernel is compiled once a process.
"""

import pytest

from conftest import MODE, engine, prompts
from test_features import grammar, params

pytestmark = pytest.mark.gpu
DEPTH, NUM_NODES = 7, 16


@pytest.fixture
def compiled(monkeypatch):
    """Returns a list that takes, from its call on, what is compiled: name, constants, signature."""

    def start() -> list[str]:
        from triton import knobs

        found: list[str] = []

        def note(*, fn, compile, **others):
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
