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
from holdfast.supervisor.supervisor import SupervisorHandle, exec_supervisor

KILL_LIMIT_S = 10.0
"""The time from SIGKILL until a whole tree has ended; only processes stuck in the kernel take longer."""
CLOSE_LIMIT_S = 15.0
"""A supervisor that has not ended this long after it was asked to is killed. Above the supervisor's own limit."""


REVIVALS_MAX = 5
REVIVAL_WINDOW_S = 60.0
"""A supervisor that ended too often within this time is not started again: the cause will end the next one too."""


class Revivals:
    """Counts how often the supervisor process was started again, since something may kill it each time."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=REVIVALS_MAX)

    def count(self, now: float) -> None:
        """Count one more start. Raises SupervisorLostError when there are too many within the window."""
        if len(self._times) == REVIVALS_MAX and now - self._times[0] < REVIVAL_WINDOW_S:
            raise SupervisorLostError(
                f"the process that holds this node's workers (hf-supervisor) ended {REVIVALS_MAX + 1} times within "
                f"{now - self._times[0]:.0f} s: something kills it, or it lacks what it needs"
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
    """As waitpid reports it: 0..255, or -N for signal N."""


class TreeKilled(Struct, frozen=True, tag_field="is", tag="tree_gone"):
    """Answer to kill_tree: no process but services lives below the supervisor."""

    leftover: tuple[int, ...]
    """Processes that did not die within the limit: stuck in the kernel. Usually empty."""


class PreloadTold(Struct, frozen=True, tag_field="is", tag="preload"):
    """Reports what the fork server imports ahead for the workers."""

    text: str
    trouble: bool
    """Workers start more slowly than requested."""


class StandbyTold(Struct, frozen=True, tag_field="is", tag="standby"):
    """The next generation's workers are forked and parked."""

    pids: tuple[int, ...]
    own_bytes: int
    """Memory that only these processes hold, of all together."""


class Fenced(Struct, frozen=True, tag_field="is", tag="fenced"):
    """The fence passed: the supervisor kills everything but services. Each worker's ProcessEnded follows, no
    TreeKilled."""


class SupervisorDied(Struct, frozen=True):
    """The supervisor ended without a request; its workers die with it. See `revive_supervisor`."""


Packet = ProcessStarted | SpawnFailed | ProcessEnded | TreeKilled | PreloadTold | StandbyTold | Fenced
"""The supervisor's events, by the tag "is"."""
SupervisorEvent = Packet | SupervisorDied


class SupervisorClient:
    """Controls one supervisor, from fork to end. Make, use and close it on the running event loop."""

    def __init__(self, handle: SupervisorHandle, on_event: Callable[[SupervisorEvent], None]) -> None:
        processes.become_subreaper()  # if the supervisor dies, its children become ours
        self.handle = handle
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._sock = handle.sock
        self._sock.setblocking(False)
        self._out = seqpacket.Outbox()
        self._ended = asyncio.Event()
        self._closing = False
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

    def signal(self, key: str, signum: int) -> None:
        """Signal the process itself, not its children; does nothing when it has ended."""
        self._send({"do": "signal", "key": key, "signum": int(signum)})

    def kill_session(self, pid: int) -> None:
        """SIGKILL the children that this process left behind: those in its session, and all below them."""
        self._send({"do": "kill_session", "pid": pid})

    def ignore(self, signum: int) -> None:
        """Every process spawned from now on starts with this signal ignored."""
        self._send({"do": "ignore", "signum": signum})

    def fence(self, at_s: float | None, suspend_at_s: float | None = None) -> None:
        """Kill everything but services at this time of `time.monotonic()`, even if the agent is stopped; Fenced reports
        it. Suspend (SIGSTOP) the same processes at the other time, until a later call names a later one, or none. None:
        not at all. Each call replaces the previous one."""
        self._send({"do": "fence", "at_s": at_s, "suspend_at_s": suspend_at_s})

    def keep_logs(self, spools: Mapping[str, int], *, first: bool) -> None:
        """Have the supervisor move to these log files what this process has not moved when it is killed. `spools`: the
        descriptor of each file's spool (log_spool.py). `first`: they replace those of earlier calls."""
        self._send({"do": "logs", "paths": list(spools), "first": first}, list(spools.values()))

    def remove_at_end(self, path: str) -> None:
        """Have the supervisor remove this folder of plain files at its end: the folder is in memory and must not
        outlive the agent."""
        self._send({"do": "remove", "path": path})

    def kill_tree(self, limit_s: float = KILL_LIMIT_S) -> None:
        """SIGKILL everything below the supervisor except services and their children: TreeKilled follows."""
        self._send({"do": "kill_tree", "limit_s": limit_s})

    async def close(self, spare: Collection[int] = ()) -> None:
        """End the supervisor and all its processes, services too, and reap it. Safe to call twice and after its death.

        Then kill the orphans that became our children: every child of this process not in `spare`.
        """
        orderly = self.alive
        self._closing = True
        if orderly:
            self._send({"do": "exit"})
            try:
                await asyncio.wait_for(self._ended.wait(), CLOSE_LIMIT_S)
            except TimeoutError:
                orderly = False
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.handle.pid, signal.SIGKILL)
                await self._ended.wait()
        # a supervisor that exited by itself left no process behind
        if orderly:
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
        else:
            self._on_event(msgspec.convert(received[0], Packet))

    def _lost(self) -> None:
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
    """After SupervisorDied: sweep, then start another supervisor. Blocks (call it in a thread). Raises OSError."""
    sweep(dead, spare)
    return exec_supervisor(dead.ignored, dead.descriptors)
