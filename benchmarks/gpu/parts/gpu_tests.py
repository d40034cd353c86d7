"""tests/gpu, by pytest in this process: what passed, what was skipped and why, what failed. Each result is written down
at once, so that a test that hangs costs only those that follow."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from benchmarks.gpu.measuring import not_here, note, say

NO_TESTS = 5
"""pytest's exit code if nothing was collected: every file was skipped."""


class Noting:
    """A plugin that writes down the results."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        self.counts[report.outcome] += 1
        reason = f": {report.longrepr[2]}" if report.skipped and isinstance(report.longrepr, tuple) else ""
        say(report.nodeid.removeprefix("tests/gpu/"), f"{report.outcome}{reason}")


def main() -> int:
    noting = Noting()
    # The project's own options need plugins that only development has.
    options = ["-o", "addopts=--import-mode=importlib -ra", "-p", "no:cacheprovider"]
    code = pytest.main(["tests/gpu", *options], plugins=[noting])
    for outcome in ("passed", "skipped", "failed"):
        note(outcome, noting.counts[outcome])
    if code in (0, NO_TESTS) and not noting.counts["passed"]:
        not_here("no test ran")
    return 0 if code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
