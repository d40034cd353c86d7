"""What a row is, and how rows are run: launchers in turn, so that a slow minute of the machine hits both.

Knows processes and clocks; knows nothing of what the rows measure.
"""

from __future__ import annotations

import contextlib
import math
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent / "scripts"
BIN = Path(sys.executable).parent
POLL_S = 0.01

Sample = dict[str, float]
HALF = "halfway"
"""Marks the sample of a repetition that failed before its end."""


@dataclass(frozen=True)
class Launcher:
    name: str
    command: tuple[str, ...]
    """What stands before the flags."""
    env: Mapping[str, str] = field(default_factory=dict)


HOLDFAST = Launcher("holdfast", (str(BIN / "holdfast"), "run"))
TORCHRUN = Launcher("torchrun", (str(BIN / "torchrun"),))
TUNED = Launcher(
    "torchrun tuned",
    (str(BIN / "torchrun"), "--rdzv-conf", "last_call_timeout=1"),
    {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
)
"""torchrun as somebody sets it who knows what its defaults cost an elastic job."""
LAUNCHERS = {launcher.name: launcher for launcher in (HOLDFAST, TORCHRUN, TUNED)}


@dataclass(frozen=True)
class Metric:
    """One number of a row, and the bound it has to keep."""

    name: str
    unit: str
    ratio_max: float | None = None
    """holdfast is at most this many times torchrun."""
    value_max: float | None = None
    """holdfast is at most this."""
    value_min: float | None = None
    digits: int = 3
    summary: Callable[[list[float]], float] = statistics.median
    """What stands for all samples."""

    @property
    def bound_given(self) -> bool:
        return any(each is not None for each in (self.ratio_max, self.value_max, self.value_min))

    def bound(self) -> str:
        parts = [
            "" if self.ratio_max is None else f"≤ {self.ratio_max:g}×",
            "" if self.value_max is None else f"≤ {self.value_max:g} {self.unit}".rstrip(),
            "" if self.value_min is None else f"≥ {self.value_min:g} {self.unit}".rstrip(),
        ]
        return ", ".join(part for part in parts if part) or "–"


@dataclass(frozen=True)
class Row:
    """One line of the table, or a few that are measured together."""

    name: str
    title: str
    metrics: tuple[Metric, ...]
    measure: Callable[[Launcher, Path], Sample]
    """One repetition in a folder of its own. Raises when the launcher did not do what the row is about."""
    repeat: Mapping[str, int]
    """Repetitions by launcher name; a launcher that is not named is not measured."""
    group: str = ""
    """Another name by which it is selected, together with others."""
    strict: bool = False
    """Every repetition has to succeed and to keep the bounds; the table shows the smallest, the median and the largest."""
    by_name: bool = False
    """It takes so long that it is run only when it is named."""
    why_not: Callable[[], str] = str
    """Why this machine cannot run it; empty when it can."""

    def called(self, names: Collection[str]) -> bool:
        """Whether it is one of these, or belongs to one of these groups; `names` empty: all that need not be named."""
        return self.name in names or self.group in names if names else not self.by_name


@dataclass
class Result:
    row: Row
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=dict)
    skipped: str = ""
    """Why nothing was measured."""

    def values(self, launcher: str, metric: Metric) -> list[float]:
        return [sample[metric.name] for sample in self.samples.get(launcher, []) if metric.name in sample]

    def runs(self, launcher: str) -> int:
        """Repetitions, those that failed included. One that failed half-way has a sample of what came before."""
        whole = sum(not sample.get(HALF) for sample in self.samples.get(launcher, []))
        return whole + len(self.errors.get(launcher, []))

    def summary(self, launcher: str, metric: Metric) -> float | None:
        values = self.values(launcher, metric)
        return metric.summary(values) if values else None

    def ratio(self, metric: Metric) -> float | None:
        ours, theirs = self.summary(HOLDFAST.name, metric), self.summary(TORCHRUN.name, metric)
        return ours / theirs if ours is not None and theirs else None

    def kept(self, metric: Metric) -> bool | None:
        """Whether the bound is kept; None: there is no bound, or nothing to compare."""
        ours, ratio = self.summary(HOLDFAST.name, metric), self.ratio(metric)
        if self.row.strict:
            return self._kept_by_all(metric)
        if self.errors.get(HOLDFAST.name):
            return False
        checks = []
        if metric.ratio_max is not None and ratio is not None:
            checks.append(ratio <= metric.ratio_max)
        if metric.value_max is not None and ours is not None:
            checks.append(ours <= metric.value_max)
        if metric.value_min is not None and ours is not None:
            checks.append(ours >= metric.value_min)
        return all(checks) if checks else None

    def _kept_by_all(self, metric: Metric) -> bool | None:
        runs = self.runs(HOLDFAST.name)
        if not runs or not metric.bound_given:
            return None
        low = -math.inf if metric.value_min is None else metric.value_min
        high = math.inf if metric.value_max is None else metric.value_max
        values = self.values(HOLDFAST.name, metric)
        return len(values) == runs and all(low <= value <= high for value in values)


