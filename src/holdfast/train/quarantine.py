"""Leaves snapshots out of the next resume if training fails soon after it went on from them, and ends a job that makes
no progress.

Rank 0 calls `judged` at each resume; every rank has an `OwnLife`, from its resume on. The files that they leave for the
next life, and the rules by which it is judged, are in snapshots/lives.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from holdfast.protocol.errors import IntervalError, SnapshotError
from holdfast.protocol.exit_codes import EXIT_NO_PROGRESS
from holdfast.text import plural
from holdfast.train.loss_watch import BAD_STEPS_MAX, LossWatch
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots import lives
from holdfast.train.snapshots.layout import Key
from holdfast.train.snapshots.lives import JobHistory, LifeFailure
from holdfast.train.snapshots.remote import Location

PREVIOUS_END = "HOLDFAST_PREVIOUS_END"
"""Variable of a worker's environment that says how the workers before it ended (`coordinator.ending.previous_end`)."""
WITHIN_STEPS = 20
"""`Patience.within_steps` if the interval of snapshots is a time."""


@dataclass(frozen=True)
class Patience:
    """The limits for failures and restarts."""

    within_steps: int
    """A failure within this number of steps after a resume makes the snapshot suspect; 0: never."""
    restarts: int
    """The number of restarts that may fail to come further; 0: any number."""

    @classmethod
    def of(cls, within_steps: int | None, interval: int | None, restarts: int | None) -> Patience:
        """The limits of `SnapshotOptions`. `interval`: steps between two snapshots; None: not known. Raises
        IntervalError."""
        for name, number in (("suspect_within_steps", within_steps), ("restarts_without_progress", restarts)):
            if number is not None and (type(number) is not int or number < 0):
                raise IntervalError(f"{name}={number!r}: a number from 0 on")
        # A state that makes the loss not finite is known only after some steps.
        default = max(interval or WITHIN_STEPS, BAD_STEPS_MAX)
        return cls(default if within_steps is None else within_steps, restarts or 0)


@dataclass(frozen=True)
class Judged:
    """Rank 0's judgement of the lives until now."""

    history: JobHistory
    suspects: dict[Key, str]
    """The marked snapshots, with the reasons."""
    over: str = ""
    """The reason why the job ends here; empty: it goes on."""

    def begin(self, folder: Location, life: str, origin: Key | None) -> None:
        """Note in the folder that another life goes on from `origin`. If the disk cannot take the note, rank 0 warns:
        that must not end the training."""
        try:
            replace(self.history, life=life, origin=origin, ended=False).save(folder)
        except SnapshotError as error:
            _warn(f"the history of this job was not written: {error}")
        lives.forget_failure(folder)


def forget_previous_end() -> None:
    """Forget how the workers before this process ended: it goes on in another world, and the first resume has judged
    that end."""
    os.environ.pop(PREVIOUS_END, None)


def judged(folder: Location, patience: Patience, in_memory: Iterable[Key]) -> Judged:
    """Judge the life that has ended, and mark suspect snapshots. `in_memory`: the keys of the states in memory of all
    ranks. Raises SnapshotError."""
    found, before, held = folders.survey(folder), JobHistory.load(folder), set(in_memory)
    failure = _failure(folder, before.life)
    reached = max((key.step for key in (*found.keys, *held)), default=0)
    new = lives.suspects_of(before, failure, patience.within_steps, found, held)
    after = before.after(failure, reached, found.keys, found_suspect=bool(new))
    gone = found.marks - {*found.keys, *held, *new}
    marks = {*found.marks, *new} - gone

    try:
        lives.unmark(folder, gone)
        if new and failure is not None:
            why = f"training failed at step {failure.step} after it had gone on from step {new[0].step}: {failure.text}"
            lives.mark(folder, new, why)
            _warn(f"{', '.join(key.name for key in new)}: suspect, and left out: {why}")
    except SnapshotError as error:
        _warn(f"suspect snapshots were not marked: {error}")
        marks = set(found.marks)
    suspects = {key: lives.why_marked(folder, key) for key in sorted(marks)}
    return _without_progress(folder, Judged(after, suspects), patience, failure)


def _failure(folder: Location, life: str) -> LifeFailure | None:
    """The failure of the newest life; None: it ended by no fault of the training. The launcher knows it best; without
    its report it is the one that a rank noted."""
    noted = lives.noted_failure(folder)
    if noted is not None and noted.life != life:
        noted = None  # it is that of an earlier life
    reported = os.environ.get(PREVIOUS_END, "")
    if not reported:
        return noted
    failure = LifeFailure.of_launcher(reported)
    if failure is not None and failure.step == 0:  # the launcher does not know the step
        return noted
    return failure


def _without_progress(folder: Location, found: Judged, patience: Patience, failure: LifeFailure | None) -> Judged:
    """The same judgement; if too many restarts failed without progress, with the reason to end the job."""
    history = found.history
    if not patience.restarts or history.stalled < patience.restarts:
        return found
    if history.ended and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        # The job was ended, and a user has started it again: the cause may have been removed, so the count begins at 0.
        return replace(found, history=replace(history, stalled=0, oldest_begun=None))

    with contextlib.suppress(SnapshotError):
        replace(history, ended=True).save(folder)
    lives.forget_failure(folder)
    text = f"no progress: {plural(history.stalled, 'restart')} did not come past step {history.best}"
    last = f"; the last failure: {failure.text}" if failure is not None and failure.text else ""
    return replace(found, over=f"{text}{last}")


@dataclass
class OwnLife:
    """One rank's life, from its resume to its end."""

    folder: Location
    word: str = ""
    """The random word that identifies the life, the same on all ranks; empty: this rank does not know it."""
    losses: LossWatch = field(default_factory=LossWatch)

    def failed(self, error: BaseException, step: int) -> None:
        """Note for the next life that this rank ends with this error after this step."""
        text = lives.text_of(error)
        if self.word and text:
            lives.note_failure(self.folder, LifeFailure(text, step, self.word))


def end_without_progress(text: str) -> NoReturn:
    """End this rank, with an exit code that asks the scheduler not to requeue the job. Every rank calls it."""
    sys.stderr.write(f"holdfast: HF253: {text}\n")
    raise SystemExit(EXIT_NO_PROGRESS)


def _warn(text: str) -> None:
    warnings.warn(f"holdfast: {text}", RuntimeWarning, stacklevel=3)
