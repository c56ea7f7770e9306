"""pytest plugin of `test.sh upstream`: every outcome as a line of JSON, a limit for each file.

Loaded with `-p upstream_plugin` into the Python under test; standard library and pytest only.
DDTREE_UPSTREAM holds {"report": path, "limit": CPU seconds a file, "only": path or null}: with
`only`, a JSON list of node ids, everything else is deselected. A line is written before and after
everything that might end the process, so that whoever reads them knows what did.
"""

from __future__ import annotations

import gc
import json
import os
import re
from pathlib import Path

import pytest

_TEXT = 300  # characters kept of a reason


class Recorder:
    """Writes the outcomes, and skips what comes after the file's limit."""

    def __init__(self, told: dict) -> None:
        self.path = Path(told["report"])
        self.limit = told["limit"]
        self.only = set(json.loads(Path(told["only"]).read_text())) if told["only"] else None
        self.spent: dict[str, float] = {}
        self.began = 0.0

    def write(self, **row: object) -> None:
        """A line at a time, so that a crash loses nothing but the test it is in."""
        with self.path.open("a") as f:
            f.write(json.dumps(row) + "\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        if self.only is None:
            return
        gone = [i for i in items if i.nodeid not in self.only]
        if gone:
            items[:] = [i for i in items if i.nodeid in self.only]
            config.hook.pytest_deselected(items=gone)

    def pytest_collection_finish(self) -> None:
        # Upstream collects garbage after every test, half a second each over all that is imported.
        # It may: but only over what came after.
        gc.collect()
        gc.freeze()
        gc.unfreeze = lambda: None

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        if isinstance(collector, pytest.File):
            self.write(id=collector.nodeid, outcome="started", collect=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.write(id=report.nodeid, outcome="not collected", why=reason(report))
        self.write(id=report.nodeid, outcome="ended")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        file = item.nodeid.partition("::")[0]
        self.began = used()
        self.write(id=item.nodeid, outcome="started")
        # Processor time: a busy machine cuts no test off.
        if self.limit and self.spent.get(file, 0.0) > self.limit:
            pytest.skip(f"over the time limit of its file: {self.limit:g} s")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            outcome = report.outcome
            if hasattr(report, "wasxfail"):
                outcome = "xpassed" if outcome == "passed" else "xfailed"
            self.write(id=report.nodeid, outcome=outcome, why=reason(report))
        if report.when == "teardown":
            file = report.nodeid.partition("::")[0]
            cpu = used() - self.began
            self.spent[file] = self.spent.get(file, 0.0) + cpu
            self.write(id=report.nodeid, outcome="ended", cpu=round(cpu, 3))


def used() -> float:
    """Processor seconds of this process and of those it started and has waited for."""
    return sum(os.times()[:4])


def reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """What a failed or skipped report says, on one line."""
    long = report.longrepr
    if not long:
        return ""
    if isinstance(long, tuple):  # skipped: file, line, text
        text = str(long[2]).removeprefix("Skipped: ")
    elif crash := getattr(long, "reprcrash", None):
        text = crash.message
    else:
        text = str(long)
        errors = [x for x in text.splitlines() if re.match(r"E  +\S", x)]
        text = errors[-1][1:] if errors else text
    return re.sub(r"\s+", " ", text).strip()[:_TEXT]


def pytest_configure(config: pytest.Config) -> None:
    if told := os.environ.get("DDTREE_UPSTREAM"):
        config.pluginmanager.register(Recorder(json.loads(told)), "ddtree-upstream")
