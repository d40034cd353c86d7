"""A pytest plugin that measures what each test costs: processor time (user + system, its children included) and wall time.

Processor time is the figure to lower: wall time on a shared machine says little. A process is counted when somebody has
waited for it, so a daemon that outlives its test is missing here; `tools/measured.py` counts those in the total.
Loaded with `-p tests.support.processor_time`. At the end it prints the slowest tests and the time per folder, and
writes `build/processor-time.tsv`, one line per test file.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

SLOWEST_MAX = 50
TABLE = Path("build/processor-time.tsv")
COST = "processor_time"
"""The name of the user property that carries a test's (processor seconds, wall seconds) to the controller."""


@dataclass(frozen=True)
class Cost:
    """What one test, file or folder used: processor seconds, wall seconds, and how many tests that were."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    tests: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s, self.tests + other.tests)


_elsewhere: list[float] = []


def add(processor_s: float) -> None:
    """Count what the current test used in a process that is not its child."""
    _elsewhere.append(processor_s)


def used_s() -> float:
    """Processor seconds of this process, of all children that were waited for, and of what was added."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(_elsewhere)


_began: dict[str, tuple[float, float]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _began[item.nodeid] = (used_s(), time.monotonic())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        cpu_s, wall_s = _began.pop(item.nodeid)
        report.user_properties.append((COST, (used_s() - cpu_s, time.monotonic() - wall_s)))
    return report


def costs(reports: Iterable[object]) -> dict[str, Cost]:
    """Cost by test id, of the reports that carry one."""
    found: dict[str, Cost] = {}
    for report in reports:
        if isinstance(report, pytest.TestReport):
            for name, value in report.user_properties:
                if name == COST and isinstance(value, tuple | list):
                    found[report.nodeid] = Cost(float(value[0]), float(value[1]), 1)
    return found


def grouped(by_test: dict[str, Cost], key: str) -> dict[str, Cost]:
    """Summed by `file` or by `folder`, the most expensive first."""
    sums: dict[str, Cost] = defaultdict(Cost)
    for test, cost in by_test.items():
        path = test.partition("::")[0]
        sums[path if key == "file" else str(Path(path).parent)] += cost
    return dict(sorted(sums.items(), key=lambda each: -each[1].cpu_s))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    by_test = costs(report for reports in terminalreporter.stats.values() for report in reports)
    if not by_test:
        return
    slowest = sorted(by_test.items(), key=lambda each: -each[1].wall_s)[:SLOWEST_MAX]
    write = terminalreporter.write_line
    terminalreporter.section(f"the {len(slowest)} slowest tests: wall s, processor s")
    for test, cost in slowest:
        write(f"{cost.wall_s:8.1f} {cost.cpu_s:8.1f}  {test}")
    terminalreporter.section("processor time per folder: processor s, wall s, tests")
    for folder, cost in grouped(by_test, "folder").items():
        write(f"{cost.cpu_s:8.1f} {cost.wall_s:8.1f} {cost.tests:6}  {folder}")
    total = sum(by_test.values(), Cost())
    write(f"{total.cpu_s:8.1f} {total.wall_s:8.1f} {total.tests:6}  all")
    lines = ["processor_s\twall_s\ttests\tfile"]
    lines += [f"{c.cpu_s:.1f}\t{c.wall_s:.1f}\t{c.tests}\t{path}" for path, c in grouped(by_test, "file").items()]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")
