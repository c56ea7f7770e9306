"""The child's side of `children.Child`: python -m ddtree_bench.serve MODULE."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def one_thread_a_core(cpus: set[int], topology: Path = Path("/sys/devices/system/cpu")) -> set[int]:
    """Of the threads of each core the first.

    Waiting for the device spins. An engine on the other thread of that core would be slower, and
    which engines are is chance.
    """
    cores: dict[str, int] = {}
    for cpu in sorted(cpus):
        file = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.setdefault(file.read_text() if file.is_file() else f"only {cpu}", cpu)
    return set(cores.values())


def main() -> None:
    """Answer until the parent closes the pipe; leave with the parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, one_thread_a_core(os.sched_getaffinity(0)))
    # Engines print: their lines go to the log, the answers alone to the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "make":
                worker = importlib.import_module(sys.argv[1]).Worker(**request["args"])
                answer = {"ok": None}
            elif request["do"].startswith("_"):
                raise AttributeError(f"not for others: {request['do']}")
            else:
                answer = {"ok": getattr(worker, request["do"])(**request["args"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
    if worker is not None:
        worker.close()


if __name__ == "__main__":
    main()
