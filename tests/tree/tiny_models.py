"""Tiny random checkpoints: targets and DFlash drafters that start in seconds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

VOCAB = 512
HIDDEN = 64
LAYERS = 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
TARGET_LAYER_IDS = [0, 1, 2]
MASK_TOKEN_ID = VOCAB - 1
MAX_POSITIONS = 4096
WINDOW = 40

_WINDOWS = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
# Three gated-delta-net layers and one of attention.
_HYBRID = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_TARGETS = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, _HYBRID | _EXPERTS),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, _HYBRID),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, _HYBRID | _EXPERTS),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "windowed": (LlamaConfig, LlamaForCausalLM, _WINDOWS),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN},
    ),
}

# Of what a picture becomes in a prompt, in the tokenizer's last places before the mask's.
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(VOCAB - 5, VOCAB - 1)


def make_target(
    folder: Path, architecture: str, dtype: str = "float32", head_dim: int = HEAD_DIM, **overrides
) -> Path:
    """Write a random target to `folder`.

    `architecture` is 'qwen3', 'qwen3-moe', 'llama', 'olmo2', 'mixtral', 'windowed', a Llama half
    of whose layers look back WINDOW tokens only, or one of HYBRIDS.

    Weights are larger than an initialiser's, so that the greedy continuation depends on
    the context instead of falling into a loop at once.
    """
    config_class, model_class, settings = _TARGETS[architecture]
    if architecture in HYBRIDS:
        settings = settings | {"linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim}
    config = config_class(**_text_config(head_dim) | settings | overrides)
    _save_random(folder, model_class, config, dtype)
    make_tokenizer().save_pretrained(folder)
    return folder


def _text_config(head_dim: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _save_random(folder: Path, model_class: type, config: Any, dtype: str) -> None:
    config.torch_dtype = dtype
    torch.manual_seed(0)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            # Slow enough a decay for a state to hold what came some dozen tokens ago.
            parameter.data.uniform_(0.01, 0.5).log_()
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def mrope_parameters(head_dim: int, interleaved: bool = True) -> dict[str, Any]:
    """Rope whose frequencies belong to time, height and width."""
    narrow = head_dim // 6
    return {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [head_dim // 2 - 2 * narrow, narrow, narrow],
        "mrope_interleaved": interleaved,
    }


def make_vision_target(
    folder: Path, architecture: str, dtype: str = "float32", head_dim: int = HEAD_DIM
) -> Path:
    """Write a random 'qwen3-vl' or 'qwen2.5-vl' and its processor to `folder`.

    An image's token stands for 8 x 8 pixels. Needs torchvision, as the models in vLLM do.
    """
    qwen3 = architecture == "qwen3-vl"
    text = _text_config(head_dim)
    if not qwen3:
        text["hidden_size"] = HEADS * text.pop("head_dim")
    text["rope_parameters"] = mrope_parameters(head_dim, interleaved=qwen3)
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "initializer_range": 0.2,
    }
    vision |= (
        {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
        if qwen3
        else {"window_size": 16, "fullatt_block_indexes": [1]}
    )
    config_class, model_class = (
        (Qwen3VLConfig, Qwen3VLForConditionalGeneration)
        if qwen3
        else (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration)
    )
    config = config_class(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
    )
    _save_random(folder, model_class, config, dtype)
    tokenizer = make_tokenizer(VISION_TOKENS)
    patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    pixels = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    if qwen3:
        from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

        processor = Qwen3VLProcessor(
            Qwen2VLImageProcessor(**patches, **pixels),
            tokenizer,
            Qwen3VLVideoProcessor(**patches, **pixels),
        )
    else:
        from transformers import (
            Qwen2_5_VLProcessor,
            Qwen2VLImageProcessor,
            Qwen2VLVideoProcessor,
        )

        processor = Qwen2_5_VLProcessor(
            Qwen2VLImageProcessor(**patches, **pixels),
            tokenizer,
            Qwen2VLVideoProcessor(**patches, **pixels),
        )
    processor.save_pretrained(folder)
    return folder


def make_tokenizer(special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with one token for each byte and some pairs of letters.

    `special` tokens get its last places, the mask's excepted.
    """
    tokens = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = "abcdefghijklmnop"
    num_merges = VOCAB - 1 - len(tokens) - len(special)
    merges = [(a, b) for a in letters for b in letters][:num_merges]
    tokens += [*(a + b for a, b in merges), *special]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.add_special_tokens({"additional_special_tokens": [*special, "<mask>"]})
    assert fast.convert_tokens_to_ids("<mask>") == MASK_TOKEN_ID
    return fast


def make_drafter(
    folder: Path,
    block_size: int,
    dtype: str = "float32",
    layers: int = 2,
    hidden: int = HIDDEN,
    head_dim: int = HEAD_DIM,
    vocab: int = VOCAB,
    target_layers: int = LAYERS,
    target_layer_ids: list[int] = TARGET_LAYER_IDS,
    mask_token_id: int = MASK_TOKEN_ID,
    dflash2: dict | None = None,
) -> Path:
    """Write a random DFlash drafter to `folder`; by default for any target of `make_target`.

    `dflash2` are the settings of a DFlash2 drafter, which is DFlash with convolutions
    around each layer's parts and a selector of candidates.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "block_size": block_size,
        "num_target_layers": target_layers,
        "layer_types": ["full_attention"] * layers,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": target_layer_ids},
    }
    if dflash2 is not None:
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] |= dflash2
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.1).to(getattr(torch, dtype))

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=getattr(torch, dtype))

    weights = {
        "fc.weight": random(hidden, len(target_layer_ids) * hidden),
        "hidden_norm.weight": ones(hidden),
    }
    weights["norm.weight"] = ones(hidden)
    for i in range(layers):
        p = f"layers.{i}."
        weights |= {
            p + "self_attn.q_proj.weight": random(HEADS * head_dim, hidden),
            p + "self_attn.k_proj.weight": random(KV_HEADS * head_dim, hidden),
            p + "self_attn.v_proj.weight": random(KV_HEADS * head_dim, hidden),
            p + "self_attn.o_proj.weight": random(hidden, HEADS * head_dim),
            p + "self_attn.q_norm.weight": ones(head_dim),
            p + "self_attn.k_norm.weight": ones(head_dim) * (1 + i),
            p + "input_layernorm.weight": ones(hidden),
            p + "post_attention_layernorm.weight": ones(hidden),
            p + "mlp.gate_proj.weight": random(2 * hidden, hidden),
            p + "mlp.up_proj.weight": random(2 * hidden, hidden),
            p + "mlp.down_proj.weight": random(hidden, 2 * hidden),
        }
        if dflash2 is not None:
            taps = dflash2["conv_kernel_size"]
            groups = hidden // dflash2["conv_group_size"]
            for part in ("attention_conv.", "mlp_conv."):
                weights[p + part + "base_kernel"] = random(2, taps, hidden)
                weights[p + part + "kernel_projection.weight"] = random(2 * taps * groups, hidden)
    if dflash2 is not None:
        rank = dflash2["selector_rank"]
        weights["candidate_selector.predecessor_codebook"] = random(vocab, rank)
        weights["candidate_selector.successor_codebook"] = random(vocab, rank)
        weights["candidate_selector.hidden_projection.weight"] = random(rank, hidden)
    save_file(weights, folder / "model.safetensors")
    return folder
