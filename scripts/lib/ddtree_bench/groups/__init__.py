"""What can be measured, by name: each takes a `Run`, adds rows to it and returns nothing.

A new group is a module here, its worker in `workers`, and a line below. Groups run in this order.
Those of one family share a prefix ("steps-63") and can be asked for by it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from . import attention, hybrid, kernels, pair, profile, steps

GROUPS: dict[str, Callable] = {
    "kernels": kernels.measure,
    "attention": attention.measure,
    "steps-63": partial(steps.measure, tree=63, chain=63),
    # Takes over both engines of the one before.
    "profile": profile.measure,
    "steps-63-15": partial(steps.measure, tree=63, chain=15),
    "steps-15": partial(steps.measure, tree=15, chain=15),
    "steps-31": partial(steps.measure, tree=31, chain=31),
    "pair": pair.measure,
    # Into a file of their own.
    "hybrid-kernels": hybrid.kernels,
    "hybrid-steps": hybrid.steps,
}
