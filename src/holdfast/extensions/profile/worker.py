"""Takes a profile of this process when its agent orders one: torch's profiler around the next steps or seconds.

Loaded by the bootstrap, by its path, when the first order comes: a worker that is never profiled does not have it.
The bootstrap sets the name `layout` to protocol/board_layout.py. torch is the one that the program has imported.

The order is one line of JSON in a file in the agent's memory, so that no disk delays it:

    {"folder": where the files go, "name": "rank3", "steps": 5, "for_s": 0.0}      steps 0: for_s counts

The worker appends what happens, a line each: {"is": "began"}, {"is": "stopped"}, and at last one of {"is": "done",
"files", "operations"} and {"is": "failed", "why"}. A thread writes the files, while the program goes on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.protocol import board_layout as layout  # noqa: TC004 - the bootstrap puts it here

OPERATIONS_SHOWN = 10
MEMORY_EVENTS_MAX = 100_000
"""Number of allocations in a memory snapshot of CUDA."""
ORDER_BYTES_MAX = 4096


class ProfileError(Exception):
    """The reason why there is no profile."""


class Profiler:
    """The profiles of this process, one at a time."""

    def __init__(self, agents_files: str) -> None:
        """`agents_files` is the folder with the agent's open files, in /proc."""
        self._files = agents_files
        self._seen = 0
        """The newest order; 0: none came."""
        self._profile: _Profile | None = None
        """The profile that is being taken; None: none is."""
        self._busy = False
        """Whether `follow` runs: a signal may interrupt it, and its handler calls it again."""

    def follow(self, order: int, *, stepped: bool) -> bool:
        """Begin or end a profile, as is ordered. `order` is the board's word (0: none), `stepped` says whether an
        optimizer has made a step. Returns whether to call this after each step."""
        if not self._busy:
            self._busy = True
            try:
                self._follow(order, stepped)
            finally:
                self._busy = False
        return self._profile is not None

    def _follow(self, order: int, stepped: bool) -> None:
        profile = self._profile
        if profile is not None and order == self._seen:
            if profile.is_due(stepped):
                self._profile = None
                profile.end()
            return
        if profile is not None:  # the order was withdrawn or replaced
            self._profile = None
            profile.give_up()

        if order in (0, self._seen):
            return
        self._seen = order
        try:
            file = os.open(f"{self._files}/{order & layout.PROFILE_FD}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            ordered = json.loads(os.pread(file, ORDER_BYTES_MAX, 0).split(b"\n")[0])
        except (OSError, ValueError):
            return  # the order was withdrawn meanwhile
        self._profile = _Profile.begun(file, ordered)


class _Profile:
    """One profile, from its beginning to its files."""

    def __init__(self, file: int, order: dict[str, Any]) -> None:
        self._file = file
        self._order = order
        self._thread = threading.get_ident()
        self._steps = int(order["steps"])
        torch = sys.modules.get("torch")
        if torch is None:
            raise ProfileError("its program has not imported torch")
        self._torch: Any = torch
        self._cuda = bool(torch.cuda.is_available() and torch.cuda.is_initialized())
        self._memory = self._cuda and _record_memory(torch)
        self._profiler = torch.profiler.profile()
        self._profiler.start()
        self._until_s = time.monotonic() + float(order["for_s"])

    @classmethod
    def begun(cls, file: int, order: dict[str, Any]) -> _Profile | None:
        """Begin a profile; None: it cannot begin, which was reported to the agent."""
        try:
            profile = cls(file, order)
        except Exception as error:  # noqa: BLE001 - a profile ends no training
            _append(file, {"is": "failed", "why": _describe(error)})
            os.close(file)
            return None
        _append(file, {"is": "began"})
        return profile

    def is_due(self, stepped: bool) -> bool:
        """Whether to end here. torch's profiler ends in the thread in which it began."""
        if threading.get_ident() != self._thread:
            return False
        if self._order["steps"]:
            self._steps -= stepped
            return self._steps <= 0
        return time.monotonic() >= self._until_s

    def end(self) -> None:
        """Stop, and write the files beside the program."""
        try:
            self._profiler.stop()
            _append(self._file, {"is": "stopped"})
            threading.Thread(target=self._finish, name="holdfast-profile").start()
        except Exception as error:  # noqa: BLE001
            self._close(error)

    def give_up(self) -> None:
        """Stop, and write nothing."""
        try:
            self._profiler.stop()
            self._close(None)
        except Exception as error:  # noqa: BLE001
            self._close(error)

    def _finish(self) -> None:
        try:
            files = [self._write("trace.json", self._write_trace)]
            where = "device" if self._cuda else "cpu"
            own = f"self_{where}_time_total"
            averages = self._profiler.key_averages()
            table = averages.table(sort_by=own, row_limit=OPERATIONS_SHOWN, max_name_column_width=100)
            files.append(self._write("operations.txt", lambda path: _write_text(path, table)))
            first = sorted(averages, key=lambda each: getattr(each, own), reverse=True)[:OPERATIONS_SHOWN]
            operations = [
                [each.key, each.count, getattr(each, own) / 1e6, getattr(each, f"{where}_time_total") / 1e6]
                for each in first
            ]
            if self._memory:
                files.append(self._write("memory.pickle", self._torch.cuda.memory._dump_snapshot))
            _append(self._file, {"is": "done", "files": files, "operations": operations})
        except Exception as error:  # noqa: BLE001
            self._close(error)
        else:
            self._close(None)

    def _write(self, kind: str, write: Callable[[str], object]) -> str:
        """Write a file whole or not at all. Returns its name."""
        path = os.path.join(self._order["folder"], f"{self._order['name']}.{kind}")
        temporary = os.path.join(self._order["folder"], f".{self._order['name']}.{os.getpid()}.{kind}")
        try:
            write(temporary)
            os.replace(temporary, path)
        except BaseException:
            for part in (temporary, f"{temporary}.tmp"):  # the second is kineto's
                if os.path.exists(part):
                    os.unlink(part)
            raise
        return os.path.basename(path)

    def _write_trace(self, path: str) -> None:
        self._profiler.export_chrome_trace(path)
        # torch reports no error of the disk: there is no file, or it ends early.
        end = b""
        if os.path.exists(path):
            with open(path, "rb") as file:
                file.seek(-min(64, file.seek(0, os.SEEK_END)), os.SEEK_END)
                end = file.read().rstrip()
        if not end.endswith(b"}"):
            raise ProfileError(f"the trace was not written: is the disk full? {os.path.dirname(path)}")

    def _close(self, error: Exception | None) -> None:
        if error is not None:
            _append(self._file, {"is": "failed", "why": _describe(error)})
        if self._memory:
            self._torch.cuda.memory._record_memory_history(enabled=None)
        os.close(self._file)


def _record_memory(torch: Any) -> bool:
    """Whether the allocations of CUDA are recorded for us: not where the program records them itself."""
    running = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None or (running is not None and running()):
        return False
    record(max_entries=MEMORY_EVENTS_MAX)
    return True


def _write_text(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _describe(error: Exception) -> str:
    if isinstance(error, ProfileError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or 'the files of the profile'}"
    return f"{type(error).__name__}: {error}"


def _append(file: int, what: dict[str, Any]) -> None:
    try:
        os.write(file, json.dumps(what).encode() + b"\n")
    except OSError:
        return  # the agent is gone
