"""A worker's side of a regroup: its channel to the agent, and the end of every wait that blocks its main thread.

A worker whose training function runs in `ht.survive` connects to a socket of its agent. When another worker is lost,
the agent orders all others to leave their generation and to wait for the next one ("release"). Then it sends each its
rank and world in that one ("go"). A thread reads these orders, because the main thread may wait in a collective
operation for the worker that is lost. gloo has no way to abort that wait: the thread shuts the connections of the
process group, and the wait ends with an exception.

A main thread that computes meets no such wait for a while. It is interrupted, but only inside the call of a module (a
forward pass). An exception anywhere else could leave half a file, which a program writes between two steps. An
exception that another thread sets is raised at some later instruction, which may be in such code. So the thread asks
for a signal handler: it runs in the main thread, sees what that is executing, and raises there or not at all.

Knows sockets, the board's address and the messages (see supervisor/channel.py). Standard library only.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import FrameType
from typing import Any, NamedTuple

from holdfast import seqpacket
from holdfast.protocol.board_layout import BOARD_VARIABLE, INTERRUPT_SIGNAL, channel_name
from holdfast.protocol.train_contract import REPLACEMENT_VARIABLE

WHY_CHARACTERS_MAX = 4096
"""Length of the reason why a worker cannot go on."""
UNINTERRUPTED_S = 0.5
"""Time after a release in which the main thread leaves its generation by itself, at its next collective operation or at
the end of its step. After that it is interrupted in the next call of a module, unless an optimizer is at work."""
INTERRUPT_AGAIN_S = 0.01
"""Pause between two attempts to interrupt it (s): the handler may find it in code where it must not raise."""
MODULE_CALL = ("torch.nn.modules.module", "_call_impl")
"""Module and name of the function through which torch calls every module."""


class Release(NamedTuple):
    """The order to leave the generation, and wait for the next one."""

    generation: int
    """The generation that is being formed."""
    at_once: bool
    """Whether to leave at once, because a worker was lost; False: at the safe point that the board names."""
    leaves: bool = False
    """Whether the worker's node leaves: it has no rank in that generation, and is ended while it waits."""
    nodes: int = 1
    """The number of nodes that have ranks in that generation."""


class Go(NamedTuple):
    """The order to go on: this worker's rank and world in a new generation, as environment variables."""

    generation: int
    environment: dict[str, str]


class MainThread(Enum):
    """What the main thread does, which says how a loss frees it."""

    WAITS = "waits"
    """It has left its generation and waits for the next one, or is to be left alone."""
    ENTERS = "enters"
    """It is on its way into the next generation: what it waits for is cut again and again."""
    TRAINS = "trains"
    """Its collective operations are cut once, and it is interrupted if it does not leave its generation then."""


class ChannelLostError(RuntimeError):
    """The agent is gone, and will end this process."""


