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
"""The launcher sends a beat every few seconds. Without one for this long it counts as lost: a cut cable sends no
EOF."""
LOSS_GRACE_S = 5.0
"""An agent without a launcher gets SIGTERM, and SIGKILL after this."""
REPLACE_S = 10.0
"""Limit for the end of an agent that an earlier connection has left behind."""
SEND_S = 10.0
"""Limit for the launcher to read a message."""
FILE_BYTES_MAX = 1 << 20
"""Part of the script that is hashed. The launcher's own hash (cli/hosts.py) reads the same part."""
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
            # Beats carry nothing, and a signal has no process to go to before the agent is started.
            if line.startswith(b"{"):
                message: dict[str, Any] = json.loads(line)
                return message


def main() -> int:
    lines = LauncherLines(0)
    request = lines.next()
    if request is None:
        return 0
    mark = request["mark"]
    take_environment(request)
    reserved, facts = gather(request)
    send(mark, facts)
    order = lines.next()
    if order is None:
        return 0
    lock = take_over(order["lock"])
    if lock is None:
        send(mark, {"end": None, "text": "an earlier agent of this run is still on this host"})
        return 1

    report, report_to = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os._exit(agent(order, parent, report_to, [0, report, lock.fileno()]))
    os.close(report_to)
    guard = Guard(pid, lines, lock, order["detach"])
    code = guard.watch()

    end = {"end": code, **read_report(report)}
    # An agent that was stopped because the launcher was lost says nothing about the job.
    if code and guard.lost and not guard.detach:
        end = {"end": None, "text": f"no message from the launcher for {SILENCE_S:g} s"}
    del reserved  # open until here: the agent bound the same port beside it, and nobody else could
    send(mark, end)
    return code


def take_environment(request: dict[str, Any]) -> None:
    """Set the agent's environment here, so that this process finds what the agent will find."""
    os.environ.update(request["env"])
    sys.path[:] = [folder for folder in sys.path if folder]  # `-c` puts the current folder first
    folders = os.environ.get("PYTHONPATH", "").split(":")
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    # An activated virtual environment has its folder first on the PATH; scripts call its programs by name.
    own = os.path.dirname(sys.executable)
    if own not in os.environ.get("PATH", "").split(":"):
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
    reserved = None
    try:
        reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Bound, not listening: no other process gets the port by chance, and the agent can bind it too.
        reserved.bind(("", 0))
        facts["port"] = reserved.getsockname()[1]
    except OSError:
        pass
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        facts["trouble"] = f"cwd: {error.strerror}"
    else:
        cwd: str = request["cwd"]
        os.environ["PWD"] = cwd if os.path.isabs(cwd) else os.getcwd()  # as `cd` does
        facts["script"], facts["trouble"] = check_script(request["script"], request["program"])
    return reserved, facts


def check_script(path: str, program: bool) -> tuple[str, str]:
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
    """An id of this machine or container: equal under all its host names."""
    parts = [socket.gethostname()]
    for path in ("/proc/self/ns/net", "/proc/self/ns/pid", "/proc/self/ns/uts"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path))
    try:  # holdfast.linux reads the same file, but holdfast need not be installed here
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
    except OSError:
        pass
    return " ".join(parts)


# ---------------------------------------------------------------- the agent


def agent(order: dict[str, Any], parent: int, report_to: int, close: list[int]) -> int:
    """Run an ordinary agent in the forked child. It also reports its end through `report_to`. Returns its exit code."""
    signal.set_wakeup_fd(-1)
    for fd in close:
        os.close(fd)
    # Standard input was the launcher's connection. The open gets descriptor 0, the lowest free one, for which dup2 does
    # nothing: so it must be made inheritable as well.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(0, True)
    if not order["detach"]:
        die_with(parent)
    import importlib

    try:
        command = importlib.import_module("holdfast.cli").run_command
        code: int = command("remote", [str(report_to), *order["argv"]])
        return code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def die_with(parent: int) -> None:
    """End the agent when its guard is killed; the agent's supervisor then ends the workers."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the guard was killed before the call above: no signal comes
        os._exit(137)


class Guard:
    """Waits for the end of the agent, for the launcher's messages, and for their absence."""

    def __init__(self, pid: int, lines: LauncherLines, lock: socket.socket, detach: bool) -> None:
        self.pid, self.lines, self.lock, self.detach = pid, lines, lock, detach
        self.lost = False
        """The launcher is lost: its connection has ended, or is silent."""
        self.ended = False
        """The agent has ended; its pid is no longer used."""
        self.kill_at: float | None = None
        """The time at which the agent gets SIGKILL, by time.monotonic(); None: no kill is due."""
        self.heard = time.monotonic()
        """The time at which the launcher's newest line arrived."""
        signal.signal(signal.SIGTERM, lambda *_: self.signal(signal.SIGTERM))
        signal.signal(signal.SIGINT, lambda *_: self.signal(signal.SIGINT))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def watch(self) -> int:
        """Wait for the agent's end. Returns its exit code as a shell shows it: 128+N after signal N."""
        ended = os.pidfd_open(self.pid)
        self.observe(self.lines.waiting)  # lines that came together with the order to start
        self.lines.waiting = []
        poller = select.poll()
        for fd in (ended, self.lines.fd, self.lock.fileno()):
            poller.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll(self.wait_ms())]
            if ended in ready:
                self.ended = True  # before waitpid frees the pid: a signal handler could hit another process
                status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                return 128 - status if status < 0 else status
            if self.lines.fd in ready:
                self.observe(self.lines.receive())
                if self.lines.ended:
                    poller.unregister(self.lines.fd)
                    self.lose_launcher()
            if self.lock.fileno() in ready:
                self.yield_host()
            now = time.monotonic()
            if not self.lost and now > self.heard + SILENCE_S:
                self.lose_launcher()
            if self.kill_at is not None and now >= self.kill_at:
                self.kill_at = None
                self.signal(signal.SIGKILL)

    def wait_ms(self) -> float | None:
        """Milliseconds until the next deadline; None: there is none."""
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

    def lose_launcher(self) -> None:
        """The launcher, or the connection to it, is lost."""
        self.lost = True
        if not self.detach:
            self.signal(signal.SIGTERM)
            self.kill_at = time.monotonic() + LOSS_GRACE_S

    def yield_host(self) -> None:
        """Kill the agent: a new connection of the same launcher takes the host over.

        The new far side connects to the lock's socket (`take_over`). Anybody on the host can do that, so only the own
        user counts.
        """
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
    """Become this run's only agent on this host: bind an abstract socket, which ends with its process.

    Returns None if an earlier agent still has it after REPLACE_S. Each failed attempt asks that agent's guard to end
    it.
    """
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
    """The agent's report of its end; empty if it was killed and could not write one."""
    os.set_blocking(fd, False)
    try:
        report: dict[str, Any] = json.loads(os.read(fd, 65536))  # one write of less than a pipe holds
    except (OSError, ValueError):
        return {}
    return report


def send(mark: str, message: dict[str, Any]) -> None:
    """Write one marked line. Give up when it is not read in time."""
    data = (mark + json.dumps(message) + "\n").encode()
    signal.setitimer(signal.ITIMER_REAL, SEND_S)  # its signal ends this process
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    sys.exit(main())
