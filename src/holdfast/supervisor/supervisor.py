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
    {"do": "logs", "paths", "first", "ended"}  brings the spools of these log files (log_spool.py): what an agent that
                                           is killed has not moved is moved then. They replace the earlier ones, if
                                           "first", or those of the paths "ended"
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
from holdfast.supervisor.move_bytes import move_bytes

NAME = b"hf-supervisor"
PROC = "/proc/self/fd"
"""Folder that must be there: holdfast finds processes and their descriptors through /proc."""
NO_PROCESS_ADVICE = " (`ulimit -u`, or the container's limit of processes)"
FENCE_KILL_LIMIT_S = 10.0
"""Longest wait for processes stuck in the kernel when the fence has passed (s)."""
END_LIMIT_S = 10.0
"""Longest wait for processes stuck in the kernel after the agent is gone (s). Then the supervisor gives them up."""
LOG_CHUNK_BYTES = 1 << 20
"""Number of bytes of a log that one system call moves at most."""

_TERMINAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_BROADCAST = (signal.SIGUSR1, signal.SIGUSR2)
"""Schedulers send these to every process of a job; they are meant for the agent and its workers."""
_NOT_OURS = (*_TERMINAL, *_BROADCAST)
"""Signals that the supervisor ignores: it ends when the agent does, and not by Ctrl-C or a scheduler."""
_PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that every Python ignores from its start. The workers get their default action."""
_NOT_INHERITED = (*_PYTHONS_OWN, signal.SIGINT, signal.SIGQUIT)
"""A shell script ignores SIGINT and SIGQUIT for what it starts with `&`. torchrun ends by them there, too."""
_HARMLESS = (signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH)
"""Signals whose default action does nothing."""
_EXEC_FAILED = 127
"""Exit code of a child that could not execute its program, as in a shell."""


class SupervisorHandle(NamedTuple):
    """The agent's end of a supervisor."""

    pid: int
    sock: socket.socket
    ignored: tuple[int, ...]
    """Signals that were ignored when the agent started: workers inherit that, as under nohup."""
    descriptors: int
    """The soft limit of open files that the agent was started with: workers have the same."""


class RecordedChild(NamedTuple):
    """A child that was started by order of the agent. An orphan that we adopted is none."""

    key: str
    """The agent's name for it."""
    service: bool
    """It survives `kill_tree` and the fence, and so does everything below it."""


