"""What was measured: rows, their bars, the JSON file and the table."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

# What a bar bounds.
RATIO_AT_MOST, RATIO_AT_LEAST = "ratio <=", "ratio >="
MS_AT_MOST, COUNT_AT_MOST = "tree_ms <=", "count <="


@dataclass
class Row:
    """One measurement.

    Attributes:
        work: what was done.
        batch: requests; None where it does not apply, as for the next two.
        context: tokens of each request.
        B: nodes of the tree.
        tree_ms: milliseconds of the tree, by what `work` says (a step, a token).
        chain_ms: the same of the chain.
        ratio: tree / chain, of times or, for "tokens/s", of rates.
        limit: the bar.
        bound: what the limit bounds: one of the constants above.
        count: what was counted, where it is no time.
        note: why a value is missing, or what to know about it.
        details: whatever else helps to explain it.

    """

    work: str
    batch: int | None = None
    context: int | None = None
    B: int | None = None
    tree_ms: float | None = None
    chain_ms: float | None = None
    ratio: float | None = None
    limit: float | None = None
    bound: str = RATIO_AT_MOST
    count: int | None = None
    note: str = ""
    details: dict = field(default_factory=dict)

    @property
    def key(self) -> tuple:
        """What a later measurement of the same thing has in common with it."""
        return (self.work, self.batch, self.context, self.B)

    @property
    def verdict(self) -> str:
        """ "pass", "miss", "none" (a bar, but no value) or "" (no bar)."""
        if self.limit is None:
            return ""
        value = {"ratio": self.ratio, "tree_ms": self.tree_ms, "count": self.count}[
            self.bound.split()[0]
        ]
        if value is None:
            return "none"
        ok = value >= self.limit if self.bound.endswith(">=") else value <= self.limit
        return "pass" if ok else "miss"


def record(row: Row, card: str, versions: dict[str, str], date: str) -> dict:
    """The row as JSON: the fields every record has, then those that say something."""
    data = asdict(row)
    names = ("work", "batch", "context", "B", "tree_ms", "chain_ms", "ratio", "limit")
    made = {name: _rounded(data[name]) for name in names}
    made |= {"card": card, "versions": versions, "date": date}
    if row.limit is not None:
        made["bound"] = row.bound
    return made | {
        n: data[n] for n in ("count", "note", "details") if data[n] not in (None, "", {})
    }


def row_of(data: dict) -> Row:
    """Back from JSON."""
    return Row(**{k: v for k, v in data.items() if k in Row.__dataclass_fields__})


def _rounded(value):
    return round(value, 5) if isinstance(value, float) else value


def file_name(card: str) -> str:
    """NVIDIA H200 -> h200.json"""
    words = re.findall(r"[a-z0-9]+", card.lower())
    return "-".join(w for w in words if w != "nvidia") + ".json"


class Results:
    """Rows of this run, merged into a file as they come.

    Args:
        file: JSON, a list of records; made if missing.
        card: name of the GPU.
        versions: of what was measured.
        date: of the run, ISO.

    Raises:
        ValueError: if the file holds something else.

    """

    def __init__(self, file: Path, card: str, versions: dict[str, str], date: str) -> None:
        self.file, self.card, self.versions, self.date = file, card, versions, date
        self.rows: list[Row] = []
        self.records: dict[tuple, dict] = {}
        if file.is_file():
            try:
                found = json.loads(file.read_text())
                if not isinstance(found, list):
                    raise TypeError("no list")
                self.records = {row_of(data).key: data for data in found}
            except (ValueError, TypeError, AttributeError) as err:
                raise ValueError(f"{file} does not hold records of the bench: {err}") from err

    def add(self, row: Row) -> None:
        """Keep the row and write the file: a run that is cut off loses nothing."""
        self.rows.append(row)
        self.records[row.key] = record(row, self.card, self.versions, self.date)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temp = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        lines = [json.dumps(self.records[key]) for key in sorted(self.records, key=_order)]
        temp.write_text("[\n" + ",\n".join(lines) + "\n]\n")
        temp.replace(self.file)

    @property
    def missed(self) -> list[Row]:
        """Rows of this run that miss their bar."""
        return [row for row in self.rows if row.verdict == "miss"]


def _order(key: tuple) -> tuple:
    work, *numbers = key
    return (work, *(-1 if n is None else n for n in numbers))


def table(rows: list[Row]) -> str:
    """The rows as aligned text; numbers to the right."""
    head = ("work", "requests", "context", "B", "tree ms", "chain ms", "ratio", "bar", "")
    lines = [head]
    for row in rows:
        bar = "" if row.limit is None else f"{row.bound} {row.limit:g}"
        value = f"{row.count}" if row.count is not None else _number(row.ratio, 3)
        times = (_number(row.tree_ms, 3), _number(row.chain_ms, 3))
        where = (_number(row.batch), _number(row.context), _number(row.B))
        said = {"none": "not measured", "miss": "MISS"}.get(row.verdict, row.verdict)
        said = f"{said} ({row.note})" if said and row.note else said or row.note
        lines.append((row.work, *where, *times, value, bar, said))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = (0, 7, 8)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
