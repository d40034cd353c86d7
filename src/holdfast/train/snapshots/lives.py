"""Files that the lives of a job leave in its snapshot folder for the next one: how far they came, how the last one
failed, and marks on suspect snapshots.

    history.json                 how far the job came; replaced by rank 0 at each resume
    failure.json                 written by the first rank of a life that fails with an exception; read and removed at
                                 the next resume
    suspect.step_000000120.0001  a mark on that snapshot, with the reason. Nothing is deleted

A life is what one group of processes does from one resume to its end. A snapshot is suspect if the life that went on
from it failed within a few steps, and the failure was the same as the one before, or a number that is not finite. Then
everything that this life has saved is suspect as well. A state in memory is marked under the number of the attempt as
which the saver would write it, so the mark also counts for what the saver wrote.

A failure is poison if the state may be its cause. An end that says nothing about the state is neither poison nor a lack
of progress: a lost node, a preemption, a process that was killed from outside, an error in the communication with other
ranks. A hang or an error of the machine (memory, files) is a lack of progress, and no poison.

Rank 0 has the folder's lease when it judges, writes marks before the history, and removes the failure last: if it is
killed in between, the next resume comes to the same result. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.protocol.errors import SnapshotError
from holdfast.protocol.exit_codes import EXIT_SIGNAL_BASE, REQUESTS
from holdfast.train.snapshots import disk
from holdfast.train.snapshots.folder import Survey, mark_file
from holdfast.train.snapshots.layout import Key
from holdfast.train.snapshots.remote import Location, RemotePath

HISTORY, FAILURE = "history.json", "failure.json"
BYTES_MAX = 1 << 16
TEXT_CHARACTERS_MAX = 200
FIRST_ATTEMPT_IN_MEMORY = 500_000_000
"""Attempts from here on are states in memory, and what the saver wrote of them (flush.ATTEMPT_MIN)."""

OF_PEERS = re.compile(
    r"^\w*(?:Connection|BrokenPipe|Dist)\w*Error\b|gloo|nccl|TCPStore|connection (?:closed|reset|refused)"
    r"|SnapshotIncompleteError|SnapshotBusyError",
    re.IGNORECASE,
)
"""Texts of failures that concern other ranks, or the connection to them: a consequence of their end."""
OF_MACHINE = re.compile(
    r"^(?:\w*OutOfMemoryError|MemoryError|OSError|FileNotFoundError|PermissionError|TimeoutError|Snapshot\w*Error"
    r"|\w+MismatchError|ReplicasDifferError)\b|out of memory|No space left"
)
"""Texts of failures by the machine's memory or files, or by what the script tracks: an older state would not help."""
NOT_FINITE = re.compile(
    r"^(?:NotFiniteError|FloatingPointError)\b|\bnan\b|\binf\b|\bnon-?finite\b|\bnot finite\b", re.I
)
"""Texts of failures by values that are not finite."""
EXIT_CODE = "exit code "
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")
"""What differs between two failures of one kind: addresses, numbers."""


@dataclass(frozen=True)
class LifeFailure:
    """The failure of a life by a fault of the training itself."""

    text: str
    """`Type: message`, or the exit code, in one line; empty: a hang."""
    step: int
    """The last step that the failed rank completed."""
    life: str = ""
    """The random word of the life; empty: the launcher reported the failure, of the life before."""

    @property
    def fingerprint(self) -> str:
        """Equal for two failures of one kind, whatever numbers are in their texts."""
        return self.text if self.text.startswith(EXIT_CODE) else _VARIES.sub("#", self.text)

    def is_poison_after(self, before: str) -> bool:
        """Whether the state may be the cause. `before`: the fingerprint of the failure before this one."""
        if not self.text or OF_MACHINE.search(self.text) or OF_PEERS.search(self.text):
            return False
        return self.fingerprint == before or NOT_FINITE.search(self.text) is not None

    @classmethod
    def of_launcher(cls, end: str) -> LifeFailure | None:
        """The failure that the launcher reports (`coordinator.ending.previous_end`); None: the end was no fault of the
        training."""
        kind, _, rest = end.partition(" ")
        step, _, text = rest.partition(" ")
        if kind not in ("failed", "hung") or not step.isdigit() or OF_PEERS.search(text):
            return None
        return cls(text, int(step))


