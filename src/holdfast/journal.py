"""The journal of one agent: events.jsonl in its run folder, one JSON object per line, for people and tools.

It never makes its caller wait: a disk that stalls costs events, never training. Must not know what the events mean.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

JOURNAL_NAME = "events.jsonl"
EVENTS_MAX = 10_000
"""Number of events that wait to be written; more are dropped and counted."""
CLOSE_S_MAX = 1.0

Listener = Callable[[str, Mapping[str, Any]], None]
"""A function that gets an event's name and fields. It must neither block nor raise."""


class Journal:
    """An append-only file of events. Its thread starts with the first event, and opens the file."""

    def __init__(self, path: Path | str | None) -> None:
        """`path` is None for `--log-dir /dev/null`: all events are dropped silently."""
        self._path = path
        self._news = threading.Condition()
        """Guards the fields below; notified when there are lines, when they are written, and at the end."""
        self._lines: deque[bytes] = deque()
        """The events that wait to be written."""
        self._writing = False
        """Whether the thread is writing lines that it has taken from the queue."""
        self._dropped = 0
        """Number of events that were lost because the queue was full or the disk failed, and not recorded yet."""
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
        """Write the queued events. Returns False if that took longer than `drain_s_max`."""
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
    """Write all of it or nothing: half a line at a full disk would spoil the next one, too. Raises OSError."""
    size = os.fstat(fd).st_size
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


def _encode(event: str, fields: dict[str, object]) -> bytes:
    import json  # here, since most modules that import this one never write

    own: dict[str, object] = {"time": time.time(), "monotonic": time.monotonic(), "event": event}
    record = own | {name: value for name, value in fields.items() if name not in own}
    try:
        text = json.dumps(record, default=str, allow_nan=False)
    except (TypeError, ValueError):  # keys that are not strings, NaN, a cycle
        text = json.dumps(own | {name: str(value) for name, value in fields.items() if name not in own})
    return text.encode() + b"\n"
