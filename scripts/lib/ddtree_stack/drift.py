"""check --next: does the stack still fit the next release? Applies, compiles, lints, imports it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from . import series, upcoming
from .apply import commit_patches, expect_tree
from .check import fail, scratch, with_quilt
from .errors import CONFLICT, StackError
from .fetch import BASE
from .git import Git
from .install import install
from .paths import Stack
from .prefixes import Checkout, judge_imports, module_name, run_tests
from .ui import result, say, step

# Names that are not there (any more), unused imports, syntax; style is the same on both releases.
_RULES = "E9,F"
_RUFF = Path(sys.executable).parent / "ruff"


def drift(stack: Stack, tests: str) -> None:
    """Run the checks on the next release; the first failure ends them with exit 1."""
    version = stack.pin.version
    again = f"scripts/rebase.sh {version}"
    if stack.pin_file.read_text() != stack.pin.render():
        raise fail(f"{stack.shown(stack.pin_file)} was edited by hand", [], "git checkout upstream")
    if late := upcoming.stale(stack):
        raise fail("patches/ changed below patches of upstream/next", late, again)
    patches = series.load(stack)
    record = upcoming.load(stack)
    if bad := series.check_headers(patches, record.dropped):
        raise fail("patches break the rules of their headers", bad, "less patches/README.md")
    with scratch(stack) as tree:
        with step(f"apply {len(patches)} patches to {version}"):
            try:
                commit_patches(tree, patches)
            except StackError as err:
                if err.code != CONFLICT:
                    raise
                # The tree it stopped in is gone in a moment.
                raise fail(f"{version}: {err.what}", err.facts[:1], again) from err
        tip = Git(tree).out("rev-parse", "HEAD")
        expect_tree(stack, Git(tree).tree_of(tip))
        if not upcoming.moved(stack):
            with_quilt(stack, tree)
            Git(tree).raw("checkout", "-q", "-f", "--detach", tip)
        files = sorted({f for p in patches for f in p.files if f.endswith(".py")})
        _lint(tree, [f for f in files if (tree / f).is_file()], tip)
        install(Stack(stack.root), "cpu")
        at = Checkout(stack, tree, tip)
        if "cpu" not in stack.pin.wheels:
            say(f"the index has no CPU wheel of {version}: the installed one's binaries are used")
        with step("compile and import"):
            at.switch(tip)
            if bad := at.compiles(files):
                raise fail("a file does not compile", bad, again)
            _import(at, files, tip)
        if tests != "none":
            every = list(dict.fromkeys(n for p in patches for n in p.tests))
            say(f"all Tests: on {version}: {run_tests(at, 'the whole stack', every)}")
    result(f"next: {len(patches)} patches fit {version}; applied, compiled, linted, imported")


def _import(at: Checkout, files: list[str], tip: str) -> None:
    """Import every patched module; fail on what upstream's own does not fail with."""
    names = [m for f in files if (at.tree / f).is_file() and (m := module_name(f))]
    told = {m: e for m, e in at.imports(names).items() if e}
    if not told:
        return
    at.switch(BASE)
    known = at.imports(list(told))
    at.switch(tip)
    if bad := judge_imports(told, known):
        raise fail("a module does not import", bad)


def _lint(tree: Path, files: list[str], tip: str) -> None:
    """Fail on what ruff finds in the patched files and did not find in upstream's."""
    if not (found := _findings(tree, files)):
        return
    git = Git(tree)
    git.raw("checkout", "-q", "-f", "--detach", BASE)
    before = _findings(tree, [f for f in files if (tree / f).is_file()])
    git.raw("checkout", "-q", "-f", "--detach", tip)
    if bad := [line for what, line in found.items() if what not in before]:
        raise fail("ruff finds fault", bad)


def _findings(tree: Path, files: list[str]) -> dict[tuple[str, str], str]:
    """ruff's lines by file and message."""
    done = subprocess.run(
        [_RUFF, "check", "-q", "--isolated", "--no-cache", "--output-format=concise"]
        + ["--select", _RULES, *files],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    found = {}
    for line in done.stdout.splitlines():
        file, _, rest = line.partition(":")
        found[file, rest.partition(": ")[2]] = line
    return found
