"""Models that are compiled, as vLLM does unless it is told to run eagerly."""

import pytest
from torch._dynamo.utils import counters as dynamo

from conftest import MODE, counters, engine, generate, prompts
from lossless import sampling
from planting import Planter, planting

pytestmark = [
    pytest.mark.exact,
    pytest.mark.skipif(MODE.on_gpu, reason="modes of a GPU that compile have files of their own"),
]
NUM_NODES, DEPTH, NUM_TOKENS = 16, 7, 48


def test_compiled_hybrids_are_lossless(models, truths):
    ids = prompts()[:3]
    truth = [t[:NUM_TOKENS] for t in truths("qwen3_next", 0.0)[:3]]
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    dynamo.clear()
    with (
        planting(planter, run_drafter=True),
        engine(
            models.target("qwen3_next"),
            models.drafter(DEPTH),
            num_tokens=NUM_NODES,
            enforce_eager=False,
        ) as llm,
    ):
        assert generate(llm, ids, sampling(0.0, NUM_TOKENS, 3)) == truth
        assert counters(llm)["accepted_tokens"] > 2 * counters(llm)["drafts"]
    # The target's and the drafter's.
    assert dynamo["stats"]["unique_graphs"] >= 2