class AgentChannel:
    """The connection to the agent. `say` and the waits belong to the main thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self.uninterrupted = threading.RLock()
        """The lock of all fields below. While the main thread has it, it is not interrupted. The main thread takes this
        lock, not the condition, whose `with` is Python code: an exception of a signal handler there would leave it
        locked."""
        self._changed = threading.Condition(self.uninterrupted)
        self.released: Release | None = None
        """The order to leave the generation, until its "go" was taken. An attribute: it is read in each step."""
        self._go: Go | None = None
        """The newest "go", until `await_go` takes it; a later release withdraws it."""
        self._lost = False
        """Whether the agent is gone."""
        self._main = MainThread.WAITS
        self._cut: Callable[[], object] = lambda: None
        self._may_interrupt: Callable[[], bool] = lambda: False
        self._exception: type[BaseException] | None = None
        """The exception that interrupts the main thread; the three come from `train`."""
        self._handler_before: Any = None
        """The program's own handler of the signal, which `close` restores. Ours is in place while this is set."""
        self._thread = threading.Thread(target=self._listen, name="holdfast-regroup", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, environ: Mapping[str, str] = os.environ) -> AgentChannel | None:
        """A channel to the agent; None: there is no agent, or it does not offer one."""
        address = environ.get(BOARD_VARIABLE, "")
        if not address:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(channel_name(os.stat(address.rpartition("@")[0]).st_ino))
            ours = seqpacket.peer(connection)[1] in (0, os.geteuid())  # another user may have taken the name
        except OSError:
            ours = False
        if not ours:
            connection.close()
            return None
        return cls(connection)

    def close(self) -> None:
        """Close the channel: this worker cannot go on in another generation any more."""
        self.arrive()  # the thread waits for that if a rank was lost while this one entered a generation
        if self._handler_before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(INTERRUPT_SIGNAL, self._handler_before)
            self._handler_before = None
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._connection.close()

    def train(
        self, cut: Callable[[], object], may_interrupt: Callable[[], bool], exception: type[BaseException]
    ) -> None:
        """Begin to watch the main thread, which trains from now on, until `arrive`.

        `cut` ends collective operations; this object's thread calls it. `exception` is raised in the main thread,
        inside the call of a module, if it has not left its generation UNINTERRUPTED_S after that and `may_interrupt()`.
        """
        if self._handler_before is None and threading.current_thread() is threading.main_thread():
            self._handler_before = signal.signal(INTERRUPT_SIGNAL, self._on_interrupt) or signal.SIG_DFL
        with self.uninterrupted:
            self._cut, self._may_interrupt, self._exception = cut, may_interrupt, exception
            self._main = MainThread.TRAINS

    def arrive(self) -> None:
        """End the watch: the main thread does not train any more. No interruption follows."""
        with self.uninterrupted:
            self._main = MainThread.WAITS
            self._changed.notify_all()

    def say(self, what: str, **fields: object) -> None:
        """Send a message. Raises ChannelLostError."""
        try:
            seqpacket.send(self._connection, {"is": what, **fields})
        except OSError as error:
            raise ChannelLostError(f"the agent cannot be reached: {error.strerror}") from error

    def catch_up(self) -> Release | None:
        """Take every message that has arrived. Returns the newest order to leave, as `released`."""
        self._receive()
        return self.released

    def await_immediate(self, limit_s: float) -> Release | None:
        """Wait for the order to leave at once, which may follow one that allows more time. Returns the newest order."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or (self.released is not None and self.released.at_once), limit_s)
            return self.released

    def await_go(self, cut: Callable[[], object] | None = None) -> Go:
        """Wait for the order to go on, and answer each release. Raises ChannelLostError.

        `cut` ends collective operations, and what the main thread waits for until it is in the new group. If another
        rank is lost, this object's thread calls it again and again, until `arrive` or `train`: the main thread may open
        one connection after the other. It is not interrupted otherwise."""
        with self._changed:
            go = self.look_ahead()
            self._go = self.released = None
            if cut is not None:  # at once: a release that comes after this must find it
                self._cut, self._main = cut, MainThread.ENTERS
            return go

    def look_ahead(self) -> Go:
        """The same, but the order stays, for `await_go`: until then this rank is to leave what it trains."""
        answered: Release | None = None
        with self._changed:
            while self._go is None:
                if self._lost:
                    raise ChannelLostError("the agent is gone")
                if self.released is not None and self.released is not answered:
                    answered = self.released
                    self.say("waits", generation=answered.generation)
                self._changed.wait()
            return self._go

    def is_due(self, go: Go) -> bool:
        """Whether this order stands. A later loss withdraws it, and so does the agent's end."""
        with self.uninterrupted:
            return self._go is go and not self._lost

    # --- the thread -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Read the agent's orders, and make the main thread leave its generation when one says so."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        while not self._lost:
            poller.poll()
            before = self.released
            self._receive()
            release = self.released
            if release is not None and release is not before and release.at_once:
                self._free_main_thread(release)

    def _receive(self) -> None:
        """Take every message that has arrived. Both threads call it."""
        with self.uninterrupted:
            while not self._lost:
                try:
                    received = seqpacket.receive(self._connection)
                except BlockingIOError:
                    break
                except (OSError, ValueError):
                    received = None
                if received is None:
                    self._lost = True
                else:
                    self._take(received[0])
            self._changed.notify_all()

    def _take(self, message: Mapping[str, Any]) -> None:
        match message.get("do"), message.get("generation"):
            case "release", int(generation):
                nodes = message.get("nodes")
                self.released = Release(
                    generation,
                    message.get("at_once") is True,
                    message.get("leaves") is True,
                    nodes if isinstance(nodes, int) else 1,
                )
                self._go = None  # it was for a generation that was given up
            case "go", int(generation):
                environment = message.get("environment")
                if isinstance(environment, dict):
                    self._go = Go(generation, {str(name): str(value) for name, value in environment.items()})

    def _free_main_thread(self, release: Release) -> None:
        """End what the main thread waits for, and interrupt it, until it has left its generation or the order is out of
        date."""
        # The lock is held until the old group is cut: otherwise the main thread might join a new one before, and lose
        # that one.
        with self._changed:
            if not self._is_due(release):
                return
            self._cut()

        deadline_s = time.monotonic() + UNINTERRUPTED_S
        while True:
            with self._changed:
                left_s = deadline_s - time.monotonic()
                if self._lost or not self._is_due(release):
                    return
                if self._main is MainThread.ENTERS:
                    self._cut()  # it may have opened another connection since
                    self._changed.wait(INTERRUPT_AGAIN_S)
                    continue
                if self._handler_before is None:
                    return
                if left_s <= 0:
                    _thread.interrupt_main(INTERRUPT_SIGNAL)  # type: ignore[arg-type] # runs the handler: no signal is sent
                self._changed.wait(max(left_s, INTERRUPT_AGAIN_S))

    def _is_due(self, release: Release) -> bool:
        """Whether this order is the newest one, and the main thread has not left its generation."""
        return self._main is not MainThread.WAITS and self.released is release

    def _on_interrupt(self, _: int, frame: FrameType | None) -> None:
        """The signal handler. It runs in the main thread, between two instructions of this frame."""
        due = self.released is not None and self.released.at_once and self._main is MainThread.TRAINS
        if due and self._exception is not None and self._may_interrupt() and _calls_a_module(frame):
            raise self._exception


