"""At T > 0 the engine samples the target's distribution, trees or not."""

import random
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare

from conftest import MODE, engine, generate, prompts
from planting import Planter, planting

pytestmark = pytest.mark.exact
# In the interpreter a draw takes a tenth of a second.
DRAWS = 4000 if MODE.on_gpu else 1200
LENGTH = 3
# Likeliest tokens looked at in each position; all others are one cell.
WIDTH = 4


class Truths(dict):
    """For every prompt a random continuation of likely tokens, so that walks go deep."""

    def __init__(self, likely: list[int]):
        self.likely, self.rng = likely, random.Random(5)

    def __getitem__(self, prompt) -> list[int]:
        return [self.rng.choice(self.likely) for _ in range(4)]


class Wanderer(Planter):
    """Fills the rest of the tree with likely tokens too."""

    def filler(self) -> int:
        return self.rng.choice(self.continuations.likely)


def sharpen(folder: str) -> None:
    """Make the target choosier: random weights are nearly indifferent."""
    weights = load_file(f"{folder}/model.safetensors")
    weights["lm_head.weight"] *= 4
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})


def test_first_tokens_follow_the_target(models):
    """The first comes from the prompt, the others from the rows of trees."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    prompt = prompts((9,))[0]
    target = models.target("qwen3", rope_theta=30000.0)
    sharpen(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    def next_token(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)

    expected = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for tokens, probability in expected.items():
            best = next_token([*prompt, *tokens]).topk(WIDTH)
            for p, token in zip(best.values.tolist(), best.indices.tolist()):
                longer[*tokens, token] = probability * p
        expected = longer
    # Cells too rare for the test's approximation are left to the rest.
    expected = {tokens: DRAWS * p for tokens, p in expected.items() if DRAWS * p >= 5}
    assert len(expected) > DRAWS // 200, len(expected)

    likely = sorted({token for tokens in expected for token in tokens})
    options = dict(num_tokens=2, max_num_seqs=100, max_model_len=32)
    with planting(Wanderer(Truths(likely))), engine(target, models.drafter(7), **options) as llm:
        params = [
            SamplingParams(
                temperature=1.0, seed=i, max_tokens=LENGTH, ignore_eos=True, detokenize=False
            )
            for i in range(DRAWS)
        ]
        outputs = generate(llm, [prompt] * DRAWS, params)
    counts = Counter(map(tuple, outputs))
    observed = [counts[tokens] for tokens in expected]
    observed.append(DRAWS - sum(observed))
    wanted = list(expected.values())
    wanted.append(DRAWS - sum(wanted))
    assert chisquare(observed, wanted).pvalue > 1e-3
