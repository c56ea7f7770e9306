"""test: the scripts' unit tests, and the feature's tests against what .venv holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from .errors import CHECK_FAILED, OK, UPSTREAM, StackError
from .install import environ, install, installed
from .model import GEMMA3, target_model
from .paths import Stack
from .ui import say

_PROBE = "import vllm, torch; print(vllm.__version__, vllm.__file__, torch.__version__, sep='\\n')"


def test(stack: Stack, suite: str, pytest: list[str]) -> int:
    """Run the suites; every one runs even if an earlier one failed."""
    status = OK
    if suite in ("scripts", "all"):
        status |= scripts(stack, pytest)
    if suite in ("tree", "all"):
        status |= tree(stack, pytest)
    if suite == "all":
        # It takes the CUDA build into .venv, so it is not run in passing.
        say("== gpu: the same engines on a GPU: scripts/test.sh gpu")
        # Whether the patches leave the rest of vLLM alone takes longer than a change may wait.
        say("== upstream: upstream's own tests: scripts/test.sh upstream")
    return CHECK_FAILED if status else OK


def scripts(stack: Stack, pytest: list[str]) -> int:
    """tests/unit in the tools' environment."""
    say("== scripts: tests/unit")
    env = dict(os.environ, PYTHONPATH=str(stack.root / "scripts" / "lib"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "2"]
    return subprocess.run(
        [*command, "--rootdir", "tests/unit", "tests/unit", *pytest], cwd=stack.root, env=env
    ).returncode


def _gemma(stack: Stack) -> dict[str, str]:
    """Where Gemma lies, or why its tests are to be skipped: it is large, and no index owes it."""
    try:
        return {"DDTREE_GEMMA": str(target_model(stack, GEMMA3))}
    except StackError as err:
        if err.code != UPSTREAM:
            raise
        say(f"== tree: {GEMMA3.name} is skipped: {err.what}")
        return {"DDTREE_GEMMA_MISSING": err.what}


def tree(stack: Stack, pytest: list[str]) -> int:
    """tests/tree against .venv, from a folder outside the tree so that only the install counts."""
    tests = stack.root / "tests" / "tree"
    # `test.sh gpu` has the other build.
    install(stack, "cpu")
    have = installed(stack) or {}
    env = environ(stack)
    env["DDTREE_TARGET"] = str(target_model(stack))
    env |= _gemma(stack)
    # Two workers, a thread each. Left alone, every engine pins a thread to each core, and they
    # wait for one another: six times as long.
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with TemporaryDirectory() as temp:
        python = str(stack.venv / "bin" / "python")
        seen = subprocess.run(
            [python, "-c", _PROBE], cwd=temp, env=env, capture_output=True, text=True
        )
        if seen.returncode:
            raise StackError(
                CHECK_FAILED, "the installed vLLM cannot be imported", seen.stderr.splitlines()[-5:]
            )
        version, path, torch = seen.stdout.splitlines()[-3:]
        say(f"== tree: vllm {version}, tree {have.get('tree')}")
        say(f"   at {Path(path).parent}, torch {torch}")
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--rootdir", str(tests)]
        # Two at a time; engines and what they must emit are shared within a file.
        command += ["-n", "2", "--dist", "loadfile"]
        return subprocess.run([*command, str(tests), *pytest], cwd=temp, env=env).returncode
