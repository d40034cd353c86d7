"""The agreement of a job's ranks during saves: small messages, when to save, and which failed saves end the job.

`Peers` sends messages over the process group's store. The main thread of every rank makes every call, in the same
order; rank 0 gathers and answers. No collective of the process group is used, so nothing here depends on a device or a
backend, and no data from the network is unpickled. A process without a group is a world of one.

`Schedule` and `Timekeeper` decide when to save. Each rank counts steps by itself. Only rank 0 measures time: at a few
steps that all ranks know in advance (`ask_at`) the others ask it. Each such step comes after about half of the time
that is left until the next save, so a period of two minutes takes about ten of them, however fast the steps are.

`FailedSaves` counts saves that failed in the background, so that all ranks raise at the same step. A full disk must not
end a training whose state is in memory: only several failures in a row do. Another job in the folder ends it at once.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from holdfast.linux import boot_id
from holdfast.protocol.errors import (
    IntervalError,
    NotFiniteError,
    RetentionError,
    SnapshotBusyError,
    SnapshotError,
    SnapshotIncompleteError,
)
from holdfast.text import seconds_of
from holdfast.train import torch_private
from holdfast.train.guards import GuardWarning, enabled
from holdfast.train.snapshots.changes import Keep

ENDING = (SnapshotBusyError.code, NotFiniteError.code)
"""Codes of failures that are fatal at once."""
Reports = Sequence[Sequence[str]]
"""The failures of one rank: code and text of each."""


@dataclass(frozen=True)
class RankFailure:
    """A failure as it is reported to all ranks."""

    code: str
    """The code of the error's class."""
    text: str
    """The message for users."""
    fatal: bool
    """Whether all ranks raise it; False: it is a warning."""


class FailedSaves:
    """Rank 0's count of failed saves."""

    def __init__(self, failed_saves_max: int) -> None:
        """`failed_saves_max`: the number of failures in a row that is fatal."""
        self._max = failed_saves_max
        self._in_row = 0
        self._open = False
        """Whether a save was handed over whose result is not known yet."""

    def handed_over(self) -> None:
        """Note that another save was handed over."""
        self._open = True

    def reported(self, reports_by_rank: Sequence[Reports], *, busy: bool) -> RankFailure | None:
        """The failure in the ranks' reports, which are in order of rank; None: there is none, or it was reported as
        another rank's. `busy`: rank 0 still writes, or waits for other parts."""
        reports = [
            (code, text if rank == 0 or code == NotFiniteError.code else f"rank {rank}: {text}")
            for rank, each in enumerate(reports_by_rank)
            for code, text in each
        ]
        for code, text in reports:
            if code in ENDING:
                return RankFailure(code, text, fatal=True)
        if not reports:
            if self._open and not busy:
                self._open, self._in_row = False, 0
            return None

        # A missing part follows from another rank's failure. Rank 0 may notice it later: it is no second failure.
        causes = [each for each in reports if each[0] != SnapshotIncompleteError.code]
        if self._open:
            self._open = False
            return self._count(*(causes or reports)[0])
        return RankFailure(*causes[0], fatal=False) if causes else None

    def not_begun(self, error: SnapshotError, *, demanded: bool = False) -> RankFailure:
        """The failure of a save that could not begin. It is fatal if the program `demanded` the save."""
        self._open = False
        if demanded or isinstance(error, SnapshotBusyError):
            return RankFailure(error.code, str(error), fatal=True)
        return self._count(error.code, str(error))

    def _count(self, code: str, text: str) -> RankFailure:
        """Count another failure in a row."""
        self._in_row += 1
        fatal = self._in_row >= self._max
        rest = "" if fatal else "; training goes on"
        return RankFailure(
            code, f"{text}\n{self._in_row} of {self._max} failed saves in a row (failed_saves_max=){rest}.", fatal
        )


ASK_STEPS_MAX = 1_000_000
"""Largest number of steps between two questions to rank 0."""


