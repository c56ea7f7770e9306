"""With the same drafter a tree that holds the chain accepts at least what it accepts."""

import pytest

from conftest import engine, generate, prompts, tokens_per_step
from planting import noisy_marginals

pytestmark = pytest.mark.exact


@pytest.mark.parametrize("architecture, depth", [("qwen3", 7), ("llama", 15)])
def test_tree_accepts_no_less_than_the_chain(models, architecture, depth):
    from vllm import SamplingParams

    ids = prompts((5, 33, 64, 90))
    params = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True, detokenize=False)
    target, drafter = models.target(architecture), models.drafter(depth)
    with engine(target) as llm:
        truth = generate(llm, ids, params)
    tau = {}
    runs = [("dflash", depth, {})]
    runs += [("ddtree", n, {"draft_tree_policy": "spine"}) for n in (depth, 63)]
    runs += [("ddtree", 63, {"draft_tree_policy": "best_first"})]
    for method, num_tokens, options in runs:
        with noisy_marginals({tuple(p): t for p, t in zip(ids, truth)}, ranks=[0.6, 0.2, 0.1]):
            engine_of = dict(method=method, num_tokens=num_tokens, speculative_config=options)
            with engine(target, drafter, **engine_of) as llm:
                assert generate(llm, ids, params) == truth
                tau[method, num_tokens, *options.values()] = tokens_per_step(llm)
    chain = tau["dflash", depth]
    assert 1.5 < chain <= tau["ddtree", depth, "spine"] < tau["ddtree", 63, "spine"]
    # Not promised, and what makes it the default.
    assert tau["ddtree", 63, "best_first"] > chain
