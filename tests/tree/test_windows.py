"""Sliding windows of a tiny model: paths cross the window's edge at every step.

A layer has to hide keys by a row's depth, not by its place in the sequence. Without Gemma's
weights (test_gemma.py) this is what runs.
"""

import pytest

from lossless import assert_accepted, run_planted


@pytest.mark.feature("sliding windows")
@pytest.mark.parametrize("temperature, num_nodes, depth", [(0.0, 33, 15), (1.0, 16, 7)])
def test_windows_by_depth(models, truths, temperature, num_nodes, depth):
    truth = truths("windowed", temperature)
    planter, spec = run_planted(models, truth, "windowed", temperature, num_nodes, depth, 80)
    assert_accepted(planter, spec)
