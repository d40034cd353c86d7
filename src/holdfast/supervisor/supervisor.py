"""The supervisor: parent of every worker, small and single-threaded, forked from the agent before heavy imports.

Every process that a worker leaves behind (own sessions and double forks too) becomes a child of the supervisor, because
it is a subreaper. When the agent is gone, however it ended, the supervisor channel reads end-of-file and the supervisor
kills all its processes.

Standard library only. Knows processes, signals and descriptors; knows nothing of ranks, generations or torch.

Commands on the supervisor channel (messages of seqpacket.py); a spawn brings one descriptor for each number:

    {"do": "start_fork_server", …}         start the fork server (worker_command.py); it forks every later "warm" worker
    {"do": "spawn", "key", "argv", "env_set", "env_unset", "cwd", "fds": [numbers in the child], "service", "cpus",
     "warm"}
    {"do": "signal", "key", "signum"}      to the process itself, not to its children
    {"do": "kill_session", "pid"}          kill what this process, which has ended, left in its session
    {"do": "kill_tree", "limit_s"}         kill everything but services; answered by tree_gone
    {"do": "ignore", "signum"}             processes spawned from now on ignore it
    {"do": "fence", "at_s", "suspend_at_s"}  when to kill and to suspend these (fence.py); the next one replaces it
    {"do": "confirm", "number"}            answered by confirmed, when all commands before it were executed
    {"do": "logs", "paths", "first"}       brings the spools of these log files (log_spool.py): what an agent that is
                                           killed has not moved is moved then. "first": they replace the earlier ones
    {"do": "remove", "path"}               remove this in-memory folder of plain files when the supervisor ends
    {"do": "exit"}                         as if the agent were gone

Events to the agent: {"is": "started", key, pid}, {"is": "spawn_failed", key, errno, text},
{"is": "ended", key, pid, exit_code}, {"is": "fenced"}, {"is": "tree_gone", leftover}, {"is": "confirmed", number},
{"is": "preload", text, trouble}, {"is": "standby", pids, own_bytes}: workers of the next generation are parked.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple, NoReturn

from holdfast import own_folders, seqpacket
from holdfast.inherited import forget_secrets, raise_limit, restore_limit, soft_limit
from holdfast.protocol.errors import PlatformError
from holdfast.supervisor import fork_server_client as fork_server
from holdfast.supervisor import processes
from holdfast.supervisor.fence import Fence

NAME = b"hf-supervisor"
PROC = "/proc/self/fd"
NO_PROCESS_ADVICE = " (`ulimit -u`, or the container's limit of processes)"
FENCE_KILL_LIMIT_S = 10.0
"""At the fence: how long to wait for processes stuck in the kernel."""
END_LIMIT_S = 10.0
"""After the agent is gone: how long the supervisor waits for processes stuck in the kernel before it gives up."""
LOG_CHUNK_BYTES = 1 << 20

_TERMINAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_BROADCAST = (signal.SIGUSR1, signal.SIGUSR2)
"""Schedulers send these to every process of a job; they are meant for the agent and its workers."""
_NOT_OURS = (*_TERMINAL, *_BROADCAST)
_PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)
_HARMLESS = (signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH)
"""Signals whose default action does nothing."""
_EXEC_FAILED = 127


class SupervisorHandle(NamedTuple):
    """The agent's end of a supervisor."""

    pid: int
    sock: socket.socket
    ignored: tuple[int, ...]
    """Signals that were ignored when the agent started: workers inherit that, as under nohup."""
    descriptors: int
    """The soft limit of open files that the agent was started with: workers have the same."""


class Kept(NamedTuple):
    key: str
    service: bool


