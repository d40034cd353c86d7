"""The run folder of one agent: the places of the workers' logs, and the journal of this node's events.

`RunFolder` knows names and modes. It must not know who writes or reads the files, or where lines are shown. `Journal`
writes events.jsonl, one JSON object per line, for people and tools. It never makes its caller wait: a disk that stalls
costs events, never training. It must not know what the events mean.

    <log_dir>/<run_id>_<8 random>/               mode 0700, kept; a job without a run id: brave-otter_<8 random>
      events.jsonl verdict.json control.sock
      attempt_<restart_count>/                   attempt_<restart_count>_generation_<g> when the first name is taken
        <local_rank>/stdout.log stderr.log error.json
        <local_rank>.<n>/                        the same of its nth replacement in this attempt
        filtered_stdout.log filtered_stderr.log
      stacks/ profiles/<time>/                   what commands and hangs have made
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import own_folders
from holdfast.protocol.errors import LogDirError
from holdfast.text import spoken

if TYPE_CHECKING:
    from holdfast.protocol.options import LogOptions

RUN_ID_BYTES_MAX = 200
"""A file name may have 255 bytes; the random suffix needs some of them."""
SUFFIX_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
SUFFIX_LENGTH = 8
NAME_TRIES_MAX = 100
TEMPORARY_NAME = "holdfast-runs-"


class WorkerSlot(NamedTuple):
    """One worker of this node in the next attempt."""

    local_rank: int
    rank: int


class RunFolder:
    """The folder of one run on this node. holdfast never deletes or reuses anything in it."""

    def __init__(self, path: Path | None, why_none: str = "--log-dir /dev/null", notice: str = "") -> None:
        self.path = path
        """None: there are no files at all."""
        self.why_none = why_none
        self.notice = notice
        """For the user: why the folder is not where it was to be."""
        self._attempts: dict[int, Path] = {}

    @classmethod
    def create(cls, options: LogOptions, run_id: str) -> RunFolder:
        """Make `<log_dir>/<run_id>_<8 random>/`, with its parents. Raises LogDirError.

        A default folder whose disk is full or read-only ends no job: the temporary folder takes its place, and where
        that is not possible either, there are no files.
        """
        if options.log_dir is None:
            return cls(None)
        parent = Path(os.path.abspath(options.log_dir))
        try:
            return cls(_make_run(parent, run_id))
        except LogDirError as error:
            if options.log_dir_named:
                raise
            why = str(error).partition(";")[0]
        other = Path(temporary_log_dir())
        try:
            made = _make_run(other, run_id)
            return cls(made, notice=f"{why}. The logs of this run go to {made.parent}.")
        except LogDirError as error:
            notice = f"{why}, and {str(error).partition(';')[0]}. This run has no log files."
            return cls(None, why_none="no log folder can be written", notice=notice)

    def attempt(self, generation: int, restart_count: int) -> Path | None:
        """The folder of this attempt, made if the disk allows; asking again for a generation gives the same one.

        A membership change starts a generation without counting a restart: it gets a folder of its own.
        """
        if self.path is None:
            return None
        if generation not in self._attempts:
            first = f"attempt_{restart_count}"
            names = (first, f"{first}_generation_{generation}")
            try:
                made = make_first(self.path, names)
            except OSError:  # what writes into it makes it when the disk allows
                made = self.path / names[(self.path / first) in self._attempts.values()]
            self._attempts[generation] = made
        return self._attempts[generation]


def _make_run(parent: Path, run_id: str) -> Path:
    """Raises LogDirError."""
    try:
        if parent.name.startswith(TEMPORARY_NAME):
            parent = _own_temporary(parent)
        else:
            parent.mkdir(parents=True, exist_ok=True)
        return _make_unique(parent, safe_name(spoken(run_id)))
    except (FileExistsError, NotADirectoryError) as error:
        raise LogDirError(f"--log-dir {parent} is not a folder: {_file_in_the_way(parent)} is a file.") from error
    except OSError as error:
        text = f"the log folder {parent} cannot be written: {error.strerror}; --log-dir names another one"
        raise LogDirError(text) from error


KERNEL_FOLDERS = ("/proc", "/sys")
"""Root has every permission there, but no folder can be created."""


def default_log_dir() -> str:
    """The folder for runs without --log-dir: the user's state folder; if that is not writable, one in the current
    folder, unless another user has put it there; else a folder of this user in the temporary folder."""
    candidates = (os.environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~/.local/state"))
    for base in candidates:
        # The XDG standard says to ignore a relative path; expanduser leaves "~" when the home folder is unknown.
        if os.path.isabs(base) and _can_be_made(base):
            return os.path.join(base, "holdfast", "runs")
    with contextlib.suppress(OSError):  # the current folder was deleted
        here = os.path.abspath(os.path.join("holdfast", "runs"))
        if _can_be_made(here) and not _is_planted(here):
            return here
    return temporary_log_dir()


def temporary_log_dir() -> str:
    """A folder in the temporary folder. Other users can create files there, so this user must own it."""
    temporary = os.environ.get("TMPDIR", "")
    folder = os.path.join(temporary if os.path.isdir(temporary) else "/tmp", f"{TEMPORARY_NAME}{os.geteuid()}")
    try:
        with own_folders.private(folder, others=0o022):
            return folder
    except FileNotFoundError:
        return folder
    except OSError:
        return f"{folder}-{os.urandom(4).hex()}"


def _own_temporary(folder: Path) -> Path:
    """Make this folder of temporary_log_dir; another name if another user was faster. Who owns a folder above the run
    folder can put a link in its place. Raises OSError."""
    for path in (folder, folder.with_name(f"{folder.name}-{os.urandom(4).hex()}")):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with contextlib.suppress(NotADirectoryError, PermissionError), own_folders.private(path, others=0o022):
            return path
    raise FileExistsError(17, "another user takes each name", str(folder))


def safe_name(run_id: str) -> str:
    """The run id as part of a file name.

    >>> safe_name("team/run 1")
    'team_run_1'
    """
    name = re.sub(r"[^\w.@=+,:-]", "_", run_id)
    return name.encode()[:RUN_ID_BYTES_MAX].decode(errors="ignore")


def _make_unique(parent: Path, name: str) -> Path:
    names = [f"{name}_{_random_suffix()}" for _ in range(NAME_TRIES_MAX)]
    return make_first(parent, names, mode=0o700)


def make_first(parent: Path, names: Iterable[str], mode: int = 0o777) -> Path:
    """Make the first of these folders that does not exist yet."""
    for name in names:
        try:
            (parent / name).mkdir(mode=mode)
        except FileExistsError:
            continue
        return parent / name
    raise FileExistsError(17, "all names are taken", str(parent))


def _random_suffix() -> str:
    # Not tempfile.mkdtemp: it would load shutil and the compression modules into the agent.
    return "".join(SUFFIX_ALPHABET[byte % len(SUFFIX_ALPHABET)] for byte in os.urandom(SUFFIX_LENGTH))


def _can_be_made(folder: str) -> bool:
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    in_kernel = os.path.realpath(folder).startswith(KERNEL_FOLDERS)
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK) and not in_kernel


def _is_planted(runs: str) -> bool:
    """Whether `holdfast/runs` is in a folder such as /tmp, and another user has made it, or a link of that name."""
    holdfast = os.path.dirname(runs)
    if not os.stat(os.path.dirname(holdfast)).st_mode & stat.S_IWOTH:
        return False
    there = [os.lstat(path) for path in (holdfast, runs) if os.path.lexists(path)]
    return any(found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) for found in there)


def _file_in_the_way(path: Path) -> Path:
    """The part of the path that exists and is not a folder."""
    return next((part for part in (path, *path.parents) if part.exists() and not part.is_dir()), path)


JOURNAL_NAME = "events.jsonl"
PROFILES = "profiles"
EVENTS_MAX = 10_000
"""Events that wait to be written; more are dropped and counted."""
CLOSE_S_MAX = 1.0

Listener = Callable[[str, Mapping[str, Any]], None]
"""Gets an event's name and its fields; must neither block nor raise."""


