"""What a page gets as it happens: the state and the story of its job, and the lines of the workers' logs.

Each job has one reader, however many browsers look at it. Each browser has a mailbox for what it has not got yet, which
keeps only the newest message of each kind: who reads slowly sees fewer updates, and costs no more memory. Without a
browser the job is asked every ten seconds, so that the curves are there for the next browser.

Of logs a page gets the last lines of each file, merged by the times in them (log_text.py) or else by
those at which the files had grown so far, then new ones as they are
written: of so many files, so many bytes of each at once, so many lines in a message. What is left out is counted.
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
from holdfast.dashboard.log_text import Levels, plain, tame, times
from holdfast.protocol.outcome import Outcome
from holdfast.runs.log_files import LogFile
from holdfast.supervisor.log_fold import LineCutter

EVERY_S = 1.0
IDLE_S = 10.0
"""Interval without a browser."""
STORY_LOAD_MAX = 0.04
"""Part of the time that may go into telling the story again, in a job with long journals."""
CURVE_MAX = 1200
"""Points; with more, every other one is dropped and the interval doubled."""
LOADS_EVERY_S = 10.0
"""Interval of the points of loads; nodes report theirs not more often."""
LOAD_NODES_MAX = 64
LOAD_POINTS_MAX = 180
"""Of each node; with more, every other one is dropped and the interval doubled."""
CLIENTS_MAX = 64
END = "end"
"""The last message of a job that has ended: after it a page closes its connections."""
FINISH_S_MAX = 1.0
"""At the end of the job: for browsers to take how it ended."""


class Mailbox:
    """The messages for one browser."""

    def __init__(self) -> None:
        self._waiting: dict[str, bytes] = {}
        self._news = asyncio.Event()
        self.empty = asyncio.Event()
        self.empty.set()

    def put(self, kind: str, body: bytes) -> None:
        self._waiting[kind] = body
        self._news.set()
        self.empty.clear()

    async def messages(self) -> AsyncIterator[bytes]:
        """As server-sent events."""
        while True:
            await self._news.wait()
            self._news.clear()
            waiting, self._waiting = self._waiting, {}
            for kind, body in waiting.items():
                yield b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
            if not self._waiting:
                self.empty.set()


class Curve:
    """Step times over time, in bounded memory: time, median, 99th percentile, own part (ms), steps per second."""

    def __init__(self) -> None:
        self.points: list[tuple[float | None, ...]] = []
        self._interval_s = 0.0

    def add(self, now: Json) -> None:
        if "median_ms" not in now or (self.points and now["at"] - (self.points[-1][0] or 0.0) < self._interval_s):
            return
        self.points.append((now["at"], now["median_ms"], now["p99_ms"], now["own_ms"], now["steps_s"]))
        if len(self.points) > CURVE_MAX:
            first, last = self.points[0][0] or 0.0, self.points[-1][0] or 0.0
            self.points = self.points[::2]
            self._interval_s = 1.5 * (last - first) / len(self.points) / 2


class LoadCurves:
    """Load of each node over time, in bounded memory: time; processors, memory and GPUs in percent."""

    def __init__(self) -> None:
        self.nodes: dict[str, list[tuple[float, float, float | None, float | None]]] = {}
        self._interval_s = LOADS_EVERY_S
        self._newest_s = -LOADS_EVERY_S

    def add(self, now: Json) -> None:
        if now["at"] - self._newest_s < self._interval_s:
            return
        for node in now.get("nodes", ()):
            load = node["load"]
            if load is None or (len(self.nodes) >= LOAD_NODES_MAX and node["host"] not in self.nodes):
                continue
            self._newest_s = now["at"]
            memory = 100 * load["memory_bytes"] / load["memory_total_bytes"] if load["memory_total_bytes"] else None
            gpus = [each[0] for each in load["gpus"]]
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
        self._wake = asyncio.Event()
        self._reading = asyncio.Lock()
        """The source is for one thread at a time."""
        self._dirty = True
        self._story_due_s = 0.0
        self._over = False

    @property
    def ended(self) -> bool:
        """The pages have everything, and ask no more."""
        return END in self._newest

    async def run(self) -> None:
        """Read until cancelled. A job that has ended is asked rarely: another one may get its name."""
        while True:
            await self._turn()
            try:
                async with asyncio.timeout(EVERY_S if self.clients and not self.ended else IDLE_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """For one browser: what is known, and then what is new."""
        mailbox = Mailbox()
        curves = {"curve": self._curve.points, "load_curves": self._loads.nodes}
        known = self._newest | {kind: msgspec.json.encode(each) for kind, each in curves.items()}
        for kind in sorted(known, key=lambda kind: kind == END):  # END is the last one
            mailbox.put(kind, known[kind])
        self.clients.add(mailbox)
        self._wake.set()
        try:
            async for message in mailbox.messages():
                yield message
        finally:
            self.clients.discard(mailbox)

    async def _call(self, function: Callable[[], Any]) -> Any:
        """A method of the source, in a thread."""
        async with self._reading:
            return await asyncio.to_thread(function)

    async def finish(self, outcome: Outcome) -> None:
        """The job has ended, and its agent ends too: every browser gets its end."""
        self.source.outcome = outcome
        self._over = True
        self._put("story", await self._call(self._story), last=True)
        self._put("now", msgspec.json.encode({"at": time.time(), "ended": True}), last=True)
        self._put(END, b"{}", last=True)
        try:
            async with asyncio.timeout(FINISH_S_MAX):
                for each in list(self.clients):
                    await each.empty.wait()
        except TimeoutError:
            pass  # they do not read

    async def _turn(self) -> None:
        now = await self._call(self.source.now)
        self._curve.add(now)
        self._loads.add(now)
        self._put("now", await asyncio.to_thread(encoded, now))
        self._dirty = await self._call(self.source.read) or self._dirty
        await self._call(lambda: self.log_sizes.look(self.source.log_files()))
        began_s = time.monotonic()
        if self._dirty and began_s >= self._story_due_s:
            self._dirty = False
            self._put("story", await self._call(self._story))
            took_s = time.monotonic() - began_s
            self._story_due_s = began_s + took_s / STORY_LOAD_MAX
        if not now.get("ended"):
            self._newest.pop(END, None)
        elif self.source.over and not self._dirty and not self.ended:
            self._put(END, b"{}")

    def _story(self) -> bytes:
        return encoded(self.source.story())

    def _put(self, kind: str, body: bytes, *, last: bool = False) -> None:
        """`last`: it says how the job has ended; nothing that was read before may replace it."""
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
        """Any job of this user on this machine gets a feed when somebody opens its page."""
        self.closing = asyncio.Event()
        """The server ends, and all streams with it."""
        self._feeds: dict[str, JobFeed] = {}
        self._readers: list[asyncio.Task[None]] = []
        for source in sources:
            self._start(source)

    @property
    def names(self) -> list[str]:
        return list(self._feeds)

    async def of(self, name: str) -> JobFeed | None:
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
"""Of each file, at first and at once."""
SEARCHED_BYTES = 8 * 1024 * 1024
"""The same when a text is searched for."""
LINES_MAX = 1000
LINE_CHARACTERS_MAX = 4000
NEWLINE = re.compile(rb"\n")


MARKS_MAX = 300
"""Of each file; with more, every other one is dropped."""


class LogSizes:
    """When the logs had grown to which size, as far as the feed has looked: most lines have no times of their own."""

    def __init__(self) -> None:
        self._marks: dict[Path, list[tuple[int, float]]] = {}
        """Size, and the last change of the file at that time."""

    def look(self, files: Sequence[LogFile]) -> None:
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
        """By each end of a line in this file: when it was first known to be there; `written_s` when that is unknown."""
        marks = self._marks.get(path, [])
        places = [bisect_left(marks, (end, 0.0)) for end in ends]
        return [min(written_s, marks[place][1]) if place < len(marks) else written_s for place in places]


class _Tail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._cutter = LineCutter()
        self._offset = 0
        self._torn = False
        """The first line is not whole."""
        self.levels = Levels()
        self.written_s = 0.0
        """The last change of the file."""
        self.skipped_bytes = 0
        """Written faster than they were shown."""

    def read(self, room: int) -> list[tuple[str, int]]:
        """New lines and where they end in the file: those of at most this many bytes, the last ones."""
        with open(self._path, "rb") as file:
            state = os.fstat(file.fileno())
            begin, self.written_s = max(self._offset, state.st_size - room), state.st_mtime
            if begin > self._offset:
                self.skipped_bytes += begin - self._offset if self._offset else 0
                self._offset, self._torn, self._cutter = begin, True, LineCutter()
            file.seek(begin)
            chunk = file.read(room)
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
    """What one page shows. `ranks` empty: all; `generation` 0: the newest, also when another one begins."""

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
        parts: list[list[tuple[float, LogFile, str, str]]] = []
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
            parts.append([(at_s, file, text, tail.levels.of(text).value) for at_s, text in zip(at, shown, strict=True)])
        lines = deque(heapq.merge(*parts, key=lambda line: line[0]), LINES_MAX)  # equal times: file after file
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
        lines = [(tame(line), end) for line, end in tail.read(SEARCHED_BYTES if self._text else LAST_BYTES)]
        return [each for each in lines if self._text in plain(each[0]).lower()] if self._text else lines