@dataclass(frozen=True)
class Interval:
    """The interval between two snapshots on the disk: `every=` of Snapshots. Without both fields none is saved by
    itself."""

    seconds: float | None = None
    steps: int | None = None
    """Calls of `Snapshots.step()`."""

    @classmethod
    def of(cls, every: str | None) -> Interval:
        """The interval of this text; None: no interval.

        >>> Interval.of("90s"), Interval.of("500 steps")
        (Interval(seconds=90.0, steps=None), Interval(seconds=None, steps=500))

        Raises IntervalError if it is not a text with a number and its unit."""
        if every is None:
            return cls()
        if isinstance(every, int | float) or (isinstance(every, str) and re.fullmatch(r"\s*[0-9.]+\s*", every)):
            number = str(every).strip()
            raise IntervalError(f'every={every!r} has no unit: write every="{number} s" or every="{number} steps"')
        if isinstance(every, str):
            steps = re.fullmatch(r"\s*([1-9][0-9]*)\s*steps?\s*", every)
            if steps is not None:
                return cls(steps=int(steps[1]))
            seconds = seconds_of(every)
            if seconds is not None:
                return cls(seconds=seconds)
        raise IntervalError(f'every={every!r}: write a number and s, min, h, d or steps: "5min", "6h", "500 steps"')


def check_options(memory_every: int | None, keep: Keep | None, copies: int) -> None:
    """Check three arguments of `Snapshots`. Raises IntervalError, RetentionError."""
    if memory_every is not None and (type(memory_every) is not int or memory_every < 1):
        raise IntervalError(f"memory_every={memory_every!r}: a number of steps, at least 1, or None")
    if copies not in (0, 1):
        raise IntervalError(f"copies={copies!r}: 0 or 1")
    if keep is not None and not isinstance(keep, Keep):
        raise RetentionError(f"keep={keep!r}: write ht.Keep(last=3), or None for all")


def crossed(step: int, last: int, every: int | None) -> bool:
    """Whether a multiple of `every` lies in (last, step], so that a delayed save is not forgotten."""
    return every is not None and step // every != last // every


class Schedule:
    """One rank's schedule of saves. `step` and `last` count calls of Snapshots.step()."""

    def __init__(self, every: Interval, memory_every: int | None) -> None:
        """`every`: the interval of saves to the disk. `memory_every`: that of saves to memory, in steps; None: none."""
        self._every_steps = every.steps
        self._timed = every.seconds is not None
        self._memory_every = memory_every
        self.within_epochs = self._timed or every.steps is not None or memory_every is not None
        """Whether states are saved in the middle of epochs."""
        self.ask_at = 1
        """The next step at which rank 0 is asked whether a save is due."""
        self.durable_step = 0
        """The step of the last save to the disk."""
        self.saved_step = 0
        """The step of the last save of any kind."""

    def start(self, step: int) -> None:
        """Begin to count: training begins, or continues, after this step."""
        self.durable_step = self.saved_step = step
        self.ask_at = step + 1

    def state(self) -> list[int]:
        """The state for a rank that joins during training: argument of `follow`."""
        return [self.durable_step, self.saved_step, self.ask_at]

    def follow(self, state: Sequence[int]) -> None:
        """Take over the schedule of another rank: the argument is its `state`."""
        self.durable_step, self.saved_step, self.ask_at = state

    def durable_due(self, step: int) -> bool:
        """Whether a save to the disk is due by the number of steps."""
        return crossed(step, self.durable_step, self._every_steps)

    def memory_due(self, step: int) -> bool:
        """Whether a save to memory is due."""
        return crossed(step, self.saved_step, self._memory_every)

    def ask_due(self, step: int) -> bool:
        """Whether rank 0 must be asked if a save is due."""
        return self._timed and step >= self.ask_at

    def saved(self, step: int, durable: bool) -> None:
        """Note that this step was saved; `durable`: to the disk."""
        self.saved_step = step
        if durable:
            self.durable_step = step


class Timekeeper:
    """Rank 0's clock for an `every=` that is a time. Its times are monotonic (s)."""

    def __init__(self, every_s: float | None) -> None:
        """`every_s`: None: `every=` is no time."""
        self._every_s = every_s
        self._saved_s = self._asked_s = 0.0
        self._asked_step = 0

    def start(self, step: int, now_s: float) -> None:
        self._saved_s = self._asked_s = now_s
        self._asked_step = step

    def due(self, now_s: float) -> bool:
        return self._every_s is not None and now_s - self._saved_s >= self._every_s

    def saved(self, now_s: float) -> None:
        self._saved_s = now_s

    def next_ask(self, step: int, now_s: float) -> int:
        """The step at which about half of the remaining time will have passed."""
        if self._every_s is None:
            return step + ASK_STEPS_MAX
        steps = max(step - self._asked_step, 1)
        step_s = max((now_s - self._asked_s) / steps, 1e-6)
        self._asked_step, self._asked_s = step, now_s
        left_s = max(self._saved_s + self._every_s - now_s, 0.0)
        ahead = int(left_s / 2 / step_s)
        return step + min(max(ahead, 1), ASK_STEPS_MAX)


