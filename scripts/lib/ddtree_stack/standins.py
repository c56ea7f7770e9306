"""Stand-ins for models that upstream's tests name but never run: a config and a tokenizer.

Without a network the scheduler's tests would all fail over the few hundred bytes of a config. The
sizes are those that the models publish; the tokenizer knows bytes only. There are no weights, so a
test that loads a model still fails, in both trees alike.
"""

from __future__ import annotations

import json
from pathlib import Path

_COMMIT = "0" * 40  # what the hub's cache calls a revision


def _letters() -> list[str]:
    """A printable character for each byte, as byte-level BPE spells them."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [b for b in range(256) if b not in own]
    place = {b: b for b in own} | {b: 256 + i for i, b in enumerate(other)}
    return [chr(place[b]) for b in range(256)]


def _tokenizer() -> dict:
    """tokenizer.json: 256 bytes and an end."""
    vocab = {"</s>": 0} | {c: i for i, c in enumerate(_letters(), 1)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = {"id": 0, "content": "</s>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": ""}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | flags],
        "normalizer": None,
        "pre_tokenizer": level | {"use_regex": True},
        "post_processor": None,
        "decoder": level | {"use_regex": True},
        "model": bpe | {"end_of_word_suffix": "", "fuse_unk": False, "vocab": vocab, "merges": []},
    }


def write_hub(models: Path, hub: Path) -> None:
    """Lay out `models` (a JSON object: repository to config) as the hub's cache keeps them."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    settings |= {"pad_token": "</s>", "model_max_length": 2048}
    for name, config in json.loads(models.read_text()).items():
        repo = hub / f"models--{name.replace('/', '--')}"
        at = repo / "snapshots" / _COMMIT
        at.mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(_COMMIT)
        files = {"config.json": config, "tokenizer.json": _tokenizer()}
        for file, data in (files | {"tokenizer_config.json": settings}).items():
            (at / file).write_text(json.dumps(data))
