"""python -m ddtree_bench: run the groups, write the JSON, print the table."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

from .children import ChildError
from .groups import GROUPS
from .options import add_options, chosen
from .records import Results, file_name, table
from .run import Run

OK, FAILED, USAGE, NO_GPU = 0, 1, 2, 6
ROOT = Path(__file__).resolve().parents[3]


def main(argv: list[str] | None = None) -> int:
    """0 if everything was measured and passes, 1 if not, 6 without a GPU."""
    parser = argparse.ArgumentParser(prog="bench.sh", description=__doc__, allow_abbrev=False)
    add_options(parser)
    args = parser.parse_args(argv)
    names = chosen(args.only)
    if args.tensor_parallel > 1 and not all(name.startswith("steps-") for name in names):
        # Rows of other groups do not say of how many cards an engine is.
        parser.error("--tensor-parallel is for steps alone: add --only steps")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        card, versions = probe()
    except LookupError as err:
        print(f"bench.sh: error[{NO_GPU}]: the bench needs an NVIDIA GPU\n  {err}", file=sys.stderr)
        return NO_GPU
    out = args.out or ROOT / "tests" / "bench" / file_name(card)
    if args.out is None and all(name.startswith("hybrid-") for name in names):
        out = out.with_stem(f"{out.stem}-hybrid")
    try:
        results = Results(out, card, versions, date.today().isoformat())
    except ValueError as err:
        print(f"bench.sh: error[{USAGE}]: {err}", file=sys.stderr)
        return USAGE
    text_file = args.out and args.out.with_suffix(".profile.txt")
    work = Path(tempfile.mkdtemp(prefix="ddtree-bench-"))
    with voice() as say:
        say(f"{card}, {', '.join(f'{k} {v}' for k, v in versions.items())}")
        run = Run(
            ROOT,
            work,
            results,
            quick=args.quick,
            batches=args.batches,
            contexts=args.contexts,
            tensor_parallel=args.tensor_parallel,
            target=args.target,
            text_file=text_file,
            say=say,
        )
        failed = run_groups(run, names)
    print(table(results.rows))
    print(f"{len(results.rows)} rows, {len(results.missed)} miss their bar: {out}")
    if failed:
        print(f"failed: {', '.join(failed)}; logs: {work}")
    else:
        shutil.rmtree(work, ignore_errors=True)
    return FAILED if failed or results.missed else OK


def run_groups(run: Run, names: list[str], groups: dict[str, Callable] = GROUPS) -> list[str]:
    """Run them one after another; returns those that failed, which does not stop the rest."""
    failed, name = [], ""
    try:
        for name in names:
            run.say(f"== {name}")
            try:
                groups[name](run)
            except (ChildError, OSError, ValueError) as err:
                failed.append(name)
                run.say(f"{name} failed: {err}")
                # Nothing can be said about the state of those that are left.
                run.kill()
        run.stop()
    except KeyboardInterrupt:
        run.say("stopped; what was measured is written")
        failed.append(name)
    finally:
        run.kill()
    return failed


def probe() -> tuple[str, dict[str, str]]:
    """Name of the card and versions, asked in a process that does not keep the card.

    Raises:
        LookupError: if there is no card, or nothing to ask with.

    """
    command = [sys.executable, "-m", "ddtree_bench.workers.probe"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LookupError("\n  ".join(done.stderr.splitlines()[-3:]))
    found = json.loads(done.stdout.splitlines()[-1])
    return found.pop("card"), found


@contextlib.contextmanager
def voice() -> Iterator[Callable[[str], None]]:
    """Lines with the time since the start; on a terminal the last one also spins."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=200, soft_wrap=True)
    import time

    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status("")) if console.is_terminal else None

        def say(text: str) -> None:
            line = f"[{time.monotonic() - begin:4.0f} s] {text}"
            console.print(line, markup=False, highlight=False)
            if status:
                status.update(text.splitlines()[0])

        yield say


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
