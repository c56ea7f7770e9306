"""A row sees its ancestors and nothing else: everything else is NaN here."""

import torch
from safetensors.torch import load_file, save_file

from conftest import MODE, counters, engine, generate, prompts
from lossless import answer, assert_same
from planting import Planter, planting

POISON = 510


def poison(folder: str) -> None:
    """Make every row that holds POISON, and all that look at such a row, NaN."""
    weights = load_file(f"{folder}/model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})


class Poisoner(Planter):
    """Plants the truth and fills every other node with POISON."""

    def filler(self) -> int:
        return POISON


def test_rows_see_no_sibling(models):
    from vllm import SamplingParams

    target = models.target("qwen3", rope_theta=20000.0)
    poison(target)
    ids = prompts((5, 31, 64))
    ids = [[t if t != POISON else 3 for t in p] for p in ids]
    # The truth must not be poisoned; NaN logits are nobody's choice.
    allowed = [t for t in range(3, 512) if t != POISON]
    params = SamplingParams(
        temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False, allowed_token_ids=allowed
    )
    with engine(target) as llm:
        truth = answer(llm, ids, params)
    assert not any(POISON in t for t in truth)
    poisoner = Poisoner({tuple(p): t for p, t in zip(ids, truth)})
    with planting(poisoner):
        with engine(target, models.drafter(7), num_tokens=33) as llm:
            poisoner.planted.clear()
            assert_same(generate(llm, ids, params), truth)
            c = counters(llm)
    assert (
        c["accepted_tokens"]
        > 0.6 * sum(poisoner.planted)
        > (10 if MODE.kv_cache_dtype == "fp8" else 30)
    )
