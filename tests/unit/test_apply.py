"""apply and refresh: same bytes, same ids, and nothing lost."""

from __future__ import annotations

import os
import shutil

import pytest

from ddtree_stack import apply, check, refresh, series, state
from ddtree_stack.errors import (
    CHECK_FAILED,
    CONFLICT,
    UNSAVED,
    USAGE,
    StackError,
)
from ddtree_stack.fetch import BASE
from ddtree_stack.git import Git


def heads(golden):
    return [golden.git.out("rev-parse", f"HEAD~{i}") for i in range(2)]


def test_clean_series_gives_the_same_bytes_and_tree(golden):
    before = golden.snapshot()
    tree = apply.apply(golden.reload())
    assert tree == golden.reload().pin.tree
    assert refresh.refresh(golden.reload()) == []
    assert golden.snapshot() == before
    text = before["0310-feature-new.patch"].decode()
    assert text.startswith("From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001")
    assert "Patch-Name" not in text
    assert before["series"] == b"0210-hook-ten.patch\n0310-feature-new.patch\n"


def test_commit_ids_are_the_same_in_another_clone(golden, tmp_path):
    apply.apply(golden.stack)
    one = heads(golden)
    other = tmp_path / "other"
    shutil.copytree(golden.stack.root, other, ignore=shutil.ignore_patterns(".work"))
    golden.stack = apply.Stack(other)
    apply.apply(golden.stack)
    assert heads(golden) == one


def test_hostile_git_configuration_changes_nothing(golden, hostile):
    apply.apply(golden.stack)
    ids, before = heads(golden), golden.snapshot()
    hostile()
    shutil.rmtree(golden.stack.work)
    apply.apply(golden.reload())
    assert heads(golden) == ids
    golden.edit("vllm/hook.py", "None", "1")
    golden.commit("0320-feature-more.patch")
    refresh.refresh(golden.reload())
    assert {n: b for n, b in golden.snapshot().items() if n in before and n[:1] == "0"} == {
        n: b for n, b in before.items() if n[:1] == "0"
    }


def test_crlf_and_trailing_blanks_survive(golden):
    golden.edit("vllm/crlf.txt", "two\r\n", "2\r\n")
    golden.commit("0330-feature-crlf.patch")
    refresh.refresh(golden.stack)
    assert b"+2\r\n" in golden.snapshot()["0330-feature-crlf.patch"]
    apply.apply(golden.reload())
    assert (golden.stack.tree / "vllm/crlf.txt").read_bytes() == b"one\r\n2\r\nthree\r\n"
    assert series.check_headers(series.load(golden.stack)) == []


def test_shipped_files_that_gitignore_names_are_in_the_base(golden):
    assert "ignored.bin" in golden.git.out("ls-tree", "-r", "--name-only", BASE)


def test_reordering_keeps_names_and_must_stay_sorted(golden):
    golden.edit("vllm/hook.py", "None", "2")
    golden.commit("0250-hook-late.patch")
    with pytest.raises(StackError, match="out of order") as err:
        refresh.refresh(golden.stack)
    assert err.value.code == CHECK_FAILED
    golden.git.raw(
        *("rebase", "-q", "-i", BASE),
        env={"GIT_SEQUENCE_EDITOR": "sh -c 'sed -i \"2{h;d};3{G}\" $0'", "GIT_EDITOR": "true"},
    )
    refresh.refresh(golden.reload())
    assert golden.snapshot()["series"].decode().split() == [
        "0210-hook-ten.patch",
        "0250-hook-late.patch",
        "0310-feature-new.patch",
    ]


def test_conflict_in_the_middle_keeps_state_and_names_the_patch(golden):
    path = golden.stack.patches / "0210-hook-ten.patch"
    path.write_bytes(path.read_bytes().replace(b" line 9\n", b" line nine\n"))
    with pytest.raises(StackError, match="0210-hook-ten.patch does not apply") as err:
        apply.apply(golden.reload())
    assert err.value.code == CONFLICT
    assert golden.git.busy() == "git am"
    assert "am" in err.value.hint
    with pytest.raises(StackError) as err:
        apply.apply(golden.reload())
    assert err.value.code == UNSAVED


def test_empty_file_and_executable_bit_survive(golden):
    (golden.stack.tree / "vllm/pkg").mkdir()
    (golden.stack.tree / "vllm/pkg/__init__.py").touch()
    (golden.stack.tree / "vllm/hook.py").chmod(0o755)
    golden.commit("0320-feature-pkg.patch")
    refresh.refresh(golden.stack)
    patch = series.load(golden.stack)[-1]
    assert sorted(patch.files) == ["vllm/hook.py", "vllm/pkg/__init__.py"]
    assert series.check_headers([patch]) == []
    with check.scratch(golden.reload()) as tree:
        check.round_trip(golden.reload(), tree, series.load(golden.stack))
        assert (tree / "vllm/hook.py").stat().st_mode & 0o100
        check.with_quilt(golden.reload(), tree)


