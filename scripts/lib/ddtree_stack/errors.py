"""Exit codes and the one exception that ends a verb with a message a person can act on."""

from __future__ import annotations

from collections.abc import Sequence

OK = 0
CHECK_FAILED = 1
USAGE = 2
CONFLICT = 3
UPSTREAM = 4  # upstream cannot be had, or is not what the pin says
UNSAVED = 5
TOOL = 6


class StackError(Exception):
    """What went wrong, the facts, and one command that gets the user on."""

    def __init__(self, code: int, what: str, facts: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.facts = list(facts)
        self.hint = hint

    def render(self, name: str) -> str:
        """The message as it goes to stderr."""
        lines = [f"{name}: error[{self.code}]: {self.what}"]
        lines += [f"  {line}" for fact in self.facts for line in fact.splitlines()]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)
