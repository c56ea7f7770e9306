"""At T > 0 the engine samples the target's distribution, trees or not."""

import random
from collections import Counter

import torch
from scipy.stats import chisquare

from conftest import engine, generate, prompts
from planting import Planter, planting

DRAWS = 4096
# Few tokens keep expected counts large enough for a chi-square test of pairs.
ALLOWED = [17, 80, 141, 202, 303]


class RandomTruth(dict):
    """Plants a random continuation: the tree may hold any of the allowed tokens."""

    def __init__(self):
        self.rng = random.Random(5)

    def __getitem__(self, prompt):
        return [self.rng.choice(ALLOWED) for _ in range(8)]


class Wanderer(Planter):
    """Fills the tree with allowed tokens, so that walks go everywhere."""

    def filler(self) -> int:
        return self.rng.choice(ALLOWED)


def test_first_two_tokens_follow_the_target(models):
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    prompt = prompts((33,))[0]
    target = models.target("qwen3")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    def probabilities(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1, ALLOWED] / 2
        return logits.double().softmax(-1)

    first = probabilities(prompt)
    expected = torch.cat([p * probabilities([*prompt, t]) for p, t in zip(first, ALLOWED)])

    planter = Wanderer(RandomTruth())
    with planting(planter):
        options = dict(num_tokens=7, max_num_seqs=64, kv_cache_memory_bytes=128 << 20)
        with engine(target, models.drafter(7), **options) as llm:
            params = [
                SamplingParams(
                    temperature=2.0,
                    seed=i,
                    max_tokens=3,
                    ignore_eos=True,
                    detokenize=False,
                    allowed_token_ids=ALLOWED,
                )
                for i in range(DRAWS)
            ]
            outputs = generate(llm, [prompt] * DRAWS, params)
    counts = Counter(tuple(o[:2]) for o in outputs)
    observed = [counts[a, b] for a in ALLOWED for b in ALLOWED]
    assert sum(observed) == DRAWS
    # The first token is sampled before any tree; pairs cover the walk of the second.
    keep = [i for i, e in enumerate(expected.tolist()) if e * DRAWS >= 5]
    rest_observed = DRAWS - sum(observed[i] for i in keep)
    f_obs = [observed[i] for i in keep]
    f_exp = [float(expected[i]) * DRAWS for i in keep]
    rest_expected = DRAWS - sum(f_exp)
    if rest_expected > 1:
        f_obs.append(rest_observed)
        f_exp.append(rest_expected)
    scale = sum(f_obs) / sum(f_exp)
    assert chisquare(f_obs, [e * scale for e in f_exp]).pvalue > 1e-3
