"""What comes out of a run: a table for people, and a file with every sample, the machine and the versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import HOLDFAST, TORCHRUN, TUNED, Metric, Result

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


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def table(results: list[Result]) -> str:
    """Markdown: a line for each metric of each row; rows of which every repetition counts have a table of their own."""
    plain = [result for result in results if not result.row.strict and not result.skipped]
    strict = [result for result in results if result.row.strict and not result.skipped]
    skipped = [f"- {result.row.name} NOT MEASURED: {result.skipped}" for result in results if result.skipped]
    parts = ([_plain(plain)] if plain else []) + ([_strict(strict)] if strict else [])
    return "\n".join([*parts, *skipped]) + ("\n" if skipped else "")


def _strict(results: list[Result]) -> str:
    """Median, (smallest – largest), and in how many of all repetitions it came to that."""
    head = "| what | torchrun, defaults | torchrun, tuned | holdfast, defaults | bound, each time | kept |"
    lines = [head, "|---|---:|---:|---:|---|---|"]
    for result in results:
        for index, metric in enumerate(result.row.metrics):
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


def _plain(results: list[Result]) -> str:
    lines = ["| what | torchrun | holdfast | ratio | bound | kept |", "|---|---:|---:|---:|---|---|"]
    for result in results:
        for index, metric in enumerate(result.row.metrics):
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


def page(results: list[Result], about: dict[str, Any]) -> str:
    head = "# holdfast beside torchrun\n\n" + "".join(f"- {key}: {value}\n" for key, value in about.items())
    counts = "".join(
        f"- {result.row.name}: "
        + ", ".join(f"{name} {len(result.samples.get(name, []))}" for name in result.row.repeat)
        + " repetitions\n"
        for result in results
        if not result.row.strict
    )
    note = "\nMedians, unless the metric says otherwise; the two launchers took turns. Every sample is in the JSON file beside this one.\n"
    failed = errors(results)
    return (
        head + note + "\n" + table(results) + ("\nFailed repetitions:\n\n" + failed if failed else "") + "\n" + counts
    )


def write(results: list[Result], about: dict[str, Any], part: str = "") -> Path:
    """The JSON and the page; returns the page's path. `part` names a run of some rows only, which replaces no other."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = f"{about['date'][:10]}-" + re.sub(
        r"[^a-z0-9]+", "-", f"{about['cpu']} {about['cores']}-cores {part}".lower()
    ).strip("-")
    rows = {
        result.row.name: {
            "title": result.row.title,
            "samples": result.samples,
            "errors": result.errors,
            "skipped": result.skipped,
            "metrics": [
                {
                    "name": metric.name,
                    "unit": metric.unit,
                    "bound": metric.bound(),
                    "holdfast": result.summary(HOLDFAST.name, metric),
                    "torchrun": result.summary(TORCHRUN.name, metric),
                    "ratio": result.ratio(metric),
                    "kept": result.kept(metric),
                    "runs": {name: result.runs(name) for name in result.row.repeat},
                }
                for metric in result.row.metrics
            ],
        }
        for result in results
    }
    data = {"facts": about, "command": sys.argv[1:], "rows": rows}
    (FOLDER / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    path = FOLDER / f"{name}.md"
    path.write_text(page(results, about), encoding="utf-8")
    return path
