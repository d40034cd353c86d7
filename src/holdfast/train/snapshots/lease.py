"""One job per snapshot folder: a file `lease.000003` that names its owner, and a counter in it that a live owner
advances.

The file with the highest number is the lease. A job takes it by creating the next number with O_EXCL, so one of several
contenders wins, and an owner that sees a higher number than its own knows that it has lost.

When another job may take the lease over:
- at once: it was given back; or its owner was a process of this machine that has ended; or it was a process of an
  earlier generation of the same job, none of which is left when holdfast starts another one; or the caller knows that
  the owner is lost (in `ht.survive` the other ranks have gone on, so the launcher has made sure of it);
- after LOOKS reads of an unchanged counter, LOOK_S apart, or LOOKS_SAME_RUN when the owner has the same run id: the
  owner is dead. (Two jobs may have one run id: the newer one may be a node that came back alone);
- otherwise never: a counter that moves, or a living process of this machine, is a SnapshotBusyError.

In an object store the file is an object: a conditional put creates it, and the counter advances by writing it again,
every REMOTE_BEAT_S. A store without conditional puts has no exclusive beginning: of two jobs that begin in the same
moment both go on until the first beat of the one whose lease the other has replaced.

Clocks of two machines are never compared. An owner on another machine that is frozen longer than that loses the lease
and learns it at its next `check`; the snapshots that both saved meanwhile are whole, because attempts are exclusive."""

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
from holdfast.train.snapshots.remote import Place, RemotePath, place_of

FOLDER_ID = "folder_id"
"""In the note of a request to save: the folder for which it was made."""
BEAT_S = 2.0
"""How often a live owner advances its counter."""
LOOK_S = 2.0
REMOTE_BEAT_S = REMOTE_LOOK_S = 5.0
"""Each beat is three requests, which cost money."""
LOOKS = 10
LOOKS_SAME_RUN = 3
"""More than one beat; a restart on another node waits this long."""
MOVES_SAME_RUN = 2
"""The first change may be the last beat of a dead owner, which a network file system shows late."""
BEATS_MISSED_MAX = 10
"""Failed beats in a row; then others may take the folder, and `check` reports it."""
JOIN_S = 5.0
SEEN_S, SEEN_LOOK_S = 10.0, 0.1
"""A network file system shows a new file to other nodes after some seconds at most."""
LEASE_BYTES_MAX = 64 << 10
NO_IDENTITY = ("", "none")
"""Run ids that identify nothing: torchrun's default is the same for every job."""

COUNTER = "{:020d}"
FREE = "free".ljust(20)
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
    """When the process started, in the kernel's ticks: a pid is reused, a pid with its start is not."""
    job_uid: str = ""
    """Of the job under holdfast; empty: it is started by something else."""
    folder_id: str = ""
    """A random word for the folder, which each lease hands on to the next one. A folder that was made again has another
    one: states in memory of the one before do not belong to it."""

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
        """Whether it certainly has ended: a process of this machine that is gone."""
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
        """Whether it was a process of an earlier generation of the same job: rank 0 of this one is on one machine."""
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
        return self.text.partition("\n")[2].startswith(FREE)


class _LeaseFile:
    """The lease's open file."""

    def __init__(self, path: Path, fd: int, line: bytes) -> None:
        self._path, self._fd, self.line = path, fd, line

    def look(self) -> None:
        """It is still there. FileNotFoundError, OSError."""
        if not os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
            raise FileNotFoundError

    def put(self, counter: str) -> None:
        os.pwrite(self._fd, counter.encode(), len(self.line))
        # Another node sees it only after it has left this node.
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class _LeaseObject:
    """The lease's object."""

    def __init__(self, path: RemotePath, line: bytes) -> None:
        self._path, self.line = path, line

    def look(self) -> None:
        """It is still ours: a store without conditional puts may have let another job replace it. OSError."""
        with contextlib.suppress(FileNotFoundError):  # the next beat makes it again
            if not (text := self._path.read(0, LEASE_BYTES_MAX)).startswith(self.line):
                raise _busy(self._path.parent, _Seen(0, text.decode(errors="replace")).owner, same_run=False)

    def put(self, counter: str) -> None:
        self._path.put(self.line + counter.encode())

    def close(self) -> None:
        pass


