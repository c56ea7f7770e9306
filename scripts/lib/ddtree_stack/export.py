"""Commits to patch files: the only way patches are written."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from .errors import CHECK_FAILED, StackError
from .git import Git, first
from .patchfile import (
    NAME,
    PATCH_NAME,
    Patch,
    canonical_name,
    parse_trailers,
    strip_name,
    trailer_block,
)

_FORMAT = (
    *("format-patch", "-N", "--zero-commit", "--no-signature", "--no-stat", "--full-index"),
    *("-U3", "--diff-algorithm=myers", "--no-renames", "--no-thread", "--no-base"),
)


def name_of(git: Git, commit: str) -> str | None:
    """The commit's Patch-Name, or None."""
    message = git.out("log", "-1", "--format=%B", commit)
    found = [v for k, v in parse_trailers(trailer_block(message)[1]) if k == PATCH_NAME]
    return canonical_name(found[-1]) if found else None


def _refuse(git: Git, base: str, commits: list[str]) -> None:
    """Everything about the commits that an export would lose or mix up."""
    tree = git.cwd
    if merges := git.out("rev-list", "--merges", f"{base}..{commits[-1]}").split():
        raise StackError(
            CHECK_FAILED,
            "the work tree's history has merges; patches are a line",
            [git.out("log", "-1", "--format=%h %s", m) for m in first(merges)],
            f"git -C {tree} rebase {base}",
        )
    subjects = {c: git.out("log", "-1", "--format=%s", c) for c in commits}
    fixups = [c for c, s in subjects.items() if s.startswith(("fixup!", "squash!", "amend!"))]
    if fixups:
        raise StackError(
            CHECK_FAILED,
            "fixup commits are not squashed yet",
            [f"{c[:12]} {subjects[c]}" for c in first(fixups)],
            f"GIT_SEQUENCE_EDITOR=true git -C {tree} rebase -i --autosquash {base}",
        )
    for commit in commits:
        if git.tree_of(commit) == git.tree_of(f"{commit}~1"):
            raise StackError(
                CHECK_FAILED,
                "a commit changes nothing",
                [f"{commit[:12]} {subjects[commit]}"],
                f"git -C {tree} rebase -i {base}",
            )


def names(git: Git, base: str, commits: list[str]) -> list[str]:
    """The patch name of every commit: present, well-formed, unique and in order."""
    found: list[str] = []
    for commit in commits:
        name = name_of(git, commit)
        at = f"{commit[:12]} {git.out('log', '-1', '--format=%s', commit)}"
        if name is None or not NAME.fullmatch(name):
            last = commit == commits[-1]
            how = "commit --amend --no-edit --trailer 'Patch-Name: NNNN-area-slug.patch'"
            raise StackError(
                CHECK_FAILED,
                "a commit has no Patch-Name trailer" if name is None else f"bad Patch-Name {name}",
                [at, "name the file it becomes, such as Patch-Name: 0310-ddtree-builder.patch"]
                + ([] if last else ["not the last commit: mark it 'edit' in a rebase first"]),
                f"git -C {git.cwd} {how if last else f'rebase -i {base}'}",
            )
        if found and name <= found[-1]:
            what = "used twice" if name == found[-1] else "out of order"
            raise StackError(
                CHECK_FAILED,
                f"patch name {what}: {name} comes after {found[-1]}",
                [at, "the series is sorted: reorder the commits or pick another number"],
                f"git -C {git.cwd} rebase -i {base}",
            )
        found.append(name)
    return found


def export(tree: Path, base: str, tip: str = "HEAD") -> list[Patch]:
    """The commits base..tip as patches, byte for byte as they belong into patches/."""
    git = Git(tree)
    commits = git.commits(base, tip)
    if not commits:
        return []
    _refuse(git, base, commits)
    listed = names(git, base, commits)
    with TemporaryDirectory() as temp:
        written = git.out(*_FORMAT, "-o", temp, f"{base}..{tip}").splitlines()
        if len(written) != len(commits):
            raise StackError(
                CHECK_FAILED,
                f"git exported {len(written)} patches from {len(commits)} commits",
            )
        mails = [Path(x).read_bytes() for x in written]
    return [Patch(n, strip_name(m)) for n, m in zip(listed, mails, strict=True)]
