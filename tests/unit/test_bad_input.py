"""Bad surroundings: each a clear error with its own exit code, and nothing half-written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import FILES, REPO, make_sdist
from ddtree_stack import apply, fetch, files, index
from ddtree_stack.errors import CHECK_FAILED, TOOL, UNSAVED, UPSTREAM, USAGE, StackError
from ddtree_stack.pin import Artifact, Pin


def left_over(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def offer(tmp_path: Path, path: Path) -> None:
    """Put a file on the index of the test."""
    page = tmp_path / "index" / "vllm"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="{path.as_uri()}">{path.name}</a>')


def test_fetch_from_the_index_goes_through_the_cache(bare, tmp_path):
    moved = tmp_path / "offered" / bare.stack.pin.sdist.name
    moved.parent.mkdir()
    (bare.cache / moved.name).rename(moved)
    offer(tmp_path, moved)
    fetch.fetch(bare.stack)
    assert left_over(bare.cache) == [moved.name]
    assert bare.git.tree_of(fetch.BASE) == bare.stack.pin.sdist_tree


def test_damaged_file_in_the_cache(bare):
    path = bare.cache / bare.stack.pin.sdist.name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StackError, match="damaged") as err:
        fetch.fetch(bare.stack)
    assert err.value.code == UPSTREAM
    assert not bare.stack.tree.exists()


def test_damaged_file_on_the_index_is_not_kept(bare, tmp_path):
    offered = tmp_path / "offered" / bare.stack.pin.sdist.name
    offered.parent.mkdir()
    (bare.cache / offered.name).unlink()
    make_sdist(offered, {**FILES, "vllm/evil.py": b"1\n"})
    offer(tmp_path, offered)
    with pytest.raises(StackError, match="damaged") as err:
        fetch.fetch(bare.stack)
    assert err.value.code == UPSTREAM
    assert left_over(bare.cache) == []


def test_right_digest_but_another_tree(bare):
    pin = bare.stack.pin
    digest = make_sdist(bare.cache / pin.sdist.name, {**FILES, "vllm/evil.py": b"1\n"})
    text = bare.stack.pin_file.read_text().replace(pin.sdist.sha256, digest)
    bare.stack.pin_file.write_text(text)
    with pytest.raises(StackError, match="pinned tree") as err:
        fetch.fetch(bare.reload())
    assert err.value.code == UPSTREAM
    assert left_over(bare.stack.work) == []


def test_truncated_archive(bare):
    pin = bare.stack.pin
    path = bare.cache / pin.sdist.name
    path.write_bytes(path.read_bytes()[:200])
    text = bare.stack.pin_file.read_text().replace(pin.sdist.sha256, files.sha256_file(path))
    bare.stack.pin_file.write_text(text)
    with pytest.raises(StackError, match="cannot be unpacked") as err:
        fetch.fetch(bare.reload())
    assert err.value.code == UPSTREAM
    assert left_over(bare.stack.work) == []


def test_no_network(bare):
    (bare.cache / bare.stack.pin.sdist.name).unlink()
    done = bare.script("fetch", PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert done.returncode == UPSTREAM
    assert "fetch.sh: error[4]:" in done.stderr and "hint: " in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert left_over(bare.cache) == []


def test_offline_needs_the_cache(bare):
    (bare.cache / bare.stack.pin.sdist.name).unlink()
    done = bare.script("fetch", "--offline")
    assert done.returncode == UPSTREAM and "--offline" in done.stderr


def test_full_disk_while_downloading(bare, tmp_path, monkeypatch):
    offered = tmp_path / "offered" / bare.stack.pin.sdist.name
    offered.parent.mkdir()
    (bare.cache / offered.name).rename(offered)
    offer(tmp_path, offered)

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(index, "_download", full)
    with pytest.raises(StackError, match="disk is full") as err:
        fetch.fetch(bare.stack)
    assert err.value.code == UPSTREAM
    assert left_over(bare.cache) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_while_unpacking(bare):
    work = bare.stack.work
    work.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", str(work)])
    if mounted.returncode:
        pytest.skip("this machine does not let root mount")
    try:
        done = bare.script("fetch")
        assert done.returncode == UPSTREAM, done.stderr
        assert "the disk is full" in done.stderr and "Traceback" not in done.stderr
        assert left_over(work) == []
    finally:
        subprocess.run(["umount", str(work)], check=True)
    bare.reload()
    assert bare.script("fetch").returncode == 0


def test_foreign_folder_in_the_place_of_the_tree(bare):
    bare.stack.tree.mkdir(parents=True)
    (bare.stack.tree / "mine").write_text("keep")
    with pytest.raises(StackError) as err:
        fetch.fetch(bare.stack)
    assert err.value.code == UNSAVED
    assert (bare.stack.tree / "mine").read_text() == "keep"


def test_archive_that_climbs_out_is_refused(bare, tmp_path):
    pin = bare.stack.pin
    path = bare.cache / pin.sdist.name
    digest = make_sdist(path, {**FILES, "../../evil": b"1\n"})
    bare.stack.pin_file.write_text(
        bare.stack.pin_file.read_text().replace(pin.sdist.sha256, digest)
    )
    with pytest.raises(StackError) as err:
        fetch.fetch(bare.reload())
    assert err.value.code == UPSTREAM
    assert not list(tmp_path.rglob("evil"))


def test_no_git_identity(golden, tmp_path):
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / ".gitconfig").write_text("[user]\nuseConfigOnly = true\n")
    done = golden.script("apply")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("applied, tree ")


def fake(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def only_path(tmp_path: Path, *tools: str) -> Path:
    """A PATH folder with nothing but the shell's helpers and some tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "env", "dirname", "basename", "head", "cat", "cksum", "mkdir", *tools):
        (folder / tool).symlink_to(
            next(p for p in map(Path, ("/usr/bin/" + tool, "/bin/" + tool)) if p.exists())
        )
    return folder