class FolderLease:
    """The lease of a folder, held until `release`; its own thread advances the counter. See `acquire`."""

    def __init__(
        self, folder: Place, number: int, file: _LeaseFile | _LeaseObject, beat_s: float, folder_id: str = ""
    ) -> None:
        self._folder = folder
        self.folder_id = folder_id
        """See LeaseOwner."""
        self.number = number
        """Larger than that of every earlier lease of this folder."""
        self._file = file
        self._beat_s = beat_s
        self._trouble: SnapshotError | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="holdfast-lease", daemon=True)
        self._thread.start()

    @property
    def line(self) -> str:
        """What the lease's file begins with: no other lease has the same."""
        return self._file.line.decode()

    def check(self) -> None:
        """Raise the problem that the thread has found. SnapshotBusyError: another job took the folder. While it lasts:
        SnapshotFolderError, the folder has vanished; SnapshotWriteError, the counter could not be written for long. One
        failed beat is no problem."""
        if self._trouble is not None:
            raise self._trouble

    def confirm(self) -> None:
        """Check now, before a write. SnapshotBusyError, SnapshotFolderError, SnapshotWriteError."""
        if isinstance(self._folder, RemotePath):
            return self.check()  # training must not wait for an object store
        try:
            self._look()
        except OSError as error:
            raise disk.write_error(error, self._folder) from error
        return None

    def _look(self) -> None:
        """OSError, in addition to the errors of `confirm`."""
        try:
            newest = _newest(self._folder)
            if newest is not None and newest.number != self.number:
                raise SnapshotBusyError(
                    f"{self._folder} was taken over by {newest.owner}: each job needs a folder of its own"
                )
            self._file.look()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise disk.vanished(self._folder) from error

    def release(self) -> None:
        """Give the lease back; the next job need not wait. May be called again."""
        if self._ending.is_set():
            return
        self._ending.set()
        # A stalled disk must not block us: the thread is a daemon, and the last user closes the file.
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            with contextlib.suppress(OSError):
                if self._trouble is None:
                    self._file.put(FREE)
            self._file.close()

    def __enter__(self) -> FolderLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat_on(self) -> None:
        count = missed = 0
        while not self._ending.wait(self._beat_s):
            count += 1
            try:
                self._look()
                self._file.put(COUNTER.format(count))
            except SnapshotBusyError as error:
                self._trouble = error
                return
            except SnapshotError as error:
                self._trouble = error
            except OSError as error:
                missed += 1
                if missed >= BEATS_MISSED_MAX:
                    self._trouble = disk.write_error(error, self._folder / _name(self.number))
            else:
                missed, self._trouble = 0, None


def acquire(
    folder: str | os.PathLike[str] | RemotePath,
    run_id: str,
    *,
    beat_s: float | None = None,
    look_s: float | None = None,
    looks: int = LOOKS,
    lost: int = 0,
    job_uid: str = "",
    wait: Callable[[float], object] = time.sleep,
) -> FolderLease:
    """Take the folder for the job with this run id; only its rank 0 does. `lost`: the number of a lease whose owner is
    known to have ended. `job_uid`: as in `Start`, if this process was started by holdfast.

    Waits up to `looks` × `look_s` seconds for the counter of an owner that may be dead.
    SnapshotBusyError when a live job has it; SnapshotWriteError when it cannot be written."""
    path = place_of(folder)
    remote = isinstance(path, RemotePath)
    beat_s = beat_s or (REMOTE_BEAT_S if remote else BEAT_S)
    look_s = look_s or (REMOTE_LOOK_S if remote else LOOK_S)
    me = LeaseOwner.me(run_id, job_uid)
    try:
        disk.make_folder(path)
        while True:
            seen = _await_turn(path, me, look_s, looks, lost, wait)
            number = seen.number + 1 if seen else 1
            folder_id = seen.owner.folder_id if seen else ""
            lease = _claim(path, number, replace(me, folder_id=folder_id or os.urandom(8).hex()), beat_s)
            if lease is not None:
                return lease
    except OSError as error:
        raise disk.write_error(error, path) from error


def owner(folder: str | os.PathLike[str] | RemotePath) -> LeaseOwner | None:
    """The owner of the folder, or the last one if it did not give it back; None: there is none."""
    seen = _newest(place_of(folder))
    return None if seen is None or seen.free else seen.owner


