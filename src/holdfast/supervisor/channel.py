"""The agent's end of the channel to workers that can go on in another generation: one listening socket for a board.

A worker connects by itself. The kernel reports which process connected, so no worker can send in another one's name,
and no other process can send at all. What workers send is checked, since they may send anything.

Knows sockets, the form of the messages and which process is which worker. Decides nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from holdfast import seqpacket
from holdfast.protocol.policy import Count, Seconds
from holdfast.protocol.train_contract import WHY_CHARACTERS_MAX

BACKLOG = 4096
"""Connections that may wait to be accepted: all workers of a node may connect at once."""
ACCEPT_AGAIN_S = 0.5
"""Pause after a connection could not be accepted because this process has no descriptor left (s)."""
CAUGHT_UP_MAX = 64
"""Number of messages of one worker that are taken at once: it may send without end."""


class SaysCanGoOn(Struct, frozen=True, tag_field="is", tag="can_go_on"):
    """Its training function runs, and it can go on in another generation."""

    generation: Count
    """The generation whose process group it has joined; 0: the one in which it was started."""


class SaysUnable(Struct, frozen=True, tag_field="is", tag="unable"):
    """Its training function has returned or raised."""


class SaysReady(Struct, frozen=True, tag_field="is", tag="ready"):
    """A replacement has started, and waits for its place."""


class Waits(Struct, frozen=True, tag_field="is", tag="waits"):
    """It has left its process group and waits for its new place."""

    generation: Count
    """The generation for which it was released."""


class Refuses(Struct, frozen=True, tag_field="is", tag="refuse"):
    """It cannot go on."""

    why: Annotated[str, Meta(max_length=WHY_CHARACTERS_MAX)]


class WentOn(Struct, frozen=True, tag_field="is", tag="went_on"):
    """The first step of the new generation is done."""

    generation: Count
    step: Count
    steps_lost: Count
    seconds: Seconds
    """Time from its release until this step was done (s)."""


WorkerMessage = SaysCanGoOn | SaysUnable | SaysReady | Waits | Refuses | WentOn


class WorkerChannel:
    """Accepts the workers of one board. Make, use and close it on the running loop."""

    def __init__(
        self,
        name: bytes,
        pids: Callable[[], Mapping[int, int]],
        on_message: Callable[[int, WorkerMessage], None],
        on_invalid: Callable[[int], None],
    ) -> None:
        """`pids`: the process of each living worker, by local rank; 0: it is being started. `on_message` gets a local
        rank and its message. `on_invalid` gets a local rank whose message is invalid; its connection is closed. Raises
        OSError.

        The end of a connection is not reported. Its worker has sent before that it leaves, or the supervisor reports
        the worker's end, or the worker does not leave its generation in time.
        """
        self._pids = pids
        self._on_message = on_message
        self._on_invalid = on_invalid
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, socket.socket] = {}
        """The connection of each worker, by local rank."""
        self._early: dict[int, socket.socket] = {}
        """Connections of processes whose start the supervisor has not reported yet, by process. Nothing is read from
        them before that."""
        self._accept_again: asyncio.TimerHandle | None = None
        """The timer that was set when no descriptor was left. It may have rung."""

        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listening.bind(name)
            self._listening.listen(BACKLOG)
        except OSError:
            self._listening.close()
            raise
        # A connection may be gone before it is accepted: `accept` must not wait for another one then.
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._accept)

    def send(self, local_rank: int, message: seqpacket.Message) -> None:
        """Send if this worker is connected. A worker that does not read, or has ended, misses the message."""
        connection = self._connections.get(local_rank)
        if connection is not None:
            try:
                seqpacket.send(connection, message)
            except (BrokenPipeError, ConnectionResetError):
                pass  # it has closed its end: what it has sent before is still to be read, and then the end
            except OSError:
                self.forget(local_rank)

    def started(self) -> None:
        """Another worker has a process: it may have connected already."""
        early, self._early = self._early, {}
        for pid, connection in early.items():
            self._admit(pid, connection)

    def catch_up(self) -> None:
        """Take what has arrived. Call it before the end of a worker is handled: the supervisor reports the end on
        another socket, and what workers have sent before must be handled before."""
        while self._accept():
            pass
        for local_rank, connection in list(self._connections.items()):
            self._take_all(local_rank, connection)

    def _take_all(self, local_rank: int, connection: socket.socket) -> None:
        for _ in range(CAUGHT_UP_MAX):
            if self._connections.get(local_rank) is not connection or not self._readable(local_rank, connection):
                break

    def forget(self, local_rank: int) -> None:
        """This worker has ended."""
        connection = self._connections.pop(local_rank, None)
        if connection is not None:
            self._close_connection(connection)

    def close(self) -> None:
        if self._accept_again is not None:
            self._accept_again.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection in (*self._connections.values(), *self._early.values()):
            self._close_connection(connection)
        self._connections, self._early = {}, {}

    def _accept(self) -> bool:
        """Accept one connection. Returns whether there was one."""
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError:  # no descriptor is left: the socket stays readable, and the loop would spin
            self._loop.remove_reader(self._listening)
            if self._accept_again is not None:
                self._accept_again.cancel()
            self._accept_again = self._loop.call_later(
                ACCEPT_AGAIN_S, self._loop.add_reader, self._listening, self._accept
            )
            return False
        connection.setblocking(False)
        pid, uid = seqpacket.peer(connection)
        # Abstract names have no permissions: any user of the machine can connect. So can processes of other containers.
        # Their number is 0 here, which is also that of a worker that is being started.
        if pid and uid in (0, os.geteuid()):
            self._admit(pid, connection)
        else:
            connection.close()
        return True

    def _admit(self, pid: int, connection: socket.socket) -> None:
        """Take this connection as that of a worker, keep it until the worker's start is reported, or close it."""
        pids = self._pids()
        local_rank = next((rank for rank, its_pid in pids.items() if its_pid == pid), None)
        if local_rank is not None:
            # A process has one connection: the newer one counts. What was sent on the other one comes first: a worker
            # opens one for each training function.
            if (older := self._connections.get(local_rank)) is not None:
                self._take_all(local_rank, older)
            self.forget(local_rank)
            self._connections[local_rank] = connection
            self._loop.add_reader(connection, self._readable, local_rank, connection)
        # The supervisor reports a start on another socket, perhaps later. Not more of them than there are workers:
        # anybody of this user may connect.
        elif 0 in pids.values() and pid not in self._early and len(self._early) < len(pids):
            self._early[pid] = connection
        else:
            connection.close()

    def _readable(self, local_rank: int, connection: socket.socket) -> bool:
        """Handle one message of this worker. Returns whether there was one."""
        try:
            received = seqpacket.receive(connection)
            # Its worker is lost when the supervisor says so, and not here: of two ranks that died at one moment the
            # second one counted as one that cannot go on, and all were started again.
            if received is None:
                self.forget(local_rank)
                return False
            for fd in received[1]:  # no message has descriptors, but a worker may send some
                os.close(fd)
            message = msgspec.convert(received[0], WorkerMessage)
        except BlockingIOError:
            return False
        except OSError:
            self.forget(local_rank)
            return False
        except (ValueError, msgspec.ValidationError):
            self.forget(local_rank)
            # What it says cannot be trusted any more (test_a_worker_that_sends_nonsense_is_not_able_any_more).
            self._on_invalid(local_rank)
            return False
        self._on_message(local_rank, message)
        return True

    def _close_connection(self, connection: socket.socket) -> None:
        self._loop.remove_reader(connection)
        connection.close()
