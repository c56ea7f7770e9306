"""What is under test is the patched build, and nothing beside it."""

from __future__ import annotations

import json
import os
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
import vllm
from vllm.platforms import current_platform

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def provenance() -> dict:
    return json.loads(distribution("vllm").read_text("ddtree.json"))


def test_version_and_tree_are_the_pinned_ones(provenance):
    pin = tomllib.loads((ROOT / "upstream" / "pin.toml").read_text())
    assert provenance["tree"] == pin["stack"]["tree"]
    wanted = f"{pin['upstream']['version']}+ddtree.{pin['stack']['revision']}"
    assert vllm.__version__.removesuffix(".cpu") == wanted
    assert distribution("vllm").version == vllm.__version__


def test_it_runs_from_the_environment_and_not_from_a_source_tree():
    assert Path(vllm.__file__).is_relative_to(ROOT / ".venv")


def test_platform_fits_the_build(provenance):
    assert current_platform.is_cpu() == (provenance["device"] == "cpu")


def test_binaries_load(provenance):
    current_platform.import_kernels()
    op = "compute_slot_mapping_kernel_impl" if provenance["device"] == "cpu" else "rms_norm"
    assert hasattr(torch.ops._C, op)


def test_recorded_files_are_there():
    files = distribution("vllm").files or []
    missing = [str(f) for f in files if f.suffix != ".pyc" and not f.locate().exists()]
    assert len(files) > 1000 and missing == []


def test_models_are_complete():
    drafter = ROOT / "tests" / "models" / "smollm2-135m-dflash-b16"
    for folder in (Path(os.environ["DDTREE_TARGET"]), drafter):
        assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_gpu_architecture_is_one_of_the_pinned():
    pin = tomllib.loads((ROOT / "upstream" / "pin.toml").read_text())
    major, minor = torch.cuda.get_device_capability()
    assert f"{major}.{minor}" in pin["requires"]["architectures"]
