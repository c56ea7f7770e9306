"""Runs compared with what the engine emits without speculation."""

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
