"""Reads the journals of a run's nodes, and the outcomes beside them.

Knows the files; diagnosis/history.py knows what the events mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.diagnosis.reference import read_event
from holdfast.journal import JOURNAL_NAME as JOURNAL
from holdfast.protocol.errors import UsageError
from holdfast.protocol.outcome import Outcome
from holdfast.runs.finding import outcome_of


def read_journal(folder: Path, say: Callable[[str], None], only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The events of a run; `only`: of these names, and perhaps others. Leaves out a last line that is still being
    written. Other lines that are torn (a full disk, a power failure) or of another version are left out too, and
    counted by `say`. Raises UsageError."""

    try:
        lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UsageError(f"{folder} is no run folder: {JOURNAL} in it: {error.strerror}") from error
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    left_out = 0
    wanted = [f'"event": "{name}"'.encode() for name in only]
    for line in lines:
        if wanted and not any(each in line for each in wanted):
            continue
        event = read_event(line)
        if event is not None:
            yield event
        else:
            left_out += 1
    if left_out and left_out == len(lines):
        raise UsageError(f"{folder / JOURNAL} contains no events of holdfast")
    if left_out:
        count = "1 line is" if left_out == 1 else f"{left_out} lines are"
        say(f"{folder / JOURNAL}: {count} torn or of another version, and left out")


def first_outcome(folders: Sequence[Path]) -> tuple[Path, Outcome] | None:
    """The first outcome with a verdict in these folders, else the first outcome."""
    ends = [(folder, outcome) for folder in folders if (outcome := outcome_of(folder)) is not None]
    return next((end for end in ends if end[1].verdict is not None), next(iter(ends), None))
