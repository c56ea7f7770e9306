"""Prefixes: each is imported and tested at its own place."""

from __future__ import annotations

import json
import sys

import pytest

from ddtree_stack import check, install, prefixes, refresh, series
from ddtree_stack.errors import CHECK_FAILED, StackError
from ddtree_stack.git import Git

BODY = """
Why.

Upstream-Status: Pending
Drop-When: never
Tests: tests/test_{0}.py
Signed-off-by: A Dev <dev@example.invalid>
"""


@pytest.fixture
def run(golden, monkeypatch, tmp_path):
    """Check the golden stack with this Python standing in for .venv."""
    site = tmp_path / "site"
    info = site / "vllm-1.0+ddtree.1.dist-info"
    info.mkdir(parents=True)
    (site / "vllm").mkdir()
    (site / "vllm" / "binary.abi3.so").write_bytes(b"from the wheel")
    (info / "RECORD").write_text("vllm/binary.abi3.so,,\nvllm/hook.py,,\n")
    venv = golden.stack.venv / "bin"
    venv.mkdir(parents=True)
    (venv / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (venv / "python").chmod(0o755)
    monkeypatch.setattr(prefixes, "install", lambda stack, device: stack.venv)
    monkeypatch.setattr(prefixes, "site_packages", lambda venv: site)
    # The golden package is text; make it Python.
    (golden.stack.tree / "vllm/__init__.py").write_text("")
    golden.commit("0320-feature-python.patch")

    def add(number: int, code: str, test: str) -> None:
        name = f"m{number}"
        (golden.stack.tree / "tests").mkdir(exist_ok=True)
        (golden.stack.tree / f"vllm/{name}.py").write_text(code)
        (golden.stack.tree / f"tests/test_{name}.py").write_text(test)
        golden.commit(f"{number:04}-feature-{name}.patch", f"Add {name}", BODY.format(name))

    def walk(tests: str = "own") -> None:
        refresh.refresh(golden.reload())
        stack = golden.reload()
        patches = series.load(stack)[3:]  # before them the package is no Python
        with check.scratch(stack) as tree:
            check.round_trip(stack, tree, series.load(stack))
            git = Git(tree)
            tip = git.out("rev-parse", "HEAD")
            monkeypatch.setattr(prefixes, "BASE", git.out("rev-parse", f"{tip}~{len(patches)}"))
            prefixes.prefixes(stack, tree, tip, patches, tests)

    return add, walk


GOOD = "X = 1\n"
TEST = "from vllm.{0} import X\ndef test_x():\n    assert X == 1\n"


def test_good_prefixes(run, capsys):
    add, walk = run
    for n in (330, 340, 350):
        add(n, GOOD, TEST.format(f"m{n}"))
    walk("all")
    told = capsys.readouterr()
    assert "prefixes: 3 import" in told.out
    assert told.err.count("1 passed") == 3 and "3 passed" in told.err


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("def broken(:\n", "does not compile"),
        ("import no_such_module\n", "does not import"),
        ("X = 2\n", "its Tests: fail"),
        ("import vllm.m350\nX = 1\n", "does not import"),
    ],
    ids=["syntax", "missing module", "failing test", "uses a later patch"],
)
def test_bad_prefix_is_named(run, code, what):
    """The last case imports what a later patch adds: only a walk over prefixes sees it."""
    add, walk = run
    add(330, GOOD, TEST.format("m330"))
    add(340, code, TEST.format("m340"))
    add(350, GOOD, TEST.format("m350"))
    with pytest.raises(StackError, match=what) as err:
        walk()
    assert err.value.code == CHECK_FAILED and "0340-feature-m340" in err.value.what


def test_tests_can_be_left_out(run, capsys):
    add, walk = run
    add(330, "X = 2\n", TEST.format("m330"))
    walk("none")
    assert "tests not run" in capsys.readouterr().err


def test_binaries_of_the_wheel_are_there(run):
    add, walk = run
    code = "from pathlib import Path\nX = Path(__file__).with_name('binary.abi3.so').exists() * 1\n"
    add(330, code, TEST.format("m330"))
    walk()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("vllm/a/b.py", "vllm.a.b"),
        ("vllm/a/__init__.py", "vllm.a"),
        ("tests/a.py", None),
        ("vllm/a.json", None),
    ],
)
def test_module_names(path, name):
    assert prefixes.module_name(path) == name


def test_provenance_of_the_installed_tree(golden):
    info = golden.stack.venv / "lib/python3.11/site-packages/vllm-1.0+ddtree.1.dist-info"
    assert install.installed(golden.stack) is None
    info.mkdir(parents=True)
    (info / "ddtree.json").write_text(json.dumps({"tree": "t"}))
    assert install.installed(golden.stack) == {"tree": "t"}
    (info / "ddtree.json").write_text("{")
    assert install.installed(golden.stack) is None
