"""check: the proofs, cheapest first. --quick needs no tree; the rest applies the stack afresh."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import features, refresh, series, upstream
from .apply import commit_patches, expect_tree
from .errors import CHECK_FAILED, StackError
from .export import export
from .fetch import BASE, fetch
from .files import temp_dir
from .git import Git, first
from .patchfile import Patch
from .paths import Stack
from .ui import result, say, step


def fail(what: str, facts: list[str], hint: str = "") -> StackError:
    """A failed check."""
    return StackError(CHECK_FAILED, what, first(facts, 40), hint)


def style(stack: Stack) -> None:
    """shellcheck, shfmt and ruff over our own files."""
    tools = Path(sys.executable).parent
    shell = [str(p) for p in sorted(stack.root.glob("scripts/**/*.sh"))]
    shell += [str(p) for p in [stack.root / ".ci" / "run"] if p.is_file()]
    python = [str(p) for p in (stack.root / "scripts", stack.root / "tests") if p.is_dir()]
    runs = [
        ([tools / "ruff", "check", "-q", *python], "ruff check --fix scripts tests"),
        ([tools / "ruff", "format", "-q", "--check", *python], "ruff format scripts tests"),
    ]
    if shell:
        runs += [
            ([tools / "shellcheck", "-x", "-P", "SCRIPTDIR", *shell], "shellcheck scripts/*.sh"),
            ([tools / "shfmt", "-i", "2", "-d", *shell], "shfmt -i 2 -w scripts .ci/run"),
        ]
    for command, hint in runs:
        done = subprocess.run(command, cwd=stack.root, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stdout + done.stderr).splitlines()
            raise fail(f"{Path(command[0]).name} finds fault", lines, f".work/tools/bin/{hint}")


def quick(stack: Stack) -> list[Patch]:
    """Series, headers, generated files, style. Seconds, and no tree."""
    patches = series.load(stack)
    if bad := series.check_headers(patches):
        raise fail("patches break the rules of their headers", bad, "less patches/README.md")
    want = series.table(patches)
    readme = stack.patches / "README.md"
    if not readme.is_file() or readme.read_text() != want:
        raise fail("patches/README.md does not fit the headers", [], "scripts/refresh.sh")
    if features.in_readme(stack) not in (None, stack.readme.read_text()):
        raise fail("README's table does not fit the tests", [], "scripts/refresh.sh")
    if stack.pin_file.read_text() != stack.pin.render():
        raise fail("upstream/pin.toml was edited by hand", [], "git checkout upstream/pin.toml")
    if bad := upstream.problems(stack):
        raise fail(
            "what upstream's tests do on the pin is not told right",
            bad,
            "scripts/test.sh upstream --record",
        )
    style(stack)
    result(f"quick: {len(patches)} patches, series, headers, table, pin and style are right")
    return patches


@contextmanager
def scratch(stack: Stack) -> Iterator[Path]:
    """A clean checkout of the base beside .work/vllm, sharing its objects."""
    fetch(stack)
    git = Git(stack.tree)
    with temp_dir(stack.work / "check") as temp:
        tree = temp / "vllm"
        git.raw("worktree", "add", "-q", "--detach", str(tree), BASE)
        try:
            yield tree
        finally:
            for folder in temp.iterdir():
                shutil.rmtree(folder, ignore_errors=True)
            git.raw("worktree", "prune")


def round_trip(stack: Stack, tree: Path, patches: list[Patch]) -> None:
    """apply -> export gives the same bytes, count and tree id."""
    commit_patches(tree, patches)
    back = export(tree, BASE)
    bad = [
        f"{a.name}: exported as {b.name}, bytes {'equal' if a.raw == b.raw else 'differ'}"
        for a, b in zip(patches, back, strict=False)
        if (a.name, a.raw) != (b.name, b.raw)
    ]
    if bad or len(back) != len(patches):
        raise fail(
            f"exporting the applied series gives other patches ({len(back)} of {len(patches)})",
            bad,
            "scripts/apply.sh && scripts/refresh.sh",
        )
    expect_tree(stack, Git(tree).tree_of("HEAD"))
    listed = (stack.patches / "series").read_bytes()
    if refresh.render(patches)["series"] != listed:
        raise fail("patches/series is not as refresh.sh writes it", [], "scripts/refresh.sh")
    result(f"round trip: {len(patches)} patches, same bytes, tree {stack.pin.tree}")


def with_quilt(stack: Stack, tree: Path) -> None:
    """quilt push -a --fuzz=0 gives the same tree."""
    tool = shutil.which("quilt")
    if not tool:
        say("quilt: skipped, it is not installed (apt-get install quilt)")
        return
    git = Git(tree)
    git.raw("checkout", "-q", "-f", "--detach", BASE)
    patches = stack.patches
    if stack.upcoming:  # two folders: one with what counts
        patches = tree.parent / "patches"
        patches.mkdir()
        for name, data in refresh.render(series.load(stack)).items():
            (patches / name).write_bytes(data)
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tree.parent),
        "QUILT_PATCHES": str(patches),
        "QUILT_PC": ".pc",
        "LC_ALL": "C",
    }
    if series.load(stack):
        done = subprocess.run(
            [tool, "--quiltrc", "-", "push", "-a", "-q", "--fuzz=0"],
            cwd=tree,
            env=env,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise fail("quilt cannot push the series", (done.stdout + done.stderr).splitlines())
    shutil.rmtree(tree / ".pc", ignore_errors=True)
    git.raw("add", "-A", "-f")
    got = git.out("write-tree")
    git.raw("reset", "-q", "--hard", BASE)
    if got != stack.pin.tree:
        raise fail("quilt gives another tree", [f"expected {stack.pin.tree}", f"found {got}"])
    result("quilt: push -a --fuzz=0 gives the same tree")


def check(stack: Stack, only_quick: bool, tests: str) -> None:
    """Run the checks; the first failure ends them with exit 1."""
    patches = quick(stack)
    if only_quick:
        return
    from .prefixes import prefixes

    with scratch(stack) as tree:
        with step("apply, export, compare"):
            round_trip(stack, tree, patches)
        tip = Git(tree).out("rev-parse", "HEAD")
        with step("quilt"):
            with_quilt(stack, tree)
        if (stack.tree / ".git").exists() and Git(stack.tree).rev("HEAD") != Git(stack.tree).rev(
            BASE
        ):
            lines = refresh.refresh(stack, check=True)
            if lines:
                raise fail("the work tree and patches/ differ", lines, "scripts/refresh.sh")
            result("refresh --check: the work tree says the same")
        prefixes(stack, tree, tip, patches, tests)
    result("check: all right")
