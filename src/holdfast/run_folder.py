"""The run folder of one agent: its name, and the folders in it.

Knows names and modes. Must not know who writes or reads the files, or where lines are shown.

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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast import own_folders
from holdfast.protocol.errors import LogDirError
from holdfast.text import spoken

if TYPE_CHECKING:
    from holdfast.protocol.options import LogOptions

RUN_ID_BYTES_MAX = 200
"""Length of a run id in a file name, which may have 255 bytes with the random suffix."""
SUFFIX_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
SUFFIX_LENGTH = 8
NAME_TRIES_MAX = 100
TEMPORARY_NAME = "holdfast-runs-"
PROFILES = "profiles"


class WorkerSlot(NamedTuple):
    """One worker of this node in the next attempt."""

    local_rank: int
    rank: int


class RunFolder:
    """The folder of one run on this node. holdfast never deletes or reuses anything in it."""

    def __init__(self, path: Path | None, why_none: str = "--log-dir /dev/null", notice: str = "") -> None:
        self.path = path
        """The folder; None: there are no files at all."""
        self.why_none = why_none
        """The reason why there are no files, for messages."""
        self.notice = notice
        """A line for the user if the folder is not where it was to be; empty: it is."""
        self._attempts: dict[int, Path] = {}
        """The folder of each generation's attempt."""

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
        """The folder of this attempt; asking again for a generation gives the same one. The mover of the logs makes
        it: no disk can delay a generation.

        A membership change starts a generation without counting a restart: it gets a folder of its own.
        """
        if self.path is None:
            return None
        if generation not in self._attempts:
            first = self.path / f"attempt_{restart_count}"
            own = self.path / f"{first.name}_generation_{generation}"
            self._attempts[generation] = own if first in self._attempts.values() else first
        return self._attempts[generation]


def _make_run(parent: Path, run_id: str) -> Path:
    """Make a run folder in this one. Raises LogDirError."""
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
"""Folders of the kernel, in which root has every permission, but no folder can be made."""


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
    folder = os.path.join(own_folders.temporary(os.environ), f"{TEMPORARY_NAME}{os.geteuid()}")
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
    for _ in range(NAME_TRIES_MAX):
        path = parent / f"{name}_{_random_suffix()}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
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
