"""Asynchronous scheduling: the scheduler runs ahead and knows drafts by their number only."""

import pytest

from conftest import counters, engine, generate, prompts
from planting import Planter, planting

pytestmark = pytest.mark.exact


@pytest.fixture
def async_scheduling(monkeypatch):
    """The CPU platform turns it off, for it gains nothing there; its logic is the GPU's."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def check_and_keep(cls, vllm_config):
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(platform, "check_and_update_config", classmethod(check_and_keep))


@pytest.mark.feature("asynchronous scheduling")
def test_placeholders_become_trees(models, async_scheduling):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    ids = prompts((5, 33, 64, 90))
    options = {"max_tokens": 40, "ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(temperature=0.0, **options),
        SamplingParams(temperature=1.0, seed=7, **options),
        SamplingParams(temperature=0.0, presence_penalty=1.0, **options),
        SamplingParams(
            temperature=0.0,
            structured_outputs=StructuredOutputsParams(regex="([a-f]{2}[0-9]){12}"),
            **options,
        ),
    ]
    target = models.target("qwen3")
    with engine(target) as llm:
        truth = generate(llm, ids, params)
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    with planting(planter, run_drafter=True):
        with engine(target, models.drafter(7), num_tokens=16) as llm:
            assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
            assert generate(llm, ids, params) == truth
            c = counters(llm)
            # Drafts a grammar has cut were computed all the same. With no time for a tree,
            # those are all beside its spine: valid, unmasked, and not to be accepted.
            core = llm.llm_engine.engine_core.engine_core
            core.structured_output_manager.draft_trees.max_seconds = 0
            assert generate(llm, ids[3:], params[3:]) == truth[3:]
    assert c["accepted_tokens"] > c["drafts"]
