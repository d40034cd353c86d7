"""One job per snapshot folder: a file `lease.000003` that names its owner, and a counter in it that a live owner
advances.

The file with the highest number is the lease. A job takes it by creating the next number with O_EXCL, so one of several
contenders wins, and an owner that sees a higher number than its own knows that it has lost.

When another job may take the lease over:
- at once: it was given back; or its owner was a process of this machine that has ended; or it was a process of an
  earlier generation of the same job, none of which is left when holdfast starts another one; or the caller knows that
  the owner is lost (in `ht.survive` the other ranks have gone on, so the launcher has made sure of it);
- after POLLS reads of an unchanged counter, POLL_S apart, or POLLS_SAME_RUN when the owner has the same run id: the
  owner is dead. (Two jobs may have one run id: the newer one may be a node that came back alone);
- otherwise never: a counter that moves, or a living process of this machine, is a SnapshotBusyError.

In an object store the file is an object: a conditional put creates it, and the counter advances by writing it again,
every REMOTE_BEAT_S. In a store without conditional puts nothing makes the beginning exclusive: two jobs that begin at
the same moment both go on, until the first beat of the one whose lease the other has replaced.

Clocks of two machines are never compared. An owner on another machine that is frozen longer than that loses the lease
and learns it at its next `check`; the snapshots that both saved meanwhile are complete, because attempts are
exclusive."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple, cast

from holdfast.linux import boot_id, process_stat
from holdfast.protocol.errors import SnapshotBusyError, SnapshotError
from holdfast.train.snapshots import disk
from holdfast.train.snapshots.remote import Location, RemotePath, location_of

FOLDER_ID = "folder_id"
"""Name in the note of a request to save: identity of the folder for which it was made (`LeaseOwner.folder_id`)."""
BEAT_S = 2.0
"""A live owner advances its counter at this interval (s)."""
POLL_S = 2.0
"""Time between two reads of another owner's counter (s)."""
REMOTE_BEAT_S = REMOTE_POLL_S = 5.0
"""The same two times in an object store (s). Each beat is three requests, which cost money."""
POLLS = 10
"""The owner is dead after this number of reads of an unchanged counter."""
POLLS_SAME_RUN = 3
"""The same for an owner with our run id: a restart on another node waits this long. More than one beat."""
MOVES_SAME_RUN = 2
"""An owner with our run id lives if its counter has moved this often. The first change may be the last beat of a dead
owner, which a network file system shows late."""
BEATS_MISSED_MAX = 10
"""Limit of failed beats in a row: then others may take the folder, and `check` reports it."""
JOIN_S = 5.0
"""Limit of the wait for the lease's thread at `release`."""
SEEN_S, SEEN_POLL_S = 10.0, 0.1
"""A network file system shows a new file to other nodes within the first of these times; a rank looks for it at
intervals of the second (s)."""
LEASE_BYTES_MAX = 64 << 10
NO_IDENTITY = ("", "none")
"""Run ids that identify nothing: torchrun's default is the same for every job."""

COUNTER = "{:020d}"
FREE = "free".ljust(20)
"""What stands in place of the counter when the lease was given back; as long as a counter."""
_NAME = re.compile(r"lease\.([0-9]{6,18})")


@dataclass(frozen=True)
class LeaseOwner:
    """The owner of a lease, as far as other jobs can identify it."""

    run_id: str = ""
    host: str = ""
    pid: int = 0
    machine: str = ""
    """The boot and the process namespace: if both are equal here, the pid means the same process."""
    started: str = ""
    """The start time of the process, in the kernel's ticks: a pid is reused, a pid with its start is not."""
    job_uid: str = ""
    """The identity of the job under holdfast; empty: something else has started the process."""
    folder_id: str = ""
    """A random word that identifies the folder. Each lease takes it from the one before. A folder that was removed and
    made again has another one: states in memory that were saved for the old folder do not belong to it."""

    @classmethod
    def me(cls, run_id: str, job_uid: str) -> LeaseOwner:
        """The owner that this process is."""
        return cls(run_id, os.uname().nodename, os.getpid(), _machine(), _started(os.getpid()), job_uid)

    def same_run(self, other: LeaseOwner) -> bool:
        """Whether both belong to one run that has an identity."""
        return self.run_id == other.run_id and self.run_id not in NO_IDENTITY

    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return bool(self.machine) and self.machine == _machine()

    def is_dead(self) -> bool:
        """Whether it is certain that this owner has ended: it was a process of this machine, and is gone."""
        if not self.is_here():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return _started(self.pid) != self.started

    def ended_before(self, other: LeaseOwner) -> bool:
        """Whether this owner was a process of an earlier generation of the same job: none of those is left. One on this
        machine is left to `is_dead`, which knows."""
        return bool(self.job_uid) and self.job_uid == other.job_uid and not self.is_here()

    def __str__(self) -> str:
        run = "a job without a name" if self.run_id in NO_IDENTITY else f"job {self.run_id!r}"
        return f"{run} (process {self.pid} on {self.host})" if self.host else "another job"


