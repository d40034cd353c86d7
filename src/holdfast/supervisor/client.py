"""The agent's side of the supervisor: commands as methods, their results as typed events on the running loop.

Knows seqpacket.py and asyncio; decides nothing. Imported after the fork. All commands are queued and never block;
events arrive in the order in which the supervisor saw them. After `SupervisorDied` there are no further events.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from msgspec import Struct

from holdfast import seqpacket
from holdfast.protocol.errors import SupervisorLostError
from holdfast.supervisor import processes
from holdfast.supervisor.release import Lateness, allowed_s
from holdfast.supervisor.supervisor import SupervisorHandle, exec_supervisor

KILL_LIMIT_S = 10.0
"""Limit for a whole tree to end after SIGKILL (s). Only processes stuck in the kernel take longer."""
CLOSE_LIMIT_S = 15.0
"""Limit for a supervisor to end after it was asked to (s); then it is killed. It is above the supervisor's own limit,
END_LIMIT_S."""


CONFIRM_S_MAX = 5.0
"""Limit for a supervisor to execute an order to end workers (s); then it is killed, and the workers with it."""
SPAWN_CONFIRM_S_MAX = 30.0
"""Limit for a supervisor to execute an order to start a process (s); then it is killed, and the workers with it."""
CONFIRM_LOOKS = 10
"""Number of looks for a confirmation within its limit. Time is counted by looks: while this process does not run, as
during a suspension of the whole node, there are none."""

REVIVALS_MAX = 5
"""Number of supervisors that may be started again within REVIVAL_WINDOW_S. Then the cause will end the next one too."""
REVIVAL_WINDOW_S = 60.0


class Revivals:
    """Counts how often the supervisor process was started again, since something may kill it each time."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=REVIVALS_MAX)

    def count(self, now: float) -> None:
        """Count one more start. Raises SupervisorLostError when there are too many within the window."""
        # The deque holds the newest starts: its first one is REVIVALS_MAX starts ago.
        if len(self._times) == REVIVALS_MAX and now - self._times[0] < REVIVAL_WINDOW_S:
            raise SupervisorLostError(
                f"the parent process of this node's workers (hf-supervisor) ended {REVIVALS_MAX + 1} times within "
                f"{now - self._times[0]:.0f} s: something kills it, or the machine lacks memory or processes"
            )
        self._times.append(now)


class ProcessStarted(Struct, frozen=True, tag_field="is", tag="started"):
    """The program runs: exec succeeded."""

    key: str
    pid: int


class SpawnFailed(Struct, frozen=True, tag_field="is", tag="spawn_failed"):
    """The program could not be executed. No ProcessEnded follows."""

    key: str
    errno: int
    text: str
    """The system's message and its subject: `No such file or directory: train`."""


class ProcessEnded(Struct, frozen=True, tag_field="is", tag="ended"):
    """The process ended. Its descendants may still run until `kill_tree`."""

    key: str
    pid: int
    exit_code: int
    """The exit code, 0..255, or -N for signal N."""


class TreeKilled(Struct, frozen=True, tag_field="is", tag="tree_gone"):
    """Answer to kill_tree: no process but services lives below the supervisor."""

    leftover: tuple[int, ...]
    """Processes that did not die within the limit: stuck in the kernel. Usually empty."""


class PreloadReported(Struct, frozen=True, tag_field="is", tag="preload"):
    """The fork server has imported modules for the workers, or could not."""

    text: str
    trouble: bool
    """Workers start more slowly than requested, for the reason in `text`."""


class StandbysReported(Struct, frozen=True, tag_field="is", tag="standby"):
    """The next generation's workers are forked and parked."""

    pids: tuple[int, ...]
    own_bytes: int
    """Memory that only these processes hold, of all together."""


class Confirmed(Struct, frozen=True, tag_field="is", tag="confirmed"):
    """The supervisor has executed every command that was sent before this confirmation was requested."""

    number: int


class Fenced(Struct, frozen=True, tag_field="is", tag="fenced"):
    """The fence passed: the supervisor kills everything but services. Each worker's ProcessEnded follows, no
    TreeKilled."""


class SupervisorKilled(Struct, frozen=True):
    """The supervisor did not confirm an order in time and was killed. SupervisorDied follows."""

    silent_s: float
    """Time for which there was no confirmation (s)."""


class SupervisorDied(Struct, frozen=True):
    """The supervisor ended without a request; its workers die with it. See `revive_supervisor`."""


Report = ProcessStarted | SpawnFailed | ProcessEnded | TreeKilled | PreloadReported | StandbysReported | Fenced
"""The supervisor's events, by the tag "is"."""
SupervisorEvent = Report | SupervisorKilled | SupervisorDied