def _calls_a_module(frame: FrameType | None) -> bool:
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == MODULE_CALL:
            return True
        frame = frame.f_back
    return False


class GroupSockets:
    """The sockets that a process group has opened in this process."""

    def __init__(self) -> None:
        self._links: dict[int, str] = {}
        """Descriptor -> kernel's name of the socket, which shows whether the number has another socket now."""
        self._before: dict[int, str] | None = None
        """The sockets of this process when the outermost block of `noting` was entered; None: it is in no block."""
        self._shut: dict[str, socket.socket] = {}
        """Duplicates of the connections that were cut, which keep them open until `forget`, by the kernel's names."""

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the sockets that are opened in the block: they belong to the group, also while it is being made."""
        outer, before = self._before, open_sockets()
        self._before = before if outer is None else outer
        try:
            yield
        finally:
            self._before = outer
            self._note(before)

    def _note(self, before: Mapping[int, str]) -> None:
        self._links |= {fd: link for fd, link in open_sockets().items() if before.get(fd) != link}

    def cut(self) -> int:
        """End every wait on the connections, in this process alone. Returns the number of those that are cut. Any
        thread may call it, again for connections that were opened since.

        They are shut for reading only, and stay open until `forget`, whatever gloo closes: gloo loses an operation, and
        waits for it for ever, when it answers a message of a peer that has closed the connection in between. A
        listening socket is left alone: gloo ends the process when its accept fails.
        """
        if self._before is not None:
            self._note(self._before)
        for fd, link in list(self._links.items()):
            with contextlib.suppress(OSError):
                if link in self._shut:
                    continue
                if os.readlink(f"/proc/self/fd/{fd}") != link:
                    continue  # gloo has closed it, and the number is another descriptor's
                same = socket.socket(fileno=os.dup(fd))
                if same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    same.close()
                    continue
                self._shut[link] = same
                same.shutdown(socket.SHUT_RD)
        return len(self._shut)

    def forget(self) -> None:
        """Close the connections that were cut, when the group is gone on all ranks."""
        self._links.clear()
        while self._shut:
            self._shut.popitem()[1].close()


def is_replacement(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started for a lost worker, and has not joined the others yet."""
    return bool(environ.get(REPLACEMENT_VARIABLE))


def open_sockets() -> dict[int, str]:
    """The sockets of this process: descriptor -> kernel's name of the socket."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found