def front(path: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(path), "HOME": "/nonexistent"}
    return subprocess.run(
        [str(REPO / "scripts" / "fetch.sh")], env=env, capture_output=True, text=True
    )


def test_python_39_is_refused(tmp_path):
    path = only_path(tmp_path, "git")
    fake(
        path,
        "python3",
        'if [ "$1" = --version ]; then echo "Python 3.9.2"; exit 0; fi\n'
        'if [ "$1" != -c ]; then echo "an old Python ran $*"; exit 9; fi\n'
        f"exec '{sys.executable}' -c \"import sys; sys.version_info = (3, 9, 2, 'final', 0)\n$2\"",
    )
    done = front(path)
    assert done.returncode == TOOL
    assert "fetch.sh: error[6]: Python 3.11" in done.stderr
    assert "python3 is Python 3.9.2" in done.stderr and "hint: " in done.stderr


def test_no_git(tmp_path):
    done = front(only_path(tmp_path))
    assert done.returncode == TOOL and "git is not installed" in done.stderr


def test_old_git(tmp_path):
    path = only_path(tmp_path)
    fake(path, "git", "echo git version 2.20.1")
    done = front(path)
    assert done.returncode == TOOL and "found git version" not in done.stderr
    assert "found git 2.20.1" in done.stderr


@pytest.mark.parametrize(
    ("verb", "args"),
    [("apply", ["--nonsense"]), ("check", ["extra"]), ("install", ["--device", "tpu"])],
)
def test_usage_errors(golden, verb, args):
    done = golden.script(verb, *args)
    assert done.returncode == USAGE
    assert f"{verb}.sh: error[2]:" in done.stderr and "hint: " in done.stderr


def test_damaged_pin(golden):
    golden.stack.pin_file.write_text("[upstream\n")
    done = golden.script("apply")
    assert done.returncode == CHECK_FAILED and "pin.toml cannot be read" in done.stderr


def test_git_failures_never_leave_as_128(golden):
    (golden.stack.tree / ".git" / "HEAD").write_text("nonsense")
    done = golden.script("refresh")
    assert done.returncode in range(1, 7) and "Traceback" not in done.stderr


def test_pin_reads_what_it_writes(bare):
    pin = bare.stack.pin
    assert Pin.load(bare.stack.pin_file) == pin
    assert pin.render() == bare.stack.pin_file.read_text()
    assert Pin.load(REPO / "upstream" / "pin.toml").sdist.project == "vllm"


def test_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "file"
    target.write_text("old")

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        files.write_atomic(target, b"new")
    assert target.read_text() == "old" and left_over(tmp_path) == ["file"]


def test_offline_file_is_checked_every_time(bare):
    art = Artifact("vllm", bare.stack.pin.sdist.name, "0" * 64)
    with pytest.raises(StackError) as err:
        index.fetch_artifact(art, bare.cache, offline=True)
    assert err.value.code == UPSTREAM and "rm " in err.value.hint


def test_apply_works_with_stdin_closed(golden):
    apply.apply(golden.reload())
    assert golden.script("refresh", "--check").returncode == 0
