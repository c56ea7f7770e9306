"""Verify steps replayed from a text and a drafter's marginals, without an engine.

The target samples every row of a draft tree with the request's ordinary noise, so a step
accepts exactly the drafts that agree with the text it would have written anyway: what a
drafter's chain or tree earns can be counted on finished texts, at any temperature. That
makes it cheap to compare trees; tests/tree/test_real_pair.py holds it to the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

# Before anything imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from eval_prompts import loops
from train_dflash import BLOCK, Drafter, Target

CANDIDATES = 128
DEPTH = BLOCK - 1


@dataclass
class Answer:
    """A prompt, the target's answer, and the drafter's marginals at each of its tokens.

    Attributes:
        category: of the prompt.
        prompt: token ids.
        text: token ids, the end token included if there is one.
        logprobs: float32 [len(text), DEPTH, CANDIDATES], best first, with text[i] as anchor.
        tokens: int64, likewise.

    """

    category: str
    prompt: list[int]
    text: list[int]
    logprobs: np.ndarray = field(repr=False, default=None)
    tokens: np.ndarray = field(repr=False, default=None)

    @property
    def loops(self) -> bool:
        return loops(self.text)


def write_answers(
    folder: Path, prompts: dict[str, list[list[int]]], temperature: float, limit: int
) -> list[Answer]:
    """Let the target (a Hugging Face folder) answer, in the engine and without speculation."""
    from vllm import LLM, SamplingParams

    flat = [(category, p) for category, rows in prompts.items() for p in rows]
    llm = LLM(
        str(folder),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=2 << 30,
    )
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": p} for _, p in flat],
            [
                SamplingParams(
                    temperature=temperature,
                    seed=i if temperature else None,
                    max_tokens=limit,
                    detokenize=False,
                )
                for i in range(len(flat))
            ],
        )
    finally:
        llm.llm_engine.engine_core.shutdown()
    return [
        Answer(category, prompt, list(output.outputs[0].token_ids))
        for (category, prompt), output in zip(flat, outputs)
    ]


def add_marginals(
    answers: list[Answer],
    target: Target,
    drafter: Drafter,
    progress: Callable[[str], None] = print,
) -> None:
    """Fill in what the drafter says at every token of every answer."""
    device = target.embedding.device
    for i, answer in enumerate(answers):
        if i % 20 == 0:
            progress(f"marginals of {i}/{len(answers)} answers")
        ids = torch.tensor(answer.prompt + answer.text, device=device)[None]
        first = len(answer.prompt)
        anchors = torch.arange(first, first + len(answer.text), device=device)[None]
        logprobs, tokens = drafter.top(ids, anchors, CANDIDATES)
        answer.logprobs = logprobs[0].cpu().numpy()
        answer.tokens = tokens[0].cpu().numpy()


@dataclass
class Counts:
    """What verify steps earned.

    Attributes:
        steps: verify steps.
        tokens: tokens they gave, bonus included.
        depths: [DEPTH + 1], steps by the number of drafts accepted.

    """

    steps: int = 0
    tokens: int = 0
    depths: np.ndarray = field(default_factory=lambda: np.zeros(DEPTH + 1, dtype=np.int64))

    @property
    def rate(self) -> float:
        """Mean tokens per step."""
        return self.tokens / max(self.steps, 1)

    @property
    def acceptance(self) -> np.ndarray:
        """[DEPTH]: share of the steps whose d-th draft was accepted."""
        return self.depths[::-1].cumsum()[::-1][1:] / max(self.steps, 1)

    def add(self, other: Counts) -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.depths = self.depths + other.depths


Step = Callable[[Answer, int], int]


def replay(answer: Answer, accepted: Step) -> Counts:
    """Verify the answer's steps; `accepted(answer, at)` is the drafts taken after text[at].

    The first token comes from the prompt's own step. The last step, which the text's end
    may cut short, is not counted.
    """
    counts, at = Counts(), 0
    while True:
        taken = accepted(answer, at)
        if at + taken + 1 >= len(answer.text):
            return counts
        counts.steps += 1
        counts.tokens += taken + 1
        counts.depths[taken] += 1
        at += taken + 1


def chain(length: int = DEPTH) -> Step:
    """The chain of best drafts."""

    def accepted(answer: Answer, at: int) -> int:
        truth = answer.text[at + 1 : at + 1 + length]
        taken = 0
        while taken < len(truth) and answer.tokens[at, taken, 0] == truth[taken]:
            taken += 1
        return taken

    return accepted


def tree(num_nodes: int, policy: str, calibrate=None) -> Step:
    """The trees that the engine builds, by its own builder.

    `calibrate`, if given, maps logprobs float32 [DEPTH, CANDIDATES] to such scores.
    """
    from vllm.v1.worker.gpu.spec_decode.ddtree.builder import (
        build_draft_trees_reference,
        num_candidates,
    )

    k = num_candidates(num_nodes, DEPTH, CANDIDATES, policy)
    rows = 1 + num_nodes
    parents, depths = (torch.zeros(1, rows, dtype=torch.int32) for _ in range(2))
    ancestors = torch.zeros(1, rows, (rows + 31) // 32, dtype=torch.int32)
    live, spine_only = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    node_tokens = torch.zeros(1, num_nodes, dtype=torch.int64)
    slot = torch.zeros(1, dtype=torch.int64)

    def accepted(answer: Answer, at: int) -> int:
        scores = answer.logprobs[at]
        if calibrate is not None:
            scores = calibrate(scores)
        build_draft_trees_reference(
            torch.from_numpy(np.ascontiguousarray(scores[None, :, :k])),
            torch.from_numpy(np.ascontiguousarray(answer.tokens[None, at, :, :k])),
            slot,
            spine_only,
            parents,
            depths,
            ancestors,
            live,
            node_tokens,
            policy,
        )
        children: dict[tuple[int, int], int] = {}
        num_live = int(live[0])
        of = zip(parents[0, 1 : num_live + 1].tolist(), node_tokens[0, :num_live].tolist())
        for row, (parent, token) in enumerate(of, 1):
            children.setdefault((parent, token), row)
        row = taken = 0
        for token in answer.text[at + 1 :]:
            row = children.get((row, token), 0)
            if not row:
                break
            taken += 1
        return taken

    return accepted


def total(answers: list[Answer], step: Step) -> dict[str, Counts]:
    """Counts by category, and over all as "all"; text that runs in circles is left out."""
    found: dict[str, Counts] = {}
    every = Counts()
    for answer in answers:
        counts = found.setdefault(answer.category, Counts())
        if answer.loops:
            continue
        one = replay(answer, step)
        counts.add(one)
        every.add(one)
    return found | {"all": every}


def save(answers: list[Answer], file: Path) -> None:
    arrays = {}
    for i, answer in enumerate(answers):
        arrays[f"{i}:{answer.category}:prompt"] = np.array(answer.prompt)
        arrays[f"{i}:{answer.category}:text"] = np.array(answer.text)
        arrays[f"{i}:{answer.category}:logprobs"] = answer.logprobs
        arrays[f"{i}:{answer.category}:tokens"] = answer.tokens
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **arrays)


def load(file: Path) -> list[Answer]:
    answers: dict[str, Answer] = {}
    with np.load(file) as arrays:
        for name in arrays.files:
            i, category, part = name.split(":")
            answer = answers.setdefault(i, Answer(category, [], []))
            value = arrays[name]
            setattr(answer, part, value.tolist() if part in ("prompt", "text") else value)
    return list(answers.values())