class Demand:
    """Waits for one confirmation of the supervisor, within a limit."""

    def __init__(self, number: int, pid: int, limit_s: float, on_late: Callable[[float], None]) -> None:
        """`on_late` gets the time for which there was no confirmation (s)."""
        self.number = number
        self._limit_s = limit_s
        self._late = Lateness(pid)
        self._on_late = on_late
        self._waited_s = 0.0
        """Time for which this process has waited, as far as it ran itself."""
        self._loop = asyncio.get_running_loop()
        self._set_timer()

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(self._limit_s / CONFIRM_LOOKS, self._look)

    def _look(self) -> None:
        self._waited_s += self._limit_s / CONFIRM_LOOKS
        # Counted by looks, and not by the clock: a node that was suspended as a whole wakes with all its time left
        # (test_time_in_which_the_agent_does_not_run_is_not_the_supervisors).
        if self._waited_s < allowed_s(self._limit_s, self._late.waited_s()):
            self._set_timer()
        else:
            self._on_late(self._waited_s)

    def cancel(self) -> None:
        self._timer.cancel()


class SupervisorClient:
    """Controls one supervisor, from fork to end. Make, use and close it on the running event loop."""

    def __init__(
        self, handle: SupervisorHandle, on_event: Callable[[SupervisorEvent], None], *, at_once_s: float = CONFIRM_S_MAX
    ) -> None:
        """`at_once_s`: limit for the supervisor to confirm when a time of the fence has passed (s). It is short: soon
        after that time others go on without these workers."""
        processes.become_subreaper()  # if the supervisor dies, its children become ours
        self.handle = handle
        self._on_event = on_event
        self._at_once_s = at_once_s
        self._loop = asyncio.get_running_loop()
        self._sock = handle.sock
        self._sock.setblocking(False)
        self._out = seqpacket.Outbox()
        self._ended = asyncio.Event()
        self._closing = False
        self._killed = False
        """We killed it: it did not confirm an order, or did not end."""
        self._spawned = False
        """It has been ordered to start a process: before that there is nothing to end."""
        self._demands: list[Demand] = []
        """Confirmations that we wait for."""
        self._demanded = 0
        """The number of the newest demand."""
        self._fence_timers: list[asyncio.TimerHandle] = []
        self._loop.add_reader(self._sock, self._readable)

    @property
    def alive(self) -> bool:
        """Whether the supervisor still takes commands; a dead one ignores them."""
        return not self._ended.is_set()

    def start_fork_server(self, order: seqpacket.Message) -> None:
        """Import modules in the fork server, for every `warm` process that is spawned from now on. `order`: from
        worker_command.py."""
        self._send(order)

    def spawn(
        self,
        key: str,
        argv: Sequence[str],
        *,
        env_set: Mapping[str, str] | None = None,
        env_unset: Sequence[str] = (),
        cwd: str | None = None,
        fds: Mapping[int, int] | None = None,
        service: bool = False,
        cpus: Sequence[int] | None = None,
        warm: bool = False,
    ) -> None:
        """Start a program. ProcessStarted or SpawnFailed follows, or ProcessEnded if it is ended before it has begun.

        `fds`: number in the child -> descriptor of ours (which stays ours, and may be closed at once); 0, 1 and 2 are
        the agent's own where not named, and nothing else is inherited. `env_set` and `env_unset` alter the environment
        that the agent was started with. `service`: survives kill_tree. `cpus`: CPU numbers to run on.
        `warm`: a program under our bootstrap, forked from the fork server if there is one.
        """
        self._spawned = True
        wanted = fds or {}
        command = {
            "do": "spawn",
            "key": key,
            "argv": list(argv),
            "env_set": dict(env_set or {}),
            "env_unset": list(env_unset),
            "cwd": cwd,
            "fds": list(wanted),
            "service": service,
            "cpus": list(cpus) if cpus is not None else None,
            "warm": warm,
        }
        self._send(command, list(wanted.values()))
        self.demand(SPAWN_CONFIRM_S_MAX)

    def signal(self, key: str, signum: int, *, to_end: bool = False) -> None:
        """Signal the process itself, not its children; does nothing when it has ended. `to_end`: it has to be
        confirmed."""
        self._send({"do": "signal", "key": key, "signum": int(signum)})
        if to_end:
            self.demand(CONFIRM_S_MAX)

    def kill_session(self, pid: int) -> None:
        """SIGKILL the children that this process left behind: those in its session, and all below them."""
        self._send({"do": "kill_session", "pid": pid})

    def ignore(self, signum: int) -> None:
        """Every process spawned from now on starts with this signal ignored."""
        self._send({"do": "ignore", "signum": signum})

    def fence(self, at_s: float | None, suspend_at_s: float | None = None) -> None:
        """Kill everything but services at this time of `time.monotonic()`, even if the agent is stopped; Fenced reports
        it. Suspend (SIGSTOP) the same processes at the other time, until a later call names a later one, or none. None:
        not at all. Each call replaces the previous one. Like all orders that end workers it has to be confirmed."""
        self._send({"do": "fence", "at_s": at_s, "suspend_at_s": suspend_at_s})
        self._cancel_fence_timers()
        due = [time_s for time_s in (at_s, suspend_at_s) if time_s is not None]
        # The supervisor kills at that time by itself. Whether it does is asked then, since it may be suspended
        # (test_the_workers_of_a_node_that_is_cut_off_end_though_its_supervisor_does_nothing).
        self._fence_timers = [self._loop.call_at(time_s, self.demand, self._at_once_s) for time_s in due]

    def demand(self, limit_s: float) -> None:
        """Kill the supervisor, and the workers with it, unless it confirms within this time that all commands so far
        were executed. It may be suspended, or in an endless loop. Time in which it only waits for a processor does not
        count, up to the same time again."""
        # Before the first order it has no process that could outlive anything, and may still start.
        if not (self.alive and self._spawned):
            return
        self._demanded += 1
        self._send({"do": "confirm", "number": self._demanded})
        self._demands.append(Demand(self._demanded, self.handle.pid, limit_s, self._late))

    def keep_logs(self, spools: Mapping[str, int], *, first: bool, ended: Sequence[str] = ()) -> None:
        """Let the supervisor move the rest of these logs to their files if this process is killed. `spools`: the
        descriptor of each file's spool (log_spool.py). `first`: they replace those of earlier calls. `ended`: those of
        earlier calls whose worker has ended."""
        message = {"do": "logs", "paths": list(spools), "first": first, "ended": list(ended)}
        self._send(message, list(spools.values()))

    def remove_at_end(self, path: str) -> None:
        """Let the supervisor remove this folder of plain files at its end. The folder is in memory and must not outlive
        the agent, however that ends."""
        self._send({"do": "remove", "path": path})

    def kill_tree(self, limit_s: float = KILL_LIMIT_S, *, confirm_s: float = CONFIRM_S_MAX) -> None:
        """SIGKILL everything below the supervisor except services and their children: TreeKilled follows. `confirm_s`:
        as for `demand`."""
        self._send({"do": "kill_tree", "limit_s": limit_s})
        self.demand(confirm_s)

    async def close(self, spare: Collection[int] = ()) -> None:
        """End the supervisor and all its processes, services too, and reap it. Safe to call twice and after its death.

        Then kill the orphans that became our children: every child of this process not in `spare`.
        """
        orderly = self.alive
        self._closing = True
        self._cancel_fence_timers()
        if orderly:
            self.demand(self._at_once_s)
            self._send({"do": "exit"})
            try:
                await asyncio.wait_for(self._ended.wait(), CLOSE_LIMIT_S)
            except TimeoutError:
                # It is suspended, or hangs in the kernel: its processes become our children, and `sweep` ends them.
                self._kill()
                await self._ended.wait()
        # A supervisor that exited by itself left no process behind. If it was killed, its orphans are our children now.
        if orderly and not self._killed:
            await asyncio.to_thread(reap, self.handle)
        else:
            await asyncio.to_thread(sweep, self.handle, spare)

    # --- the supervisor channel ---------------------------------------------------------------------------------------

    def _send(self, command: seqpacket.Message, fds: Sequence[int] = ()) -> None:
        if self.alive:
            self._out.add(command, fds)
            self._writable()

    def _writable(self) -> None:
        try:
            self._out.flush(self._sock)
        except OSError:
            self._out.clear()  # the reader sees end-of-file on the supervisor channel and reports it
        if self._out:
            self._loop.add_writer(self._sock, self._writable)
        else:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        received = seqpacket.receive(self._sock)
        if received is None:
            self._lost()
            return
        event = msgspec.convert(received[0], Report | Confirmed)
        if isinstance(event, Confirmed):
            self._cancel_demands(event.number)
        else:
            self._on_event(event)

    def _late(self, silent_s: float) -> None:
        self._kill()
        if not self._closing:
            self._on_event(SupervisorKilled(silent_s))

    def _kill(self) -> None:
        self._killed = True
        self._cancel_demands(self._demanded)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.handle.pid, signal.SIGKILL)

    def _cancel_demands(self, confirmed: int) -> None:
        for demand in self._demands:
            if demand.number <= confirmed:
                demand.cancel()
        self._demands = [demand for demand in self._demands if demand.number > confirmed]

    def _cancel_fence_timers(self) -> None:
        for timer in self._fence_timers:
            timer.cancel()
        self._fence_timers = []

    def _lost(self) -> None:
        self._cancel_demands(self._demanded)
        self._cancel_fence_timers()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._out.clear()
        self._sock.close()
        self._ended.set()
        if not self._closing:
            self._on_event(SupervisorDied())


def reap(handle: SupervisorHandle) -> None:
    """Wait for a supervisor whose channel has ended. Blocks (call it in a thread)."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(handle.pid, 0)


def sweep(handle: SupervisorHandle, spare: Collection[int] = ()) -> list[int]:
    """Reap a dead supervisor and kill the orphans that became our children: every child not in `spare`. Blocks.

    Returns processes that could not be killed, usually none.
    """
    reap(handle)
    return processes.kill_descendants(os.getpid(), spare, KILL_LIMIT_S)


def revive_supervisor(dead: SupervisorHandle, spare: Collection[int] = ()) -> SupervisorHandle:
    """Sweep after SupervisorDied, then start another supervisor. Blocks (call it in a thread). Raises OSError."""
    sweep(dead, spare)
    return exec_supervisor(dead.ignored, dead.descriptors)
