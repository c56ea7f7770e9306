"""Kinds of targets: with trees each emits what it emits without speculation.

Deep sideways accepts are planted, and the drafter runs as well, so that what it shares with the
target is used. Checkpoints are random and made here.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tiny_models
from conftest import MODE, counting, engine, generate, prompts, skip_without_experts
from lossless import NEAR_TIE, answer, assert_same, differences_in_rounds, sampling
from planting import Planter, planting
from quantized import quantize

NUM_NODES, DEPTH = 15, 7
NUM_TOKENS = 32
LENGTHS = (5, 33, 60, 20)
# Tokens whose difference of logits is larger than rounding explains. A mask that shows one row
# too many makes 4 %, wrong positions make 17 %.
MAX_FAR = 0.02


@dataclass(frozen=True)
class Target:
    """A kind of target.

    Attributes:
        make: writes its checkpoint to a folder.
        hidden: its hidden size.
        options: of `vllm.LLM`.
        gpu_only: why the CPU cannot run it, if it cannot.
        module: that it imports and that a CPU's environment is without.
        experts: it has some.
        images: prompts hold one.
        adapters: requests have LoRA adapters, a different one each, or none.
        far: where it is not exact, logits differ by more only if something is wrong. Quantised
            activations that round the other way move a component by 1 % in int8, 6 % in fp8;
            perturbed like that, logits that change places are up to 0.7 and 1.4 apart.

    """

    make: Callable[[Path], object]
    hidden: int = tiny_models.HIDDEN
    options: dict = field(default_factory=dict)
    gpu_only: str | None = None
    module: str | None = None
    experts: bool = False
    images: bool = False
    adapters: bool = False
    far: float = 2 * NEAR_TIE

    @property
    def exact(self) -> bool:
        return MODE.exact and "dtype" not in self.options


def plain(architecture: str, **overrides) -> Callable[[Path], object]:
    return lambda folder: tiny_models.make_target(
        folder, architecture, head_dim=MODE.head_dim, **overrides
    )


def quantized(name: str, far: float = 0.75, **options) -> Target:
    hidden = 128  # Marlin takes multiples of it

    def make(folder: Path):
        tiny_models.make_target(
            folder,
            "qwen3",
            dtype="bfloat16",
            head_dim=MODE.head_dim,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
        )
        quantize(folder, name)

    return Target(make, hidden, {"dtype": "bfloat16"}, far=far, **options)


def vision(architecture: str) -> Target:
    return Target(
        lambda folder: tiny_models.make_vision_target(folder, architecture, head_dim=MODE.head_dim),
        tiny_models.HIDDEN if architecture == "qwen3-vl" else tiny_models.HEADS * MODE.head_dim,
        module="torchvision",
        images=True,
    )


def register_mrope() -> None:
    """Make vLLM's Qwen 3 see a picture in every prompt: 3 rows of 4 tokens from the eighth on.

    No class of upstream's that has M-RoPE can be imported without torchvision.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import SupportsMRoPE
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    class Qwen3WithMRoPE(Qwen3ForCausalLM, SupportsMRoPE):
        def get_mrope_input_positions(self, input_tokens, mm_features):
            num_tokens = len(input_tokens)
            positions = torch.arange(num_tokens).repeat(3, 1)
            if num_tokens >= 20:
                positions[0, 8:20] = 8
                positions[1, 8:20] = 8 + torch.arange(12) // 4
                positions[2, 8:20] = 8 + torch.arange(12) % 4
                positions[:, 20:] = torch.arange(12, num_tokens - 8)
            return positions, int(positions.max()) + 1 - num_tokens

    ModelRegistry.register_model("Qwen3WithMRoPE", Qwen3WithMRoPE)


def make_mrope(folder: Path) -> None:
    register_mrope()
    rope = tiny_models.mrope_parameters(MODE.head_dim)
    plain("qwen3", rope_parameters=rope)(folder)


# With a slot to spare: on the CPU requests without an adapter get what is in the last one.
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
if MODE.on_gpu:
    LORA["dtype"] = "bfloat16"  # Upstream's kernels take nothing else there.
NO_FP8 = "the CPU's kernels for fp8 need AMX"
TARGETS = {
    "MoE targets": Target(plain("qwen3-moe"), experts=True),
    "Transformers backend": Target(plain("olmo2")),
    "LoRA on the target": Target(plain("qwen3"), options=LORA, adapters=True),
    "M-RoPE targets": Target(
        make_mrope, options={"hf_overrides": {"architectures": ["Qwen3WithMRoPE"]}}
    ),
    "Qwen3-VL": vision("qwen3-vl"),
    "Qwen2.5-VL": vision("qwen2.5-vl"),
    "compressed-tensors W8A8": quantized("compressed-tensors W8A8"),
    "compressed-tensors W4A16": quantized("compressed-tensors W4A16"),
    "AWQ": quantized("AWQ"),
    "GPTQ": quantized("GPTQ"),
    "fp8": quantized("fp8", gpu_only=NO_FP8, far=1.5),
    "fp8 in blocks": quantized("fp8 in blocks", gpu_only=NO_FP8, far=1.5),
}


