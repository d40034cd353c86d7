"""The supervisor's side of the fork server: starts it, asks it for workers, and starts them by exec where it has none.

The fork server (worker/fork_server.py) imports the heavy modules once. It is a separate process, so that the supervisor
stays small and no import can end it. Workers forked there become children of the supervisor, which reads each one's
pid, records it, and only then lets it run: no worker runs that the supervisor does not know. Standbys are workers that
are forked ahead, for the next generation. They wait parked, recorded by the supervisor as services, and become workers
within a millisecond.

Modules that only restarts need are imported while workers run, in a copy of the fork server: the next one. It is the
supervisor's child, too. No start waits for it: until it is ready, the present one forks. Then the next one takes its
place, and the standbys are forked again. If it dies, hangs or is suspended, the present one stays.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from holdfast import seqpacket
from holdfast.supervisor import processes

KEY = "fork-server"
"""The key of the fork server, and of the next one."""
STANDBY = "standby"
"""The key of all parked workers."""
QUIET_S = 1.0
"""Time from the start of the last worker until standbys and the next fork server are forked (s): they must not slow
down the start of the workers."""
CONTROL_FD = 3
"""The fork server's descriptor of its control socket."""
REBUILDS_MAX = 10
"""Number of times that a job starts its fork server again. One that ends more often does not work on this machine."""
ANSWER_BYTES_MAX = 4096
REQUEST_FIELDS = ("argv", "env_set", "env_unset", "cwd", "cpus")
"""Fields of a command that the fork server needs."""

Command = dict[str, Any]


class Fork:
    """A request for a worker, a standby or the next fork server.

    Owns a worker's descriptors, because it may have to be started by exec.
    """

    def __init__(
        self, command: Command | None = None, fds: Sequence[int] = (), modules: Sequence[str] | None = None
    ) -> None:
        """`modules`: what a next fork server is to import. Raises OSError when no descriptor is left."""
        self.command = command
        """None: a standby, which waits for the command that makes it a worker, or a next fork server."""
        self.modules = modules
        self.fds = list(fds)
        self.parked_pid = 0
        """The process, once it is a parked standby; it stays set when the standby becomes a worker."""
        self.ours, self.theirs = seqpacket.pair()

    def packet(self) -> tuple[Command, list[int]]:
        """The request, and the descriptors that go with it: 0, 1 and 2 are the supervisor's own where not named."""
        answer = [] if self.parked_pid else [self.theirs.fileno()]  # a standby has its socket already
        if self.modules is not None:
            return {"next": self.modules, "supervisor": os.getpid()}, answer
        if self.command is None:
            return {"park": True, "supervisor": os.getpid()}, answer
        numbers = list(self.command["fds"])
        own = [number for number in (0, 1, 2) if number not in numbers]
        request = {name: self.command[name] for name in REQUEST_FIELDS}
        return {**request, "fds": numbers + own, "supervisor": os.getpid()}, [*answer, *self.fds, *own]

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Next:
    """The next fork server, while it imports."""

    def __init__(self, pid: int, sock: socket.socket, late_at_s: float) -> None:
        self.pid = pid
        self.sock = sock
        self.unfit = False
        """It has reported a module that cannot be forked, and ends."""
        self.late_at_s = late_at_s
        """The time at which it is reported that it is still not ready (monotonic s); inf: that was reported."""


