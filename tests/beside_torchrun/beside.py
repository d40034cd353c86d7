"""One command line under torchrun and under `holdfast run`, and what the workers, the files and the console show of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
PROBE = str(SCRIPTS / "probe.py")
LIMIT_S = 60.0
WRITE = os.O_WRONLY | os.O_CREAT | os.O_APPEND

Probe = dict[str, Any]


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
    """A command line, without the launcher's name; `{logs}` in it becomes a folder of each side's own."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    module: str = "run"
    stdin: str = os.devnull


class Job:
    """A launcher that runs. `wait` gives its exit code, as a shell would tell it for signals: negative."""

    def __init__(self, side: Side, wait: Callable[[], int], end: Callable[[], None]) -> None:
        self.side = side
        self._wait = wait
        self._end = end

    def finish(self) -> Side:
        try:
            self.side.code = self._wait()
        finally:
            self._end()
        self.side.out, self.side.err = (
            path.read_text(errors="replace") if path.exists() else ""
            for path in (self.side.folder / "stdout", self.side.folder / "stderr")
        )
        return self.side


class Launchers:
    """Runs lines under both; every run gets a folder of its own below `root`."""

    def __init__(self, server: str, root: Path) -> None:
        self._server = server
        self._root = root
        self._count = 0

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
        side = self._side("torchrun")
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(LIMIT_S)
        connection.connect(self._server)
        file = connection.makefile("rw")
        request = {
            "argv": arguments(line, side),
            "module": f"torch.distributed.{line.module}",
            "env": environment(line, side),
            "cwd": str(SCRIPTS),
            **dict(zip(("stdin", "stdout", "stderr"), streams(line, side, terminal), strict=True)),
        }
        print(json.dumps(request), file=file, flush=True)
        pid = int(file.readline())

        def end() -> None:
            file.close()
            connection.close()
            end_group(pid)

        return Job(side, lambda: int(file.readline()), end)

    def holdfast(self, line: Line, command: Sequence[str] = (), terminal: str | None = None) -> Job:
        """`command`: another module and its first arguments in place of `holdfast run`."""
        side = self._side("holdfast")
        stdin, stdout, stderr = streams(line, side, terminal)
        with opened(stdin, os.O_RDONLY) as source, opened(stdout, WRITE) as out, opened(stderr, WRITE) as err:
            process = subprocess.Popen(
                [sys.executable, "-m", *(command or ("holdfast", line.module)), *arguments(line, side)],
                env=environment(line, side),
                cwd=SCRIPTS,
                stdin=source,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

        def end() -> None:
            end_group(process.pid)
            process.wait()

        return Job(side, lambda: process.wait(LIMIT_S), end)

    def _side(self, name: str) -> Side:
        self._count += 1
        folder = self._root / f"{self._count}-{name}"
        (folder / "probes").mkdir(parents=True)
        return Side(name, folder, code=-1, out="", err="")


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


def arguments(line: Line, side: Side) -> list[str]:
    return [word.replace("{logs}", str(side.logs)) for word in line.argv]


def environment(line: Line, side: Side) -> dict[str, str]:
    """This process's, with what the line adds and a place for the probe."""
    given = {name: value.replace("{logs}", str(side.logs)) for name, value in line.env.items()}
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