def requests(target: Target, folder: Path) -> tuple[list[list[int]], list, dict]:
    """Tokens of the prompts as the engine sees them, the prompts, and options of `generate`."""
    ids = prompts(LENGTHS)
    options = {}
    if target.adapters:
        first, second = (make_adapter(folder / f"adapter-{i}", i) for i in (1, 2))
        options["lora_request"] = [first, None, second, first]
    if not target.images:
        return ids, ids, options
    # A prompt's tokens are not those of an image, and images differ in size.
    ids = [[t % tiny_models.VISION_START for t in p] for p in ids]
    inputs = []
    for i, p in enumerate(ids):
        rows, columns = 2 + i % 3, 5 - i % 2
        before, after = p[: i * 5], p[i * 5 :]
        image = [tiny_models.VISION_START, tiny_models.IMAGE_PAD, tiny_models.VISION_END]
        inputs.append(
            {
                "prompt_token_ids": [*before, *image, *after],
                "multi_modal_data": {"image": make_image(8 * rows, 8 * columns, seed=i)},
            }
        )
        image[1:2] *= rows * columns
        p[:] = [*before, *image, *after]
    return ids, inputs, options


def make_image(height: int, width: int, seed: int):
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def make_adapter(folder: Path, number: int, rank: int = 4):
    """Write a LoRA adapter of attention, MLP and head; returns its request."""
    from vllm.lora.request import LoRARequest

    generator = torch.Generator().manual_seed(number)
    hidden, heads = tiny_models.HIDDEN, tiny_models.HEADS * MODE.head_dim
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.down_proj": (hidden, 2 * hidden),
    }
    modules = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(tiny_models.LAYERS)
        for name, shape in shapes.items()
    } | {"lm_head": (tiny_models.VOCAB, hidden)}
    weights = {}
    for name, (num_out, num_in) in modules.items():
        for part, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            random = torch.randn(*shape, generator=generator) * 0.3
            weights[f"base_model.model.{name}.lora_{part}.weight"] = random
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "o_proj", "down_proj", "lm_head"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(f"adapter-{number}", number, str(folder))


class Watcher(Planter):
    """A planter that keeps the speculator."""

    def plant(self, speculator, input_batch):
        self.speculator = speculator
        super().plant(speculator, input_batch)


def assert_few_far(margins: list[float], target: Target) -> None:
    """Of the tokens that differ, logits do not by more than rounding moves them."""
    far = sum(margin > target.far for margin in margins)
    told = f"{far} of {len(margins)} differences are far, by logits {sorted(margins)}"
    print(told)
    assert far <= MAX_FAR * NUM_TOKENS * len(LENGTHS), told


@pytest.mark.feature(keys="TARGETS")
@pytest.mark.parametrize("name", TARGETS)
def test_trees_equal_no_speculation(name, tmp_path):
    target = TARGETS[name]
    if target.gpu_only and not MODE.on_gpu:
        pytest.skip(target.gpu_only)
    if target.module and not importlib.util.find_spec(target.module):
        pytest.skip(f"there is no {target.module}, which upstream's class imports")
    if target.experts:
        skip_without_experts()
    folder, drafter = tmp_path / "target", tmp_path / "drafter"
    target.make(folder)
    tiny_models.make_drafter(drafter, DEPTH + 1, hidden=target.hidden, head_dim=MODE.head_dim)
    ids, inputs, options = requests(target, tmp_path)
    params = sampling(0.0, NUM_TOKENS, len(ids))
    if target.exact:
        params[1:2] = sampling(1.0, NUM_TOKENS, 1)
    with engine(str(folder), **target.options) as llm:
        truth = answer(llm, inputs, params, target.exact, **options)
        if target.adapters:
            without = generate(llm, inputs, sampling(0.0, 8, len(ids)))
            for lora, plain_tokens, tokens in zip(options["lora_request"], without, truth):
                assert lora is None or plain_tokens != tokens[:8]

    planter = Watcher({tuple(p): t for p, t in zip(ids, truth)})
    with (
        planting(planter, run_drafter=True),
        engine(str(folder), str(drafter), num_tokens=NUM_NODES, **target.options) as llm,
    ):
        planter.planted.clear()
        with counting(llm) as spec:
            if target.exact or target.images:
                assert_same(generate(llm, inputs, params, **options), truth)
            else:
                assert_few_far(differences_in_rounds(llm, planter, ids, truth, **options), target)
    lengths = [length for length in planter.planted if length]
    assert len(lengths) > 12 and sum(lengths) > 2 * len(lengths)
    assert spec["accepted_tokens"] > (0.8 if target.exact else 0.3) * sum(lengths)
    # Most of them not along first children.
    assert spec["accepted_spine_tokens"] < spec["accepted_tokens"] / 2
    if target.adapters:
        from vllm.lora.layers import BaseLayerWithLoRA

        drafter_modules = planter.speculator.model.modules()
        assert not any(isinstance(m, BaseLayerWithLoRA) for m in drafter_modules)


REFUSED = {"no hidden states of its layers": ("mixtral", "MixtralForCausalLM.*Use method")}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_startup(name, models):
    architecture, told = REFUSED[name]
    with (
        pytest.raises(ValueError, match=told),
        engine(models.target(architecture), models.drafter(DEPTH), num_tokens=NUM_NODES),
    ):
        pass