def text_of(error: BaseException) -> str:
    """The text of a failure; empty for an end that is not the training's own fault."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        # Larger codes stand for signals.
        own = 0 < code <= EXIT_SIGNAL_BASE and code not in REQUESTS
        return f"{EXIT_CODE}{code}" if own else ""
    if not isinstance(error, Exception):
        return ""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - the program's own code, which must not hide the error
        message = "(its __str__ fails)"
    text = f"{type(error).__name__}: {message}".partition("\n")[0][:TEXT_CHARACTERS_MAX]
    return "" if OF_PEERS.search(text) else text


def note_failure(folder: Location, failure: LifeFailure) -> None:
    """Leave this failure for the next resume, unless another rank has left its own. It never raises, since an error
    here would hide the failure."""
    path, text = folder / FAILURE, json.dumps(asdict(failure))
    with contextlib.suppress(OSError):
        if isinstance(path, RemotePath):
            return path.leave(text.encode())
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(file, "w", encoding="utf-8", errors="replace") as out:
            out.write(text)
    return None


def noted_failure(folder: Location) -> LifeFailure | None:
    """The failure that `note_failure` left; None: there is none, or it cannot be read."""
    body = _read(folder / FAILURE)
    text, step, life = body.get("text"), body.get("step"), body.get("life")
    if isinstance(text, str) and type(step) is int and isinstance(life, str):
        return LifeFailure(text, step, life)
    return None


def forget_failure(folder: Location) -> None:
    """Remove the failure that was left, after it was judged."""
    with contextlib.suppress(OSError):
        disk.delete(folder / FAILURE)


@dataclass(frozen=True)
class JobHistory:
    """What is known of the lives until now. The fields have the same names in the file, but for `oldest_begun`, which
    is "floor" there."""

    life: str = ""
    """The random word of the newest life."""
    origin: Key | None = None
    """The snapshot from which the newest life went on; None: it began from the beginning."""
    best: int = 0
    """The largest step that any life has completed, as far as it is known."""
    stalled: int = 0
    """The number of lives in a row that failed without a step beyond `best`. A life that went back to an older state,
    because its origin was suspect, does not count."""
    oldest_begun: int | None = None
    """The oldest step from which one of these stalled lives went on; None: there was none."""
    failure: str = ""
    """The fingerprint of the last failure; empty: there was none."""
    ended: bool = False
    """Whether the job was ended for lack of progress."""

    @classmethod
    def load(cls, folder: Location) -> JobHistory:
        """The history in this folder; an empty one if there is none, or none that can be read."""
        body = _read(folder / HISTORY)
        try:
            origin, oldest_begun = body.get("origin"), body.pop("floor", None)
            found = cls(**{**body, "origin": Key(*origin) if origin else None, "oldest_begun": oldest_begun})
        except TypeError:
            return cls()
        numbers = (found.best, found.stalled, *(found.origin or ()), *([] if oldest_begun is None else [oldest_begun]))
        kinds = ((str, found.life, found.failure), (int, *numbers))
        return found if all(type(each) is kind for kind, *values in kinds for each in values) else cls()

    def save(self, folder: Location) -> None:
        """Write the history into this folder. Raises SnapshotWriteError."""
        body = asdict(self)
        body["floor"] = body.pop("oldest_begun")
        try:
            disk.write_atomically(folder / HISTORY, json.dumps(body))
        except OSError as error:
            raise disk.write_error(error, folder) from error

    def after(
        self, failure: LifeFailure | None, reached: int, on_disk: Iterable[Key], *, found_suspect: bool
    ) -> JobHistory:
        """The history after the end of the newest life. `failure`: None: it ended by no fault of the training.
        `reached`: the newest step that is saved anywhere. `on_disk`: the keys of all snapshots. `found_suspect`: the
        snapshot from which it went on is suspect now."""
        came = max(reached, failure.step if failure is not None else 0)
        fingerprint = failure.fingerprint if failure is not None and failure.text else self.failure
        if came > self.best or not self._is_there(on_disk):
            return replace(self, best=came, stalled=0, oldest_begun=None, failure=fingerprint)
        if failure is None:
            return self

        # A life from an older state than any stalled life before tries what was not tried yet: it does not count.
        begun = 0 if self.origin is None else self.origin.step
        goes_back = found_suspect and (self.oldest_begun is None or begun <= self.oldest_begun)
        oldest_begun = begun if self.oldest_begun is None else min(begun, self.oldest_begun)
        return replace(self, stalled=self.stalled + (not goes_back), oldest_begun=oldest_begun, failure=fingerprint)

    def _is_there(self, on_disk: Iterable[Key]) -> bool:
        """Whether the origin of the newest life, or something newer, is still on the disk. False: a person has removed
        the newest snapshots, so that the job repeats its steps."""
        origin = self.origin
        return origin is None or origin.attempt >= FIRST_ATTEMPT_IN_MEMORY or any(each >= origin for each in on_disk)


def suspects_of(
    history: JobHistory, failure: LifeFailure | None, within: int, found: Survey, in_memory: Iterable[Key]
) -> list[Key]:
    """The snapshots that become suspect by the failure of the newest life: its origin, and what it has saved.

    `within`: only a failure at most this number of steps after the origin makes it suspect. All that is newer than the
    origin was saved by this life, because a life goes on from the newest state that is not suspect.
    """
    origin = history.origin
    if origin is None or failure is None or not 0 <= failure.step - origin.step <= within:
        return []
    if not failure.is_poison_after(history.failure):
        return []
    return sorted({origin, *(each for each in (*found.keys, *in_memory) if each.step > origin.step)} - found.marks)


def mark(folder: Location, keys: Iterable[Key], why: str) -> None:
    """Mark snapshots as suspect. SnapshotWriteError."""
    try:
        for key in keys:
            disk.write_atomically(folder / mark_file(key), why + "\n")
        disk.sync_folder(folder)
    except OSError as error:
        raise disk.write_error(error, folder) from error


def unmark(folder: Location, keys: Iterable[Key]) -> None:
    """Remove marks. SnapshotWriteError."""
    try:
        for key in keys:
            disk.delete(folder / mark_file(key))
    except OSError as error:
        raise disk.write_error(error, folder) from error


def why_marked(folder: Location, key: Key) -> str:
    """The reason in a mark, in one line."""
    with contextlib.suppress(OSError, SnapshotError):
        return " ".join(disk.read_text(folder / mark_file(key), BYTES_MAX).split())
    return ""


def _read(path: Location) -> dict[str, Any]:
    """The JSON object in this file; an empty one if there is none, or none that can be read."""
    try:
        body = json.loads(disk.read_text(path, BYTES_MAX))
    except (OSError, SnapshotError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
