"""Draft trees for people: a trace of verify steps, read and drawn in a terminal.

A trace holds one JSON object a line: a header, then one step of one request each. Rows number
the nodes of a step's tree from 1; row 0 is the root, the last token known before the step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.text import Text

Decode = Callable[[list[int]], str]

_MARKS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}
_TOKEN_CELLS = 24
# What a line keeps free for its count of folded nodes.
_FOLD_CELLS = len(" … 999 more nodes")
_SIDE_NOTES = ("  ← side branch: a chain stops above", "  ← side branch")


class TraceError(ValueError):
    """What is wrong with a trace, and in which line."""


@dataclass(frozen=True)
class Header:
    """How the trees of a trace were made."""

    method: str
    num_nodes: int
    depth: int
    policy: str
    target: str
    drafter: str


@dataclass(frozen=True)
class Step:
    """One tree of one request and what the target made of it; lists go by row from 1."""

    request: str
    number: int
    position: int
    root: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    logprobs: tuple[float, ...]
    accepted: tuple[int, ...]
    bonus: int

    @cached_property
    def children(self) -> list[list[int]]:
        """The rows below each row, the drafter's favourite first."""
        found: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for row, parent in enumerate(self.parents, 1):
            found[parent].append(row)
        for rows in found:
            rows.sort(key=lambda row: (-self.logprobs[row - 1], row))
        return found

    @cached_property
    def sizes(self) -> list[int]:
        """How many nodes each row's subtree has, itself included."""
        found = [1] * (len(self.tokens) + 1)
        for row in range(len(self.tokens), 0, -1):
            found[self.parents[row - 1]] += found[row]
        return found

    @cached_property
    def on_chain(self) -> int:
        """How many of the accepted nodes are the drafter's first choice all the way from the root.

        If that is not all of them, a chain would have stopped there: its draft for the next
        position is another token than the one that was accepted.
        """
        parent = 0
        for count, row in enumerate(self.accepted):
            if self.children[parent][0] != row:
                return count
            parent = row
        return len(self.accepted)

    @property
    def left_chain(self) -> bool:
        """Was a token accepted that a chain of first choices does not hold?"""
        return self.on_chain < len(self.accepted)

    @property
    def emitted(self) -> list[int]:
        """What the step added to the text."""
        return [*(self.tokens[row - 1] for row in self.accepted), self.bonus]

    def before(self, row: int) -> int:
        """The token that the row's token follows."""
        parent = self.parents[row - 1]
        return self.tokens[parent - 1] if parent else self.root


@dataclass(frozen=True)
class Generation:
    """A question and all steps of its answer."""

    question: str
    steps: Sequence[Step]

    @property
    def tokens(self) -> list[int]:
        """The answer; its first token came with the prompt and is the first step's root."""
        found = [self.steps[0].root] if self.steps else []
        for step in self.steps:
            found += step.emitted
        return found

    @property
    def tokens_per_step(self) -> float:
        """The mean of what a verify step added."""
        return (len(self.tokens) - 1) / len(self.steps) if self.steps else 0.0


@dataclass(frozen=True)
class Trace:
    """A trace's steps by request, requests in the order in which they first appear."""

    header: Header
    requests: dict[str, list[Step]]


def read_trace(path: Path) -> Trace:
    """Read and check a whole trace."""
    header: Header | None = None
    requests: dict[str, list[Step]] = {}
    number = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
                if not isinstance(fields, dict):
                    raise ValueError("not a JSON object")
                if header is None:
                    header = _header(fields)
                    continue
                step = _step(fields, header)
                steps = requests.setdefault(step.request, [])
                if steps:
                    _follows(step, steps[-1])
                steps.append(step)
            except ValueError as err:
                what = f"not JSON: {err}" if isinstance(err, json.JSONDecodeError) else err
                raise TraceError(f"{path}, line {number}: {what}") from None
    if header is None:
        raise TraceError(f"{path}, line {number + 1}: empty, no header")
    return Trace(header, requests)