def test_work_goes_on_after_a_conflict(golden):
    path = golden.stack.patches / "0210-hook-ten.patch"
    good = path.read_bytes()
    path.write_bytes(good.replace(b" line 9\n", b" line nine\n"))
    with pytest.raises(StackError, match="does not apply"):
        apply.apply(golden.reload())
    path.write_bytes(good)
    apply.apply(golden.reload(), force=True)
    assert golden.git.busy() is None and refresh.refresh(golden.reload(), check=True) == []


def test_patch_that_is_already_there_is_told_apart(golden):
    patch = (golden.stack.patches / "0210-hook-ten.patch").read_bytes()
    (golden.stack.patches / "0220-hook-again.patch").write_bytes(patch)
    golden.stack.series_file.write_text(
        "0210-hook-ten.patch\n0220-hook-again.patch\n0310-feature-new.patch\n"
    )
    with pytest.raises(StackError, match="already in the tree") as err:
        apply.apply(golden.reload())
    assert err.value.code == CONFLICT and "0220-hook-again" in err.value.what


def test_empty_patch_is_refused_before_anything_moves(golden):
    path = golden.stack.patches / "0310-feature-new.patch"
    path.write_bytes(path.read_bytes().split(b"diff --git")[0])
    with pytest.raises(StackError, match="changes nothing") as err:
        apply.apply(golden.reload())
    assert err.value.code == CHECK_FAILED


def test_commit_that_changes_nothing_is_refused_at_export(golden):
    golden.git.raw("commit", "-q", "--allow-empty", "-m", "Nothing\n\nPatch-Name: 0340-a-b")
    with pytest.raises(StackError, match="changes nothing"):
        refresh.refresh(golden.stack)


@pytest.mark.parametrize("damage", ["missing", "extra", "double", "unsorted", "no series"])
def test_series_that_does_not_fit(golden, damage):
    before = golden.git.out("rev-parse", "HEAD")
    names = ["0210-hook-ten.patch", "0310-feature-new.patch"]
    if damage == "missing":
        (golden.stack.patches / names[0]).unlink()
    elif damage == "extra":
        (golden.stack.patches / "0400-kernel-x.patch").write_text("x")
    elif damage == "double":
        golden.stack.series_file.write_text("\n".join([*names, names[1]]))
    elif damage == "unsorted":
        golden.stack.series_file.write_text("\n".join(reversed(names)))
    else:
        golden.stack.series_file.unlink()
    with pytest.raises(StackError, match="patches/series") as err:
        apply.apply(golden.reload())
    assert err.value.code == CHECK_FAILED
    assert golden.git.out("rev-parse", "HEAD") == before


def test_series_changed_after_the_pin_is_seen(golden):
    (golden.stack.patches / "0310-feature-new.patch").unlink()
    golden.stack.series_file.write_text("0210-hook-ten.patch\n")
    with pytest.raises(StackError, match="pinned tree") as err:
        apply.apply(golden.reload())
    assert err.value.code == CHECK_FAILED


@pytest.mark.parametrize("work", ["edit", "new file", "commit"])
def test_unsaved_work_stops_apply_and_force_keeps_it(golden, work):
    if work == "new file":
        (golden.stack.tree / "vllm/mine.py").write_text("MINE = 1\n")
    else:
        golden.edit("vllm/hook.py", "None", "MINE")
    if work == "commit":
        golden.commit("0350-feature-mine.patch")
    before = golden.git.out("rev-parse", "HEAD")
    with pytest.raises(StackError) as err:
        apply.apply(golden.reload())
    assert err.value.code == UNSAVED
    assert golden.git.out("rev-parse", "HEAD") == before
    apply.apply(golden.reload(), force=True)
    assert not golden.git.dirty()
    kept = golden.git.out("for-each-ref", "--format=%(refname)", "refs/heads/backup/")
    assert "MINE" in golden.git.out("diff", BASE, kept)
    assert "MINE" not in golden.git.out("diff", BASE, "HEAD")


def test_saved_commits_do_not_stop_apply(golden):
    golden.edit("vllm/hook.py", "None", "3")
    golden.commit("0350-feature-mine.patch")
    refresh.refresh(golden.stack)
    assert state.unsaved(golden.reload()) == []
    apply.apply(golden.reload())


def test_generated_files_of_a_build_are_no_edit(golden):
    apply.apply(golden.stack)
    (golden.stack.tree / "vllm/_version.py").write_text("__version__ = 'other'\n")
    (golden.stack.tree / "vllm.egg-info/PKG-INFO").write_text("other")
    assert state.unsaved(golden.stack) == []
    apply.apply(golden.reload())


