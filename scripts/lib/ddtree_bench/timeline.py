"""What a profiler's trace says about the GPU: busy, idle, the most expensive kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what the intervals (start, end) cover, overlaps once."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def summary(trace: dict, steps: int, top: int = 10) -> dict:
    """Milliseconds a step: span, busy and idle, and the kernels that take most of them.

    Args:
        trace: a Chrome trace, as torch.profiler exports it (microseconds).
        steps: engine steps in it.
        top: how many kernels.

    Returns:
        span_ms, busy_ms, idle_ms, launches (a step) and kernels: [name, launches a step, ms a
        step], the most expensive first.

    Raises:
        ValueError: if nothing ran on the GPU.

    """
    events = [
        (e["name"], e["ts"], e["ts"] + e["dur"])
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in _ON_GPU
    ]
    if not events:
        raise ValueError("the trace has nothing that ran on the GPU")
    span = max(e[2] for e in events) - min(e[1] for e in events)
    busy = union((start, end) for _, start, end in events)
    time, launches = Counter(), Counter()
    for name, start, end in events:
        time[name] += end - start
        launches[name] += 1
    scale = 1000 * steps
    return {
        "span_ms": span / scale,
        "busy_ms": busy / scale,
        "idle_ms": (span - busy) / scale,
        "launches": len(events) / steps,
        "kernels": [
            [name, launches[name] / steps, us / scale] for name, us in time.most_common(top)
        ],
    }


def render(title: str, found: dict) -> str:
    """The summary as text."""
    lines = [
        title,
        f"  a step: {found['span_ms']:.3f} ms, busy {found['busy_ms']:.3f}, "
        f"idle {found['idle_ms']:.3f}, {found['launches']:.0f} launches",
    ]
    lines += [
        f"  {ms:8.4f} ms  {count:7.1f} x  {name[:120]}" for name, count, ms in found["kernels"]
    ]
    return "\n".join(lines)
