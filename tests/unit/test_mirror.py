"""mirror: upstream's history without what the stack does not touch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddtree_stack import bisect, mirror
from ddtree_stack.errors import CHECK_FAILED, TOOL, UNSAVED, USAGE, StackError
from ddtree_stack.git import Git


@pytest.fixture
def clone(golden, tmp_path) -> Path:
    """The release as a tag, then commits on and off the stack's paths."""
    at = tmp_path / "clone"
    at.mkdir()
    git = Git(at)
    git.raw("init", "-q")
    for path in ("vllm/__init__.py", "vllm/hook.py", "csrc/op.cpp"):
        (at / path).parent.mkdir(exist_ok=True)
        (at / path).write_bytes(golden.git.raw("show", f"refs/ddtree/base:{path}"))

    def commit(subject: str) -> None:
        git.raw("add", "-A")
        git.raw("commit", "-q", "-m", subject)

    (at / "docs").mkdir()
    (at / "docs/big.bin").write_bytes(bytes(range(256)) * 4000)
    commit("release")
    git.raw("tag", "v1.0")
    for path in ("docs/a.md", "vllm/a.py", "docs/b.md", "vllm/hook.py", "vllm/__init__.py"):
        with (at / path).open("a") as f:
            f.write(f"# {path}\n")
        commit(f"Touch {path}")
    return at


def subjects(repository: Path) -> list[str]:
    return Git(repository).out("log", "--format=%s", "--all").split("\n")


def test_what_is_kept(golden):
    assert mirror.wanted(golden.reload(), minimal=True) == ["vllm/__init__.py", "vllm/new.py"]
    kept = mirror.wanted(golden.reload())
    assert "vllm/" in kept and not any(x.startswith("vllm/_") for x in kept)


def test_the_front(golden, clone, capsys):
    done = golden.script("mirror", str(clone))
    assert done.returncode == 0, done.stderr
    out = golden.stack.work / "mirror.git"
    assert done.stdout == f"{out}\n" and " MB -> " in done.stderr
    assert not any("docs" in s for s in subjects(out)) and len(subjects(out)) == 4
    name = "vllm/__init__.py"
    assert Git(out).out("rev-parse", f"v1.0:{name}") == Git(clone).out("rev-parse", f"v1.0:{name}")
    assert Git(clone).dirty() == [] and len(subjects(clone)) == 6
    # Again: the old one is replaced.
    assert golden.script("mirror", str(clone), "--minimal").returncode == 0
    assert len(subjects(out)) == 2
    done = golden.script("mirror", "--minimal", "--list")
    assert done.stdout == "vllm/__init__.py\nvllm/new.py\n"


def test_bisect_on_a_mirror_names_upstreams_commit(golden, clone, capsys):
    out = mirror.mirror(golden.reload(), clone)
    command = ["sh", "-c", "! grep -qs '# vllm/hook.py' vllm/hook.py"]
    bisect.bisect(golden.reload(), "v1.0", "HEAD", command, out)
    told = capsys.readouterr().out
    want = Git(clone).out("log", "-1", "--format=%H", "--grep=Touch vllm/hook.py")
    assert "(Touch vllm/hook.py)" in told and f"upstream's {want[:12]}" in told


def test_refusals(golden, clone, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    for at, out, code in ((tmp_path / "none", None, USAGE), (clone, mine, UNSAVED)):
        with pytest.raises(StackError) as err:
            mirror.mirror(golden.reload(), at, out)
        assert err.value.code == code
    assert golden.script("mirror").returncode == USAGE
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(StackError, match="git-filter-repo is not installed") as err:
        mirror.mirror(golden.reload(), clone)
    assert err.value.code == TOOL


def test_contents_are_compared(golden, clone, monkeypatch):
    monkeypatch.setattr(mirror, "wanted", lambda stack, minimal: ["vllm/hook.py"])
    with pytest.raises(StackError, match="are not upstream's") as err:
        mirror.mirror(golden.reload(), clone)
    assert err.value.code == CHECK_FAILED and "vllm/__init__.py" in err.value.facts[0]
    assert not (golden.stack.work / "mirror.git").exists()