class _Seen(NamedTuple):
    """A lease as it was read."""

    number: int
    text: str

    @property
    def owner(self) -> LeaseOwner:
        """The writer of the lease; an empty owner when that is unreadable (it was being written)."""
        try:
            found = json.loads(self.text.partition("\n")[0])
            return LeaseOwner(**{each.name: found[each.name] for each in fields(LeaseOwner) if each.name in found})
        except (ValueError, TypeError):
            return LeaseOwner()

    @property
    def free(self) -> bool:
        """Whether its owner has given it back."""
        return self.text.partition("\n")[2].startswith(FREE)


class _LeaseFile:
    """Our lease's open file. `line` is what it begins with: the owner."""

    def __init__(self, path: Path, fd: int, line: bytes) -> None:
        self._path, self._fd, self.line = path, fd, line

    def check(self) -> None:
        """Raise FileNotFoundError if the file is not there any more, or is another one. OSError."""
        if not os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
            raise FileNotFoundError

    def put(self, counter: str) -> None:
        """Write the counter. OSError."""
        os.pwrite(self._fd, counter.encode(), len(self.line))
        # On a network file system another node sees it only after it has left this node.
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class _LeaseObject:
    """Our lease's object in an object store. `line` is what it begins with: the owner."""

    def __init__(self, path: RemotePath, line: bytes) -> None:
        self._path, self.line = path, line

    def check(self) -> None:
        """Raise SnapshotBusyError if the object is not ours any more: a store without conditional puts may have let
        another job replace it. OSError."""
        with contextlib.suppress(FileNotFoundError):  # the next beat makes it again
            if not (text := self._path.read(0, LEASE_BYTES_MAX)).startswith(self.line):
                raise _busy(self._path.parent, _Seen(0, text.decode(errors="replace")).owner, same_run=False)

    def put(self, counter: str) -> None:
        """Write the counter. OSError."""
        self._path.put(self.line + counter.encode())

    def close(self) -> None:
        pass


class FolderLease:
    """The lease of a folder, held until `release`; its own thread advances the counter. See `acquire`."""

    def __init__(
        self, folder: Location, number: int, file: _LeaseFile | _LeaseObject, beat_s: float, folder_id: str = ""
    ) -> None:
        self._folder = folder
        self.folder_id = folder_id
        """See LeaseOwner."""
        self.number = number
        """The lease's number, larger than that of every earlier lease of this folder."""
        self._file = file
        self._beat_s = beat_s
        self._problem: SnapshotError | None = None
        """The problem that the thread has found; None: the lease is ours."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="holdfast-lease", daemon=True)
        self._thread.start()

    @property
    def line(self) -> str:
        """The first line of the lease's file: no other lease has the same."""
        return self._file.line.decode()

    def check(self) -> None:
        """Raise the problem that the thread has found. SnapshotBusyError: another job took the folder. Two problems may
        end by themselves: SnapshotFolderError, the folder has vanished; SnapshotWriteError, the counter could not be
        written for a long time. One failed beat is no problem."""
        if self._problem is not None:
            raise self._problem

    def confirm(self) -> None:
        """Look into the folder now, before a write. Raises SnapshotBusyError, SnapshotFolderError,
        SnapshotWriteError."""
        if isinstance(self._folder, RemotePath):
            return self.check()  # training must not wait for an object store
        try:
            self._check_folder()
        except OSError as error:
            raise disk.write_error(error, self._folder) from error
        return None

    def _check_folder(self) -> None:
        """Make sure that this lease is the folder's newest. Raises OSError, and the errors of `confirm`."""
        try:
            newest = _newest(self._folder)
            if newest is not None and newest.number != self.number:
                raise SnapshotBusyError(
                    f"{self._folder} was taken over by {newest.owner}: each job needs a folder of its own"
                )
            self._file.check()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise disk.vanished(self._folder) from error

    def release(self) -> None:
        """Give the lease back: the next job need not wait. It may be called again."""
        if self._ending.is_set():
            return
        self._ending.set()
        # A disk that does not answer must not block us: the thread is a daemon, and then the file stays open.
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            with contextlib.suppress(OSError):
                if self._problem is None:  # otherwise the file may be another job's
                    self._file.put(FREE)
            self._file.close()

    def __enter__(self) -> FolderLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat_on(self) -> None:
        """Advance the counter until `release`, or until another job has taken the folder. Runs in the thread."""
        count = missed = 0
        while not self._ending.wait(self._beat_s):
            count += 1
            try:
                self._check_folder()
                self._file.put(COUNTER.format(count))
            except SnapshotBusyError as error:
                self._problem = error
                return
            except SnapshotError as error:
                self._problem = error
            except OSError as error:
                missed += 1
                if missed >= BEATS_MISSED_MAX:
                    self._problem = disk.write_error(error, self._folder / _name(self.number))
            else:
                missed, self._problem = 0, None