PATIENCE_S = 600.0
"""The ranks wait this long for each other: the slowest one may be reading a data set."""

RANK_0_FIRST_S = 5.0
"""The others wait this much longer for rank 0: it may itself wait for one of them, and then its report says for which
one."""
SILENT = "silent"
"""The key of that report in the store."""
GUARD_S = 5.0
"""A rank that has waited this long in a named call warns which ranks are missing; ranks other than 0 wait twice as
long."""
MEETING_GUARD_S = 30.0
"""The same as GUARD_S, while the ranks meet: before that, one of them may have had a data set to prepare."""
POLL_S = 0.005
"""Pause between two reads of the store while ranks meet (s)."""

_numbers = itertools.count()
"""A number for each Peers object of this process. It is the same on all ranks: they create these objects in the same
order, as they do process groups."""


class Peers:
    """The ranks of this job, and the messages between them."""

    def __init__(self, rank: int, world: int, store: Any = None, patience_s: float = PATIENCE_S) -> None:
        """`store`: a store of torch with a prefix that was never used before; None only in a world of one."""
        self.rank, self.world = rank, world
        self.store = store
        self._patience_s = patience_s
        self._turn = 0
        """The number of messages so far; it makes their keys unique, and is equal on all ranks."""
        self._posted: list[str] = []
        """Keys of rank 0's messages that the others may not have read yet."""
        self._call, self._guard_s = "", GUARD_S

    @classmethod
    def of_this_process(cls) -> Peers:
        """The peers of the default process group; a world of one when there is none."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(0, 1)
        store = dist.PrefixStore(f"holdfast.train.snapshots/{next(_numbers)}", torch_private.default_store())
        return cls.meeting(store, dist.get_rank(), dist.get_world_size())

    @classmethod
    def meeting(
        cls,
        store: Any,
        rank: int,
        world: int,
        patience_s: float = PATIENCE_S,
        call: str = "ht.Snapshots (its resume(), or its first step())",
    ) -> Peers:
        """The peers that meet in this store, under a prefix that no earlier life of the job has used. `call`: the call
        of the script in which they meet.

        torchrun keeps one store over its restarts, so messages of dead processes could be mistaken for answers.
        Therefore each rank sends a random word, and waits for an answer to that word: the prefix, which is the random
        word of rank 0.
        """
        word = os.urandom(8).hex()
        peers = cls(rank, world, store, patience_s)
        with peers.calling(call, MEETING_GUARD_S):
            if rank:
                store.set(f"hello/{rank}", word)
                word = peers._take([word])[0].decode()
                store.set(f"{word}/{rank}", "here")
            else:
                peers._greet(word)
        peers.store = dist.PrefixStore(word, store)
        return peers

    def _greet(self, word: str) -> None:
        """Answer every hello, also one that replaces a dead process's, until all ranks are present. Rank 0 calls it."""
        hellos = [f"hello/{rank}" for rank in range(1, self.world)]
        here = [f"{word}/{rank}" for rank in range(1, self.world)]
        answered: set[str] = set()
        begun_s = time.monotonic()
        warn_s, deadline_s = begun_s + self._guard_s, begun_s + self._patience_s
        while not self.store.check(here):
            names = {each.decode() for each in self._take(hellos)}
            for each in names - answered:
                self.store.set(each, word)
            answered |= names
            if time.monotonic() > deadline_s:
                raise self._silence(here)
            if time.monotonic() > warn_s:
                self._warn(here, self._guard_s)
                warn_s = deadline_s
            time.sleep(POLL_S)  # a store reports that there is a value, not that the value has changed
        for each in (*hellos, *here, *answered):
            self.store.delete_key(each)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, at rank 0. The other ranks do not wait, and get an empty list."""
        if self.store is None:
            return [value]
        self._turn += 1
        key = f"{self._turn}/"
        if self.rank:
            self.store.set(f"{key}{self.rank}", json.dumps(value))
            return []
        keys = [f"{key}{rank}" for rank in range(1, self.world)]
        texts = self._take(keys)
        for each in (*keys, *self._posted):  # a rank that has sent its value has read the earlier messages
            self.store.delete_key(each)
        self._posted.clear()
        return [value, *map(json.loads, texts)]

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, at every rank; the others' `value` is ignored."""
        if self.store is None:
            return value
        self._turn += 1
        key = f"{self._turn}!"
        if self.rank:
            return json.loads(self._take([key])[0])
        self.store.set(key, json.dumps(value))
        self._posted.append(key)
        return value

    def scatter(self, values: list[Any]) -> Any:
        """Rank 0's value for each rank: the element at its index."""
        if self.store is None:
            return values[0]
        self._turn += 1
        if self.rank:
            key = f"{self._turn}!{self.rank}"
            return json.loads(self._take([key])[0])
        for rank in range(1, self.world):
            self.store.set(f"{self._turn}!{rank}", json.dumps(values[rank]))
            self._posted.append(f"{self._turn}!{rank}")
        return values[0]

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, at every rank."""
        shared: list[Any] = self.broadcast(self.gather(value))
        return shared

    def forget(self) -> None:
        """Delete rank 0's last messages: all ranks have read them, or do not wait for them any more."""
        while self._posted:
            self.store.delete_key(self._posted.pop())

    def post(self, name: str, value: Any) -> None:
        """Leave a value under this name for any rank that asks; not all ranks need to. The first one stays."""
        with contextlib.suppress(RuntimeError):  # the store is gone, so no rank can ask
            if self.store is not None:
                self.store.compare_set(f"posted/{name}", "", json.dumps(value))

    def posted(self, name: str, patience_s: float) -> Any:
        """The value that some rank has posted, or posts within this time; None: none has."""
        key, deadline = f"posted/{name}", time.monotonic() + patience_s
        with contextlib.suppress(RuntimeError):
            while self.store is not None:
                if self.store.check([key]):
                    return json.loads(self.store.get(key))
                if time.monotonic() >= deadline:
                    break
                time.sleep(POLL_S)  # the store's own `wait` would print a warning when its time is over
        return None

    @contextlib.contextmanager
    def calling(self, call: str, guard_s: float | None = None) -> Iterator[None]:
        """Messages inside the block belong to this call of the script: a rank that waits in it for long warns."""
        self._call, self._guard_s = call, GUARD_S if guard_s is None else guard_s
        try:
            yield
        finally:
            self._call = ""

    def _take(self, keys: list[str]) -> list[bytes]:
        """Wait for these keys. Returns their values. Raises SnapshotIncompleteError."""
        patience_s = self._patience_s + (RANK_0_FIRST_S if self.rank else 0.0)
        guard_s = 2 * self._guard_s if self.rank else self._guard_s
        if self._call and guard_s < patience_s and not self._is_there(keys, guard_s):
            self._warn(keys, guard_s)
            patience_s -= guard_s
        if not self._is_there(keys, patience_s):
            raise self._silence(keys)
        texts: list[bytes] = self.store.multi_get(keys)
        return texts

    def _warn(self, keys: list[str], waited_s: float) -> None:
        if enabled():
            warnings.warn(
                f"holdfast: rank {self.rank} has waited {waited_s:g} s in {self._call} for rank "
                f"{self._missing(keys)}, and waits on.\n"
                "Every rank has to make this call: take it out of `if rank == 0:`, the ranks do it together.",
                GuardWarning,
                stacklevel=3,
            )

    def _is_there(self, keys: list[str], patience_s: float) -> bool:
        try:
            self.store.wait(keys, datetime.timedelta(seconds=patience_s))
        except dist.DistStoreError:
            return False
        return True

    def _missing(self, keys: list[str]) -> str:
        """The ranks whose keys are missing, for a message. Ranks other than 0 wait for rank 0 only."""
        missing = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
        return ", ".join(missing[:8]) + (" …" if len(missing) > 8 else "") if self.rank == 0 else "0"

    def _silence(self, keys: list[str]) -> SnapshotIncompleteError:
        """The error for ranks that send nothing. Rank 0 also leaves their numbers for the others."""
        silent = self._missing(keys)
        if self.rank == 0:
            self.store.set(SILENT, silent)
        elif self.store.check([SILENT]):
            silent = self.store.get(SILENT).decode()
        return SnapshotIncompleteError(
            f"rank {silent} sent nothing for {self._patience_s:g} s\n"
            "every rank has to call resume(), step() and save() equally often"
        )


def node_key() -> str:
    """A key that is equal for processes with the same /dev/shm."""
    boot = boot_id()
    try:
        status = os.stat("/dev/shm")
    except OSError:
        return f"{boot}:{os.getpid()}"
    return f"{boot}:{status.st_dev}:{status.st_ino}"
