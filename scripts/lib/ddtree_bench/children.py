"""Child processes that touch the GPU, driven over pipes: a line of JSON each way."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TAIL = 40


class ChildError(Exception):
    """A child raised or died; the message holds its traceback or the end of its log."""


class Child:
    """A `Worker` in a process of its own.

    The process starts at once; `ready` waits until the worker is made, so that several can start
    side by side. Methods of the worker are called by name with JSON values.

    Args:
        name: for people.
        worker: module that has the class `Worker`.
        log: file that takes what the child prints.
        config: arguments of `Worker`.

    """

    def __init__(self, name: str, worker: str, log: Path, **config: Any) -> None:
        self.name, self.log = name, log
        self._waiting = 0
        command = [sys.executable, "-m", "ddtree_bench.serve", worker]
        with log.open("w") as f:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=f, text=True
            )
        self.send("make", **config)

    def ready(self) -> None:
        """Wait until the worker is made; once is enough."""
        while self._waiting:
            self.receive()

    def send(self, method: str, **args: Any) -> None:
        """Ask for something; `receive` gives the answer, in the order of the questions."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": method, "args": args}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._died() from None
        self._waiting += 1

    def receive(self) -> Any:
        """The oldest answer outstanding.

        Raises:
            ChildError: if the worker raised, or the process ended.

        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        self._waiting -= 1
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self.name} failed; log: {self.log}\n{answer['error']}")
        return answer["ok"]

    def call(self, method: str, **args: Any) -> Any:
        """Ask and wait; nothing else may be outstanding."""
        self.ready()
        self.send(method, **args)
        return self.receive()

    def stop(self, seconds: float = 60) -> None:
        """End it and wait until it is gone, and with it its memory."""
        if self._process.poll() is None:
            assert self._process.stdin is not None and self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self.stop()

    def _died(self) -> ChildError:
        status = self._process.wait()
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL:]
        return ChildError("\n".join([f"{self.name} died ({status}); log: {self.log}", *lines]))