def move_rest(memory_fd: int, file: int) -> None:
    """Append what is left of this memory to the file. Holes are what the agent dropped, since the disk did not take it.
    Raises OSError."""
    # The read offset is that of the open file, which the agent shares with us: what it has moved is behind.
    at, size = os.lseek(memory_fd, 0, os.SEEK_CUR), os.fstat(memory_fd).st_size
    while at < size:
        try:
            begin = os.lseek(memory_fd, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
            begin = size
        if begin > at:
            from holdfast.supervisor.log_spool import missing_note  # here, as the supervisor stays small without it

            os.write(file, missing_note(begin - at))
        at = os.lseek(memory_fd, begin, os.SEEK_HOLE) if begin < size else size
        os.lseek(memory_fd, begin, os.SEEK_SET)
        while begin < at and (moved_bytes := move_bytes(memory_fd, file, min(LOG_CHUNK_BYTES, at - begin))):
            begin += moved_bytes


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

    # A Ctrl-C between fork and SIG_IGN would end the child: it stays blocked until the child ignores it.
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
            # Its own session, at once: a Ctrl-C before its main() would end it.
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        except OSError:
            ours.close()
            raise
    process.returncode = os.EX_OK  # the owner of the handle reaps it by its pid, not subprocess
    return SupervisorHandle(process.pid, ours, tuple(ignored), limit)


def ignored_signals() -> tuple[int, ...]:
    """Signals that were ignored when this process was started, without those that are never inherited."""
    return tuple(
        signum
        for signum in sorted(signal.valid_signals())
        if signum not in _NOT_INHERITED and signal.getsignal(signum) is signal.SIG_IGN
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

        # Away from the agent's terminal, and deaf to what is meant for the agent and the workers.
        with contextlib.suppress(PermissionError):
            os.setsid()  # an exec'd supervisor leads its session already
        for signum in _NOT_OURS:
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

        processes.prctl(processes.PR_SET_NAME, NAME)
        # With the agent's command line it would be killed together with it by `pkill -9 -f holdfast`, and nobody would
        # end what the workers have started.
        processes.set_command_line(NAME)

        # If it is suspended when the agent ends, it would leave its workers running: so the kernel sends SIGCONT then.
        # The signal does nothing to a supervisor that runs, which still has to end the workers.
        processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGCONT)
        processes.become_subreaper()

        # A copy of the agent's descriptors would keep its files open, and its sockets connected, after its end.
        processes.close_all_but(sock.fileno())
        raise_limit()
        forget_secrets()

        supervisor = Supervisor(sock, agent, ignored, limit)
        try:
            supervisor.run()
        finally:
            # The processes first: they must not outlive the agent, and after them nothing writes into the logs. The
            # disk last: it may never answer.
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


class Supervisor:
    """Event loop of the supervisor: polls the supervisor channel, the SIGCHLD pipe and the pipes of pending execs."""

    def __init__(self, sock: socket.socket, agent: int, ignored: Sequence[int], limit: int) -> None:
        self._sock = sock
        self._ignored = tuple(ignored)
        self._limit = limit
        """Soft limit of open files for every started process."""
        self._pid = os.getpid()
        self._out = seqpacket.Outbox()
        self._recorded: dict[int, RecordedChild] = {}
        """Living children that were started by order, by pid."""
        self._execs: dict[int, int] = {}
        """Pipe that reports whether exec worked -> pid."""
        self._kill_deadline: float | None = None
        """The time at which a kill in progress gives up (monotonic s); None: no kill is in progress."""
        self._kill_asked = False
        """The agent asked for the kill in progress, and gets its answer. False: the fence did."""
        self._rescan_at = 0.0
        """The time of the next scan of a kill in progress (monotonic s), if not all victims are reaped before."""
        self._victims: set[int] = set()
        """Processes that have got SIGKILL in the last scan and are not reaped yet."""
        self._fence = Fence(self._workers)
        self._folders: list[str] = []
        """Folders to remove when the supervisor ends."""
        self._logs: list[tuple[str, int]] = []
        """Log files, and the descriptors of their spools."""
        self._leaving = False
        """The agent is gone, or has asked for the end."""

        self._poller = select.poll()
        sock.setblocking(False)
        self._poller.register(sock, select.POLLIN)
        self._wake = self._wake_at_child_end()
        self._poller.register(self._wake, select.POLLIN)
        self._agent_end = self._watch_agent(agent)
        self._fork_server = fork_server.ForkServerClient(self._poller, self._spawn, self._forked, self._out.add)

    def _wake_at_child_end(self) -> int:
        """A descriptor that is readable when a child has ended."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        return wake_read

    def _watch_agent(self, agent: int) -> int:
        """Watch the agent's process. End-of-file on the supervisor channel is not enough: a child of the agent may have
        inherited the other end. Returns its pidfd; -1: there is none."""
        try:
            agent_end = os.pidfd_open(agent)
        except ProcessLookupError:
            self._leaving = True
            return -1
        except OSError:
            return -1  # a kernel without pidfd: end-of-file on the supervisor channel must suffice
        self._leaving = os.getppid() != agent  # it ended before, and the pidfd may be that of another process
        self._poller.register(agent_end, select.POLLIN)
        return agent_end

    def run(self) -> None:
        """Serve until the agent is gone or asks for the end."""
        while not self._leaving:
            for fd, mask in self._poller.poll(self._poll_timeout_ms()):
                self._serve(fd, mask)
            self._reap()
            # After the commands, one of which may have moved the fence: on a busy machine we may read it late.
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
        for folder in self._folders:
            with contextlib.suppress(OSError):  # usually it is gone already
                own_folders.remove_private(folder)

    def move_logs(self) -> None:
        """Move what a killed agent has not moved. The disk may take nothing for ever: that delays no one, because no
        process of the job lives any more."""
        for path, memory_fd in self._logs:
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                os.lseek(file, 0, os.SEEK_END)
                move_rest(memory_fd, file)

    def _poll_timeout_ms(self) -> int | None:
        """The time after which something is due without any event; None: nothing is."""
        if self._kill_deadline is not None:
            return int(processes.RESCAN_S * 1000)
        timeout_s = min(self._fence.due_s - time.monotonic(), self._fork_server.due_in_s())
        return None if timeout_s == inf else max(0, int(timeout_s * 1000) + 1)

    def _workers(self) -> list[int]:
        """All living processes but services: workers, and what they have started."""
        return processes.descendants(self._pid, {pid for pid, each in self._recorded.items() if each.service})

    def _kill_tree(self, limit_s: float) -> None:
        """Begin to kill everything but services; `_kill_pass` goes on with it."""
        # A worker that is being forked may still be below the fork server, which is a service: no scan would find it.
        self._fork_server.cancel(None, signal.SIGKILL)
        self._kill_deadline = time.monotonic() + limit_s

    def _serve(self, fd: int, mask: int) -> None:
        """Handle a descriptor that is ready."""
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
        """Execute a command of the agent. `fds`: the descriptors that came with it, which are ours now."""
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
            # A recorded process with this number is another one: that of the command has ended.
            case "kill_session" if command["pid"] not in self._recorded:
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
                # It is sent at the end of this pass of the loop. By then the fence, if due, and a kill have had their
                # first scan.
                self._out.add({"is": "confirmed", "number": command["number"]})
            case "remove":
                self._folders.append(command["path"])
            case "logs":
                self._keep_logs(command, fds)
            case "exit":
                self._keep_logs({"paths": [], "first": True, "ended": []}, [])  # the agent moves them itself
                self._leaving = True

    def _keep_logs(self, command: dict[str, Any], fds: list[int]) -> None:
        gone = [each for each in self._logs if command["first"] or each[0] in command["ended"]]
        for _, memory_fd in gone:
            os.close(memory_fd)
        self._logs = [each for each in self._logs if each not in gone]
        self._logs += zip(command["paths"], fds, strict=True)

    # --- starting -----------------------------------------------------------------------------------------------------

    def _spawn(self, command: dict[str, Any], fds: list[int]) -> int:
        """Fork a child that executes this command. Returns its pid; 0: no process could be started, which was
        reported."""
        key = command["key"]
        # The child's end closes itself at exec: end-of-file without a text means that exec worked.
        try:
            read_end, write_end = os.pipe()
        except OSError as error:  # no descriptors left
            self._out.add({"is": "spawn_failed", "key": key, "errno": error.errno, "text": f"pipe: {error.strerror}"})
            return 0

        # The child ignores these signals as we do until it restores them. Until then they are blocked, so that an early
        # one waits and is not lost.
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
        self._recorded[pid] = RecordedChild(key, bool(command["service"]))
        self._execs[read_end] = pid
        self._poller.register(read_end, select.POLLIN)
        return pid

    def _forked(self, command: dict[str, Any], pid: int) -> None:
        """A process was forked by the fork server and became our child; a worker waits for permission to run."""
        self._recorded[pid] = RecordedChild(command["key"], bool(command["service"]))
        if command["key"] not in (fork_server.STANDBY, fork_server.KEY):  # these are internal: no event
            self._out.add({"is": "started", "key": command["key"], "pid": pid})

    def _become(self, command: dict[str, Any], fds: list[int], report: int) -> NoReturn:
        """Execute the program in the child that was forked for it, or report why that fails. Every descriptor that is
        not placed closes itself at exec."""
        try:
            signal.set_wakeup_fd(-1)  # the pipe is the supervisor's: a signal here must not wake it
            os.setsid()  # what it leaves behind is found by its session (kill_session)

            # If the supervisor is killed, the kernel kills the workers.
            processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(_EXEC_FAILED)  # the supervisor died before the call above, so nothing would kill this process

            self._restore_signals()
            if command["cpus"]:
                os.sched_setaffinity(0, command["cpus"])
            if command["cwd"] is not None:
                os.chdir(command["cwd"])
            report = _place_descriptors(dict(zip(command["fds"], fds, strict=True)), report)

            # After the descriptors: beside the supervisor's, their copies may have numbers above the user's limit.
            restore_limit(self._limit)
            environment = {**os.environ, **command["env_set"]}
            for name in command["env_unset"]:
                environment.pop(name, None)
            os.execvpe(command["argv"][0], command["argv"], environment)
        except OSError as error:
            folder = command["cwd"]
            name = folder if folder is not None and error.filename == folder else command["argv"][0]
            os.write(report, f"{error.errno} {error.strerror}: {name}".encode(errors="surrogateescape"))
        except BaseException as error:  # noqa: BLE001 - the forked child must not live on as a second supervisor
            os.write(report, f"0 {type(error).__name__}: {error}".encode(errors="backslashreplace"))
        finally:
            os._exit(_EXEC_FAILED)

    def _restore_signals(self) -> None:
        """Give the child the signals with which the agent was started. They are unblocked last: an early one must find
        its action restored."""
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
            if self._recorded[pid].key != fork_server.KEY:  # the fork server is internal: no event
                self._out.add({"is": "started", "key": self._recorded[pid].key, "pid": pid})
            return
        number, _, text = reason.decode(errors="replace").partition(" ")
        key = self._recorded.pop(pid).key
        if key == fork_server.KEY:
            self._fork_server.ended(pid, _EXEC_FAILED)
            return
        self._out.add({"is": "spawn_failed", "key": key, "errno": int(number), "text": text})

    # --- ending -------------------------------------------------------------------------------------------------------

    def _signal(self, key: str, signum: int) -> None:
        """Signal the process with this key. One that is still being forked ends as the signal would end it."""
        if signum not in self._ignored and signum not in _HARMLESS:
            self._fork_server.cancel(key, signum)
        # A recorded process is not reaped yet, so its number is still its own: no pidfd is needed.
        for pid, each in self._recorded.items():
            if each.key == key:
                # One that has become another user's (`sudo`, `setpriv`) costs a signal, and not all other workers.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                self._victims.discard(ended[0])
                self._ended(*ended)

    def _ended(self, pid: int, status: int) -> None:
        for fd in [fd for fd, pending in self._execs.items() if pending == pid]:
            self._read_exec_result(fd)  # "started" or "spawn_failed" comes before "ended"
        if pid not in self._recorded or self._recorded[pid].key == fork_server.STANDBY:
            self._fork_server.read_answers()  # it may be a worker whose answer, with its pid, we have not read yet
        process = self._recorded.pop(pid, None)
        if process is None:  # an orphan that we adopted
            return
        code = os.waitstatus_to_exitcode(status)
        if process.key == fork_server.KEY:
            self._fork_server.ended(pid, code)
        elif process.key != fork_server.STANDBY:
            self._out.add({"is": "ended", "key": process.key, "pid": pid, "exit_code": code})

    def _kill_pass(self, deadline: float) -> None:
        """Find and kill, and do so again when the victims are reaped: only then are the children found that they have
        forked in between. It never waits, so that the agent and the fence are served meanwhile."""
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
    """Move each source descriptor to its number. Returns where `report` is now, which exec still closes."""
    # Above all wanted numbers first: a source may have the number that another one is to get.
    above = max(wanted, default=2) + 1
    report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, above)
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
