"""A drafter that does not belong to its target stops the start, or is told of at run time."""

import json
import shutil
from pathlib import Path

import pytest

from conftest import engine, generate, prompts


@pytest.fixture
def warned(monkeypatch):
    """What is warned about at the start and later, whatever the logging is set to."""
    from vllm.config import ddtree_pairing
    from vllm.v1.spec_decode import pairing_watch

    at_start: list[str] = []
    later: list[str] = []
    for module, messages in ((ddtree_pairing, at_start), (pairing_watch, later)):
        monkeypatch.setattr(
            module.logger,
            "warning",
            lambda text, *args, messages=messages, **kwargs: messages.append(text % args),
        )
    return at_start, later


@pytest.fixture
def broken(models, tmp_path):
    """A copy of the tiny drafter with another config."""

    def broken(dflash: dict | None = None, **fields) -> str:
        folder = tmp_path / "broken"
        shutil.copytree(models.drafter(7), folder)
        path = Path(folder) / "config.json"
        config = json.loads(path.read_text()) | fields
        config["dflash_config"] |= dflash or {}
        path.write_text(json.dumps(config))
        return str(folder)

    return broken


@pytest.mark.parametrize(
    "dflash, fields, message",
    [
        ({"target_layer_ids": [0, 1]}, {}, r"2 target_layer_ids .*\(64, 128\).*\(64, 192\)"),
        ({"target_layer_ids": [2, 1, 0]}, {}, r"target_layer_ids=\[2, 1, 0\].*ascending"),
        ({"mask_token_id": 512}, {}, "mask_token_id=512, vocab_size is 512"),
        ({}, {"num_target_layers": 5}, "num_target_layers=5, the target has 4 layers"),
        (
            {},
            {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
            r"num_hidden_layers=1, the weights have layers \[0, 1\]",
        ),
    ],
    ids=["fc", "order", "mask", "target", "layers"],
)
def test_start_is_refused(models, broken, dflash, fields, message):
    with pytest.raises(ValueError, match=f"does not fit target .*{message}"):
        with engine(models.target("qwen3"), broken(dflash, **fields), num_tokens=7):
            pass


@pytest.mark.parametrize("method", ["ddtree", "dflash"])
def test_drafter_that_never_hits_is_told_of_once(models, warned, method):
    """A random drafter; the pair itself starts without a warning."""
    from vllm import SamplingParams

    target, drafter = models.target("qwen3"), models.drafter(7)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    ids = prompts()
    at_start, later = warned
    with engine(target, drafter, method=method, num_tokens=7, disable_log_stats=True) as llm:
        # Every request makes a token in its first step, before it has drafts.
        generate(llm, ids, params)
        assert later == []
        for _ in range(3):
            generate(llm, ids, params)
    assert at_start == []
    (message,) = later
    assert target in message and drafter in message and "in 256 steps" in message
