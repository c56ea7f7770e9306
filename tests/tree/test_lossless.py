"""With trees the engine emits the tokens it emits without speculation."""

import pytest

from conftest import counters, engine, generate, prompts
from planting import Planter, planting

# By temperature: sampling a row takes the interpreter milliseconds.
NUM_TOKENS = {0.0: 512, 1.0: 160}


def sampling(temperature: float, num_tokens: int, num_prompts: int):
    from vllm import SamplingParams

    return [
        SamplingParams(
            temperature=temperature,
            seed=100 + i if temperature else None,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(num_prompts)
    ]


@pytest.fixture(scope="module")
def truths(models):
    """What the engine emits without speculation, by (architecture, temperature)."""
    known: dict = {}

    def truth(architecture: str, temperature: float) -> list[list[int]]:
        if (architecture, temperature) not in known:
            ids = prompts()
            with engine(models.target(architecture)) as llm:
                for t in (0.0, 1.0):
                    known[architecture, t] = generate(
                        llm, ids, sampling(t, NUM_TOKENS[t], len(ids))
                    )
        return known[architecture, temperature]

    return truth


def run_planted(models, truth, architecture, temperature, num_nodes, depth, num_tokens, **options):
    ids = prompts()
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)}, seed=num_nodes)
    with (
        planting(planter, **options),
        engine(models.target(architecture), models.drafter(depth), num_tokens=num_nodes) as llm,
    ):
        # Warm-up plants nothing; what counts starts here.
        planter.planted.clear()
        before = counters(llm)
        outputs = generate(llm, ids, sampling(temperature, num_tokens, len(ids)))
        after = counters(llm)
    assert outputs == [t[:num_tokens] for t in truth]
    return planter, {k: after[k] - before[k] for k in after}


@pytest.mark.parametrize(
    "architecture, temperature, num_nodes, depth",
    [("qwen3", 0.0, 33, 15), ("llama", 0.0, 16, 7), ("qwen3", 1.0, 7, 7), ("llama", 1.0, 7, 15)],
)
def test_long_outputs_equal_no_speculation(
    models, truths, architecture, temperature, num_nodes, depth
):
    """Long answers to each of 8 prompts, deep sideways accepts at every step."""
    truth = truths(architecture, temperature)
    planter, spec = run_planted(
        models, truth, architecture, temperature, num_nodes, depth, NUM_TOKENS[temperature]
    )
    # Equal outputs prove nothing unless planted nodes were accepted: a plant is missed
    # only where the end of the output cuts the step.
    planted = sum(planter.planted) / len(planter.planted)
    assert spec["accepted_tokens"] / spec["drafts"] > 0.8 * planted > 1.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "num_nodes, depth",
    [(1, 1), (1, 15), (2, 7), (7, 1), (7, 15), (16, 15), (33, 7), (64, 1), (64, 15)],
)
def test_every_shape_equals_no_speculation(models, truths, num_nodes, depth, temperature):
    architecture = "llama" if num_nodes % 2 else "qwen3"
    truth = truths(architecture, temperature)
    _, spec = run_planted(models, truth, architecture, temperature, num_nodes, depth, 48)
    assert spec["accepted_tokens"] > 0


@pytest.mark.parametrize("num_nodes, depth", [(7, 7), (16, 7), (64, 15)])
def test_real_drafter_under_planted_trees(models, truths, num_nodes, depth):
    """The drafter's own pass runs too: its context is gathered by path at every step."""
    truth = truths("qwen3", 0.0)
    run_planted(models, truth, "qwen3", 0.0, num_nodes, depth, 48, run_drafter=True)


@pytest.mark.parametrize("architecture, num_nodes, depth", [("qwen3", 31, 15), ("llama", 7, 7)])
def test_drafted_trees_equal_no_speculation(models, truths, architecture, num_nodes, depth):
    """No planting: the whole path, from the drafter's logits to the accepted tokens."""
    ids = prompts()
    with engine(models.target(architecture), models.drafter(depth), num_tokens=num_nodes) as llm:
        for temperature in (0.0, 1.0):
            outputs = generate(llm, ids, sampling(temperature, 64, len(ids)))
            assert outputs == [t[:64] for t in truths(architecture, temperature)]
