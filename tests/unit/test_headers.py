"""The rules for one patch: each broken once."""

from __future__ import annotations

import pytest

from ddtree_stack.export import export
from ddtree_stack.fetch import BASE
from ddtree_stack.patchfile import Patch, inject_name, problems, strip_name, trailer_block

GOOD = b"""\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A Dev <dev@example.invalid>
Date: Sun, 1 Nov 2026 00:00:00 +0000
Subject: [PATCH] Add a thing

Why, what, and what breaks without it.

Upstream-Status: Pending
Drop-When: upstream has a thing
Depends-On: 0200-hook-first.patch
Tests: tests/v1/test_thing.py::test_it
 tests/v1/test_other.py
Signed-off-by: A Dev <dev@example.invalid>

diff --git a/vllm/a.py b/vllm/a.py
index 1..2 100644
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1,2 +1,3 @@
 one
+added
 two
"""
EARLIER = ["0200-hook-first.patch"]


def found(raw: bytes, name: str = "0310-area-slug.patch") -> list[str]:
    return problems(Patch(name, raw), EARLIER)


def test_good_patch_has_no_problems():
    assert found(GOOD) == []
    patch = Patch("0310-area-slug.patch", GOOD)
    assert patch.subject == "Add a thing"
    assert patch.body == "Why, what, and what breaks without it."
    assert patch.files == ["vllm/a.py"]
    assert patch.tests == ["tests/v1/test_thing.py::test_it", "tests/v1/test_other.py"]
    assert patch.depends == EARLIER


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (b"[PATCH] Add a thing", b"[PATCH] [vllm] Add a thing", "brackets"),
        (b"Add a thing", b"A" * 73, "73 characters"),
        (b"Why, what, and what breaks without it.\n\n", b"", "no body"),
        (b"Upstream-Status: Pending\n", b"", "no Upstream-Status"),
        (b"Status: Pending", b"Status: Soon", "none of the five forms"),
        (b"Status: Pending", b"Status: Denied", "none of the five forms"),
        (b"Drop-When: upstream has a thing\n", b"", "no Drop-When"),
        (b"Signed-off-by: A Dev <dev@example.invalid>\n", b"", "no Signed-off-by"),
        (b"0200-hook-first", b"0400-kernel-later", "does not come earlier"),
        (b"Tests: tests/v1/test_thing.py::test_it\n", b"Tests: none\n", "needs its reason"),
        (b"tests/v1/test_other.py", b"v1/test_other.py", "no node id"),
        (b"+added", b"+added ", "trailing whitespace"),
        (b"+added", b"+<<<<<<< ours", "conflict marker"),
        (b"+added", b"+  \tx", "space before tab"),
        (b"vllm/a.py", b"vllm/a.py.rej", "left-over"),
        (b"+added", b"+added\n+again", "cannot be parsed"),
        (b"00000 Mon", b"00001 Mon", "not written by refresh.sh"),
        (b"Tests: ", b"Patch-Name: x\nTests: ", "left in"),
        (b"Why", b"Why \xff", "not UTF-8"),
    ],
)
def test_each_rule(old, new, rule):
    bad = found(GOOD.replace(old, new))
    assert any(rule in line for line in bad), bad


@pytest.mark.parametrize(
    "name",
    ["310-a-b.patch", "0310-area.patch", "0910-a-b.patch", "0310_a_b.patch", "0310-A-b.patch"],
)
def test_names(name):
    assert any("name is not" in x for x in found(GOOD, name))


@pytest.mark.parametrize(
    "value",
    [
        "Submitted [https://x.invalid/1]",
        "Backport [0123abc]",
        "Denied [kept: us]",
        "Inappropriate [local]",
    ],
)
def test_every_form_of_status(value):
    assert found(GOOD.replace(b"Pending", value.encode())) == []


def test_name_trailer_goes_in_and_out():
    named = inject_name(GOOD, "0310-area-slug.patch")
    assert b"<dev@example.invalid>\nPatch-Name: 0310-area-slug.patch\n\ndiff" in named
    assert strip_name(named) == GOOD


def test_name_trailer_without_other_trailers():
    bare = GOOD.replace(GOOD[GOOD.index(b"Upstream-") : GOOD.index(b"diff --git")], b"")
    named = inject_name(bare, "0310-a-b.patch")
    assert b"without it.\n\nPatch-Name: 0310-a-b.patch\n\ndiff" in named
    assert strip_name(named) == bare


def test_body_that_quotes_the_name_keeps_it():
    text = GOOD.replace(b"Why, what", b"Patch-Name: is what export strips.\nWhy, what")
    assert strip_name(inject_name(text, "0310-a-b.patch")) == text


def test_trailers_are_the_last_paragraph_only():
    assert trailer_block("s\n\nKey: no\nprose\n\nAcked-by: x") == (
        "s\n\nKey: no\nprose",
        ["Acked-by: x"],
    )
    assert trailer_block("s\n\nKey: no\nprose") == ("s\n\nKey: no\nprose", [])


def test_long_and_foreign_subjects_survive(golden):
    golden.edit("vllm/hook.py", "None", "1")
    subject = "Größe: " + "a word " * 8 + "end"
    golden.commit("0320-area-long.patch", subject)
    patch = export(golden.stack.tree, BASE)[-1]
    (golden.stack.patches / patch.name).write_bytes(patch.raw)
    with golden.stack.series_file.open("a") as f:
        f.write(f"{patch.name}\n")
    from ddtree_stack import apply
    from ddtree_stack.errors import StackError

    with pytest.raises(StackError, match="pinned tree"):
        apply.apply(golden.reload(), force=True)
    assert golden.git.out("log", "-1", "--format=%s") == subject.strip()
    assert export(golden.stack.tree, BASE)[-1].raw == patch.raw
