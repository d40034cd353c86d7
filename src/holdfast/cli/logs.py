"""`holdfast logs [RUN]`: shows the output of the workers of a running or ended job on this host.

Knows the options and how to follow files; runs/log_files.py knows which files there are.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypedDict

from holdfast.cli import say
from holdfast.cli.printing import Parser, print_json
from holdfast.journal import JOURNAL_NAME as JOURNAL
from holdfast.protocol.errors import HoldfastError, NoRunError, UsageError
from holdfast.protocol.ranks_text import ranks_of
from holdfast.runs.finding import outcome_of, run_folders, running_job
from holdfast.runs.log_files import LogFile, NamedFiles, log_files
from holdfast.runtime.running import Call
from holdfast.supervisor.log_fold import LineCutter
from holdfast.supervisor.log_tail import ChangeWatch

CHUNK_BYTES = 256 * 1024
POLL_S = 1.0
"""Interval for files whose changes the kernel does not report (network folders), while following."""

CALM_S = 0.1
"""Shortest time between two turns (s): busy workers change their files all the time."""
REST_S = 1.0
"""Time in which the supervisor of a killed agent moves the rest of the output into the files (s)."""


class LineData(TypedDict):
    """One line of output."""

    rank: int
    stream: str
    """The stream: `stdout` or `stderr`."""
    generation: int
    line: str


JSON_FORMS = {"logs": ((LineData,),)}


class LogLine(NamedTuple):
    """A line of a log file."""

    file: LogFile
    text: str


def main(argv: Sequence[str]) -> int:
    """Run `holdfast logs` with these arguments. Returns the exit status. Raises HoldfastError."""
    chosen = parser().parse_args(argv)
    wanted = Wanted.from_arguments(chosen)
    folders = run_folders(chosen.run)
    files = wanted.files([file for folder in folders for file in log_files(folder)])
    if not files and not chosen.follow:
        raise NoRunError(f"{', '.join(map(str, folders))}: {wanted.missing(folders)}")
    show = partial(print_line, as_json=chosen.json, alone=len(wanted.ranks) == 1)
    if chosen.follow:
        with contextlib.suppress(KeyboardInterrupt):
            follow(folders, wanted, show, chosen.lines if chosen.lines is not None else 10)
        return 0
    for file in files:
        lines = (line for line in whole_lines(file) if wanted.matches(line.text))
        for line in lines if chosen.lines is None else deque(lines, chosen.lines):
            show(line)
    if not any(os.path.getsize(file.path) for file in files):
        say(f"{', '.join(map(str, folders))}: these workers wrote nothing")
    return 0


def parser() -> Parser:
    made = Parser(prog="holdfast logs", description="Show what the workers of this host wrote.")
    made.add_argument(
        "run", nargs="?", metavar="RUN", help="run id, its beginning, or run folder; by default the newest"
    )
    made.add_argument("--rank", action="append", metavar="N", help="only these ranks: 3, 0-7, 1,5; may be repeated")
    made.add_argument("-f", "--follow", action="store_true", help="show new output until the job ends")
    made.add_argument("--grep", metavar="RE", help="only lines that match this regular expression")
    made.add_argument("--stdout", action="store_true", help="only what they wrote to stdout")
    made.add_argument("--stderr", action="store_true", help="only what they wrote to stderr")
    made.add_argument("--generation", type=int, metavar="G", help="the generation; by default the newest")
    made.add_argument(
        "-n", "--lines", type=int, metavar="N", help="the last N lines of each file; by default all, with -f 10"
    )
    made.add_json("print a JSON object for each line")
    return made


class Wanted(NamedTuple):
    """The requested ranks, streams, generation and pattern."""

    ranks: set[int]
    streams: tuple[str, ...]
    generation: int | None
    pattern: re.Pattern[str] | None

    @classmethod
    def from_arguments(cls, chosen: argparse.Namespace) -> Wanted:
        """The wishes in the command's arguments. Raises UsageError."""
        if chosen.lines is not None and chosen.lines < 0:
            raise UsageError(f"--lines {chosen.lines}: must be 0 or more")
        try:
            pattern = re.compile(chosen.grep) if chosen.grep is not None else None
        except re.error as error:
            raise UsageError(f"--grep {chosen.grep}: {error}") from None
        streams = tuple(name for name in ("stdout", "stderr") if getattr(chosen, name))
        return cls(ranks_of(chosen.rank), streams or ("stdout", "stderr"), chosen.generation, pattern)

    def matches(self, text: str) -> bool:
        return self.pattern is None or self.pattern.search(text) is not None

    def files(self, named: Sequence[LogFile]) -> list[LogFile]:
        """The wanted log files that exist, by rank and stream, of the newest generation unless another was given."""
        generations = sorted({file.generation for file in named}, reverse=True)
        for generation in generations if self.generation is None else [self.generation]:
            there = [file for file in named if file.generation == generation and file.path.is_file()]
            if there:
                break
        else:
            return []
        taken = [file for file in there if file.stream in self.streams and (not self.ranks or file.rank in self.ranks)]
        return sorted(taken, key=lambda file: (file.rank, file.stream != "stdout"))

    def missing(self, folders: Sequence[Path]) -> str:
        """The reason why there are no such log files."""
        found = [file for folder in folders for file in log_files(folder)]
        if not found:
            return "no worker has written output yet"
        generations = sorted({file.generation for file in found})
        if self.generation is not None and self.generation not in generations:
            return f"no generation {self.generation}; the generations are {', '.join(map(str, generations))}"
        ranks = sorted({file.rank for file in found})
        return f"no such rank on this host; the ranks here are {', '.join(map(str, ranks))}"