def fork_supervisor() -> SupervisorHandle:
    """Fork the supervisor. The agent calls this once, before it starts a thread or installs a signal handler.

    Raises PlatformError where the machine lacks a needed feature.
    """
    if not os.path.isdir(PROC):
        raise PlatformError(f"{PROC} is missing: holdfast finds and ends processes through /proc; mount it")
    _fill_standard_descriptors()
    ignored = ignored_signals()
    limit = soft_limit()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = os.getpid()
    # Ctrl-C must not reach the child before it ignores it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_OURS)
    try:
        pid = os.fork()
        if pid == 0:
            ours.close()
            _run(theirs, agent, ignored, limit)
    except OSError as error:
        ours.close()
        theirs.close()
        raise PlatformError(f"no process can be started here: {error.strerror}{NO_PROCESS_ADVICE}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return SupervisorHandle(pid, ours, ignored, limit)


def exec_supervisor(ignored: Sequence[int], limit: int | None = None) -> SupervisorHandle:
    """Start a supervisor by exec, when the forked one died and the agent already has threads. Raises OSError.

    `limit`: soft limit of open files for its processes; None: the present one.
    """
    import subprocess  # rarely needed, and the supervisor must stay light

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The path of our package is passed directly: the workers must not inherit a PYTHONPATH.
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
    program = f"import sys; sys.path.insert(0, {root!r}); from holdfast.supervisor.supervisor import main; main()"
    limit = soft_limit() if limit is None else limit
    arguments = [str(theirs.fileno()), str(os.getpid()), ",".join(str(int(signum)) for signum in ignored), str(limit)]
    with theirs:
        try:
            command = [sys.executable, "-P", "-c", program, *arguments]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        except OSError:
            ours.close()
            raise
    process.returncode = os.EX_OK  # the owner of the handle reaps it by its pid, not subprocess
    return SupervisorHandle(process.pid, ours, tuple(ignored), limit)


def ignored_signals() -> tuple[int, ...]:
    """Signals that were ignored when this process was started (Python's own two excepted)."""
    return tuple(
        signum
        for signum in sorted(signal.valid_signals())
        if signum not in _PYTHONS_OWN and signal.getsignal(signum) is signal.SIG_IGN
    )


def _fill_standard_descriptors() -> None:
    """Open the standard descriptors that are closed, so that no log file or socket gets the number of stdout."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)


def _run(sock: socket.socket, agent: int, ignored: Sequence[int], limit: int) -> NoReturn:
    """Run the supervisor in the child. Never returns to the agent's code above it."""
    status = os.EX_OK
    try:
        gc.freeze()  # the agent's objects stay unchanged: collecting them would copy pages
        with contextlib.suppress(PermissionError):
            os.setsid()  # an exec'd supervisor leads its session already
        for signum in _NOT_OURS:
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        processes.prctl(processes.PR_SET_NAME, NAME)
        # With the agent's command line it would be killed together with it by `pkill -9 -f holdfast`, and nobody would
        # end what the workers have started.
        processes.set_command_line(NAME)
        # Suspended when the agent ends, it would leave its workers running. To one that runs, the signal does nothing.
        processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGCONT)
        processes.become_subreaper()
        _close_all_but(sock.fileno())
        raise_limit()
        forget_secrets()
        supervisor = Supervisor(sock, agent, ignored, limit)
        try:
            supervisor.run()
        finally:
            processes.kill_descendants(os.getpid(), limit_s=END_LIMIT_S)
            supervisor.read_last()
            supervisor.remove_folders()
            supervisor.move_logs()
    except BaseException:  # noqa: BLE001 - nothing may unwind into the agent's frames
        import traceback

        traceback.print_exc()
        status = os.EX_SOFTWARE
    finally:
        os._exit(status)


