"""Command line, the same for scripts/bench.sh and python -m ddtree_bench."""

from __future__ import annotations

import argparse
from pathlib import Path

from .groups import GROUPS


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is measured and where it goes."""
    parser.add_argument(
        "--quick", action="store_true", help="1 and 8 requests, contexts 512 and 8k only"
    )
    for name, what in (
        ("batches", "steps and the pair at these numbers of requests only"),
        ("contexts", "steps at these contexts only"),
    ):
        parser.add_argument(f"--{name}", nargs="+", type=int, metavar="N", help=what)
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="steps of engines on N cards; they have no bars",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="GROUP",
        type=_group,
        help=f"some of: {', '.join(GROUPS)}; 'steps' is all that begin with it",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON; rows it has are kept unless measured again "
        "(default: tests/bench/CARD.json, CARD-hybrid.json for 'hybrid' alone)",
    )
    parser.add_argument(
        "--target", type=Path, metavar="DIR", help="SmolLM2-135M-Instruct, for the group pair"
    )


def _group(name: str) -> str:
    if not chosen([name]):
        raise argparse.ArgumentTypeError(f"no such group: {name} (known: {', '.join(GROUPS)})")
    return name


def chosen(names: list[str] | None) -> list[str]:
    """Groups to run, in their own order; without names all but the hybrids'.

    A name that is no group's own stands for all that begin with it.

    """
    if names is None:
        return [group for group in GROUPS if not group.startswith("hybrid-")]
    return [
        group
        for group in GROUPS
        if group in names
        or any(name not in GROUPS and group.startswith(f"{name}-") for name in names)
    ]