def print_line(line: LogLine, *, as_json: bool, alone: bool) -> None:
    """Print the line with the rank in front, unless there is only one rank."""
    file, text = line
    if as_json:
        print_json(LineData(rank=file.rank, stream=file.stream, generation=file.generation, line=text), indent=None)
    else:
        print(text if alone else f"{file.rank}| {text}")


def whole_lines(file: LogFile) -> Iterator[LogLine]:
    """All lines of the file, also an unfinished last one. A line that overwrites itself has its last state."""
    with contextlib.closing(Tail(file)) as tail:
        yield from tail.read()
        yield from tail.rest()


class Tail:
    """Reads one file from the last position."""

    def __init__(self, file: LogFile) -> None:
        self.file = file
        """A worker that goes on in another generation may have another rank there."""
        self._cutter = LineCutter()
        try:
            self._fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NoRunError(f"{file.path}: {error.strerror}") from error

    def read(self) -> Iterator[LogLine]:
        while chunk := os.read(self._fd, CHUNK_BYTES):
            yield from self._lines(self._cutter.feed(chunk))

    def rest(self) -> Iterator[LogLine]:
        yield from self._lines(self._cutter.flush())

    def close(self) -> None:
        os.close(self._fd)

    def _lines(self, data: bytes) -> Iterator[LogLine]:
        for line in data.split(b"\n")[:-1]:
            yield LogLine(self.file, line.decode(errors="replace"))


def follow(folders: list[Path], wanted: Wanted, show: Callable[[LogLine], None], lines: int) -> None:
    """Print the last lines and all new ones until the job ends, also of later generations."""
    with contextlib.ExitStack() as stack:
        watch = ChangeWatch()
        stack.callback(watch.close)
        for folder in folders:
            watch.add(folder / JOURNAL)
        end = end_of(folders, stack)
        named = [NamedFiles(folder) for folder in folders]
        tails: dict[Path, Tail] = {}
        stack.callback(_close_all, tails)

        def show_rest(tail: Tail) -> None:
            for line in tail.rest():
                if wanted.matches(line.text):
                    show(line)

        first = True
        while True:
            ended = wait_for_news(watch, end) if not first else False
            if ended and not all(outcome_of(folder) for folder in folders):  # the agent was killed
                time.sleep(REST_S)
            files = wanted.files([file for each in named for file in each.read()])
            for file in files:
                if file.path not in tails:
                    tails[file.path] = Tail(file)
                    watch.add(file.path)
                tails[file.path].file = file
            for tail in tails.values():
                # Of a job that is over nobody completes the last line, so it counts among the last ones.
                read = chain(tail.read(), tail.rest() if end is None else ())
                news = (line for line in read if wanted.matches(line.text))
                for line in deque(news, lines) if first else news:
                    show(line)
            # Those of an older generation get no more lines. A job may have more generations than descriptors.
            for path in tails.keys() - {file.path for file in files}:
                with contextlib.closing(tails.pop(path)) as tail:
                    show_rest(tail)
            sys.stdout.flush()
            if ended or end is None:
                break
            first = False
        for tail in tails.values():
            show_rest(tail)


def _close_all(tails: Mapping[Path, Tail]) -> None:
    for tail in tails.values():
        tail.close()


def end_of(folders: Sequence[Path], stack: contextlib.ExitStack) -> Call | None:
    """A connection that becomes readable when the job ends; None: the job has ended."""
    try:
        entries = running_job(str(folders[0]))
        return stack.enter_context(Call(entries[0], None))
    except HoldfastError:
        return None


def wait_for_news(watch: ChangeWatch, end: Call | None) -> bool:
    """Wait until a file changes, or at most POLL_S. Returns whether the job has ended."""
    sources = [fd for fd in (watch.fd, end.fileno() if end is not None else -1) if fd >= 0]
    ready, _, _ = select.select(sources, [], [], POLL_S)
    ended = end is not None and end.fileno() in ready
    if not ended:
        time.sleep(CALM_S)
    watch.drain()
    return ended