def _field(fields: dict, name: str, kind: type, item: type | tuple[type, ...] = object):
    if name not in fields:
        raise ValueError(f"no {name!r}")
    value = fields[name]
    # bool is an int to isinstance, but no token.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name!r} is {value!r}, not of type {kind.__name__}")
    if kind is list:
        for x in value:
            if not isinstance(x, item) or isinstance(x, bool):
                raise ValueError(f"{name!r} holds {x!r}")
    return value


def _header(fields: dict) -> Header:
    if fields.get("ddtree_trace") != 1:
        raise ValueError("not the header of a trace of version 1")
    return Header(
        method=_field(fields, "method", str),
        num_nodes=_field(fields, "num_nodes", int),
        depth=_field(fields, "depth", int),
        policy=_field(fields, "policy", str),
        target=_field(fields, "target", str),
        drafter=_field(fields, "drafter", str),
    )


def _step(fields: dict, header: Header) -> Step:
    tokens = _field(fields, "tokens", list, int)
    parents = _field(fields, "parents", list, int)
    # The engine writes null for a probability of zero.
    logprobs = _field(fields, "logprobs", list, (int, float, type(None)))
    logprobs = [-math.inf if x is None else x for x in logprobs]
    accepted = _field(fields, "accepted", list, int)
    if not len(tokens) == len(parents) == len(logprobs):
        raise ValueError(
            f"{len(tokens)} tokens, {len(parents)} parents and {len(logprobs)} logprobs"
        )
    if len(tokens) > header.num_nodes:
        raise ValueError(f"{len(tokens)} nodes, but the header says {header.num_nodes}")
    for row, parent in enumerate(parents, 1):
        if not 0 <= parent < row:
            raise ValueError(f"row {row} has parent {parent}, which does not come before it")
    for row, logprob in enumerate(logprobs, 1):
        # A rounding error above 0 is no reason to refuse; nan fails the comparison.
        if not logprob <= 1e-3:
            raise ValueError(f"row {row} has log-probability {logprob}")
    parent = 0
    for row in accepted:
        if not 1 <= row <= len(tokens):
            raise ValueError(f"accepted row {row} is not one of {len(tokens)}")
        if parents[row - 1] != parent:
            raise ValueError(f"accepted row {row} does not hang under row {parent}")
        parent = row
    return Step(
        request=_field(fields, "request", str),
        number=_field(fields, "step", int),
        position=_field(fields, "position", int),
        root=_field(fields, "root", int),
        tokens=tuple(tokens),
        parents=tuple(parents),
        logprobs=tuple(min(0.0, float(x)) for x in logprobs),
        accepted=tuple(accepted),
        bonus=_field(fields, "bonus", int),
    )


def _follows(step: Step, last: Step) -> None:
    if step.number <= last.number:
        raise ValueError(f"step {step.number} of request {step.request} after step {last.number}")
    if step.root != last.bonus:
        raise ValueError(f"root {step.root} is not the last step's bonus token {last.bonus}")


def pick_step(steps: Sequence[Step]) -> Step:
    """The step worth showing: where a chain would have stopped and the tree went furthest on."""
    if not steps:
        raise ValueError("no steps to pick from")
    return max(steps, key=lambda step: (step.left_chain, len(step.accepted)))


def visible(text: str) -> str:
    """A token on one line, its blanks and control characters to be seen."""
    marked = "".join(
        _MARKS.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode())
        for c in text
    )
    return marked or "∅"


def token_text(token: int, before: int | None, decode: Decode) -> str:
    """A token's text; some tokenizers give its leading blank only after another token."""
    if before is not None:
        head, whole = decode([before]), decode([before, token])
        if len(whole) > len(head) and whole.startswith(head):
            return whole[len(head) :]
    return decode([token])


def percent(logprob: float) -> str:
    """A probability that never claims to be certain, or impossible."""
    value = math.exp(logprob)
    return "<1%" if value < 0.005 else ">99%" if value >= 0.995 else f"{value:.0%}"


