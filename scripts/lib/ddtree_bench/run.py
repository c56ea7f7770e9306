"""What groups are given: children, a place for rows, and a voice."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .children import Child
from .records import Results, Row


@dataclass
class Run:
    """A run of the bench.

    Attributes:
        root: the checkout.
        work: folder for logs and configs, gone at the end unless something failed.
        results: where rows go.
        quick: whether to measure the cells of most bars only.
        batches: numbers of requests that steps and the pair are measured at; None for all.
        contexts: their contexts, likewise.
        tensor_parallel: cards of an engine, for steps.
        target: folder of the reference pair's target.
        text_file: takes what explains a miss; None to leave it out.
        say: takes a line for the person watching.

    """

    root: Path
    work: Path
    results: Results
    quick: bool = False
    batches: list[int] | None = None
    contexts: list[int] | None = None
    tensor_parallel: int = 1
    target: Path | None = None
    text_file: Path | None = None
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, wanted: dict[str, tuple[str, dict[str, Any]]]) -> list[Child]:
        """These children, by name (worker, config): those alive stay, all others are ended first.

        They start side by side.

        """
        for name in set(self.children) - set(wanted):
            self.children.pop(name).stop()
        for name, (worker, config) in wanted.items():
            if name not in self.children:
                self.say(f"start {name}")
                log = self.work / f"{name.replace(' ', '-')}.log"
                self.children[name] = Child(name, worker, log, **config)
        begin = time.monotonic()
        for name in wanted:
            self.children[name].ready()
        if (seconds := time.monotonic() - begin) > 1:
            self.say(f"{', '.join(wanted)}: ready after {seconds:.0f} s")
        return [self.children[name] for name in wanted]

    def stop(self) -> None:
        """End every child."""
        while self.children:
            self.children.popitem()[1].stop()

    def kill(self) -> None:
        """End every child at once."""
        while self.children:
            self.children.popitem()[1].kill()

    def add(self, row: Row) -> None:
        """Keep a row and show it."""
        self.results.add(row)
        cell = [
            f"{n} {v}" for n, v in zip(("requests", "context", "B"), row.key[1:], strict=True) if v
        ]
        value = f"{row.count}" if row.count is not None else None
        if row.ratio is not None:
            value = f"ratio {row.ratio:.3f}"
        elif row.tree_ms is not None:
            value = f"{row.tree_ms:.4f} ms"
        told = ", ".join([row.work, *cell])
        self.say(f"{told}: {value or 'not measured'} {row.verdict} {row.note}".rstrip())

    def explain(self, text: str) -> None:
        """Append to the file that explains misses."""
        if self.text_file is not None:
            with self.text_file.open("a") as f:
                f.write(text.rstrip("\n") + "\n\n")