def acquire(
    folder: str | os.PathLike[str] | RemotePath,
    run_id: str,
    *,
    beat_s: float | None = None,
    poll_s: float | None = None,
    polls: int = POLLS,
    lost: int = 0,
    job_uid: str = "",
    wait: Callable[[float], object] = time.sleep,
) -> FolderLease:
    """Take the folder for the job with this run id; only rank 0 of a job does this.

    It waits up to `polls` × `poll_s` seconds for the counter of an owner that may be dead. `lost`: the number of a
    lease whose owner is known to have ended. `job_uid`: as in `Start`, if this process was started by holdfast. `wait`:
    called with the seconds to sleep. Raises SnapshotBusyError when a live job has the folder; SnapshotWriteError when
    it cannot be written."""
    path = location_of(folder)
    remote = isinstance(path, RemotePath)
    beat_s = beat_s or (REMOTE_BEAT_S if remote else BEAT_S)
    poll_s = poll_s or (REMOTE_POLL_S if remote else POLL_S)
    me = LeaseOwner.me(run_id, job_uid)
    try:
        disk.make_folder(path)
        while True:
            seen = _await_turn(path, me, poll_s, polls, lost, wait)
            number = seen.number + 1 if seen else 1
            folder_id = seen.owner.folder_id if seen else ""
            lease = _claim(path, number, replace(me, folder_id=folder_id or os.urandom(8).hex()), beat_s)
            if lease is not None:
                return lease
    except OSError as error:
        raise disk.write_error(error, path) from error


def owner(folder: str | os.PathLike[str] | RemotePath) -> LeaseOwner | None:
    """The owner of the folder, or the last one if it did not give the folder back; None: there is none. OSError."""
    seen = _newest(location_of(folder))
    return None if seen is None or seen.free else seen.owner


def is_seen(folder: str | os.PathLike[str], number: int, line: str, patience_s: float) -> bool:
    """Whether this process sees the lease that rank 0 has just taken: whether both have the same folder. It waits up to
    `patience_s` seconds for it."""
    path, deadline = Path(folder) / _name(number), time.monotonic() + patience_s
    while True:
        with contextlib.suppress(OSError):
            os.listdir(folder)  # a network file system asks its server again
            if path.read_bytes().startswith(line.encode()):
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(SEEN_POLL_S)