def is_seen(folder: str | os.PathLike[str], number: int, line: str, patience_s: float) -> bool:
    """Whether this process sees the lease that rank 0 has just taken: whether both see one folder."""
    path, deadline = Path(folder) / _name(number), time.monotonic() + patience_s
    while True:
        with contextlib.suppress(OSError):
            os.listdir(folder)  # a network file system asks its server again
            if path.read_bytes().startswith(line.encode()):
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(SEEN_LOOK_S)


def is_of_another_folder(folder: Place, folder_id: str) -> bool:
    """Whether the folder was removed since it had this identity, and perhaps made again. False: nobody knows."""
    try:
        seen = _newest(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    known = "" if seen is None else seen.owner.folder_id  # also empty: it is being written at this moment
    return seen is None or (bool(known) and known != folder_id)


def _await_turn(
    folder: Place, me: LeaseOwner, look_s: float, looks: int, lost: int, wait: Callable[[float], object]
) -> _Seen | None:
    """The lease that may be taken over now; None when there is none. SnapshotBusyError."""
    before, stood, moves = None, 0, 0
    while True:
        seen = _newest(folder)
        if seen is None or seen.free or seen.number == lost or seen.owner.is_dead() or seen.owner.ended_before(me):
            return seen
        same_run = seen.owner.same_run(me)
        if before is not None and seen != before:
            stood, moves = 0, moves + 1
            if not same_run or moves == MOVES_SAME_RUN:
                raise _busy(folder, seen.owner, same_run=same_run)
        elif stood >= (LOOKS_SAME_RUN if same_run else looks):
            if seen.owner.is_here():
                raise _busy(folder, seen.owner, same_run=same_run)
            return seen
        before, stood = seen, stood + 1
        wait(look_s)


def _busy(folder: Place, owner: LeaseOwner, *, same_run: bool) -> SnapshotBusyError:
    other = ", another one with the same --rdzv-id" if same_run else ""
    return SnapshotBusyError(f"{folder} is in use by {owner}{other}; give each job a folder of its own")


def _claim(folder: Place, number: int, me: LeaseOwner, beat_s: float) -> FolderLease | None:
    """Create the lease with this number; None when another job was faster."""
    path = folder / _name(number)
    line = json.dumps(asdict(me)).encode() + b"\n"
    before = folder / _name(number - 1) if number > 1 else None
    if (file := _create(path, line, before)) is None:
        return None
    try:
        newest = _newest(folder)
        if newest is None or newest.number != number:
            # Meanwhile other jobs took, gave back and cleared away the number that we made.
            disk.delete(path)
            file.close()
            return None
    except OSError:
        file.close()
        disk.delete(path)
        raise
    for name in _numbers(folder):
        if name < number:
            with contextlib.suppress(OSError):
                disk.delete(folder / _name(name))
    return FolderLease(folder, number, file, beat_s, me.folder_id)


def _create(path: Place, line: bytes, before: Place | None) -> _LeaseFile | _LeaseObject | None:
    """Make the lease's file; None: there is one. `before`: the file of the lease before. OSError."""
    first = line + COUNTER.format(0).encode()
    if isinstance(path, RemotePath):
        first = line + COUNTER.format(random.getrandbits(60)).encode()  # unlike that of any other thread
        return _LeaseObject(path, line) if path.create(first) else None
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
    """On a full disk: make the file of the lease before, which has ended, that of the new one. None: another job was
    faster. OSError."""
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


def _newest(folder: Place) -> _Seen | None:
    while True:
        number = max(_numbers(folder), default=None)
        if number is None:
            return None
        with contextlib.suppress(FileNotFoundError):
            path = folder / _name(number)
            data = (
                path.read(0, LEASE_BYTES_MAX) if isinstance(path, RemotePath) else path.read_bytes()[:LEASE_BYTES_MAX]
            )
            return _Seen(number, data.decode(errors="replace"))


def _numbers(folder: Place) -> list[int]:
    return [int(found[1]) for name in disk.listed(folder) if (found := _NAME.fullmatch(name))]


def _name(number: int) -> str:
    return f"lease.{number:06d}"


def _machine() -> str:
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _started(pid: int) -> str:
    """The start time of a process; empty when it is dead (a zombie too) or not visible."""
    stat = process_stat(pid)
    return stat.started if stat is not None and not stat.has_ended else ""
