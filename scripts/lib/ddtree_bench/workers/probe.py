"""Print the card and the versions as JSON; fails without a card."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys


def main() -> None:
    """One line of JSON."""
    import torch
    import triton

    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} of {sys.executable} sees no CUDA device")
    try:
        vllm = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        import vllm as package

        vllm = package.__version__
    found = {
        "card": torch.cuda.get_device_name(),
        "vllm": vllm,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
