"""The reference pair: SmolLM2-135M-Instruct and the drafter that ships with these tests."""

import os
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[1] / "models"
DRAFTER = MODELS / "smollm2-135m-dflash-b16"
sys.path.insert(0, str(MODELS))


def target() -> Path:
    """Its folder, which scripts/test.sh makes."""
    folder = os.environ.get("DDTREE_TARGET")
    if not folder:
        pytest.skip("DDTREE_TARGET is not set: scripts/test.sh makes the target")
    return Path(folder)


def own_prompts(count: int) -> list[list[int]]:
    """Token ids of the first prompts of our own, one of each category in turn."""
    import eval_prompts
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target())
    questions = [q for each in zip(*eval_prompts.OWN.values()) for q in each]
    return [eval_prompts.encode(tokenizer, eval_prompts.user(q)) for q in questions[:count]]
