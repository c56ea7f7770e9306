"""mirror: a clone of upstream without what neither the stack nor its tests touch.

For developers who rebase and bisect; applying and building never need it. Contents and their blob
ids stay as they are, so patches apply with 3-way merges. Commits get other ids: the mirror keeps
which was which, and bisect.sh prints upstream's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from . import series
from .errors import CHECK_FAILED, TOOL, UNSAVED, USAGE, StackError
from .files import replace_dir, temp_dir
from .git import Git, clean_env, first
from .paths import Stack
from .ui import say, step
from .upstream import Suite

_MAP = "filter-repo/commit-map"
# What tests import besides vllm itself.
_SUPPORT = (
    *("tests/__init__.py", "tests/conftest.py", "tests/utils.py", "tests/ci_envs.py"),
    *("tests/models/", "tests/v1/__init__.py", "tests/v1/utils.py", "tests/v1/kv_connector/unit/"),
    *("pyproject.toml", "requirements/", "setup.py"),
)


def wanted(stack: Stack, minimal: bool = False) -> list[str]:
    """Paths (folders end in /) that the mirror keeps.

    Args:
        minimal: only files that a patch touches, which is what a rebase needs. Without it also
            what it takes to run the tests, which is what a bisect needs.

    """
    found = {f for p in series.load(stack) for f in p.files}
    if not minimal:
        found |= {n.partition("::")[0] for p in series.load(stack) for n in p.tests}
        found |= {"vllm/", *_SUPPORT}
        if (stack.root / "upstream" / "tests" / "suite.toml").is_file():
            found |= {f"{area}/" for area in Suite.load(stack).areas}
    folders = tuple(x for x in found if x.endswith("/"))
    return sorted(x for x in found if x in folders or not x.startswith(folders))


def commit_map(repository: Path) -> dict[str, str]:
    """Mirror's commit to upstream's; empty if this is no mirror."""
    path = repository / _MAP
    if not path.is_file():
        return {}
    rows = (line.split() for line in path.read_text().splitlines()[1:])
    return {new: old for old, new in rows if set(new) != {"0"}}


def mirror(stack: Stack, clone: Path, out: Path | None = None, minimal: bool = False) -> Path:
    """Make the bare mirror; returns its path. An older mirror is replaced.

    Raises:
        StackError: 2 if `clone` is none, 5 if `out` is something else, 6 without git-filter-repo.

    """
    out = (out or stack.work / "mirror.git").absolute()
    if not clone.is_dir() or Git(clone).call("rev-parse", "--git-dir").returncode:
        raise StackError(
            USAGE,
            f"{clone} is no clone of upstream",
            hint="git clone https://github.com/vllm-project/vllm",
        )
    if out.exists() and not (out / _MAP).is_file():
        raise StackError(
            UNSAVED,
            f"{out} is there and is no mirror",
            ["it is left as it is"],
            "ls -la " + str(out),
        )
    tool = Path(sys.executable).with_name("git-filter-repo")
    if not tool.is_file():
        raise StackError(TOOL, "git-filter-repo is not installed", hint="rm -r .work/tools")
    with temp_dir(out) as temp:
        new, paths = temp / "mirror.git", temp / "paths"
        paths.write_text("".join(f"{x}\n" for x in wanted(stack, minimal)))
        with step(f"copy {clone}"):
            # A real copy: filter-repo packs anew, and must not touch what others share.
            Git(temp).raw("clone", "-q", "--mirror", "--no-local", str(clone.absolute()), str(new))
        before = _size(new)
        with step("filter"):
            done = subprocess.run(
                [tool, "--force", "--quiet", "--paths-from-file", paths],
                cwd=new,
                env=clean_env(),
                capture_output=True,
                text=True,
            )
        if done.returncode:
            raise StackError(CHECK_FAILED, "git-filter-repo failed", done.stderr.splitlines()[-8:])
        _same_contents(stack, clone, new)
        after = _size(new)
        replace_dir(new, out)
    commits = len(commit_map(out))
    say(f"{before / 1e6:.1f} MB -> {after / 1e6:.1f} MB, {commits} commits")
    return out


def _size(repository: Path) -> int:
    return sum(p.stat().st_size for p in (repository / "objects").rglob("*") if p.is_file())


def _same_contents(stack: Stack, clone: Path, new: Path) -> None:
    """The files that patches touch are at the pinned tag what they are in the clone."""
    tag = stack.pin.tag
    if Git(clone).rev(tag) is None:
        say(f"{clone} has no tag {tag}: contents are not compared")
        return
    files = sorted({f for p in series.load(stack) for f in p.files})
    # In a repository that lost them all there is no tag either.
    listed = [
        set(Git(x).call("ls-tree", "-r", tag, "--", *files).stdout.decode().splitlines())
        for x in (clone, new)
    ]
    if bad := listed[0] ^ listed[1]:
        raise StackError(CHECK_FAILED, "the mirror's files are not upstream's", first(sorted(bad)))
