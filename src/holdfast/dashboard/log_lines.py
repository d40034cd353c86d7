"""Lines of the workers' logs for a page: the last ones of each file, then new ones as they are written.

Bounded: so many files, so many bytes of each at once, so many lines in a message. What is left out is counted. Whole
files are served as they are. Blocking: called in a thread.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from holdfast.dashboard.job_source import Json, ShownJob
from holdfast.supervisor.log_fold import LineCutter

FILES_MAX = 64
LAST_BYTES = 256 * 1024
"""Of each file, at first and at once."""
SEARCHED_BYTES = 8 * 1024 * 1024
"""The same when a text is searched for."""
LINES_MAX = 1000
LINE_CHARACTERS_MAX = 4000


class _Tail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._cutter = LineCutter()
        self._offset = 0
        self._torn = False
        """The first line is not whole."""
        self.skipped_bytes = 0
        """Written faster than they were shown."""

    def read(self, room: int) -> list[str]:
        """New lines: those of at most this many bytes, the last ones."""
        with open(self._path, "rb") as file:
            begin = max(self._offset, os.fstat(file.fileno()).st_size - room)
            if begin > self._offset:
                self.skipped_bytes += begin - self._offset if self._offset else 0
                self._offset, self._torn, self._cutter = begin, True, LineCutter()
            file.seek(begin)
            chunk = file.read(room)
        self._offset += len(chunk)
        lines = self._cutter.feed(chunk).decode(errors="replace").split("\n")[:-1]
        if self._torn and lines:
            self._torn = False
            return lines[1:]
        return lines


class LogLines:
    """What one page shows. `ranks` empty: all; `generation` 0: the newest, also when another one begins."""

    def __init__(self, source: ShownJob, ranks: frozenset[int], generation: int, text: str) -> None:
        self._source = source
        self._ranks = ranks
        self._generation = generation
        self._text = text.lower()
        self._tails: dict[Path, _Tail] = {}

    def read(self) -> Json | None:
        """New lines; None: there are none."""
        files = [file for file in self._source.log_files() if not self._ranks or file.rank in self._ranks]
        newest = self._generation or max((file.generation for file in files), default=0)
        wanted = sorted((file for file in files if file.generation == newest), key=lambda file: file[:2])
        lines: deque[tuple[int, str, str]] = deque(maxlen=LINES_MAX)
        count, skipped, room = 0, 0, SEARCHED_BYTES if self._text else LAST_BYTES
        for file in wanted[:FILES_MAX]:
            tail = self._tails.get(file.path) or _Tail(file.path)
            try:
                new = tail.read(room)
            except OSError:
                continue  # the file is gone, or the disk has an error: the others can be shown
            self._tails[file.path] = tail
            skipped += tail.skipped_bytes
            found = [line for line in new if self._text in line.lower()]
            count += len(found)
            lines += [(file.rank, file.stream, line[:LINE_CHARACTERS_MAX]) for line in found]
        if not lines:
            return None
        return {
            "generation": newest,
            "lines": list(lines),
            "left_out": count - len(lines),
            "bytes_left_out": skipped,
            "files_left_out": max(0, len(wanted) - FILES_MAX),
        }
