"""One command line under torchrun and under `holdfast run`, and what the workers, the files and the console show of it."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.beside_torchrun.installed import skip_what_it_lacks
from tests.beside_torchrun.recording import SCRIPTS, Book, Mode, Probe, fingerprint, record, replay
from tests.processes.agent_server import AgentServer, can_be_forked
from tests.support.limits import limit_s

PROBE = str(SCRIPTS / "probe.py")
LIMIT_S = 60.0
WRITE = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@dataclass
class Side:
    """What one launcher made of a line. `folder` is its working folder, `logs` the place for --log-dir."""

    name: str
    folder: Path
    code: int
    out: str
    err: str

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def probes(self) -> dict[str, Probe]:
        """By `<rank>.<restart count>`."""
        return {path.stem: json.loads(path.read_text()) for path in sorted((self.folder / "probes").glob("*.json"))}

    def tree(self) -> dict[str, str]:
        """Files below the run folder, with what is in them. There is one run folder."""
        runs = sorted(self.logs.iterdir())
        assert len(runs) == 1, runs
        return {
            str(path.relative_to(runs[0])): path.read_text(errors="surrogateescape")
            for path in runs[0].rglob("*")
            if path.is_file()
        }

    def __str__(self) -> str:
        return f"{self.name}: exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


@dataclass
class Line:
    """A command line, without the launcher's name; `{logs}` and `{folder}` in it become each side's own, `{port}` the port."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    module: str = "run"
    stdin: str = os.devnull
    port: str | None = None


class Job:
    """A launcher that runs. `wait` gives its exit code, as a shell would tell it for signals: negative."""

    def __init__(self, side: Side, wait: Callable[[], int], end: Callable[[], None] = lambda: None) -> None:
        self.side = side
        self._wait = wait
        self._end = end
        self.ended: Callable[[], None] = lambda: None
        """Called when everything of the run has ended."""

    def finish(self) -> Side:
        try:
            self.side.code = self._wait()
        finally:
            self._end()
        self.ended()
        self.side.out, self.side.err = (
            path.read_text(errors="replace") if path.exists() else ""
            for path in (self.side.folder / "stdout", self.side.folder / "stderr")
        )
        return self.side


class Launchers:
    """Runs lines under both; every run gets a folder of its own below `root`.

    torchrun's side is replayed from `book`, where the runs of `test` stand in the order in which it starts them. In
    live mode torchrun runs, and has to do what is recorded, where anything is.
    """

    def __init__(
        self, mode: Mode, book: Book, test: str, root: Path, server: AgentServer | None, agents: AgentServer
    ) -> None:
        self._mode = mode
        self._book = book
        self._test = test
        self._server = server
        self._agents = agents
        self._root = root
        self._count = 0
        self._torchruns = 0

    def both(self, *lines: Line) -> tuple[list[Side], list[Side]]:
        """The lines as the nodes of one job, under torchrun and, at the same time, under holdfast."""
        jobs = [(self.torchrun(line), self.holdfast(line)) for line in lines]
        pairs = [(theirs.finish(), ours.finish()) for theirs, ours in jobs]
        return [theirs for theirs, _ in pairs], [ours for _, ours in pairs]

    def pair(self, *argv: str, env: Mapping[str, str] | None = None, stdin: str = os.devnull) -> tuple[Side, Side]:
        """One node."""
        theirs, ours = self.both(Line(argv, env or {}, stdin=stdin))
        return theirs[0], ours[0]

    def torchrun(self, line: Line, terminal: str | None = None) -> Job:
        """`terminal` takes the place of all three standard streams."""
        skip_what_it_lacks(self._mode, line.argv, line.env)
        side = self._side("torchrun")
        number = self._torchruns
        self._torchruns += 1
        runs = self._book.runs.setdefault(self._test, [])
        if self._mode is Mode.REPLAY:
            assert number < len(runs), f"torchrun was not recorded for {self._test}: make record-torchrun"
            return Job(side, lambda: replay(runs[number], side.folder, environment(line, side), line.port))
        job = self._live(line, side, terminal)

        def ended() -> None:
            made = record(side.folder, side.code, environment(line, side), line.port)
            if self._mode is Mode.RECORD:
                runs[number:] = [made]
            elif number < len(runs):
                then, now = (
                    json.dumps(fingerprint(each), indent=1, sort_keys=True).splitlines()
                    for each in (runs[number], made)
                )
                changes = "\n".join(difflib.unified_diff(then, now, "recorded", "torchrun", lineterm="", n=1))
                assert not changes, f"torchrun does not do what is recorded: {changes}\n{side}"

        job.ended = ended
        return job

    def again(self) -> None:
        """The last run of torchrun does not count: the next one takes its place, in the recording too."""
        if self._mode is not Mode.REPLAY:
            self._torchruns -= 1

    def _live(self, line: Line, side: Side, terminal: str | None) -> Job:
        assert self._server is not None
        stdin, stdout, stderr = streams(line, side, terminal)
        program = f"torch.distributed.{line.module}"
        words, given = arguments(line, side), environment(line, side)
        process = self._server.start(words, given, SCRIPTS, Path(stdout), Path(stderr), stdin, program)
        return running(side, process)

    def holdfast(self, line: Line, command: Sequence[str] = (), terminal: str | None = None) -> Job:
        """`command`: another module and its first arguments in place of `holdfast run`."""
        side = self._side("holdfast")
        stdin, stdout, stderr = streams(line, side, terminal)
        words, given = arguments(line, side), environment(line, side)
        process: Any
        if line.module == "run" and not command and terminal is None and can_be_forked(given):
            process = self._agents.start(words, given, SCRIPTS, Path(stdout), Path(stderr), stdin)
        else:
            with opened(stdin, os.O_RDONLY) as source, opened(stdout, WRITE) as out, opened(stderr, WRITE) as err:
                process = subprocess.Popen(
                    [sys.executable, "-m", *(command or ("holdfast", line.module)), *words],
                    env=given,
                    cwd=SCRIPTS,
                    stdin=source,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )

        return running(side, process)

    def _side(self, name: str) -> Side:
        self._count += 1
        folder = self._root / f"{self._count}-{name}"
        (folder / "probes").mkdir(parents=True)
        return Side(name, folder, code=-1, out="", err="")


def running(side: Side, process: Any) -> Job:
    """`process`: a Popen, or as much of one as a forked agent has."""

    def end() -> None:
        end_group(process.pid)
        process.wait()

    return Job(side, lambda: process.wait(limit_s(LIMIT_S)), end)


def streams(line: Line, side: Side, terminal: str | None) -> tuple[str, str, str]:
    if terminal is not None:
        return terminal, terminal, terminal
    return line.stdin, str(side.folder / "stdout"), str(side.folder / "stderr")


@contextlib.contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """A terminal must not become ours by being opened."""
    fd = os.open(path, flags | os.O_NOCTTY, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def filled(text: str, line: Line, side: Side) -> str:
    return (
        text.replace("{logs}", str(side.logs)).replace("{folder}", str(side.folder)).replace("{port}", line.port or "")
    )


def arguments(line: Line, side: Side) -> list[str]:
    return [filled(word, line, side) for word in line.argv]


def environment(line: Line, side: Side) -> dict[str, str]:
    """This process's, with what the line adds and a place for the probe."""
    given = {name: filled(value, line, side) for name, value in line.env.items()}
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "KMP_INIT_AT_FORK")
    }
    return {
        **inherited,
        "PROBE_DIR": str(side.folder / "probes"),
        "PROBE_PYTHON": sys.executable,
        "PYTHONDONTWRITEBYTECODE": "1",
        **given,
    }


def end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
