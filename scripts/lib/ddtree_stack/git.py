"""git, with the user's and the system's configuration switched off.

A hostile gitconfig (prefixes, whitespace, hooks, signing, line endings) would change every commit
id and every exported patch, so nothing of it may reach these calls.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import CHECK_FAILED, TOOL, StackError

NAME = "vllm-ddtree"
EMAIL = "stack@vllm-ddtree.invalid"

_CONFIG = {
    "core.autocrlf": "false",
    "core.safecrlf": "false",
    "core.fileMode": "true",
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.quotePath": "true",
    "commit.gpgSign": "false",
    "tag.gpgSign": "false",
    "gc.auto": "0",
    "init.defaultBranch": "ddtree",
    "advice.detachedHead": "false",
    "safe.directory": "*",
}


def clean_env(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """The environment without the caller's git settings and with a fixed committer."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env.update(
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_CONFIG_COUNT=str(len(_CONFIG)),
        GIT_TERMINAL_PROMPT="0",
        GIT_ATTR_NOSYSTEM="1",
        GIT_AUTHOR_NAME=NAME,
        GIT_AUTHOR_EMAIL=EMAIL,
        GIT_COMMITTER_NAME=NAME,
        GIT_COMMITTER_EMAIL=EMAIL,
        LC_ALL="C",
        TZ="UTC",
    )
    for i, (key, value) in enumerate(_CONFIG.items()):
        env[f"GIT_CONFIG_KEY_{i}"] = key
        env[f"GIT_CONFIG_VALUE_{i}"] = value
    env.update(extra)
    return env


class Git:
    """git in one directory."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd

    def call(
        self, *args: str, data: bytes | None = None, env: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[bytes]:
        """Run and return, whatever the exit status."""
        try:
            return subprocess.run(
                ["git", *args], cwd=self.cwd, input=data, capture_output=True, env=clean_env(env)
            )
        except FileNotFoundError as err:
            raise StackError(TOOL, "git is not installed", hint="apt-get install git") from err

    def raw(self, *args: str, data: bytes | None = None, env: Mapping[str, str] = {}) -> bytes:
        """Standard output as bytes; a failure becomes a StackError (never git's 128)."""
        done = self.call(*args, data=data, env=env)
        if done.returncode:
            raise StackError(
                CHECK_FAILED,
                f"git {args[0]} failed",
                [done.stderr.decode(errors="replace").strip() or f"status {done.returncode}"],
            )
        return done.stdout

    def out(self, *args: str, data: bytes | None = None, env: Mapping[str, str] = {}) -> str:
        """Standard output as text without the last newline."""
        return self.raw(*args, data=data, env=env).decode(errors="surrogateescape").rstrip("\n")

    def rev(self, name: str) -> str | None:
        """The object a name points to, or None."""
        done = self.call("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        return done.stdout.decode().strip() or None

    def tree_of(self, name: str) -> str:
        return self.out("rev-parse", f"{name}^{{tree}}")

    def commits(self, base: str, tip: str) -> list[str]:
        """Oldest first."""
        return self.out("rev-list", "--reverse", f"{base}..{tip}").split()

    def git_dir(self) -> Path:
        return Path(self.out("rev-parse", "--absolute-git-dir"))

    def busy(self) -> str | None:
        """The unfinished operation in this work tree, if any."""
        at = self.git_dir()
        for name, what in (
            ("rebase-apply", "git am"),
            ("rebase-merge", "git rebase"),
            ("CHERRY_PICK_HEAD", "git cherry-pick"),
            ("MERGE_HEAD", "git merge"),
        ):
            if (at / name).exists():
                return what
        return None

    def dirty(self) -> list[str]:
        """Edited and new files, as `git status` lists them."""
        return self.out("status", "--porcelain", "--untracked-files=all").splitlines()


def first(items: Sequence[str], limit: int = 10) -> list[str]:
    """The head of a list, with a count of what was left off."""
    rest = len(items) - limit
    return list(items[:limit]) + ([f"... and {rest} more"] if rest > 0 else [])
