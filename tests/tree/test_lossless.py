"""With trees the engine emits the tokens it emits without speculation."""

import pytest

from conftest import engine, generate, prompts
from lossless import assert_accepted, assert_same, num_tokens, run_planted, sampling


@pytest.mark.parametrize(
    "architecture, temperature, num_nodes, depth",
    [("qwen3", 0.0, 33, 15), ("llama", 0.0, 16, 7), ("qwen3", 1.0, 7, 7), ("llama", 1.0, 7, 15)],
)
def test_long_outputs_equal_no_speculation(
    models, truths, architecture, temperature, num_nodes, depth
):
    """Long answers to each of 8 prompts, deep sideways accepts at every step."""
    truth = truths(architecture, temperature)
    length = num_tokens(architecture, temperature)
    planter, spec = run_planted(models, truth, architecture, temperature, num_nodes, depth, length)
    assert_accepted(planter, spec)


@pytest.mark.parametrize("architecture, num_nodes, depth", [("qwen3", 31, 15), ("llama", 7, 7)])
def test_drafted_trees_equal_no_speculation(models, truths, architecture, num_nodes, depth):
    """No planting: the whole path, from the drafter's logits to the accepted tokens."""
    ids = prompts()
    # Before the engine starts: one at a time.
    truth = {temperature: truths(architecture, temperature) for temperature in (0.0, 1.0)}
    with engine(models.target(architecture), models.drafter(depth), num_tokens=num_nodes) as llm:
        for temperature, wanted in truth.items():
            outputs = generate(llm, ids, sampling(temperature, 64, len(ids)))
            assert_same(outputs, wanted.cut(64))
