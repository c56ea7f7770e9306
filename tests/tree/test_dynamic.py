"""The number of nodes goes by the number of requests: a prefix of every tree is verified."""

import numpy as np
import pytest

from conftest import MODE, counters, engine, generate, prompts
from lossless import Answers, assert_same, replays, verifying
from planting import Planter, planting

# From, to, nodes: by the number of requests in a step.
SCHEDULE = [(1, 2, 24), (3, 5, 9), (6, 6, 1), (7, 8, 0)]
NUM_NODES, DEPTH = 24, 7


@pytest.mark.feature("num_speculative_tokens_per_batch_size")
def test_trees_are_cut_to_what_the_batch_can_afford(models, truths):
    from vllm import SamplingParams

    truth = truths("llama", 0.0)
    # They end one after another, and every size of batch comes by.
    lengths = [20 + 12 * i for i in range(len(truth))]
    ids = prompts()
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in lengths
    ]
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    # Requests, and rows of each, of every step that verifies trees.
    steps: list[tuple[int, set[int]]] = []

    def note(verifier, input_batch, output):
        rows = np.diff(input_batch.cu_num_logits_np)
        steps.append((len(rows), set(rows.tolist())))

    schedule = {"num_speculative_tokens_per_batch_size": SCHEDULE}
    with (
        planting(planter),
        verifying(note),
        replays() as replayed,
        engine(
            models.target("llama"),
            models.drafter(DEPTH),
            num_tokens=NUM_NODES,
            speculative_config=schedule,
        ) as llm,
    ):
        steps.clear()
        replayed.clear()
        outputs = generate(llm, ids, params)
        accepted = counters(llm)["accepted_tokens"]
    assert_same(outputs, Answers([t[:n] for t, n in zip(truth, lengths)], truth.likely))
    # What a step verifies was decided by the size of the batch before it.
    nodes = {n: {max(r) - 1 for m, r in steps if m == n} for n in range(1, 9)}
    assert nodes[1] == {24} and 24 in nodes[2] and 9 in nodes[5] and max(nodes[4]) == 9
    assert nodes[8] == set() and 1 in nodes[6] | nodes[5]
    assert accepted > 20
    assert (len(replayed) > len(steps) / 2) == MODE.graphs
