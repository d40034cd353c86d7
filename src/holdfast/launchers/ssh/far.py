"""The far side of one ssh connection: reports facts about its host, then guards the agent as long as it lives.

It is sent as text to a bare `python`, so it imports nothing of holdfast before the order to start, and works with any
Python and holdfast: the launcher judges the differences. It reads lines of JSON and words from standard input, and
answers with marked lines on standard output. Values of variables come this way and are on no command line.

    request ► facts ► (beat | signal N)* ► go ► (beat | signal N | kill)* ► end
    end of input, or silence: the connection is lost

This process stays small and only waits: the agent is its child and writes directly to ssh.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SILENCE_S = 15.0
"""The launcher sends a beat every few seconds. Without one for so long it is lost: a cut cable sends no EOF."""
LOSS_GRACE_S = 5.0
"""An agent without a launcher gets SIGTERM, and SIGKILL after this."""
REPLACE_S = 10.0
"""Limit for the end of an agent that an earlier connection has left behind."""
TELL_S = 10.0
"""Limit for the last message to be read."""
FILE_BYTES_MAX = 1 << 20
HEADER_BYTES_MAX = 4096


class LauncherLines:
    """Lines from the launcher."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.rest = b""
        self.waiting: list[bytes] = []
        """Lines that came together with the one that `next` returned."""
        self.ended = False

    def receive(self) -> list[bytes]:
        """The new whole lines. Blocks when there are none."""
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            data = b""
        self.ended = not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines

    def next(self) -> dict[str, Any] | None:
        """The next message; None when the connection has ended, or is silent."""
        while True:
            while not self.waiting:
                if self.ended or not select.select([self.fd], [], [], SILENCE_S)[0]:
                    return None
                self.waiting = self.receive()
            line = self.waiting.pop(0)
            if line.startswith(b"{"):  # nor is there an agent yet for a signal
                message: dict[str, Any] = json.loads(line)
                return message


def main() -> int:
    words = LauncherLines(0)
    request = words.next()
    if request is None:
        return 0
    mark = request["mark"]
    take_environment(request)
    held, facts = gather(request)
    tell(mark, facts)
    go = words.next()
    if go is None:
        return 0
    lock = take_over(go["lock"])
    if lock is None:
        tell(mark, {"end": None, "text": "an earlier agent of this run is still on this host"})
        return 1
    report, tells = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os._exit(agent(go, parent, tells, [0, report, lock.fileno()]))
    os.close(tells)
    guard = Guard(pid, words, lock, go["detach"])
    code = guard.watch()
    end = {"end": code, **read_report(report)}
    if code and guard.lost and not guard.detach:  # it ended because of the lost launcher: not an end of the job
        end = {"end": None, "text": f"no message from the launcher for {SILENCE_S:g} s"}
    del held  # until here: the agent has bound the same port beside it
    tell(mark, end)
    return code


def take_environment(request: dict[str, Any]) -> None:
    """Set the agent's environment here, so that this process finds what the agent will find."""
    os.environ.update(request["env"])
    sys.path[:] = [folder for folder in sys.path if folder]  # `-c` puts the current folder first
    folders = os.environ.get("PYTHONPATH", "").split(":")
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    own = os.path.dirname(sys.executable)
    if own not in os.environ.get("PATH", "").split(":"):  # as an activated virtual environment has it
        os.environ["PATH"] = own + ":" + os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")


# ---------------------------------------------------------------- facts


def gather(request: dict[str, Any]) -> tuple[socket.socket | None, dict[str, Any]]:
    """The facts that the launcher compares, and a socket that keeps a port free for the coordinator."""
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "holdfast": holdfast_version(),
        "torch": torch_version(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus(),
        "machine": machine(),
        "address": "",
        "client": "",
        "port": 0,
        "script": "",
        "trouble": "",
    }
    client, _, address = ([*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""])[:3]
    facts["client"], facts["address"] = client, address
    held = None
    try:
        held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Bound, not listening: no other process gets the port by chance, and the agent can bind it too.
        held.bind(("", 0))
        facts["port"] = held.getsockname()[1]
    except OSError:
        pass
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        facts["trouble"] = f"cwd: {error.strerror}"
    else:
        cwd: str = request["cwd"]
        os.environ["PWD"] = cwd if os.path.isabs(cwd) else os.getcwd()  # as `cd` does
        facts["script"], facts["trouble"] = look_at_script(request["script"], request["program"])
    return held, facts


def look_at_script(path: str, program: bool) -> tuple[str, str]:
    """The hash of the script, and its problem."""
    if not path:
        return "", ""
    if program:
        folders = [""] if "/" in path else os.environ.get("PATH", "").split(":")
        found = any(os.access(os.path.join(each, path), os.X_OK) for each in folders)
        return "", "" if found else "script: no such executable"
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX)
    except OSError as error:
        return "", f"script: {error.strerror}"
    import hashlib

    return hashlib.sha256(data).hexdigest(), ""


def holdfast_version() -> str:
    try:
        from holdfast.version import __version__
    except ImportError:
        return ""
    return __version__


