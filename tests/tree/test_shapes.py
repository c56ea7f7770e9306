"""Every number of nodes with every depth: the tokens of no speculation."""

import pytest

from lossless import run_planted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "num_nodes, depth",
    [(1, 1), (1, 15), (2, 7), (7, 1), (7, 15), (16, 15), (33, 7), (64, 1), (64, 15)],
)
def test_every_shape_equals_no_speculation(models, truths, num_nodes, depth, temperature):
    architecture = "llama" if num_nodes % 2 else "qwen3"
    truth = truths(architecture, temperature)
    # The interpreter draws each of the tree's rows by itself.
    num_tokens = 48 if temperature == 0 else 20
    _, spec = run_planted(models, truth, architecture, temperature, num_nodes, depth, num_tokens)
    assert spec["accepted_tokens"] > 0


@pytest.mark.parametrize("num_nodes, depth", [(7, 7), (16, 7), (64, 15)])
def test_real_drafter_under_planted_trees(models, truths, num_nodes, depth):
    """The drafter's own pass runs too: its context is gathered by path at every step."""
    truth = truths("qwen3", 0.0)
    run_planted(models, truth, "qwen3", 0.0, num_nodes, depth, 48, run_drafter=True)
