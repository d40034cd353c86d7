"""Jobs that share an import of torch: `holdfast` commands that are forked from a program of `Warm`, several at a time.

A command is forked, and so is what its agent would execute to import torch for the workers, the fork server: it finds torch
imported. All else is as ever: agent, supervisor, fork server, workers and services are the processes that they always are.
On a pretend host (tests/network/hosts.py) a command is forked into the namespaces of that host.
tests/fork_server has fork servers that import torch themselves.

    warm_jobs.py serve SOCKET MODULES               forks a process for each command that comes
    warm_jobs.py command SOCKET PROGRAM ARGUMENTS   a command: it has the streams, folder, environment and exit code
                                                    PROGRAM: "holdfast", or the path of a Python script

Standard library only at the top: a command is a Python of its own that starts for nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping
    from pathlib import Path
    from typing import NoReturn

    from tests.warm import Warm

ORDER_BYTES_MAX = 1 << 20
START_S_MAX, SERVE_S_MAX = 60.0, 3600.0
PR_SET_PDEATHSIG = 1
NAMESPACES = ("uts", "ipc", "net", "pid", "mnt")
"""Of a pretend host. The last one has another /proc."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


# --- as a test sees it ------------------------------------------------------------------------------------------------


class WarmJobs:
    """Where commands are served, until `close` or the end of a `with`. No other program runs in `warm` meanwhile."""

    def __init__(self, warm: Warm, folder: Path, *modules: str) -> None:
        """`folder` gets the socket, and a `holdfast` for PATH. `modules` are imported once for all jobs."""
        from threading import Thread

        from tests.support.limits import until

        self.folder = folder
        self._socket = folder / "jobs"
        self._thread = Thread(target=self._serve, args=(warm, modules), name="warm jobs")
        self._thread.start()
        until(lambda: self._socket.exists() or not self._thread.is_alive(), "commands are served", START_S_MAX)
        self._held = connected(str(self._socket))
        shim = folder / "holdfast"
        shim.write_text(f'#!/bin/sh\nexec {shlex.join(self.command("holdfast"))} "$@"\n')
        shim.chmod(0o755)

    def _serve(self, warm: Warm, modules: tuple[str, ...]) -> None:
        done = warm.run([__file__, "serve", self._socket, ",".join(modules)], timeout=SERVE_S_MAX)
        sys.stderr.write(done.stderr)

    def command(self, program: str | Path, *arguments: str | Path) -> list[str]:
        """A command line that runs it: "holdfast", or the path of a Python script."""
        return [sys.executable, "-I", "-S", __file__, "command", str(self._socket), str(program), *map(str, arguments)]

    def run(
        self, program: str | Path, *arguments: str | Path, cwd: Path | None = None, timeout: float = 100.0
    ) -> subprocess.CompletedProcess[str]:
        import subprocess

        from tests.support.gloo_lines import without_gloo_lines
        from tests.support.limits import limit_s
        from tests.warm import ON_CPU

        done = subprocess.run(
            self.command(program, *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, **ON_CPU},
            cwd=cwd,
            timeout=limit_s(timeout),
        )
        done.stdout = without_gloo_lines(done.stdout)
        return done

    def start(
        self,
        program: str | Path,
        *arguments: str | Path,
        env: Mapping[str, str],
        output: Path,
        folder: Path | None = None,
    ) -> Started:
        """Do not wait for its end. Both streams are appended to `output`. `folder`: None is that of `output`."""
        from tests.warm import ON_CPU

        order = {
            "arguments": [str(program), *map(str, arguments)],
            "environment": {**env, **ON_CPU},
            "folder": str(folder or output.parent),
        }
        sock = connected(str(self._socket))
        with open(os.devnull, "rb") as nothing, output.open("ab") as log:
            socket.send_fds(sock, [json.dumps(order).encode()], [nothing.fileno(), log.fileno(), log.fileno()])
        return Started(sock)

    def close(self) -> None:
        """What still runs is killed, as it is when this process ends."""
        self._held.close()
        self._thread.join()

    def __enter__(self) -> WarmJobs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Started:
    """A command's process, with what the tests use of `subprocess.Popen`. It is no child of the test's process."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.pid = int(sock.recv(32))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        import subprocess

        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a command", timeout or 0)
        return code

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._sock], [], [], seconds)[0]:
            self.returncode = int(self._sock.recv(32) or -signal.SIGKILL)
            self._sock.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path)
    return sock


# --- a command --------------------------------------------------------------------------------------------------------


def command(path: str, arguments: list[str]) -> int:
    """Have it run, pass signals on to it, and end with its exit code, or by the signal that ended it."""
    order = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with connected(path) as sock:
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        socket.send_fds(sock, [json.dumps(order).encode()], [0, 1, 2])
        pid = int(sock.recv(32))
        for signum in FORWARDED:
            signal.signal(signum, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = int(sock.recv(32) or -signal.SIGKILL)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no other way
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


# --- where they are forked --------------------------------------------------------------------------------------------


def serve(path: str, modules: list[str]) -> list[str]:
    """Returns in each forked process, with its arguments."""
    import gc
    import importlib

    for name in ("holdfast.cli", *modules):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path + ".new")
    listener.listen()
    os.rename(path + ".new", path)
    holder, _ = listener.accept()
    jobs: dict[int, tuple[int, socket.socket]] = {}
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    poller.register(holder, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd == holder.fileno():
                for left, _ in jobs.values():
                    os.kill(left, signal.SIGKILL)
                sys.exit(0)
            if fd in jobs:
                _end(*jobs.pop(fd))
                poller.unregister(fd)
                os.close(fd)
                continue
            sock, _ = listener.accept()
            packet, fds, _, _ = socket.recv_fds(sock, ORDER_BYTES_MAX, 3)
            pid = os.fork()
            if pid == 0:
                for own in (listener, holder):
                    own.close()
                for other, (_, its_sock) in jobs.items():
                    os.close(other)
                    its_sock.close()
                _enter_host_of(sock)
                with sock:
                    sock.send(b"%d" % os.getpid())
                return _become(fds, **json.loads(packet))
            for each in fds:
                os.close(each)
            ended = os.pidfd_open(pid)
            jobs[ended] = pid, sock
            poller.register(ended, select.POLLIN)


def _end(pid: int, sock: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    with sock, contextlib.suppress(BrokenPipeError):  # the command has been killed
        sock.send(b"%d" % os.waitstatus_to_exitcode(status))


def _enter_host_of(sock: socket.socket) -> None:
    """Fork once more into the namespaces of the process at the other end, unless they are ours. The parent waits for the
    child, and ends as it does."""
    import ctypes

    peer = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))[0]
    if os.readlink(f"/proc/{peer}/ns/pid") == os.readlink("/proc/self/ns/pid"):
        return
    namespaces = [os.open(f"/proc/{peer}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    libc = ctypes.CDLL(None, use_errno=True)
    for each in namespaces:
        if libc.setns(each, 0):
            raise OSError(ctypes.get_errno(), "the namespaces of a pretend host cannot be entered")
        os.close(each)
    pid = os.fork()
    if pid == 0:
        return
    sock.close()
    _, status = os.waitpid(pid, 0)
    _end_as(os.waitstatus_to_exitcode(status))


def _end_as(code: int) -> NoReturn:
    """End with this exit code, or by the signal that it stands for."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no other way
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _become(fds: list[int], arguments: list[str], environment: dict[str, str], folder: str) -> list[str]:
    import ctypes
    import faulthandler

    from holdfast.worker import forking

    os.setsid()
    forking.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    if environment.get("PYTHONFAULTHANDLER"):  # a new Python would see it
        faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    forking.show_as([sys.executable, *arguments], environment)
    return arguments


