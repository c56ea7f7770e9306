"""A worker for the tests of the bench's children: no GPU, no torch."""

import os
import sys


class Worker:
    def __init__(self, base=0, broken=False):
        if broken:
            raise ValueError("cannot be made")
        self.base = base
        print("an engine's own talk")

    def add(self, number):
        print("more talk")
        return self.base + number

    def fail(self):
        raise KeyError("lost")

    def die(self):
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(9)

    def _private(self):
        return "secret"

    def close(self):
        print("closed", flush=True)
