"""README's table of features: rows come from tests and refusals, and nothing can drift."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_stack import features
from ddtree_stack.errors import CHECK_FAILED, StackError
from ddtree_stack.paths import Stack
from test_gpu import patch

REPO = Path(__file__).resolve().parents[2]
TESTS = """
@pytest.mark.feature("bananas", "Apples, green")
def test_a(): ...

@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.feature("cherries"))])
@pytest.mark.feature("dates", falls_back="they are dry")
def test_b(x): ...

FIGS = {"figs": 1, "grapes": 2}

@pytest.mark.feature(keys="FIGS")
def test_c(): ...
"""
CONFIG = """
def verify(n):
    chain = "a chain"
    refusals: list = [(n > 1, "eggs > 1", "they break", "no eggs, or " + chain)]
    for option, reason, instead in refusals:
        raise _refused(option, reason, instead)
    raise _refused(f"flour={n}", "too fine", chain)
"""


@pytest.fixture
def stack(tmp_path) -> Stack:
    (tmp_path / "tests" / "tree").mkdir(parents=True)
    (tmp_path / "tests" / "tree" / "test_a.py").write_text(TESTS)
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "series").write_text("a.patch\n")
    name(tmp_path, 'X = ["eggs > 1", "flour=7 is named by its first letters only", "flour="]')
    return Stack(tmp_path)


def name(root: Path, tests: str) -> None:
    (root / "patches" / "a.patch").write_text(
        "A\n\n"
        + patch("vllm/config/ddtree.py", *CONFIG.splitlines())
        + patch("tests/v1/spec_decode/ddtree/test_config.py", tests)
    )


def test_rows_are_what_tests_and_refusals_say(stack):
    assert features.table(stack).splitlines() == [
        "| | with trees |",
        "| --- | --- |",
        "| Apples, green; bananas; cherries; figs; grapes | work |",
        "| dates | the spine of its tree: they are dry |",
        "| eggs > 1 | refused: they break; use no eggs, or a chain |",
        "| flour=... | refused: too fine; use a chain |",
    ]


def test_a_refusal_needs_a_test(stack):
    name(stack.root, 'X = ["flour="]')
    with pytest.raises(StackError) as error:
        features.table(stack)
    assert error.value.code == CHECK_FAILED and error.value.facts == ["eggs > 1"]


def test_only_the_table_is_replaced(stack):
    assert features.in_readme(stack) is None
    stack.readme.write_text("# No place\n")
    assert features.in_readme(stack) is None
    stack.readme.write_text(f"before\n\n{features._BEGIN}old\n{features._END}\nafter\n")
    stack.readme.write_text(features.in_readme(stack))
    text = stack.readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| dates |" in text and features.in_readme(stack) == text


def test_readme_is_up_to_date():
    stack = Stack(REPO)
    assert features.in_readme(stack) == stack.readme.read_text()