def _execvpe(file: str, argv: list[str], environment: Mapping[str, str]) -> NoReturn:
    """os.execvpe, but a fork server is a fork."""
    if "fork-server" not in argv:
        real_execvpe(file, argv, environment)
    from holdfast.worker import forking

    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of the list
            if int(name) > 2 and not os.get_inheritable(int(name)):
                os.close(int(name))
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    forking.show_as(argv, dict(environment))
    for name in [name for name in sys.modules if name.partition(".")[0] == "holdfast"]:
        del sys.modules[name]
    sys.orig_argv[:] = argv
    sys.argv[:] = argv[argv.index("fork-server") - 1 :]
    _unbuffer()
    import warm_program

    warm_program.run(sys.argv[0])


def _unbuffer() -> None:
    """As `python -u` has its streams."""
    import io

    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(fd, "wb", closefd=False)
        new = io.TextIOWrapper(raw, old.encoding, old.errors, newline="\n", write_through=True)  # type: ignore[type-var]
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


if __name__ == "__main__":
    _mode, _path, *_rest = sys.argv[1:]
    if _mode == "command":
        sys.exit(command(_path, _rest))
    import warm_program

    _program, *_arguments = serve(_path, [name for name in _rest[0].split(",") if name])
    real_execvpe, os.execvpe = os.execvpe, _execvpe
    sys.argv[:] = [_program, *_arguments]
    if _program != "holdfast":
        warm_program.run(_program)
    from holdfast.cli import main as _holdfast

    warm_program.leave(_holdfast(_arguments))
