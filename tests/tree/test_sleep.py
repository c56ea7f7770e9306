"""Sleep mode: what trees and their drafter are made of outlasts sleep, at both levels.

Memory that sleep takes back comes again at the same addresses, in CUDA graphs as in the table of
KV caches. What was in it does not, unless it was put aside.
"""

import pytest

from conftest import counting, engine, generate, prompts
from lossless import assert_accepted, sampling
from planting import Planter, planting

pytestmark = [pytest.mark.gpu, pytest.mark.exact]
NUM_NODES, DEPTH, NUM_TOKENS = 16, 7, 64


class Watcher(Planter):
    """Also notes which trees the drafter drew, before others are planted.

    Attributes:
        drawn: tokens of the drafter's nodes, by length of the prompt and of the text so far.

    """

    def __init__(self, *args):
        super().__init__(*args)
        self.drawn: dict[tuple[int, int], list[int]] = {}

    def plant(self, speculator, input_batch) -> None:
        states = speculator.draft_tree_req_states
        for row, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            total = int(states.total_len.gpu[slot])
            key = int(states.prompt_len.np[slot]), total
            self.drawn[key] = speculator.node_tokens[row].tolist()
        super().plant(speculator, input_batch)


@pytest.mark.feature("sleep mode")
def test_before_and_after(models, truths):
    from vllm.platforms import current_platform

    if not current_platform.is_cumem_allocator_available():
        pytest.skip("this vLLM has no library to allocate memory that sleeps (cumem_allocator)")
    ids, truth = prompts(), [t[:NUM_TOKENS] for t in truths("qwen3", 0.0)]
    planter = Watcher({tuple(p): t for p, t in zip(ids, truths("qwen3", 0.0))})

    def run(llm) -> dict[tuple[int, int], list[int]]:
        """What the drafter drew, as everything was emitted as it should be."""
        planter.drawn = {}
        planter.rng.seed(0)
        planter.planted.clear()
        with counting(llm) as spec:
            outputs = generate(llm, ids, sampling(0.0, NUM_TOKENS, len(ids)))
        assert outputs == truth
        assert_accepted(planter, spec)
        return planter.drawn

    def assert_drawn_again(drawn) -> None:
        shared = first.keys() & drawn.keys()
        assert len(shared) > 0.8 * len(first)
        # Where two candidates nearly tie, another batch may swap them.
        same = sum(drawn[key] == first[key] for key in shared)
        assert same > 0.9 * len(shared)

    with (
        planting(planter, run_drafter=True),
        engine(
            models.target(),
            models.drafter(DEPTH),
            num_tokens=NUM_NODES,
            enable_sleep_mode=True,
            # Level 2 discards weights; reload_weights restores the target's.
            sleep_preserve_parameter_names=["draft.*"],
        ) as llm,
    ):
        first = run(llm)

        llm.sleep(level=1)
        llm.wake_up()
        assert_drawn_again(run(llm))

        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        llm.wake_up(tags=["kv_cache"])
        assert_drawn_again(run(llm))

        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        assert_drawn_again(run(llm))