def render_tree(step: Step, decode: Decode, *, width: int = 80, lines: int = 40) -> Text:
    """The step's tree, at most `width` (60 or more) cells wide and about `lines` high.

    The accepted path runs down the left edge, one node a line, and the bonus token ends it, so
    that depth costs no indentation. Rejected branches hang beside it; the least probable of
    them are folded into a count.
    """
    total = [0.0] * (len(step.tokens) + 1)
    for row, parent in enumerate(step.parents, 1):
        total[row] = total[parent] + step.logprobs[row - 1]
    trunk = {0, *step.accepted}
    # A node comes after its parent here, so every head of this list is a tree with the trunk.
    side = sorted(set(range(len(total))) - trunk, key=lambda row: (-total[row], row))
    drawn: list[Text] = []
    for count in range(len(side), -1, -1):
        drawn = _Drawing(step, decode, trunk | set(side[:count]), width).lines()
        if len(drawn) <= lines:
            break
    return Text("\n").join(drawn)


@dataclass
class _Drawing:
    """The lines of a tree of which some nodes are shown."""

    step: Step
    decode: Decode
    shown: set[int]
    width: int

    def lines(self) -> list[Text]:
        step = self.step
        found: list[Text] = []
        trunk = [0, *step.accepted]
        for depth, row in enumerate(trunk):
            if row:
                line = Text("✔ ", style="bold green") + self._label(row, "bold green")
                # The first node off the chain is what a tree is for.
                if depth == step.on_chain + 1:
                    room = self.width - line.cell_len - _FOLD_CELLS
                    line.append(next((n for n in _SIDE_NOTES if len(n) <= room), ""), style="cyan")
            else:
                line = Text("● ") + self._token(token_text(step.root, None, self.decode), "bold")
                line.append("  root", style="dim")
            after = trunk[depth + 1] if depth + 1 < len(trunk) else None
            kids = [kid for kid in step.children[row] if kid != after]
            found.append(self._fold(line, sum(step.sizes[k] for k in kids if k not in self.shown)))
            for kid in kids:
                if kid in self.shown:
                    found += self._branch(kid, "├── ", "│   ")
        before = step.tokens[trunk[-1] - 1] if trunk[-1] else step.root
        line = Text("★ ", style="bold magenta")
        line += self._token(token_text(step.bonus, before, self.decode), "bold magenta")
        found.append(line.append("  bonus: the target's own token", style="dim"))
        return found

    def _branch(self, row: int, joint: str, lead: str) -> list[Text]:
        """A rejected subtree; nodes with one child shown share a line with it."""
        step = self.step
        line = Text(joint, style="dim") + self._label(row, "")
        hidden = 0
        while True:
            kids = [kid for kid in step.children[row] if kid in self.shown]
            hidden += sum(step.sizes[kid] for kid in step.children[row] if kid not in self.shown)
            if len(kids) != 1:
                break
            longer = line + Text(" → ", style="dim") + self._label(kids[0], "")
            # What is cut off by the margin is folded as well; its note must still fit.
            if longer.cell_len + _FOLD_CELLS > self.width:
                return [self._fold(line, hidden + step.sizes[kids[0]])]
            line, row = longer, kids[0]
        room = self.width - len(lead) - len("├── ") - _FOLD_CELLS
        if any(self._label(kid, "").cell_len > room for kid in kids):
            hidden += sum(step.sizes[kid] for kid in kids)
            kids = []
        found = [self._fold(line, hidden)]
        for kid in kids:
            last = kid == kids[-1]
            found += self._branch(
                kid, lead + ("└── " if last else "├── "), lead + ("    " if last else "│   ")
            )
        return found

    def _label(self, row: int, style: str) -> Text:
        step = self.step
        text = token_text(step.tokens[row - 1], step.before(row), self.decode)
        return self._token(text, style).append(
            f" {percent(step.logprobs[row - 1])}", style=style or "dim"
        )

    @staticmethod
    def _token(text: str, style: str) -> Text:
        text = visible(text)
        if cell_len(text) > _TOKEN_CELLS:
            text = set_cell_size(text, _TOKEN_CELLS - 1) + "…"
        return Text(text, style=style)

    @staticmethod
    def _fold(line: Text, count: int) -> Text:
        if count:
            line.append(f" … {count} more node{'s' if count > 1 else ''}", style="dim italic")
        return line
