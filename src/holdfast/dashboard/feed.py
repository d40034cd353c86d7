"""What a page gets as it happens: the state and the story of its job, and the lines of the workers' logs.

Each job has one reader, however many browsers show it. Each browser has a mailbox for what it has not got yet, which
keeps only the newest message of each kind: a slow browser sees fewer updates, and costs no more memory. Without a
browser the job is asked every ten seconds, so that the curves are there for the next browser.

A page gets the last lines of each log file, then new ones as they are written. They are merged by the times in them
(log_text.py), or else by the times at which the files had grown so far. The number of files, the bytes of each and the
lines in a message are limited, and what is left out is counted.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import re
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.dashboard.job_source import Json, ShownJob, encoded, jobs_here
from holdfast.dashboard.log_text import Levels, plain, times, without_controls
from holdfast.protocol.outcome import Outcome
from holdfast.runs.log_files import LogFile
from holdfast.supervisor.log_fold import LineCutter

EVERY_S = 1.0
"""Interval of reading the job while a browser shows it."""
IDLE_S = 10.0
"""Interval of reading the job without a browser."""
STORY_TIME_SHARE_MAX = 0.04
"""Share of the time that may go into making the story again, for a job with long journals."""
CURVE_MAX = 1200
"""Number of points of a curve; with more, every other one is dropped and the interval doubled."""
LOADS_EVERY_S = 10.0
"""Interval of the points of loads; nodes report theirs not more often."""
LOAD_NODES_MAX = 64
LOAD_POINTS_MAX = 180
"""Number of points of each node; with more, every other one is dropped and the interval doubled."""
CLIENTS_MAX = 64
END = "end"
"""Kind of the last message of a job that has ended: after it a page closes its connections."""
FINISH_S_MAX = 1.0
"""Limit at the end of the job for browsers to receive its outcome."""


class Mailbox:
    """The messages for one browser."""

    def __init__(self) -> None:
        self._waiting: dict[str, bytes] = {}
        """The newest message of each kind that the browser has not got."""
        self._news = asyncio.Event()
        self.empty = asyncio.Event()
        """Set while the browser has got everything."""
        self.empty.set()

    def put(self, kind: str, body: bytes) -> None:
        self._waiting[kind] = body
        self._news.set()
        self.empty.clear()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the messages as server-sent events, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            waiting, self._waiting = self._waiting, {}
            for kind, body in waiting.items():
                yield b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
            if not self._waiting:
                self.empty.set()


class Curve:
    """Step times over time, in bounded memory."""

    def __init__(self) -> None:
        self.points: list[tuple[float | None, ...]] = []
        """Time (epoch s), median, 99th percentile and own time of the steps (ms), steps per second."""
        self._interval_s = 0.0
        """Least time between two points."""

    def add(self, now: Json) -> None:
        if "median_ms" not in now or (self.points and now["at"] - (self.points[-1][0] or 0.0) < self._interval_s):
            return
        self.points.append((now["at"], now["median_ms"], now["p99_ms"], now["own_ms"], now["steps_s"]))
        if len(self.points) > CURVE_MAX:
            first, last = self.points[0][0] or 0.0, self.points[-1][0] or 0.0
            self.points = self.points[::2]
            # Three quarters of the new distance between points: one that comes a little early still counts.
            self._interval_s = 1.5 * (last - first) / len(self.points) / 2


class LoadCurves:
    """Load of each node over time, in bounded memory."""

    def __init__(self) -> None:
        self.nodes: dict[str, list[tuple[float, float, float | None, float | None]]] = {}
        """Points by host: time (epoch s); processors, memory and GPUs in percent."""
        self._interval_s = LOADS_EVERY_S
        self._newest_s = -LOADS_EVERY_S

    def add(self, now: Json) -> None:
        if now["at"] - self._newest_s < self._interval_s:
            return
        for node in now.get("nodes", ()):
            load = node.get("load")
            if load is None or (len(self.nodes) >= LOAD_NODES_MAX and node["host"] not in self.nodes):
                continue
            self._newest_s = now["at"]
            memory = 100 * load["memory_bytes"] / load["memory_total_bytes"] if load["memory_total_bytes"] else None
            gpus = [each["percent"] for each in load["gpus"]]
            mean = sum(gpus) / len(gpus) if gpus else None
            self.nodes.setdefault(node["host"], []).append((now["at"], load["cpu_percent"], memory, mean))
        if any(len(points) > LOAD_POINTS_MAX for points in self.nodes.values()):
            self.nodes = {host: points[::2] for host, points in self.nodes.items()}
            self._interval_s *= 2


class JobFeed:
    """The reader of one job."""

    def __init__(self, source: ShownJob) -> None:
        self.source = source
        self.clients: set[Mailbox] = set()
        self._curve = Curve()
        self._loads = LoadCurves()
        self.log_sizes = LogSizes()
        self._newest: dict[str, bytes] = {}
        """The newest message of each kind, for the next browser."""
        self._wake = asyncio.Event()
        """Set when a browser comes: the job is read at once."""
        self._reading = asyncio.Lock()
        """Held while a thread uses the source, which is for one thread at a time."""
        self._story_is_old = True
        """Whether the journals have grown since the newest story."""
        self._story_due_s = 0.0
        """The time from which the story may be made again, by time.monotonic()."""
        self._over = False
        """Whether `finish` was called: only its messages are still put."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended and the pages have everything: they ask no more."""
        return END in self._newest

    async def run(self) -> None:
        """Read until cancelled. A job that has ended is asked rarely: another one may get its name."""
        while True:
            await self._read_once()
            try:
                async with asyncio.timeout(EVERY_S if self.clients and not self.ended else IDLE_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield what is known, and then what is new, for one browser."""
        mailbox = Mailbox()
        curves = {"curve": self._curve.points, "load_curves": self._loads.nodes}
        known = self._newest | {kind: msgspec.json.encode(each) for kind, each in curves.items()}
        for kind in sorted(known, key=lambda kind: kind == END):  # a page closes its connections at END
            mailbox.put(kind, known[kind])
        self.clients.add(mailbox)
        self._wake.set()
        try:
            async for message in mailbox.messages():
                yield message
        finally:
            self.clients.discard(mailbox)

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Call a method of the source in a thread."""
        async with self._reading:
            return await asyncio.to_thread(function)

    async def finish(self, outcome: Outcome) -> None:
        """Send the job's outcome to every browser: its agent ends now, and this process with it."""
        self.source.outcome = outcome
        self._over = True
        await self._call(self.source.read)  # what ended the job may be newer than the last look
        self._put("story", await self._call(self._story), last=True)
        self._put("now", msgspec.json.encode({"at": time.time(), "ended": True}), last=True)
        self._put(END, b"{}", last=True)
        try:
            async with asyncio.timeout(FINISH_S_MAX):
                for each in list(self.clients):
                    await each.empty.wait()
        except TimeoutError:
            pass  # some do not read

    async def _read_once(self) -> None:
        now = await self._call(self.source.now)
        self._curve.add(now)
        self._loads.add(now)
        self._put("now", await asyncio.to_thread(encoded, now))
        self._story_is_old = await self._call(self.source.read) or self._story_is_old
        await self._call(lambda: self.log_sizes.note(self.source.log_files()))

        began_s = time.monotonic()
        if self._story_is_old and began_s >= self._story_due_s:
            self._story_is_old = False
            self._put("story", await self._call(self._story))
            took_s = time.monotonic() - began_s
            self._story_due_s = began_s + took_s / STORY_TIME_SHARE_MAX

        if not now.get("ended"):
            self._newest.pop(END, None)  # another job has the name now, or the same one was started again
        elif self.source.over and not self._story_is_old and not self.ended:
            self._put(END, b"{}")

    def _story(self) -> bytes:
        return encoded(self.source.story())

    def _put(self, kind: str, body: bytes, *, last: bool = False) -> None:
        """Send a message to all browsers. `last` marks those of `finish`, which nothing that was read before
        replaces."""
        if self._over and not last:
            return
        self._newest[kind] = body
        for each in self.clients:
            each.put(kind, body)


class JobFeeds:
    """The feeds of one dashboard by the name of the job."""

    def __init__(self, tasks: asyncio.TaskGroup, sources: list[ShownJob]) -> None:
        self._tasks = tasks
        self.all_jobs = not sources
        """Whether any job of this user on this machine gets a feed when somebody opens its page."""
        self.closing = asyncio.Event()
        """Set when the server ends, and all streams with it."""
        self._feeds: dict[str, JobFeed] = {}
        self._readers: list[asyncio.Task[None]] = []
        for source in sources:
            self._start(source)

    @property
    def names(self) -> list[str]:
        return list(self._feeds)

    async def feed(self, name: str) -> JobFeed | None:
        """The feed of this job; None: there is no such job."""
        if name in self._feeds or not self.all_jobs:
            return self._feeds.get(name)
        found = {each["name"]: each["folder"] for each in await asyncio.to_thread(jobs_here)}
        if name not in found:
            return None
        if name not in self._feeds:  # somebody else may have asked meanwhile
            self._start(ShownJob(found[name] or name, [found[name]]), name)
        return self._feeds[name]

    def _start(self, source: ShownJob, name: str = "") -> None:
        feed = self._feeds[name or source.title] = JobFeed(source)
        self._readers.append(self._tasks.create_task(feed.run()))

    def stop(self) -> None:
        for reader in self._readers:
            reader.cancel()

    async def finish(self, outcome: Outcome) -> None:
        for feed in self._feeds.values():
            await feed.finish(outcome)

    @property
    def clients(self) -> int:
        return sum(len(feed.clients) for feed in self._feeds.values())


# --- lines of logs ----------------------------------------------------------------------------------------------------

FILES_MAX = 64
LAST_BYTES = 256 * 1024
"""Bytes of each file that are read at once, the last ones."""
SEARCHED_BYTES = 8 * 1024 * 1024
"""Bytes of each file that are read at once when a text is searched for."""
LINES_MAX = 1000
"""Number of lines in one message."""
LINE_CHARACTERS_MAX = 4000
NEWLINE = re.compile(rb"\n")
MARKS_MAX = 300
"""Number of sizes that are kept of each file; with more, every other one is dropped."""


class LogSizes:
    """The sizes of log files over time. They date the lines, most of which have no times of their own."""

    def __init__(self) -> None:
        self._marks: dict[Path, list[tuple[int, float]]] = {}
        """Sizes of each file in ascending order, each with the file's time of change (epoch s) when it was seen."""

    def note(self, files: Sequence[LogFile]) -> None:
        """Note the sizes of the newest generation's logs. Blocking: called in a thread."""
        newest = max((file.generation for file in files), default=0)
        found: dict[Path, list[tuple[int, float]]] = {}
        for file in [file for file in files if file.generation == newest][:FILES_MAX]:
            marks = found[file.path] = self._marks.get(file.path, [])
            try:
                state = os.stat(file.path)
            except OSError:
                continue  # it does not exist yet, or the disk has an error
            if state.st_size > (marks[-1][0] if marks else 0):
                marks = [*marks, (state.st_size, state.st_mtime)]
                found[file.path] = marks if len(marks) <= MARKS_MAX else marks[::-2][::-1]
        self._marks = found

    def times_of(self, path: Path, ends: Sequence[int], written_s: float) -> list[float]:
        """The time (epoch s) at which the file was first seen with each of these line ends; `written_s` if never."""
        marks = self._marks.get(path, [])
        indices = [bisect_left(marks, (end, 0.0)) for end in ends]
        return [min(written_s, marks[index][1]) if index < len(marks) else written_s for index in indices]


class _Tail:
    """One log file, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cutter = LineCutter()
        self._offset = 0
        self._torn = False
        """Whether reading began within a line, whose end is not shown."""
        self.levels = Levels()
        self.written_s = 0.0
        """Time of the file's last change (epoch s)."""
        self.skipped_bytes = 0
        """Number of bytes that were left out because the worker writes faster than the page reads."""

    def read(self, bytes_max: int) -> list[tuple[str, int]]:
        """New lines, each with its end in the file: the last `bytes_max` bytes at most. Raises OSError."""
        with open(self._path, "rb") as file:
            state = os.fstat(file.fileno())
            begin, self.written_s = max(self._offset, state.st_size - bytes_max), state.st_mtime
            if begin > self._offset:
                # What lies before the first read is not missing: the page asked for the last lines.
                self.skipped_bytes += begin - self._offset if self._offset else 0
                self._offset, self._torn, self._cutter = begin, True, LineCutter()
            file.seek(begin)
            chunk = file.read(bytes_max)

        ends = [begin + found.end() for found in NEWLINE.finditer(chunk)]
        self._offset += len(chunk)
        texts = self._cutter.feed(chunk).decode(errors="replace").split("\n")[:-1]
        # The cutter cuts lines that are too long: then there are more texts than ends.
        lines = list(zip(texts, ends + [self._offset] * (len(texts) - len(ends)), strict=True))
        if self._torn and lines:
            self._torn = False
            return lines[1:]
        return lines


class LogLines:
    """The lines that one page shows. `ranks` empty: all; `generation` 0: the newest, also when another one begins."""

    def __init__(
        self, source: ShownJob, ranks: frozenset[int], generation: int, text: str, sizes: LogSizes | None = None
    ) -> None:
        self._source = source
        self._sizes = sizes or LogSizes()
        self._ranks = ranks
        self._generation = generation
        self._text = text.lower()
        self._tails: dict[Path, _Tail] = {}

    def read(self) -> Json | None:
        """New lines, in order of time; None: there are none. Blocking: called in a thread."""
        files = [file for file in self._source.log_files() if not self._ranks or file.rank in self._ranks]
        newest = self._generation or max((file.generation for file in files), default=0)
        wanted = sorted((file for file in files if file.generation == newest), key=lambda file: file[:2])

        by_file: list[list[tuple[float, LogFile, str, str]]] = []
        count, skipped = 0, 0
        for file in wanted[:FILES_MAX]:
            tail = self._tails.get(file.path) or _Tail(file.path)
            try:
                found = self._found(tail)
            except OSError:
                continue  # the file is gone, or the disk has an error: the others can be shown
            self._tails[file.path] = tail
            skipped += tail.skipped_bytes
            count += len(found)
            shown = [text for text, _ in found[-LINES_MAX:]]
            ends = [end for _, end in found[-LINES_MAX:]]
            at = times(shown, self._sizes.times_of(file.path, ends, tail.written_s))
            by_file.append(
                [(at_s, file, text, tail.levels.next(text).value) for at_s, text in zip(at, shown, strict=True)]
            )

        lines = deque(heapq.merge(*by_file, key=lambda line: line[0]), LINES_MAX)  # equal times: file after file
        if not lines:
            return None
        return {
            "generation": newest,
            "lines": [(file.rank, file.stream, text[:LINE_CHARACTERS_MAX], level) for _, file, text, level in lines],
            "left_out": count - len(lines),
            "bytes_left_out": skipped,
            "files_left_out": max(0, len(wanted) - FILES_MAX),
        }

    def _found(self, tail: _Tail) -> list[tuple[str, int]]:
        """The new lines of a file in which the text occurs. Raises OSError."""
        lines = [(without_controls(line), end) for line, end in tail.read(SEARCHED_BYTES if self._text else LAST_BYTES)]
        return [each for each in lines if self._text in plain(each[0]).lower()] if self._text else lines
