"""What comes out of a run: a table for people, and a file with every sample, the machine and the versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import HOLDFAST, TORCHRUN, TUNED, Metric, Result, Row

LOADED = 1.5
"""A machine with this load at the begin of a run had other work."""
FOLDER = Path(__file__).resolve().parent / "results"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=FOLDER.parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def facts() -> dict[str, Any]:
    """Hardware, versions and date."""
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "holdfast": package_version("holdfast"),
        "commit": commit(),
        "load_1min": os.getloadavg()[0],
    }


def facts_line(about: Mapping[str, Any]) -> str:
    """The same in one line, for readers. The date of the run, not its time: rows of one run share the line."""
    load = f"load {about['load_1min']:.0f}" if about["load_1min"] >= LOADED else "quiet"
    return f"{about['date'][:10]}, {about['cores']} cores of {about['cpu']} ({load}), torch {about['torch']}"


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def table(results: list[Result], *, main_only: bool = False) -> str:
    """Markdown: a line for each metric of each row; rows of which every repetition counts have a table of their own.
    `main_only`: the first metric of each row, and those with a bound."""
    plain = [result for result in results if not result.row.strict and not result.skipped]
    strict = [result for result in results if result.row.strict and not result.skipped]
    skipped = [f"- {result.row.name} NOT MEASURED: {result.skipped}" for result in results if result.skipped]
    parts = ([_plain(plain, main_only)] if plain else []) + ([_strict(strict, main_only)] if strict else [])
    return "\n".join([*parts, *skipped]) + ("\n" if skipped else "")


def _strict(results: list[Result], main_only: bool) -> str:
    """Median, (smallest – largest), and in how many of all repetitions it came to that."""
    head = "| what | torchrun, defaults | torchrun, tuned | holdfast, defaults | bound, each time | kept |"
    lines = [head, "|---|---:|---:|---:|---|---|"]
    for result in results:
        for index, metric in enumerate(result.row.metrics):
            if main_only and index and not metric.bound_given:
                continue
            if not metric.bound_given and not any(result.values(name, metric) for name in result.row.repeat):
                continue  # what would only explain a number that is not there
            cells = [_spread(result, launcher.name, metric) for launcher in (TORCHRUN, TUNED, HOLDFAST)]
            what = f"… {metric.name}" if index else f"{result.row.title}: {metric.name}"
            kept = {True: "yes", False: "NO", None: ""}[result.kept(metric)]
            lines.append(f"| {what} | {' | '.join(cells)} | {metric.bound()} | {kept} |")
    return "\n".join(lines) + "\n"


def _spread(result: Result, launcher: str, metric: Metric) -> str:
    values, runs = result.values(launcher, metric), result.runs(launcher)
    if not runs:
        return "–"
    if not values:
        return f"0 of {runs}"
    low, middle, high = (number(each, metric.digits) for each in (min(values), median(values), max(values)))
    unit = f" {metric.unit}".rstrip()
    if low == high:
        return f"{middle}{unit}, {len(values)} of {runs}"
    return f"{middle} ({low} – {high}){unit}, {len(values)} of {runs}"


def _plain(results: list[Result], main_only: bool) -> str:
    lines = ["| what | torchrun | holdfast | ratio | bound | kept |", "|---|---:|---:|---:|---|---|"]
    for result in results:
        for index, metric in enumerate(result.row.metrics):
            if main_only and index and not metric.bound_given:
                continue
            title = result.row.title if index == 0 else ""
            ours, theirs = result.summary(HOLDFAST.name, metric), result.summary(TORCHRUN.name, metric)
            ratio = result.ratio(metric)
            kept = {True: "yes", False: "NO", None: ""}[result.kept(metric)]
            what = f"{title}: {metric.name}" if title else f"… {metric.name}"
            unit = f" {metric.unit}".rstrip()
            lines.append(
                f"| {what} | {number(theirs, metric.digits)}{unit if theirs is not None else ''} "
                f"| {number(ours, metric.digits)}{unit if ours is not None else ''} "
                f"| {'–' if ratio is None else f'{ratio:.3f}×'} | {metric.bound()} | {kept} |"
            )
    return "\n".join(lines) + "\n"


def errors(results: list[Result]) -> str:
    lines = [
        f"- {result.row.name}, {name}: {len(found)} of {result.runs(name)} repetitions failed; first: {found[0]}"
        for result in results
        for name, found in result.errors.items()
    ]
    return "\n".join(lines) + ("\n" if lines else "")


@dataclass(frozen=True)
class Stored:
    """The newest measurement of one row, as it lies in FOLDER."""

    result: Result
    facts: Mapping[str, Any]


def write(results: list[Result], about: Mapping[str, Any], folder: Path = FOLDER) -> list[Path]:
    """Write one file per row, with every sample; it replaces the row's earlier measurement, which git keeps. A row that
    this machine could not measure replaces nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for result in results:
        if result.skipped:
            continue
        data = {"facts": about, "samples": result.samples, "errors": result.errors}
        path = folder / f"{result.row.name}.json"
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        written.append(path)
    return written


def stored(rows: Iterable[Row], folder: Path = FOLDER) -> Iterator[Stored]:
    """What was measured of these rows. A row without a file was never measured."""
    for row in rows:
        path = folder / f"{row.name}.json"
        if path.is_file():
            data = json.loads(path.read_text(encoding="utf-8"))
            yield Stored(Result(row, data["samples"], data["errors"]), data["facts"])
