"""A web page of whole generations: every answer, step by step, with the tree of each step.

One file with nothing to fetch. Trees are drawn by the page from compact JSON; without
JavaScript it still shows the answers and, as text, each one's first tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jinja2

from draft_tree_view import (
    Decode,
    Generation,
    Header,
    Step,
    pick_step,
    render_tree,
    token_text,
    visible,
)

_TEMPLATE = "draft_tree_page.html.j2"


def write_page(
    path: Path,
    generations: Sequence[Generation],
    header: Header,
    decode: Decode,
    title: str = "Draft trees, step by step",
) -> None:
    """Write the page of one run; every generation has at least one step."""
    if not generations or not all(g.steps for g in generations):
        raise ValueError("a page needs generations, and each of them a step")

    # The same few tokens come again in every tree.
    @cache
    def known(tokens: tuple[int, ...]) -> str:
        return decode(list(tokens))

    def remembered(tokens: list[int]) -> str:
        return known(tuple(tokens))

    words = _Words()
    runs = [_run(g, decode, remembered, words) for g in generations]
    steps = sum(len(g.steps) for g in generations)
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    env.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    html = env.get_template(_TEMPLATE).render(
        title=title,
        header=header,
        runs=runs,
        steps=steps,
        rate=sum(len(g.tokens) - 1 for g in generations) / steps,
        # tojson escapes <, > and &: no token can end the script element.
        data={"words": words.texts, "runs": [run["trees"] for run in runs]},
    )
    path.write_text(html, encoding="utf-8")


class _Words:
    """Texts of tokens, each kept once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def add(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]


def _run(generation: Generation, decode: Decode, remembered: Decode, words: _Words) -> dict:
    """What the template shows of one generation."""
    texts = pieces(generation.tokens, decode)
    segments = []
    at = 1
    for step in generation.steps:
        after = at + len(step.accepted)
        turn = at + step.on_chain
        segments.append(
            [
                (kind, text)
                for kind, text in (
                    ("chain", "".join(texts[at:turn])),
                    ("side", "".join(texts[turn:after])),
                    ("bonus", texts[after]),
                )
                if text
            ]
        )
        at = after + 1
    best = pick_step(generation.steps)
    return {
        "question": generation.question,
        "first": texts[0],
        "segments": segments,
        "rate": generation.tokens_per_step,
        "tokens": len(generation.tokens),
        "best": generation.steps.index(best) + 1,
        "left_chain": sum(step.left_chain for step in generation.steps),
        "text_tree": render_tree(generation.steps[0], remembered, width=72).plain,
        "trees": [_tree(step, remembered, words) for step in generation.steps],
    }


def _tree(step: Step, decode: Decode, words: _Words) -> list:
    """A step as the page's script reads it."""
    last = step.tokens[step.accepted[-1] - 1] if step.accepted else step.root
    return [
        words.add(visible(token_text(step.root, None, decode))),
        [
            words.add(visible(token_text(token, step.before(row), decode)))
            for row, token in enumerate(step.tokens, 1)
        ],
        step.parents,
        # JSON has no infinity.
        [round(max(logprob, -99.0), 3) for logprob in step.logprobs],
        step.accepted,
        step.on_chain,
        words.add(visible(token_text(step.bonus, last, decode))),
    ]


def pieces(tokens: Sequence[int], decode: Decode) -> list[str]:
    """The text each token adds; a character of several tokens comes with the last of them."""
    found: list[str] = []
    start, shown = 0, ""
    for at in range(len(tokens)):
        text = decode(list(tokens[start : at + 1]))
        if text.endswith("\ufffd") and at + 1 < len(tokens):
            found.append("")
            continue
        found.append(text[len(shown) :])
        shown = text
        alone = decode([tokens[at]])
        # Going on from here keeps long answers cheap, unless the token is part of a character.
        if at - start >= 16 and "\ufffd" not in alone:
            start, shown = at, alone
    return found
