"""With the same drafter a tree that holds the chain accepts at least what it accepts."""

import pytest
from planting import noisy_marginals

from conftest import engine, generate, prompts, tokens_per_step


@pytest.mark.parametrize("architecture, depth", [("qwen3", 7), ("llama", 15)])
def test_tree_accepts_no_less_than_the_chain(models, architecture, depth):
    from vllm import SamplingParams

    ids = prompts((5, 33, 64, 90))
    params = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True, detokenize=False)
    target, drafter = models.target(architecture), models.drafter(depth)
    with engine(target) as llm:
        truth = generate(llm, ids, params)
    tau = {}
    for method, num_tokens in [("dflash", depth), ("ddtree", depth), ("ddtree", 63)]:
        with noisy_marginals({tuple(p): t for p, t in zip(ids, truth)}, ranks=[0.6, 0.2, 0.1]):
            with engine(target, drafter, method=method, num_tokens=num_tokens) as llm:
                assert generate(llm, ids, params) == truth
                tau[method, num_tokens] = tokens_per_step(llm)
    assert 1.5 < tau["dflash", depth] <= tau["ddtree", depth] < tau["ddtree", 63]
