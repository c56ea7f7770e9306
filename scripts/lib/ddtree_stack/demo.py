"""demo: apply, install, models, then the engine's own demonstration inside .venv."""

from __future__ import annotations

import subprocess

from .errors import CHECK_FAILED, StackError
from .install import environ, install
from .model import target_model
from .paths import Stack


def demo(stack: Stack, options: list[str]) -> int:
    """Status of scripts/lib/demo_engine.py, run with the installed tree."""
    program = stack.root / "scripts" / "lib" / "demo_engine.py"
    if not program.is_file():
        raise StackError(
            CHECK_FAILED,
            "the stack has no demonstration of the engine yet",
            [f"missing: {stack.shown(program)}"],
            "scripts/test.sh",
        )
    # No GPU backend honours a tree's mask yet: the CPU build runs on every machine.
    install(stack, "cpu")
    env = environ(stack)
    options = [
        *("--target", str(target_model(stack))),
        *("--drafter", str(stack.root / "tests" / "models" / "smollm2-135m-dflash-b16")),
        *options,
    ]
    python = str(stack.venv / "bin" / "python")
    # From the root, which has no vllm folder: the installed tree is the one that runs.
    return subprocess.run([python, str(program), *options], cwd=stack.root, env=env).returncode