def test_refresh_does_not_undo_what_a_colleague_brought(golden):
    """patches/ got a new version (a pull) while the work tree has its own commit."""
    path = golden.stack.patches / "0310-feature-new.patch"
    path.write_bytes(path.read_bytes().replace(b"+X = 1", b"+X = 2"))
    golden.edit("vllm/hook.py", "None", "4")
    golden.commit("0350-feature-mine.patch")
    before = golden.snapshot()
    with pytest.raises(StackError, match="changed since") as err:
        refresh.refresh(golden.reload())
    assert err.value.code == UNSAVED
    assert golden.snapshot() == before


def test_refresh_refuses_a_part_of_the_series(golden):
    apply.apply(golden.stack, upto="0210-hook-ten")
    assert len(golden.git.commits(BASE, "HEAD")) == 1
    before = golden.snapshot()
    with pytest.raises(StackError, match="only up to 0210"):
        refresh.refresh(golden.reload())
    assert golden.snapshot() == before
    apply.apply(golden.reload())


def test_apply_to_an_unknown_patch_is_a_usage_error(golden):
    with pytest.raises(StackError) as err:
        apply.apply(golden.stack, upto="0999-no-such")
    assert err.value.code == USAGE


def test_commit_without_a_name_says_how_to_name_it(golden):
    golden.edit("vllm/hook.py", "None", "5")
    golden.commit(None)
    with pytest.raises(StackError, match="no Patch-Name") as err:
        refresh.refresh(golden.stack)
    assert err.value.code == CHECK_FAILED
    command = err.value.hint.replace("NNNN-area-slug", "0360-area-slug")
    assert os.system(f"GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=b {command} >/dev/null") == 0
    refresh.refresh(golden.reload())
    assert "0360-area-slug.patch" in golden.snapshot()


def test_fixups_must_be_squashed(golden):
    golden.edit("vllm/hook.py", "None", "6")
    golden.commit(None, "fixup! Add the feature", "")
    with pytest.raises(StackError, match="not squashed") as err:
        refresh.refresh(golden.stack)
    assert err.value.code == CHECK_FAILED
    assert (
        os.system(f"GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=b {err.value.hint} 2>/dev/null") == 0
    )
    refresh.refresh(golden.reload())
    assert b"return 6" in golden.snapshot()["0310-feature-new.patch"]


def test_uncommitted_edits_stop_refresh(golden):
    golden.edit("vllm/hook.py", "None", "7")
    with pytest.raises(StackError) as err:
        refresh.refresh(golden.stack)
    assert err.value.code == UNSAVED


def test_refresh_check_lists_and_writes_nothing(golden):
    golden.edit("vllm/hook.py", "None", "8")
    golden.commit("0370-feature-x.patch")
    before = golden.snapshot()
    lines = refresh.refresh(golden.stack, check=True)
    assert "new: patches/0370-feature-x.patch" in lines
    assert any("pin.toml" in x for x in lines)
    assert golden.snapshot() == before


def test_revision_counts_committed_trees(golden):
    assert golden.reload().pin.revision == 1
    git = Git(golden.stack.root)
    git.raw("init", "-q")
    git.raw("add", "upstream")
    git.raw("commit", "-q", "-m", "one")
    for value in ("9", "10"):
        golden.edit("vllm/hook.py", golden.git.out("show", "HEAD:vllm/hook.py").split()[-1], value)
        golden.git.raw("commit", "-q", "-a", "--amend", "--no-edit")
        refresh.refresh(golden.reload())
    assert golden.reload().pin.revision == 2


def test_plain_gives_the_same_tree_without_commits(golden):
    tree = apply.apply(golden.stack, plain=True)
    assert tree == golden.reload().pin.tree
    assert golden.git.out("rev-parse", "HEAD") == golden.git.out("rev-parse", BASE)
    apply.apply(golden.reload(), force=True)


def test_round_trip_and_quilt(golden, capsys):
    patches = series.load(golden.stack)
    with check.scratch(golden.reload()) as tree:
        check.round_trip(golden.reload(), tree, patches)
        check.with_quilt(golden.reload(), tree)
    told = capsys.readouterr()
    assert "same bytes" in told.out
    assert "same tree" in told.out or "quilt: skipped" in told.err


def test_round_trip_sees_a_changed_byte(golden):
    path = golden.stack.patches / "0310-feature-new.patch"
    path.write_bytes(path.read_bytes().replace(b"index 000000", b"index 00000", 1))
    with check.scratch(golden.stack) as tree, pytest.raises(StackError, match="other patches"):
        check.round_trip(golden.reload(), tree, series.load(golden.stack))
