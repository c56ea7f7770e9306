"""bisect: over the stack, and over upstream's commits with the stack on each."""

from __future__ import annotations

import pytest

from ddtree_stack import bisect, refresh
from ddtree_stack.errors import CHECK_FAILED, USAGE, StackError
from ddtree_stack.git import Git
from ddtree_stack.state import load

HOLDS = ["sh", "-c", "! grep -rqs BROKEN vllm"]


@pytest.fixture
def five(golden):
    """Five patches; the fourth breaks something."""
    for number, text in ((320, "X = 2\n"), (330, "BROKEN\n"), (340, "X = 3\n")):
        (golden.stack.tree / f"vllm/m{number}.py").write_text(text)
        golden.commit(f"0{number}-feature-m{number}.patch", f"Add m{number}")
    refresh.refresh(golden.reload())
    return golden


def test_first_bad_patch(five, capsys):
    tree, patches = five.stack.tree, five.snapshot()
    (tree / "vllm/mine.py").write_text("unsaved work\n")
    before = (five.git.out("rev-parse", "HEAD"), load(five.git), five.git.dirty())
    bisect.bisect(five.reload(), "base", "0340-feature-m340", HOLDS)
    assert capsys.readouterr().out == "first bad: 0330-feature-m330.patch (Add m330)\n"
    assert before == (five.git.out("rev-parse", "HEAD"), load(five.git), five.git.dirty())
    assert five.snapshot() == patches
    assert five.git.out("worktree", "list").count("\n") == 0  # nothing is left behind
    assert not list(five.stack.work.glob(".check*"))


def test_neighbours_need_no_step(five, capsys):
    good, bad = "0320-feature-m320", "0330-feature-m330"
    bisect.bisect(five.reload(), good, bad, HOLDS)
    told = capsys.readouterr()
    assert "0330-feature-m330" in told.out
    assert told.err.count(": status") == 2


def test_the_front(five):
    done = five.script("bisect", "--good", "base", "--bad", "0340-feature-m340", "--", *HOLDS)
    assert (done.returncode, done.stdout) == (0, "first bad: 0330-feature-m330.patch (Add m330)\n")
    done = five.script("bisect", "--good", "base", "--bad", "0340-feature-m340")
    assert done.returncode == USAGE and "bisect.sh: error[2]: no command" in done.stderr
    assert "hint: scripts/bisect.sh" in done.stderr


def test_what_the_command_leaves_does_not_reach_the_next_step(five, capsys):
    litter = "! grep -rqs BROKEN vllm && test ! -e left && touch left && echo x >> vllm/hook.py"
    bisect.bisect(five.reload(), "base", "0340-feature-m340", ["sh", "-c", litter])
    assert "0330-feature-m330" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "what"),
    [("true", "--bad is good"), ("false", "--good is bad"), ("exit 125", "--good is skip")],
)
def test_ends_that_are_not_what_they_are_said_to_be(five, command, what):
    with pytest.raises(StackError, match=what) as err:
        bisect.bisect(five.reload(), "base", "0340-feature-m340", ["sh", "-c", command])
    assert err.value.code == CHECK_FAILED


def test_skips_that_hide_the_answer(five):
    command = "test -e vllm/m320.py && test ! -e vllm/m340.py && exit 125; ! test -e vllm/m340.py"
    with pytest.raises(StackError, match="skips hide") as err:
        bisect.bisect(five.reload(), "base", "0340-feature-m340", ["sh", "-c", command])
    assert err.value.code == CHECK_FAILED
    assert [f.split()[2] for f in err.value.facts] == [
        f"0{n}-feature-m{n}.patch" for n in (320, 330, 340)
    ]


def test_signals_stop(five):
    with pytest.raises(StackError, match="neither good nor bad"):
        bisect.bisect(five.reload(), "base", "0340-feature-m340", ["sh", "-c", "kill -9 $$"])


@pytest.mark.parametrize(
    ("good", "bad", "what"),
    [
        ("0340-feature-m340", "base", "does not come before"),
        ("0330-feature-m330", "0330-feature-m330", "does not come before"),
        ("base", "0990-no-such", "no patch"),
    ],
)
def test_wrong_ends(five, good, bad, what):
    with pytest.raises(StackError, match=what) as err:
        bisect.bisect(five.reload(), good, bad, HOLDS)
    assert err.value.code == USAGE


@pytest.fixture
def upstream(golden, tmp_path):
    """A clone of upstream with ten commits after the release: one breaks, three do not take the stack."""
    clone = tmp_path / "clone"
    clone.mkdir()
    git = Git(clone)
    git.raw("init", "-q")
    base = Git(golden.stack.tree)
    (clone / "vllm").mkdir()
    for path in ("vllm/__init__.py", "vllm/hook.py", "csrc/op.cpp"):
        (clone / path).parent.mkdir(exist_ok=True)
        (clone / path).write_bytes(base.raw("show", f"refs/ddtree/base:{path}"))

    def commit(subject: str) -> None:
        git.raw("add", "-A")
        git.raw("commit", "-q", "-m", subject)

    commit("release")
    git.raw("tag", "v1.0")
    text = (clone / "vllm/__init__.py").read_text()
    for i in range(1, 11):
        (clone / "vllm" / f"u{i}.py").write_text("BROKEN\n" if i == 7 else "x\n")
        if i == 2:  # moves the hook's place: only a 3-way merge follows
            text = text.replace("line 7\n", "line seven\n")
        # The fourth to the sixth take away what the patch changes.
        now = text.replace("line 10\n", "") if i in (4, 5, 6) else text
        (clone / "vllm/__init__.py").write_text(now)
        commit(f"Change {i}")
    return clone


def test_upstream(golden, upstream, capsys):
    before = Git(upstream).out("for-each-ref") + Git(upstream).out("worktree", "list")
    with pytest.raises(StackError, match="skips hide") as err:
        bisect.bisect(golden.reload(), "v1.0", "HEAD", HOLDS, upstream)
    assert [f.split("(")[1] for f in err.value.facts] == [f"Change {i})" for i in (4, 5, 6, 7)]
    told = capsys.readouterr()
    assert "(Change 5): 0210-hook-ten.patch does not apply" in told.err
    assert Git(upstream).out("for-each-ref") + Git(upstream).out("worktree", "list") == before
    assert Git(upstream).dirty() == [] and not list(golden.stack.work.glob(".bisect*"))


def test_upstream_the_stack_is_on_each_commit(golden, upstream, capsys):
    both = ["sh", "-c", "grep -q 'line ten' vllm/__init__.py || exit 125; ! grep -qs x vllm/u9.py"]
    bisect.bisect(golden.reload(), "HEAD~3", "HEAD", both, upstream)
    assert "(Change 9)" in capsys.readouterr().out


def test_upstream_end_where_the_stack_does_not_apply(golden, upstream):
    with pytest.raises(StackError, match="--good is skip"):
        bisect.bisect(golden.reload(), "HEAD~5", "HEAD", HOLDS, upstream)


def test_upstream_that_is_none(golden, upstream, tmp_path):
    for clone, rev in ((tmp_path, "HEAD"), (upstream, "v9")):
        with pytest.raises(StackError) as err:
            bisect.bisect(golden.reload(), rev, "HEAD", HOLDS, clone)
        assert err.value.code == USAGE