def torch_version() -> str:
    """Version of the torch that an import would find, without importing it."""
    for folder in sys.path:
        try:
            with open(os.path.join(folder, "torch", "version.py")) as file:
                text = file.read(HEADER_BYTES_MAX)
        except OSError:
            continue
        for line in text.splitlines():
            if line.startswith("__version__"):
                return line.partition("=")[2].strip().strip("'\"")
    return ""


def gpus() -> int:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def machine() -> str:
    """The same for two names of one machine (or container)."""
    parts = [socket.gethostname()]
    for path in ("/proc/self/ns/net", "/proc/self/ns/pid", "/proc/self/ns/uts"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path))
    try:  # as holdfast.linux does, which is not at hand here
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
    except OSError:
        pass
    return " ".join(parts)


# ---------------------------------------------------------------- the agent


def agent(go: dict[str, Any], parent: int, tells: int, close: list[int]) -> int:
    """In the child: an ordinary agent that also reports its end through `tells`. Returns its exit code."""
    signal.set_wakeup_fd(-1)
    for fd in close:
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # already 0, the lowest free descriptor
    os.set_inheritable(0, True)
    if not go["detach"]:
        die_with(parent)
    import importlib

    try:
        command = importlib.import_module("holdfast.cli").run_command
        code: int = command("remote", [str(tells), *go["argv"]])
        return code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def die_with(parent: int) -> None:
    """End the agent when its guard is killed; the agent's supervisor then ends the workers."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(137)


class Guard:
    """Waits for the end of the agent, for the launcher's messages, and for their absence."""

    def __init__(self, pid: int, words: LauncherLines, lock: socket.socket, detach: bool) -> None:
        self.pid, self.words, self.lock, self.detach = pid, words, lock, detach
        self.lost = self.ended = False
        self.kill_at: float | None = None
        self.heard = time.monotonic()
        signal.signal(signal.SIGTERM, lambda *_: self.signal(signal.SIGTERM))
        signal.signal(signal.SIGINT, lambda *_: self.signal(signal.SIGINT))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def watch(self) -> int:
        """Returns the agent's exit code as a shell shows it."""
        ended = os.pidfd_open(self.pid)
        self.observe(self.words.waiting)  # what came together with the order to go
        self.words.waiting = []
        poller = select.poll()
        for fd in (ended, self.words.fd, self.lock.fileno()):
            poller.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll(self.wait_ms())]
            if ended in ready:
                self.ended = True  # before its number is free for another process
                status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                return 128 - status if status < 0 else status
            if self.words.fd in ready:
                self.observe(self.words.receive())
                if self.words.ended:
                    poller.unregister(self.words.fd)
                    self.lose()
            if self.lock.fileno() in ready:
                self.leave()
            now = time.monotonic()
            if not self.lost and now > self.heard + SILENCE_S:
                self.lose()
            if self.kill_at is not None and now >= self.kill_at:
                self.kill_at = None
                self.signal(signal.SIGKILL)

    def wait_ms(self) -> float | None:
        dues = [self.kill_at] if self.kill_at is not None else []
        if not self.lost:
            dues.append(self.heard + SILENCE_S)
        return max(0.0, min(dues) - time.monotonic()) * 1000 + 1 if dues else None

    def observe(self, lines: list[bytes]) -> None:
        if lines:
            self.heard = time.monotonic()
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"signal":
                self.signal(int(number))
            elif word == b"kill":
                self.signal(signal.SIGKILL)

    def lose(self) -> None:
        """The launcher, or the connection to it, is lost."""
        self.lost = True
        if not self.detach:
            self.signal(signal.SIGTERM)
            self.kill_at = time.monotonic() + LOSS_GRACE_S

    def leave(self) -> None:
        """Leave the host to another connection of the same launcher."""
        caller, _ = self.lock.accept()
        with caller:
            who = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", who)[1] == os.geteuid():
            self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def take_over(name: str) -> socket.socket | None:
    """Become this run's only agent on this host: bind an abstract socket, which ends with its process. None: an earlier
    agent holds it."""
    end = time.monotonic() + REPLACE_S
    while time.monotonic() < end:
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind("\0" + name)
            lock.listen()
        except OSError:
            lock.close()
        else:
            return lock
        with socket.socket(socket.AF_UNIX) as caller, contextlib.suppress(OSError):
            caller.connect("\0" + name)
        time.sleep(0.05)
    return None


def read_report(fd: int) -> dict[str, Any]:
    """The agent's report of its end; empty: it was killed."""
    os.set_blocking(fd, False)
    try:
        report: dict[str, Any] = json.loads(os.read(fd, 65536))  # one write of less than a pipe holds
    except (OSError, ValueError):
        return {}
    return report


def tell(mark: str, message: dict[str, Any]) -> None:
    """Write one marked line. Give up when it is not read in time."""
    data = (mark + json.dumps(message) + "\n").encode()
    signal.setitimer(signal.ITIMER_REAL, TELL_S)  # its signal ends this process
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    sys.exit(main())
