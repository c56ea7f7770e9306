"""demo: apply, install, models, then the engine's own demonstration inside .venv."""

from __future__ import annotations

import subprocess

from .errors import CHECK_FAILED, OK, StackError
from .install import environ, install
from .model import reference_drafter, target_model
from .paths import Stack


def demo(stack: Stack, options: list[str]) -> int:
    """Run scripts/lib/demo_engine.py with the installed tree; 0, or 1 when it fails."""
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
    models = ["--target", str(target_model(stack)), "--drafter", str(reference_drafter(stack))]
    command = [str(stack.venv / "bin" / "python"), str(program), *models, *options]
    # From the root, which has no vllm folder: the installed tree is the one that runs.
    status = subprocess.run(command, cwd=stack.root, env=env).returncode
    return CHECK_FAILED if status else OK