def _close_all_but(kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


class Supervisor:
    """Event loop of the supervisor: polls the supervisor channel, the SIGCHLD pipe and the pipes of pending execs."""

    def __init__(self, sock: socket.socket, agent: int, ignored: Sequence[int], limit: int) -> None:
        self._sock = sock
        self._ignored = tuple(ignored)
        self._limit = limit
        """Soft limit of open files for every started process."""
        self._pid = os.getpid()
        self._out = seqpacket.Outbox()
        self._kept: dict[int, Kept] = {}
        self._execs: dict[int, int] = {}
        """Pipe that reports whether exec worked -> pid."""
        self._kill_deadline: float | None = None
        self._kill_asked = False
        """The agent asked for the kill, not the fence."""
        self._rescan_at = 0.0
        self._victims: set[int] = set()
        self._fence = Fence(self._workers)
        self._doomed: list[str] = []
        """Folders to remove when the supervisor ends."""
        self._logs: list[tuple[str, int]] = []
        """Log files, and the descriptors of their spools."""
        self._leaving = False
        self._poller = select.poll()
        sock.setblocking(False)
        self._poller.register(sock, select.POLLIN)
        self._wake = self._wake_at_child_end()
        self._poller.register(self._wake, select.POLLIN)
        self._agent_end = self._watch_agent(agent)
        self._fork_server = fork_server.ForkServerClient(self._poller, self._spawn, self._forked, self._out.add)

    def _wake_at_child_end(self) -> int:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        return wake_read

    def _watch_agent(self, agent: int) -> int:
        """Watch the agent's pid too, because a stray child of it may hold the other end of the supervisor channel."""
        try:
            agent_end = os.pidfd_open(agent)
        except ProcessLookupError:
            self._leaving = True
            return -1
        except OSError:
            return -1  # a kernel without pidfd: end-of-file on the supervisor channel must suffice
        self._leaving = os.getppid() != agent
        self._poller.register(agent_end, select.POLLIN)
        return agent_end

    def run(self) -> None:
        """Serve until the agent is gone or asks for the end."""
        while not self._leaving:
            for fd, mask in self._poller.poll(self._patience_ms()):
                self._ready(fd, mask)
            self._reap()
            if self._fence.look(time.monotonic()):
                self._out.add({"is": "fenced"})
                self._kill_tree(FENCE_KILL_LIMIT_S)
            if self._kill_deadline is not None:
                self._kill_pass(self._kill_deadline)
            self._fork_server.tick()
            self._flush()

    def read_last(self) -> None:
        """Read what the agent sent before it was killed, for what is done after its end: folders to remove and logs to
        move. On a busy machine the end of the agent may be noticed while such messages are unread."""
        with contextlib.suppress(BlockingIOError):
            while (received := seqpacket.receive(self._sock)) is not None:
                if received[0]["do"] in ("remove", "logs", "exit"):
                    self._obey(*received)

    def remove_folders(self) -> None:
        """Remove the folders that a killed agent could not remove."""
        for folder in self._doomed:
            with contextlib.suppress(OSError):  # usually it is gone already
                own_folders.remove_private(folder)

    def move_logs(self) -> None:
        """Move what a killed agent has not moved. The disk may stand still: no process lives any more that waits for
        it."""
        for path, memory_fd in self._logs:
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                os.lseek(file, 0, os.SEEK_END)
                # From the offset that the agent shares with us: what it has not moved.
                while os.sendfile(file, memory_fd, None, LOG_CHUNK_BYTES):
                    pass

    def _patience_ms(self) -> int | None:
        if self._kill_deadline is not None:
            return int(processes.RESCAN_S * 1000)
        patience_s = min(self._fence.due_s - time.monotonic(), self._fork_server.patience_s())
        return None if patience_s == inf else max(0, int(patience_s * 1000) + 1)

    def _workers(self) -> list[int]:
        """All living processes but services: workers, and what they have started."""
        return processes.descendants(self._pid, {pid for pid, kept in self._kept.items() if kept.service})

    def _kill_tree(self, limit_s: float) -> None:
        self._fork_server.cancel(None, signal.SIGKILL)
        self._kill_deadline = time.monotonic() + limit_s

    def _ready(self, fd: int, mask: int) -> None:
        if fd == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 4096)
        elif fd == self._agent_end:
            self._leaving = True
        elif fd in self._execs:
            self._read_exec_result(fd)
        elif self._fork_server.owns(fd):
            self._fork_server.serve(fd)
        elif fd == self._sock.fileno() and mask & ~select.POLLOUT:
            received = seqpacket.receive(self._sock)
            if received is None:
                self._leaving = True
            else:
                self._obey(*received)

    def _obey(self, command: dict[str, Any], fds: list[int]) -> None:
        match command["do"]:
            case "start_fork_server":
                self._fork_server.begin(command)
            case "spawn" if self._fork_server.takes(command):
                self._fork_server.ask(command, fds)
            case "spawn":
                try:
                    self._spawn(command, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
            case "signal":
                self._signal(command["key"], command["signum"])
            case "kill_session" if command["pid"] not in self._kept:  # else the number belongs to another process
                processes.kill_session(self._pid, command["pid"])
            case "kill_tree":
                self._kill_asked = True
                self._kill_tree(command["limit_s"])
            case "fence":
                self._fence.move(command["at_s"], command["suspend_at_s"])
            case "ignore":
                self._ignored = (*self._ignored, command["signum"])
                signal.signal(command["signum"], signal.SIG_IGN)
            case "confirm":
                # Sent after this pass of the loop, in which the fence is due and a tree that is to be killed is killed.
                self._out.add({"is": "confirmed", "number": command["number"]})
            case "remove":
                self._doomed.append(command["path"])
            case "logs":
                self._keep_logs(command, fds)
            case "exit":
                self._keep_logs({"paths": [], "first": True}, [])  # the agent moves them itself
                self._leaving = True

    def _keep_logs(self, command: dict[str, Any], fds: list[int]) -> None:
        if command["first"]:
            for _, memory_fd in self._logs:
                os.close(memory_fd)
            self._logs = []
        self._logs += zip(command["paths"], fds, strict=True)

    # --- starting -----------------------------------------------------------------------------------------------------

    def _spawn(self, command: dict[str, Any], fds: list[int]) -> int:
        """Returns the pid; 0: no process could be started, which was reported."""
        key = command["key"]
        try:
            read_end, write_end = os.pipe()
        except OSError as error:  # no descriptors left
            self._out.add({"is": "spawn_failed", "key": key, "errno": error.errno, "text": f"pipe: {error.strerror}"})
            return 0
        # The child ignores these signals as we do until it restores them: while blocked, an early one waits and is not
        # lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_OURS)
        try:
            pid = os.fork()
            if pid == 0:
                self._become(command, fds, write_end)
        except OSError as error:
            os.close(read_end)
            os.close(write_end)
            self._out.add({"is": "spawn_failed", "key": key, "errno": error.errno, "text": f"fork: {error.strerror}"})
            return 0
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(write_end)
        self._kept[pid] = Kept(key, bool(command["service"]))
        self._execs[read_end] = pid
        self._poller.register(read_end, select.POLLIN)
        return pid

    def _forked(self, command: dict[str, Any], pid: int) -> None:
        """A process was forked by the fork server and became our child; a worker waits for permission to run."""
        self._kept[pid] = Kept(command["key"], bool(command["service"]))
        if command["key"] not in (fork_server.STANDBY, fork_server.KEY):  # these are internal: no event
            self._out.add({"is": "started", "key": command["key"], "pid": pid})

    def _become(self, command: dict[str, Any], fds: list[int], report: int) -> NoReturn:
        """In the child: execute the program, or report why not. Every other descriptor closes itself at exec."""
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(_EXEC_FAILED)  # the supervisor died in between, so nothing would kill this process
            self._restore_signals()
            restore_limit(self._limit)
            if command["cpus"]:
                os.sched_setaffinity(0, command["cpus"])
            if command["cwd"] is not None:
                os.chdir(command["cwd"])
            report = _place_descriptors(dict(zip(command["fds"], fds, strict=True)), report)
            environment = {**os.environ, **command["env_set"]}
            for name in command["env_unset"]:
                environment.pop(name, None)
            os.execvpe(command["argv"][0], command["argv"], environment)
        except OSError as error:
            name = command["cwd"] if error.filename == command["cwd"] else command["argv"][0]
            os.write(report, f"{error.errno} {error.strerror}: {name}".encode(errors="surrogateescape"))
        except BaseException as error:  # noqa: BLE001 - the forked child must not live on as a second supervisor
            os.write(report, f"0 {type(error).__name__}: {error}".encode(errors="backslashreplace"))
        finally:
            os._exit(_EXEC_FAILED)

    def _restore_signals(self) -> None:
        for signum in (*_NOT_OURS, *_PYTHONS_OWN, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        for number in self._ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _read_exec_result(self, fd: int) -> None:
        """The pipe is closed (exec worked) or holds the reason why exec failed."""
        pid = self._execs.pop(fd)
        self._poller.unregister(fd)
        reason = os.read(fd, 4096)
        os.close(fd)
        if not reason:
            if self._kept[pid].key != fork_server.KEY:  # the fork server is internal: no event
                self._out.add({"is": "started", "key": self._kept[pid].key, "pid": pid})
            return
        number, _, text = reason.decode(errors="replace").partition(" ")
        key = self._kept.pop(pid).key
        if key == fork_server.KEY:
            self._fork_server.ended(pid, _EXEC_FAILED)
            return
        self._out.add({"is": "spawn_failed", "key": key, "errno": int(number), "text": text})

    # --- ending -------------------------------------------------------------------------------------------------------

    def _signal(self, key: str, signum: int) -> None:
        if signum not in self._ignored and signum not in _HARMLESS:
            self._fork_server.cancel(key, signum)
        for pid, kept in self._kept.items():
            if kept.key == key:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                self._victims.discard(ended[0])
                self._ended(*ended)

    def _ended(self, pid: int, status: int) -> None:
        for fd in [fd for fd, pending in self._execs.items() if pending == pid]:
            self._read_exec_result(fd)  # "started" or "spawn_failed" comes before "ended"
        if pid not in self._kept or self._kept[pid].key == fork_server.STANDBY:
            self._fork_server.read_answers()  # a requested worker may already run, with its answer unread
        kept = self._kept.pop(pid, None)
        if kept is not None:
            code = os.waitstatus_to_exitcode(status)
            if kept.key == fork_server.KEY:
                self._fork_server.ended(pid, code)
                return
            if kept.key != fork_server.STANDBY:
                self._out.add({"is": "ended", "key": kept.key, "pid": pid, "exit_code": code})

    def _kill_pass(self, deadline: float) -> None:
        """Find and kill, again after the victims are reaped: children forked in between are found then."""
        now = time.monotonic()
        if self._victims and now < self._rescan_at:
            return
        living = self._workers()
        if living and now < deadline:
            processes.kill_each(self._pid, living)
            self._victims = set(living)
            self._rescan_at = now + processes.RESCAN_S
            return
        self._kill_deadline = None
        self._victims.clear()
        self._reap()  # so that every "ended" comes before "tree_gone"
        if self._kill_asked:
            self._kill_asked = False
            self._out.add({"is": "tree_gone", "leftover": living})

    def _flush(self) -> None:
        """Write what the socket takes now; the rest waits for POLLOUT, so a stalled agent never stalls the
        supervisor."""
        try:
            self._out.flush(self._sock)
        except OSError:
            self._leaving = True
        self._poller.modify(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))


def _place_descriptors(wanted: dict[int, int], report: int) -> int:
    """Move each source descriptor to its number. Returns where `report` is now (still closed by exec)."""
    above = max(wanted, default=2) + 1
    report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, above)
    # First move them out of each other's way, then to their numbers.
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in wanted.items()}
    for number, fd in high.items():
        os.dup2(fd, number, inheritable=True)
    return report


def main() -> NoReturn:
    """Run a supervisor by exec. Arguments: the socket's descriptor, the agent's pid, ignored signals, soft limit of
    files."""
    fd, agent, ignored, limit = sys.argv[1:]
    sock = socket.socket(fileno=int(fd))
    sock.set_inheritable(False)
    _run(sock, int(agent), [int(signum) for signum in ignored.split(",") if signum], int(limit))
