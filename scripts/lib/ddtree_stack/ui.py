"""Talk goes to stderr, results go to stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """One line for the person watching."""
    print(text, file=sys.stderr, flush=True)


def result(text: str) -> None:
    """One line of the verb's answer, for people and pipes."""
    print(text, flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Announce a slow step and say how long it took."""
    started = time.monotonic()
    say(f"{text} ...")
    yield
    say(f"{text}: done in {time.monotonic() - started:.1f} s")