def is_of_another_folder(folder: Location, folder_id: str) -> bool:
    """Whether the folder was removed since it had this identity, and perhaps made again. False also when that is not
    known."""
    try:
        seen = _newest(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    known = "" if seen is None else seen.owner.folder_id  # empty also for a lease that is being written at this moment
    return seen is None or (bool(known) and known != folder_id)


def _await_turn(
    folder: Location, me: LeaseOwner, poll_s: float, polls: int, lost: int, wait: Callable[[float], object]
) -> _Seen | None:
    """Wait until the folder may be taken. Returns the lease that is taken over; None: there was none. Raises
    SnapshotBusyError when its owner lives."""
    before, unchanged, moves = None, 0, 0
    while True:
        seen = _newest(folder)
        if seen is None or seen.free or seen.number == lost or seen.owner.is_dead() or seen.owner.ended_before(me):
            return seen

        same_run = seen.owner.same_run(me)
        if before is not None and seen != before:
            unchanged, moves = 0, moves + 1
            if not same_run or moves == MOVES_SAME_RUN:
                raise _busy(folder, seen.owner, same_run=same_run)
        elif unchanged >= (POLLS_SAME_RUN if same_run else polls):
            # A process of this machine that has not ended is not dead, only stopped (SIGSTOP): it may go on.
            if seen.owner.is_here():
                raise _busy(folder, seen.owner, same_run=same_run)
            return seen
        before, unchanged = seen, unchanged + 1
        wait(poll_s)


def _busy(folder: Location, owner: LeaseOwner, *, same_run: bool) -> SnapshotBusyError:
    other = ", another one with the same --rdzv-id" if same_run else ""
    return SnapshotBusyError(f"{folder} is in use by {owner}{other}; give each job a folder of its own")


def _claim(folder: Location, number: int, me: LeaseOwner, beat_s: float) -> FolderLease | None:
    """Create the lease with this number; None when another job was faster."""
    path = folder / _name(number)
    line = json.dumps(asdict(me)).encode() + b"\n"
    before = folder / _name(number - 1) if number > 1 else None
    if (file := _create(path, line, before)) is None:
        return None
    try:
        newest = _newest(folder)
        if newest is None or newest.number != number:
            # Our number was taken before: since our listing other jobs took it, gave it back and cleared it away.
            disk.delete(path)
            file.close()
            return None
    except OSError:
        file.close()
        disk.delete(path)
        raise

    for older in _numbers(folder):
        if older < number:
            with contextlib.suppress(OSError):
                disk.delete(folder / _name(older))
    return FolderLease(folder, number, file, beat_s, me.folder_id)


def _create(path: Location, line: bytes, before: Location | None) -> _LeaseFile | _LeaseObject | None:
    """Make the lease's file; None: it exists. `before`: the file of the lease before. OSError."""
    first = line + COUNTER.format(0).encode()
    if isinstance(path, RemotePath):
        # A random counter: two threads of one process would otherwise write equal objects (`RemotePath.create`).
        first = line + COUNTER.format(random.getrandbits(60)).encode()
        return _LeaseObject(path, line) if path.create(first) else None

    # On a full disk the file of the lease before is used again: a job must be able to resume, and to delete snapshots.
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or before is None:
            raise
        return _take_over(cast("Path", before), path, line)
    try:
        os.pwrite(fd, first, 0)
        os.fsync(fd)
    except OSError as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or before is None:
            raise
        return _take_over(cast("Path", before), path, line)
    return _LeaseFile(path, fd, line)


def _take_over(before: Path, path: Path, line: bytes) -> _LeaseFile | None:
    """Give the file of the lease before, which has ended, the new lease's name and content: on a full disk that needs
    no space. None: another job was faster. OSError."""
    try:
        os.link(before, path)  # exclusive, as O_EXCL
    except FileExistsError:
        return None
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, line + COUNTER.format(0).encode(), 0)
        os.fsync(fd)
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return _LeaseFile(path, fd, line)


def _newest(folder: Location) -> _Seen | None:
    """The lease with the highest number; None: there is none. OSError."""
    while True:
        number = max(_numbers(folder), default=None)
        if number is None:
            return None
        with contextlib.suppress(FileNotFoundError):  # it was replaced since the listing
            path = folder / _name(number)
            data = (
                path.read(0, LEASE_BYTES_MAX) if isinstance(path, RemotePath) else path.read_bytes()[:LEASE_BYTES_MAX]
            )
            return _Seen(number, data.decode(errors="replace"))


def _numbers(folder: Location) -> list[int]:
    return [int(found[1]) for name in disk.listed(folder) if (found := _NAME.fullmatch(name))]


def _name(number: int) -> str:
    return f"lease.{number:06d}"


def _machine() -> str:
    """The boot and the process namespace of this process; empty: unknown."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _started(pid: int) -> str:
    """The start time of a process; empty when it is dead (a zombie too) or not visible."""
    stat = process_stat(pid)
    return stat.started if stat is not None and not stat.has_ended else ""