def turns(repeat: Mapping[str, int]) -> Iterator[str]:
    """Launcher names, each as often as it is to run, spread evenly over the time of the row."""
    places = [((index + 0.5) / count, name) for name, count in repeat.items() for index in range(count)]
    for _, name in sorted(places):
        yield name


def run_row(row: Row, repeat: int | None, say: Callable[[str], None]) -> Result:
    """All repetitions of one row. An error of a launcher is a result; it does not end the run."""
    counts = {name: count if repeat is None else min(repeat, count) for name, count in row.repeat.items()}
    result = Result(row, skipped=row.why_not())
    if result.skipped:
        say(f"  NOT MEASURED: {result.skipped}")
        return result
    for name in turns(counts):
        launcher = LAUNCHERS[name]
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            try:
                sample = row.measure(launcher, Path(folder))
            except (BenchmarkError, OSError, subprocess.SubprocessError, ImportError) as error:
                result.errors.setdefault(name, []).append(f"{type(error).__name__}: {error}")
                if isinstance(error, HalfwayError):
                    result.samples.setdefault(name, []).append({**error.sample, HALF: 1.0})
                say(f"  {name}: {type(error).__name__}: {error}")
            else:
                result.samples.setdefault(name, []).append(sample)
                say(f"  {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in sample.items()))
    return result


class BenchmarkError(Exception):
    """A launcher did not do what the row is about."""


class HalfwayError(BenchmarkError):
    """It did some of it: `sample` holds what was measured until then."""

    def __init__(self, text: str, sample: Sample) -> None:
        super().__init__(text)
        self.sample = sample


# --- what rows are made of --------------------------------------------------------------------------------------------


def environment(folder: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A clean environment: nothing of an outer launcher, run folders inside the repetition's own folder."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_", "HOLDFAST_"))}
    return {
        **kept,
        "HOME": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "BENCH_OUT": str(folder),
        **(extra or {}),
    }


@contextlib.contextmanager
def launched(
    launcher: Launcher,
    flags: list[str],
    script: str,
    folder: Path,
    *arguments: str,
    stdout: int = subprocess.DEVNULL,
    extra: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The launcher on a script of ours, and the monotonic nanoseconds just before it was started."""
    command = [*launcher.command, *flags, str(SCRIPTS / script), *arguments]
    with (folder / "stderr.txt").open("wb") as stderr:
        began_ns = time.monotonic_ns()
        process = subprocess.Popen(
            command,
            env=environment(folder, {**launcher.env, **(extra or {})}),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            yield process, began_ns
        finally:
            if process.poll() is None:
                end(process)


def measured_by(
    script: str, launcher: Launcher, ranks: int, folder: Path, limit_s: float, extra: Mapping[str, str] | None = None
) -> dict[str, float]:
    """What a script of ours that measures itself has left in its JSON file, when its job of so many ranks is over.
    Raises BenchmarkError."""
    line = ["--standalone", "--nproc-per-node", str(ranks)]
    with launched(launcher, line, script, folder, extra=extra) as (process, _):
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"no end within {limit_s:g} s") from error
    if code != 0:
        raise BenchmarkError(f"exit code {code}: {tail(folder)}")
    found: dict[str, float] = json.loads((folder / script).with_suffix(".json").read_text())
    return found


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does: the job that runs ends, and its folders are removed."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))


def end(process: subprocess.Popen[bytes]) -> None:
    """Politely, then for good."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def stamps(folder: Path, name: str) -> dict[int, int]:
    """Numbers that ranks left as files `name.RANK`, by rank."""
    return {
        int(path.suffix[1:]): int(path.read_text()) for path in folder.glob(f"{name}.*") if path.suffix[1:].isdigit()
    }


def wait_for_stamps(
    folder: Path, name: str, count: int, process: subprocess.Popen[bytes], limit_s: float = 60.0
) -> dict[int, int]:
    deadline = time.monotonic() + limit_s
    while len(found := stamps(folder, name)) < count:
        if process.poll() is not None:
            raise BenchmarkError(f"ended with {process.returncode} before {name}: {tail(folder)}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"no {name} from {count} ranks within {limit_s:g} s")
        time.sleep(POLL_S)
    return found


def tail(folder: Path, characters: int = 300) -> str:
    return (folder / "stderr.txt").read_text(errors="replace")[-characters:].replace("\n", " | ")


def cpu_s(pid: int) -> float:
    """CPU time of all threads, from the scheduler's nanoseconds (stat's ticks are too coarse for 0.2 %)."""
    return (
        sum(
            int(Path(f"/proc/{pid}/task/{t}/schedstat").read_text().split()[0]) for t in os.listdir(f"/proc/{pid}/task")
        )
        / 1e9
    )