class ForkServerClient:
    """Runs one fork server, and for a while the next one beside it.

    Every request for a worker ends in `forked`, in `spawn`, or in an `ended` event.
    """

    def __init__(
        self,
        poller: select.poll,
        spawn: Callable[[Command, list[int]], int],
        forked: Callable[[Command, int], None],
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        """`spawn` starts a program by exec and returns its pid (0: none was started), `forked` records a process that
        was forked, `emit` sends an event to the agent."""
        self._poller = poller
        self._spawn = spawn
        self._forked = forked
        self._emit = emit
        self._order: Command | None = None
        """The order to start it, without the modules that turned out to be unfit; None: there was none."""
        self._control: socket.socket | None = None
        """Our end of its control socket; None: workers are started by exec."""
        self._pid = 0
        """The process; 0: it could not be started."""
        self._ready = False
        """It has reported that its imports are done."""
        self._next: Next | None = None
        self._rebuilds = 0
        self._unfit = False
        """It has reported a module that cannot be forked, and ends."""
        self._queue: deque[tuple[Command, list[int], Fork | None]] = deque()
        """Requests that the fork server has not taken yet."""
        self._forks: dict[int, Fork] = {}
        """Requested workers, standbys and next fork servers, by descriptor of our end of the answer's socket."""
        self._prepare_at_s = inf
        """The time at which standbys and the next fork server are due (monotonic s); inf: they are not."""
        self._later: list[str] = []
        """Modules that the present fork server does not have and that the next one is to import."""
        self._served = False
        """Whether a worker was requested: only then are preparations useful."""
        self._reported: set[str] = set()
        """Reasons for starts by exec that were reported. Each is reported once, not for each worker."""

    def begin(self, order: Command) -> None:
        """Start the fork server; `order` comes from supervisor/worker_command.py."""
        self._order = order
        self._try_start(order)

    def takes(self, command: Command) -> bool:
        """Whether to send this request to the fork server. False while it is started again: exec is faster then.
        During its first start, requests wait for its imports."""
        return bool(command.get("warm")) and self._control is not None and (self._ready or self._rebuilds == 0)

    def ask(self, command: Command, fds: list[int]) -> None:
        """Ask for a worker; takes ownership of `fds`."""
        if not command["service"]:
            self._served = True
            self._prepare_at_s = time.monotonic() + QUIET_S
            if self._promote(command, fds):
                return
        try:
            self._request(Fork(command, fds))
        except OSError:  # no descriptors left
            self._spawn(command, fds)
            for fd in fds:
                os.close(fd)
            return
        self._flush()

    def due_in_s(self) -> float:
        """Seconds until `tick` is due; inf: it is not."""
        late_at_s = self._next.late_at_s if self._next is not None else inf
        return min(self._prepare_at_s, late_at_s) - time.monotonic()

    def tick(self) -> None:
        """Fork the standbys and the next fork server when they are due, and report a next one that may hang."""
        if self._next is not None and time.monotonic() >= self._next.late_at_s:
            self._report_late(self._next)
        if time.monotonic() < self._prepare_at_s:
            return
        self._prepare_at_s = inf
        if self._ready:  # otherwise due again when a fork server has started
            self._park()
            self._fork_next()

    def owns(self, fd: int) -> bool:
        """Whether `serve` handles this descriptor."""
        return fd in self._forks or fd in self._controls()

    def serve(self, fd: int) -> None:
        """Handle a descriptor that is ready."""
        if fd in self._forks:
            self._read_answer(self._forks[fd])
        else:
            self._flush()
            self._read_reports()

    def read_answers(self) -> None:
        """Process every answer that has already arrived."""
        for fd in list(self._forks):
            if fd in self._forks:  # an answer may have ended another fork
                self._read_answer(self._forks[fd])

    def cancel(self, key: str | None, signum: int) -> None:
        """A signal ends workers that are still being forked, as it would end a Python that is starting.

        `key`: that worker; None: all but services.
        """
        self.read_answers()  # a worker that has answered is recorded, and gets the signal like any other
        for fork in list(self._forks.values()):
            command = fork.command
            if command is not None and (command["key"] == key or (key is None and not command["service"])):
                self._drop(fork)
                self._emit({"is": "ended", "key": command["key"], "pid": 0, "exit_code": -signum})

    def ended(self, pid: int, exit_code: int) -> None:
        """A fork server has ended: start another one, unless that would end in the same way."""
        # What it has reported before comes first: it may say why it ended, or that the next one is the present one now.
        self._read_reports_of_next()
        if self._next is not None and pid == self._next.pid:
            self._next_ended(self._next, exit_code)
            return
        self._read_reports()
        if pid != self._pid:  # it was replaced
            return

        self._close()
        assert self._order is not None
        was_ready, self._ready = self._ready, False
        unfit, self._unfit = self._unfit, False
        # One that ended during its imports would do so again, unless it left out what is unfit or was killed.
        again = bool(self._order["modules"]) if unfit else was_ready or exit_code == -signal.SIGKILL
        again = again and self._rebuilds < REBUILDS_MAX
        if not unfit:
            self._report_problem(
                f"the fork server ended with exit code {exit_code}", "it is built again" if again else ""
            )
        if again:
            self._rebuilds += 1
            self._try_start(self._order)

    # --- the process --------------------------------------------------------------------------------------------------

    def _try_start(self, order: Command) -> None:
        try:
            self._start(order)
        except OSError as error:
            self._close()
            self._report_problem(f"the fork server cannot be started: {error.strerror}", "")

    def _start(self, order: Command) -> None:
        self._control, theirs = seqpacket.pair()
        self._poller.register(self._control, select.POLLIN)
        program = {
            "key": KEY,
            "argv": order["argv"],
            "env_set": order["env_set"],
            "env_unset": [],
            "cwd": None,
            "fds": [0, 1, 2, CONTROL_FD],
            "service": True,
            "cpus": None,
        }
        fds: list[int] = []
        try:
            fds.append(os.open(os.devnull, os.O_RDWR))
            # Output of the imports belongs to the workers: each of them repeats it.
            fds += (os.memfd_create(name) for name in ("stdout", "stderr"))
            self._pid = self._spawn(program, [*fds, theirs.fileno()])
        finally:
            theirs.close()
            for fd in fds:
                os.close(fd)

        self._later = list(order["later"])
        first = {"modules": order["modules"], **order["worker"]}
        self._queue.appendleft((first, [], None))
        self._flush()

    def _flush(self) -> None:
        """Send the requests that the control socket takes now; the others wait for POLLOUT."""
        while self._queue and self._control is not None:
            packet, fds, fork = self._queue[0]
            try:
                seqpacket.send(self._control, packet, fds)
            except BlockingIOError:
                break
            except OSError as error:
                self._queue.popleft()  # the fork server is gone: `ended` will be called
                if fork is not None:
                    self._give_up(fork, os.strerror(error.errno or 0))
                continue
            self._queue.popleft()
            if fork is not None:
                fork.theirs.close()  # its copy is the only one now: end-of-file means that the fork will not answer
        if self._control is not None:
            self._poller.modify(self._control, select.POLLIN | (select.POLLOUT if self._queue else 0))

    def _controls(self) -> list[int]:
        """Descriptors on which fork servers report."""
        socks = (self._control, self._next.sock if self._next is not None else None)
        return [sock.fileno() for sock in socks if sock is not None]

    def _shut(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self._poller.unregister(sock)
            sock.close()

    def _read_reports(self) -> None:
        """Read what the fork servers report about themselves."""
        while self._control is not None:
            try:
                received = seqpacket.receive(self._control)
            except BlockingIOError:
                break
            if received is None:
                self._close()
                break
            self._handle_report(received[0])
        self._read_reports_of_next()

    def _handle_report(self, message: dict[str, Any]) -> None:
        assert self._order is not None
        match message["is"]:
            case "unfit":
                self._unfit = True
                for kind in ("modules", "later"):
                    self._order[kind] = [name for name in self._order[kind] if name != message["module"]]
                # None is left that can be imported: it has reported each of them before.
                if not message["module"]:
                    self._order["modules"] = []
                self._report_problem(message["text"], "left out" if self._order["modules"] else "")
            case "left_out":
                self._emit({"is": "preload", "text": message["text"], "trouble": True})
            case "ready":
                self._ready = True
                self._emit({"is": "preload", "text": f"imported {message['text']}", "trouble": False})
                if self._served:
                    self._prepare_at_s = time.monotonic() + QUIET_S

    def _report_problem(self, why: str, then: str) -> None:
        """`then`: what is done about it; empty: workers are started by exec."""
        self._emit(
            {
                "is": "preload",
                "text": f"{why}; {then or 'each worker imports by itself: starts are slower'}",
                "trouble": True,
            }
        )

    def _close(self) -> None:
        """Do without the fork server. Queued requests are executed by exec now; those already sent see end-of-file on
        their own sockets."""
        if self._control is None:
            return
        self._end_next()
        self._shut(self._control)
        self._control = None
        queued, self._queue = self._queue, deque()
        for _, _, fork in queued:
            if fork is not None:
                self._give_up(fork, "")

    # --- the next one -------------------------------------------------------------------------------------------------

    def _fork_next(self) -> None:
        """Ask for the next fork server if there is something to import."""
        if not self._later or self._next is not None or any(fork.modules for fork in self._forks.values()):
            return
        with contextlib.suppress(OSError):  # no descriptors left: the present one goes on
            self._request(Fork(modules=self._later))
        self._flush()

    def _next_forked(self, fork: Fork, pid: int) -> None:
        """The socket of the request is its control socket from now on."""
        del self._forks[fork.ours.fileno()]
        assert self._order is not None
        self._next = Next(pid, fork.ours, time.monotonic() + self._order["later_s"])
        self._forked({"key": KEY, "service": True}, pid)

    def _read_reports_of_next(self) -> None:
        while self._next is not None and self._next.sock.fileno() >= 0:
            try:
                received = seqpacket.receive(self._next.sock)
            except BlockingIOError:
                return
            if received is None:
                self._shut(self._next.sock)
            else:
                self._handle_report_of_next(self._next, received[0])

    def _handle_report_of_next(self, following: Next, message: dict[str, Any]) -> None:
        assert self._order is not None
        match message["is"]:
            case "unfit":
                following.unfit = True
                module = message["module"]
                # No module: it has none that can be imported, and has reported each of them.
                self._order["later"] = [name for name in self._order["later"] if module and name != module]
                if module:
                    self._report_problem(message["text"], "left out")
            case "left_out":
                self._emit({"is": "preload", "text": message["text"], "trouble": True})
            case "ready":
                self._emit({"is": "preload", "text": f"imported {message['text']}, for restarts", "trouble": False})
                self._replace(following)

    def _replace(self, following: Next) -> None:
        """Let the next one take the place of the present one. The present one still forks what it was asked for, and
        then ends, because its control socket is closed."""
        assert self._control is not None
        self._shut(self._control)
        self._control, self._pid = following.sock, following.pid
        self._next = None
        self._later = []
        for standby in self._standbys():  # they lack what the next one has imported
            self._drop(standby)
        # The standbys are forked again, with what it has imported
        # (test_standbys_are_there_before_it_and_again_with_what_it_has_imported).
        if self._prepare_at_s == inf:
            self._prepare_at_s = time.monotonic()
        self._flush()

    def _next_ended(self, following: Next, exit_code: int) -> None:
        assert self._order is not None
        self._shut(following.sock)
        self._next = None
        if following.unfit:  # again, for the modules that are left
            self._later = list(self._order["later"])
            self._prepare_at_s = min(self._prepare_at_s, time.monotonic())
            return
        names, self._later = ", ".join(self._later), []
        self._report_problem(
            f"{names}: the process that imports for restarts ended with exit code {exit_code}", "left out"
        )

    def _report_late(self, following: Next) -> None:
        """It may hang, or its imports are slow. It is not ended: no worker waits for it."""
        following.late_at_s = inf
        assert self._order is not None
        who = f"the process that imports for restarts (pid {following.pid})"
        text = f"{', '.join(self._later)}: {who} is not ready after {self._order['later_s']:g} s"
        self._report_problem(text, "workers import this themselves until it is")

    def _end_next(self) -> None:
        """End the next fork server, because the present one is gone."""
        for fork in [fork for fork in self._forks.values() if fork.modules]:
            self._read_answer(fork)  # it may have begun to import, and then it is known by its number only from here on
        for fork in [fork for fork in self._forks.values() if fork.modules]:
            self._drop(fork)
        if self._next is not None:
            self._shut(self._next.sock)
            # It imports, or is suspended, and would not notice the closed socket. The number is still its own: once it
            # is reaped, `ended` comes first and forgets it.
            os.kill(self._next.pid, signal.SIGKILL)
            self._next = None

    # --- the workers --------------------------------------------------------------------------------------------------

    def _request(self, fork: Fork) -> None:
        """Queue a request; `_flush` sends it."""
        self._forks[fork.ours.fileno()] = fork
        self._poller.register(fork.ours, select.POLLIN)
        self._queue.append((*fork.packet(), fork))

    def _read_answer(self, fork: Fork) -> None:
        answer = _answer(fork.ours)
        if answer is None:
            return
        word, rest = answer
        if word != "pid":
            self._give_up(fork, rest)
        elif fork.modules:
            self._next_forked(fork, int(rest))
        elif fork.command is None:
            self._parked(fork, int(rest))
        else:
            # It is recorded before it may run: it could end at once, and its end must find its name.
            self._forked(fork.command, int(rest))
            with contextlib.suppress(OSError):  # it has been killed
                fork.ours.send(b"go")
            self._drop(fork)

    def _give_up(self, fork: Fork, why: str) -> None:
        """Do without this fork: start a worker by exec, drop a standby or a next fork server. `why`: the reason, if the
        fork server gave one."""
        command = fork.command
        if command is None:
            self._drop(fork)
            if fork.modules and why:
                self._later = []
                self._report_problem(
                    f"{', '.join(fork.modules)}: no process can import for restarts: {why}", "left out"
                )
            return
        fds, fork.fds = fork.fds, []
        self._drop(fork)
        if fork.parked_pid and not why and self.takes(command):  # the standby was killed: fork another one
            self.ask(command, fds)
            return
        if why and why not in self._reported:
            self._reported.add(why)
            self._report_problem(why, "")
        try:
            self._spawn(command, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _drop(self, fork: Fork) -> None:
        """Forget this fork and close its descriptors, which ends a parked standby."""
        del self._forks[fork.ours.fileno()]
        self._poller.unregister(fork.ours)
        self._queue = deque(item for item in self._queue if item[2] is not fork)
        fork.close()

    # --- the standbys -------------------------------------------------------------------------------------------------

    def _park(self) -> None:
        """Request the standbys that are missing."""
        assert self._order is not None
        try:
            for _ in range(self._order["standby"] - len(self._standbys())):
                self._request(Fork())
        except OSError:  # no descriptors left: restarts fork then
            pass
        self._flush()

    def _standbys(self) -> list[Fork]:
        return [fork for fork in self._forks.values() if fork.command is None and not fork.modules]

    def _parked(self, standby: Fork, pid: int) -> None:
        standby.parked_pid = pid
        self._forked({"key": STANDBY, "service": True}, pid)
        pids = [each.parked_pid for each in self._standbys()]
        if all(pids):
            self._emit({"is": "standby", "pids": pids, "own_bytes": sum(map(processes.own_bytes, pids))})

    def _promote(self, command: Command, fds: list[int]) -> bool:
        """Turn a parked standby into a worker, if there is one; then takes ownership of `fds`."""
        for standby in [each for each in self._standbys() if each.parked_pid]:
            standby.command, standby.fds = command, fds
            try:
                seqpacket.send(standby.ours, *standby.packet())
            except OSError:  # it has been killed
                standby.command, standby.fds = None, []
                self._drop(standby)
                continue
            return True
        return False


def _answer(sock: socket.socket) -> tuple[str, str] | None:
    """The first word of an answer, and the rest; both empty: the sender is gone. None: there is no answer yet."""
    try:
        answer = sock.recv(ANSWER_BYTES_MAX)
    except BlockingIOError:
        return None
    except OSError:
        answer = b""
    word, _, rest = answer.decode(errors="replace").partition(" ")
    return word, rest
