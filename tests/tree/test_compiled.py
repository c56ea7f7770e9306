"""Models that are compiled, as vLLM does unless it is told to run eagerly."""

import pytest
from torch._dynamo.utils import counters as dynamo

from conftest import MODE, counters, engine, generate, prompts
from lossless import sampling

pytestmark = [
    pytest.mark.exact,
    pytest.mark.skipif(MODE.on_gpu, reason="modes of a GPU that compile have files of their own"),
]
NUM_NODES, DEPTH, NUM_TOKENS = 16, 7, 24


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_next"])
def test_compiled_models_are_lossless(models, truths, architecture):
    ids = prompts()[:3]
    truth = [t[:NUM_TOKENS] for t in truths(architecture, 0.0)[:3]]
    dynamo.clear()
    with engine(
        models.target(architecture),
        models.drafter(DEPTH),
        num_tokens=NUM_NODES,
        enforce_eager=False,
    ) as llm:
        assert generate(llm, ids, sampling(0.0, NUM_TOKENS, 3)) == truth
        assert counters(llm)["drafts"] > NUM_TOKENS
    # The target's and the drafter's.
    assert dynamo["stats"]["unique_graphs"] >= 2
