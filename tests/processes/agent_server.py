"""Agents that share an import: one process has imported what holdfast's agents or torchrun import, and forks them.

The imports take more than half of the processor time of an agent that runs a short job, and two seconds of a torchrun.
`test_the_server_is_torchrun` compares a forked torchrun with the installed command. A forked agent has command line,
environment, folder, streams and session of its own, and ends as an interpreter ends. What has to be a process that
somebody executed (another program, an environment that an interpreter reads) is one: see `JobFolder.start`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ != "__main__":
    from tests.support import processor_time
    from tests.support.limits import limit_s

MODULES = (
    "holdfast.run",
    "holdfast.cli.run",
    "holdfast.cli.resolve",
    "holdfast.runtime.agent_service",
    "holdfast.supervisor.supervisor",
    "holdfast.supervisor.worker_command",
    "holdfast.diagnosis.screen",
    "holdfast.diagnosis.causes",
)
ORDER_BYTES_MAX = 1 << 20
ANSWER_S_MAX = 60.0
READ_AT_THE_START = ("PYTHON", "LD_", "MALLOC_")
"""Variables that an interpreter or its libraries read when they start: too late for a fork."""


class ForkedAgent:
    """A forked process, with what the tests use of `subprocess.Popen`."""

    def __init__(self, server: AgentServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("an agent", timeout or 0)
        return code

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], seconds)[0]:
            ended = self._server.ask({"reap": self.pid})
            os.close(self._pidfd)
            self._server.used(ended["processor_s"])
            self.returncode = ended["code"]
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(9)


class AgentServer:
    """The parent of the agents, as a test sees it."""

    def __init__(self, *more_modules: str, modules: Sequence[str] = MODULES) -> None:
        """`modules` and `more_modules`: what these agents import."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            line = [sys.executable, __file__, str(theirs.fileno()), *modules, *more_modules]
            self._process = subprocess.Popen(line, pass_fds=[theirs.fileno()], start_new_session=True)
        self._sock.settimeout(limit_s(ANSWER_S_MAX))
        self._used_s = 0.0

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        screen: Path,
        errors: Path | None = None,
        stdin: str = os.devnull,
        program: str = "holdfast.run",
    ) -> ForkedAgent:
        """Both its streams go to `screen`, unless there is a file for `errors`."""
        order = {
            "program": program,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(folder),
            "streams": [stdin, str(screen), str(errors or screen)],
        }
        return ForkedAgent(self, self.ask(order)["pid"])

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        self._sock.send(json.dumps(order).encode())
        answer: dict[str, Any] = json.loads(self._sock.recv(ORDER_BYTES_MAX))
        return answer

    def used(self, processor_s: float) -> None:
        """Count it for the test that is running."""
        self._used_s += processor_s
        processor_time.add(processor_s)

    def close(self) -> None:
        self._sock.close()
        self._process.wait()
        processor_time.add(-self._used_s)  # with the server itself all its children are counted


def can_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether an agent in this environment may be forked: an interpreter would read nothing else from it than ours did."""
    names = {name for name in environment.keys() | os.environ.keys() if name.startswith(READ_AT_THE_START)}
    return all(environment.get(name) == os.environ.get(name) for name in names - {"PYTHONDONTWRITEBYTECODE"})


def serve(sock: socket.socket, modules: Sequence[str]) -> tuple[str, list[str]]:
    """Fork an agent for each order, and say how it ended when asked; returns in an agent: its program and arguments."""
    for name in modules:
        importlib.import_module(name)
    sys.dont_write_bytecode = False
    gc.collect()
    gc.freeze()  # else each agent's first collection copies every page that it looks at
    while packet := sock.recv(ORDER_BYTES_MAX):
        order = json.loads(packet)
        if "reap" in order:
            _, status, usage = os.wait4(order["reap"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status), "processor_s": usage.ru_utime + usage.ru_stime}
        else:
            pid = os.fork()
            if pid == 0:
                sock.close()
                return become(**order)
            answer = {"pid": pid}
        sock.send(json.dumps(answer).encode())
    sys.exit(0)


def become(
    program: str, arguments: list[str], environment: dict[str, str], folder: str, streams: list[str]
) -> tuple[str, list[str]]:
    from holdfast.worker import forking

    os.setsid()
    for fd, path in enumerate(streams):
        flags = os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(path, flags | os.O_NOCTTY, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder
    sys.modules["__main__"] = sys.modules[program]  # which a child that multiprocessing spawns imports
    sys.argv = [str(sys.modules[program].__file__), *arguments]
    sys.orig_argv = [sys.executable, "-m", program, *arguments]
    forking.show_as(sys.orig_argv, environment)
    return program, arguments


if __name__ == "__main__":
    _program, _arguments = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    sys.exit(sys.modules[_program].main(_arguments))
