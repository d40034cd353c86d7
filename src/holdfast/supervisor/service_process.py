"""A service: a process below the supervisor that outlives generations, and its socket to this agent.

It starts when it is needed, has one SOCK_SEQPACKET socket to this agent, and ends when the other end of that socket is
closed. A kill of the workers spares it. Knows none of the services: the store, the saver, the dashboard.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress

from holdfast import seqpacket
from holdfast.supervisor.client import ProcessEnded, SpawnFailed, SupervisorClient, SupervisorEvent

CONTROL_FD = 3
"""The service's end of its socket."""


class ServiceProcess:
    """One service, started as often as needed. Pass every event of the supervisor to `why_ended`."""

    def __init__(
        self,
        supervisor: Callable[[], SupervisorClient],
        name: str,
        on_packet: Callable[[seqpacket.Message], None],
        on_silent: Callable[[], None],
    ) -> None:
        """`supervisor` returns the present one. `on_silent` is called when the process has closed its end of the
        socket."""
        self._supervisor = supervisor
        self._name = name
        self._on_packet = on_packet
        self._on_silent = on_silent
        self._loop = asyncio.get_running_loop()
        self._control: socket.socket | None = None
        self._started = 0

    @property
    def running(self) -> bool:
        """Whether it was started and not dropped."""
        return self._control is not None

    @property
    def _key(self) -> str:
        """The key at the supervisor. Each process has its own, so that a late event about a dead one is ignored."""
        return f"{self._name}#{self._started}"

    def start(self, argv: Sequence[str], fds: Mapping[int, int] | None = None, *, warm: bool = False) -> None:
        """Start the process. `fds`: number in the process -> descriptor of ours, beside CONTROL_FD."""
        self._started += 1
        ours, theirs = seqpacket.pair()
        # Our copy of its end is closed: otherwise the socket would outlive the process, and its death go unseen.
        with theirs, open("/dev/null", "r+b", buffering=0) as null:
            standard = dict.fromkeys((0, 1, 2), null.fileno())
            passed = {**standard, CONTROL_FD: theirs.fileno(), **(fds or {})}
            self._supervisor().spawn(self._key, argv, fds=passed, service=True, warm=warm)
        self._control = ours
        self._loop.add_reader(ours, self._readable)

    def send(self, packet: seqpacket.Message, fds: Sequence[int] = ()) -> None:
        """Send without waiting. Raises OSError: BlockingIOError when the process does not read, another when it is
        gone."""
        assert self._control is not None
        seqpacket.send(self._control, packet, fds)

    def why_ended(self, event: SupervisorEvent) -> str:
        """The reason, if this event says that the running process ended; empty for all other events."""
        if self._control is None:
            return ""
        if isinstance(event, ProcessEnded) and event.key == self._key:
            return f"ended with exit code {event.exit_code}"
        if isinstance(event, SpawnFailed) and event.key == self._key:
            return f"could not be started: {event.text}"
        return ""

    def drop(self) -> None:
        """Close the socket, which ends the process. What it has sent before is passed on: the supervisor may report its
        end first."""
        control, self._control = self._control, None
        if control is not None:
            self._loop.remove_reader(control)
            with closing(control), suppress(BlockingIOError):
                while received := seqpacket.receive(control):
                    self._on_packet(received[0])

    def _readable(self) -> None:
        assert self._control is not None
        try:
            received = seqpacket.receive(self._control)
        except BlockingIOError:
            return
        if received is None:
            # At its end a socket stays readable: the loop would call this for ever.
            self._loop.remove_reader(self._control)
            self._on_silent()
        else:
            self._on_packet(received[0])
