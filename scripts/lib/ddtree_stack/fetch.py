"""fetch: the pinned sdist as one base commit in .work/vllm."""

from __future__ import annotations

import os
import tarfile
import zlib
from pathlib import Path

from .errors import UNSAVED, UPSTREAM, StackError
from .files import temp_dir
from .git import Git
from .index import disk_full, fetch_artifact, full_disk_error
from .paths import Stack
from .pin import Pin
from .ui import step

BASE = "refs/ddtree/base"
BRANCH = "ddtree"

# Files that builds write over tracked ones; a build in the tree must not read as an edit.
EGG_INFO = "vllm.egg-info"
GENERATED = ("vllm/_version.py", "PKG-INFO", EGG_INFO)
_EXCLUDE = "/build/\n/dist/\n/vllm/vllm-rs\n/vllm/*.so\n*.abi3.so\n__pycache__/\n.deps/\n"


def unpack(archive: Path, into: Path) -> Path:
    """The source folder inside `into`. Owners are dropped, paths outside are refused."""
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(into, filter="data")
            else:  # Python 3.11.0 to 3.11.3
                tar.extractall(into)
    except (tarfile.TarError, EOFError, zlib.error) as err:
        raise StackError(UPSTREAM, f"{archive.name} cannot be unpacked", [str(err)]) from err
    tops = list(into.iterdir())
    if len(tops) != 1 or not tops[0].is_dir():
        raise StackError(UPSTREAM, f"{archive.name} does not hold one folder")
    return tops[0]


def commit_base(tree: Path, pin: Pin) -> str:
    """Make `tree` a repository with one commit of every file; its ids are the same everywhere."""
    git = Git(tree)
    git.raw("init", "-q", "-b", BRANCH)
    # Shipped files match upstream's .gitignore, hence -f.
    git.raw("add", "-A", "-f")
    date = f"{pin.epoch} +0000"
    git.raw(
        *("commit", "-q", "--no-verify", "-m", f"vLLM {pin.version} ({pin.sdist.name})"),
        env={"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date},
    )
    head = git.out("rev-parse", "HEAD")
    git.raw("update-ref", BASE, head)
    settle(tree)
    return head


def settle(tree: Path) -> None:
    """Local settings that keep a developer's own git from rewriting bytes in this tree."""
    git = Git(tree)
    for key, value in (("core.autocrlf", "false"), ("core.fileMode", "true"), ("gc.auto", "0")):
        git.raw("config", key, value)
    info = git.git_dir() / "info"
    info.mkdir(exist_ok=True)
    (info / "exclude").write_text(_EXCLUDE)
    hide_generated(git)


def hide_generated(git: Git) -> None:
    """Let builds rewrite GENERATED without git seeing an edit."""
    tracked = git.out("ls-files", "--", *GENERATED).splitlines()
    if tracked:
        git.raw("update-index", "--skip-worktree", "--", *tracked)


def fetch(stack: Stack, offline: bool = False) -> str:
    """Make sure the base commit is there; returns its id."""
    pin = stack.pin
    if stack.tree.exists():
        base = Git(stack.tree).rev(BASE) if (stack.tree / ".git").exists() else None
        if base and Git(stack.tree).tree_of(base) == pin.sdist_tree:
            return base
        raise StackError(
            UNSAVED,
            f"{stack.shown(stack.tree)} is not a tree of vLLM {pin.version}",
            [
                "it is left as it is, for it may hold work",
                f"base tree expected {pin.sdist_tree}",
                f"base tree found    {Git(stack.tree).tree_of(base) if base else 'none'}",
            ],
            f"mv {stack.tree} {stack.tree}.old",
        )
    archive = fetch_artifact(pin.sdist, stack.cache, offline)
    try:
        with step(f"unpack and commit {archive.name}"), temp_dir(stack.tree) as temp:
            source = unpack(archive, temp)
            base = commit_base(source, pin)
            found = Git(source).tree_of(base)
            if found != pin.sdist_tree:
                raise StackError(
                    UPSTREAM,
                    f"{archive.name} does not give the pinned tree",
                    [f"tree expected {pin.sdist_tree}", f"tree found    {found}"],
                )
            os.rename(source, stack.tree)
    except OSError as err:
        if disk_full(err):
            raise full_disk_error(stack.work, err) from err
        raise
    except StackError as err:
        # git reports a full disk in words only.
        if any("No space left on device" in fact for fact in err.facts):
            raise full_disk_error(stack.work, OSError("; ".join(err.facts))) from err
        raise
    return base