class Journal:
    """An append-only file of events. Its thread starts with the first event, and opens the file."""

    def __init__(self, path: Path | str | None) -> None:
        """`path` None: all events are dropped silently (`--log-dir /dev/null`)."""
        self._path = path
        self._news = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._writing = False
        self._dropped = 0
        """Events lost because the queue was full or the disk failed, and not yet recorded."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call the listener with every event from now on, also without a file, in the thread that writes the event."""
        self._listeners.append(listener)

    def write(self, event: str, /, **fields: object) -> None:
        """Append one event with `time` (epoch seconds), `monotonic` (seconds), `event` and the fields.

        Never blocks, never raises. A value that JSON does not know is written as its `str`.
        """
        for listener in list(self._listeners):
            try:
                listener(event, fields)
            except Exception as error:  # noqa: BLE001 - a listener only watches
                self._listeners.remove(listener)
                self.fault("listener", error)
        if self._path is None:
            return
        line = _encode(event, fields)
        with self._news:
            if self._closed:
                return
            if len(self._lines) >= EVENTS_MAX:
                self._dropped += 1
                return
            self._lines.append(line)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="holdfast-journal", daemon=True)
                thread.start()
                self._thread = thread
            self._news.notify_all()

    def fault(self, what: str, error: Exception) -> None:
        """Record a fault of a part that only watches or shows: the job continues."""
        self.write("observer_fault", what=what, error=f"{type(error).__name__}: {error}")

    def close(self, drain_s_max: float = CLOSE_S_MAX) -> bool:
        """Write the queued events; False if that took longer than `drain_s_max`."""
        with self._news:
            self._closed = True
            self._news.notify_all()
            return self._news.wait_for(lambda: not (self._lines or self._writing), drain_s_max)

    def _run(self) -> None:
        fd = -1
        while True:
            with self._news:
                self._writing = False
                self._news.notify_all()
                self._news.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    break
                lines, dropped = list(self._lines), self._dropped
                self._lines.clear()
                self._dropped, self._writing = 0, True
            if dropped:
                lines.append(_encode("journal_dropped", {"count": dropped}))
            try:
                if fd < 0:
                    fd = self._open()
                _append(fd, b"".join(lines))
            except OSError:
                with self._news:
                    self._dropped += len(lines) - bool(dropped) + dropped
        if fd >= 0:
            os.close(fd)

    def _open(self) -> int:
        assert self._path is not None
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _append(fd: int, data: bytes) -> None:
    """All of it or nothing: half a line at a full disk would spoil the next one, too. OSError."""
    size = os.fstat(fd).st_size
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


def _encode(event: str, fields: dict[str, object]) -> bytes:
    import json  # lazily: most importers never write

    own: dict[str, object] = {"time": time.time(), "monotonic": time.monotonic(), "event": event}
    record = own | {name: value for name, value in fields.items() if name not in own}
    try:
        text = json.dumps(record, default=str, allow_nan=False)
    except (TypeError, ValueError):  # keys that are not strings, NaN, a cycle
        text = json.dumps(own | {name: str(value) for name, value in fields.items() if name not in own})
    return text.encode() + b"\n"
