"""Traces as an engine would write them: seeded drafters, trees built best first, walked greedily."""

from __future__ import annotations

import heapq
import json
import math
import random
import re
from pathlib import Path

DEPTH = 15
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Give me three tips for learning a new language.",
    "Write a Python function that adds two numbers.",
)
ANSWERS = (
    "The capital of France is Paris. It is known for its art, its food and its fashion, and for "
    "landmarks such as the Eiffel Tower, the Louvre and the cathedral of Notre-Dame. The city lies "
    "on the river Seine, which parts it into a left and a right bank. Millions of people visit it "
    "every year; many of them come for the museums, others for the cafés and the bread.",
    "Here are three tips for learning a new language:\n\n"
    "1. **Practise every day.** Ten minutes a day are worth more than an hour on Sunday.\n"
    "2. **Listen to people who speak it.** Music, films and podcasts train your ear.\n"
    "3. **Speak from the first day.** You will make mistakes, and you will learn from them.\n\n"
    "Above all, be patient with yourself: a language is learned over years, not over weeks.",
    "Here is a function that adds two numbers:\n\n```python\ndef add(a, b):\n"
    '    """Return the sum of a and b."""\n    return a + b\n\n\nprint(add(2, 3))\n```\n\n'
    "The function takes two arguments, `a` and `b`, and returns their sum. The last line calls it "
    "with the numbers 2 and 3, so that the program prints 5. It works for integers, for floats "
    "and for anything else that knows how to be added with the plus sign.",
)
TRAPS = (
    "<script>document.title='owned'</script>",
    "[bold]",
    "[/]",
    "</script>",
    "\n",
    "语言",
    "\x1b",
)


class Words:
    """A tokenizer of whole words."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: dict[str, int] = {}
        for text in (*ANSWERS, *TRAPS):
            self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Words take the blank before them along, as those of byte-pair encodings do."""
        words = [text] if text in TRAPS else re.findall(r" ?\w+|\n+| ?[^\w\s]+|\s", text)
        for word in words:
            if word not in self.ids:
                self.ids[word] = len(self.texts)
                self.texts.append(word)
        return [self.ids[word] for word in words]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.texts[token] for token in tokens)


def marginals(rng: random.Random, truth: list[int], size: int) -> list[list[tuple[float, int]]]:
    """What a fair drafter says of each position: surer near the root, and at times wrong."""
    rows = []
    for depth, token in enumerate(truth):
        others = rng.sample([t for t in range(size) if t != token], 8)
        sure = rng.betavariate(5, 1 + depth * 0.35)
        rank = 0 if rng.random() < 0.35 + 0.6 * sure else min(int(rng.expovariate(0.6)) + 1, 8)
        tokens = [*others[:rank], token, *others[rank:]][:8]
        masses, left = [], 1.0
        for _ in tokens:
            masses.append(left * (0.3 + 0.65 * sure) * rng.uniform(0.8, 1))
            left -= masses[-1]
        masses.sort(reverse=True)
        rows.append([(math.log(m), t) for m, t in zip(masses, tokens)])
    return rows


def best_first(rows: list[list[tuple[float, int]]], num_nodes: int):
    """The most probable prefixes: tokens, parents, each node's own log-probability."""
    tokens: list[int] = []
    parents: list[int] = []
    logprobs: list[float] = []
    heap = [(-rows[0][0][0], 0, 0, 0)]
    while heap and len(tokens) < num_nodes:
        cost, parent, depth, rank = heapq.heappop(heap)
        logprob, token = rows[depth][rank]
        tokens.append(token)
        parents.append(parent)
        logprobs.append(round(logprob, 5))
        if rank + 1 < len(rows[depth]):
            heapq.heappush(
                heap, (cost + logprob - rows[depth][rank + 1][0], parent, depth, rank + 1)
            )
        if depth + 1 < len(rows):
            heapq.heappush(heap, (cost - rows[depth + 1][0][0], len(tokens), depth + 1, 0))
    return tokens, parents, logprobs


def steps(rng: random.Random, request: str, text: list[int], size: int, num_nodes: int):
    """Steps of one request until its text is used up."""
    at, number = 0, 0
    while at + 1 < len(text):
        truth = text[at + 1 : at + 1 + DEPTH]
        tokens, parents, logprobs = best_first(marginals(rng, truth, size), num_nodes)
        accepted: list[int] = []
        for token in truth[:-1]:
            parent = accepted[-1] if accepted else 0
            rows = [r for r, p in enumerate(parents, 1) if p == parent and tokens[r - 1] == token]
            if not rows:
                break
            accepted.append(rows[0])
        yield {
            "request": request,
            "step": number,
            "position": 40 + at,
            "root": text[at],
            "tokens": tokens,
            "parents": parents,
            "logprobs": logprobs,
            "accepted": accepted,
            "bonus": text[at + 1 + len(accepted)],
        }
        at += len(accepted) + 1
        number += 1


def header(num_nodes: int = 63) -> dict:
    return {
        "ddtree_trace": 1,
        "method": "ddtree",
        "num_nodes": num_nodes,
        "depth": DEPTH,
        "policy": "best_first",
        "target": "SmolLM2-135M-Instruct",
        "drafter": "SmolLM2-135M-DFlash",
    }


def records(words: Words, num_nodes: int = 63, seed: int = 7, repeat: int = 1) -> list[dict]:
    """A whole trace; requests take turns, as in a batch."""
    rng = random.Random(seed)
    runs = [
        list(steps(rng, str(i), words.encode(text) * repeat, len(words.texts), num_nodes))
        for i, text in enumerate(ANSWERS)
    ]
    longest = max(len(run) for run in runs)
    return [header(num_nodes), *(r[i] for i in range(longest) for r in runs if i < len(r))]


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
