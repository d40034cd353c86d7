"""A worker's side of the saver: hand over a slot and go on training.

    place = Place.find()                           # where this worker's slots and saver are; SnapshotMemoryError: nowhere
    saver = SaverClient(place)
    slots = place.slots(rank=…, world=…)
    …
    saver.persist(slot, ticket, metadata)          # returns at once; from here on the save outlives this worker
    saver.check()                                  # in every step: raises what went wrong since

Under holdfast the saver is the agent's child and started when somebody connects. Elsewhere the first worker of the node
starts it, as a process of its own that ends after the job: torchrun's end, or under no launcher this process's.

Not for several threads. A forked child must leave it alone. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core import errors
from holdfast.core.errors import SaverLostError, SnapshotError, SnapshotMemoryError, SnapshotWriteError
from holdfast.snapshots import packets, rescue, shelf
from holdfast.snapshots.attempt import PATIENCE_S, Ticket
from holdfast.snapshots.slots import Slot, SlotOwner, Slots, lend

START_LIMIT_S = 10.0
"""For a detached saver to be on its own feet, and for another worker of this node that is starting it."""
RECONNECT_S = 5.0
"""Between two attempts to have a saver while nothing is to be saved."""
LOOK_AGAIN_S = 0.01


def rescue_attempt() -> int:
    """A number for the attempt in which memory steps are written should the workers die; nothing else has it.

    Rank 0 draws it once per generation and tells the others; all put it into the tickets of `Slots.commit`. Random,
    because nobody is there to agree when it is needed, and an attempt that an earlier crash has left must not be met.
    """
    return random.SystemRandom().randint(rescue.ATTEMPT_MIN, rescue.ATTEMPT_MAX)


@dataclass(frozen=True)
class SaverAddress:
    """Where one worker's slots and saver are."""

    folder: Path
    local_rank: int
    generation: int
    anchor: int
    """The process whose end is the job's; 0: an agent looks after the saver."""
    held: shelf.Shelf | None = None
    """What keeps the folder from being cleaned away while this process lives; None: the agent does."""

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ, root: Path = shelf.ROOT) -> SaverAddress:
        """By the environment. Raises SnapshotMemoryError when there is no memory to keep anything in."""
        address = environ.get(packets.SAVER_VARIABLE, "")
        if address:
            folder, generation, local_rank = address.rsplit("@", 2)
            return cls(Path(folder), int(local_rank), int(generation), 0)
        # torchrun's workers find the same shelf after a restart, because torchrun itself has not changed.
        launched = "TORCHELASTIC_RUN_ID" in environ
        anchor = os.getppid() if launched else os.getpid()
        run_id = environ.get("TORCHELASTIC_RUN_ID", "plain")
        name = shelf.name_of(run_id, shelf.key_of(run_id, anchor, _start_time(anchor)))
        shelf.clean(root)
        try:
            held = shelf.Shelf.at(name, root)
        except OSError as error:
            raise SnapshotMemoryError(f"{root} cannot be used: {error.strerror}.") from error
        local_rank = environ.get("LOCAL_RANK", "0") if launched else "0"
        return cls(held.path, int(local_rank), int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")), anchor, held)

    def slots(self, *, rank: int, world: int) -> Slots:
        """This worker's, under its rank of today."""
        return Slots(self.folder, SlotOwner(self.local_rank, rank, world, self.generation))

    def close(self) -> None:
        """Let go of the folder."""
        if self.held is not None:
            self.held.close()


@dataclass
class _Asked:
    step: int
    written: bool = False


class SaverClient:
    """A connection to the node's saver, made anew when the saver has died."""

    def __init__(self, place: SaverAddress) -> None:
        """Connects. Raises SnapshotMemoryError when there is no saver and none can be started."""
        self._place = place
        self._sock: socket.socket | None = None
        self._asked: dict[int, _Asked] = {}
        """Not answered for good."""
        self._waiting_for = 0
        """Of the last `wait` that asked the saver; 0: answered."""
        self._last_id = 0
        self._failures: list[SnapshotError] = []
        self._lost_at_s: float | None = None
        self.news: list[str] = []
        """What became of a predecessor's saves; for a warning, and the reader's to clear."""
        self._connect()

    @property
    def in_flight(self) -> list[int]:
        """Steps that were handed over and are not over."""
        return sorted(asked.step for asked in self._asked.values())

    @property
    def writing(self) -> list[int]:
        """Those of them whose slot is not free yet."""
        return sorted(asked.step for asked in self._asked.values() if not asked.written)

    def persist(
        self,
        slot: Slot,
        ticket: Ticket,
        metadata: Mapping[str, Any] | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Have this slot written to disk; once this returns, the end of this process does not prevent it.

        `slot`: as `Slots.commit` gave it; it is not staged into until it is written. The ticket's folder is made
        absolute. On rank 0 the saver commits when the other ranks' files are there, within `patience_s`, with
        `metadata`. Never waits. Raises SnapshotWriteError when no saver takes it, ValueError when the slot was staged
        into since, or ticket and metadata exceed seqpacket.MESSAGE_BYTES_MAX.
        """
        lent = lend(self._place.folder, slot)
        try:
            order = {
                "do": "persist",
                "id": self._next_id(),
                "sequence": slot.sequence,
                "ticket": {**ticket.to_json(), "folder": os.path.abspath(ticket.folder)},
                "metadata": dict(metadata or {}),
                "patience_s": float(patience_s),
            }
            self._receive()
            self._send(order, lent)
            self._asked[self._last_id] = _Asked(slot.step)
        finally:
            os.close(lent)

    def check(self) -> None:
        """Raise what went wrong since the last call, one failure at a time: SnapshotError. Never waits."""
        self._receive()
        if self._sock is None and self._lost_at_s is not None and time.monotonic() > self._lost_at_s + RECONNECT_S:
            self._lost_at_s = time.monotonic()
            with contextlib.suppress(SnapshotError):  # it may be possible later; a save that needs it says it
                self._connect()
        if self._failures:
            raise self._failures.pop(0)

    def wait(self, patience_s: float) -> bool:
        """Until nothing of this local rank is in flight, a predecessor's saves included. False: it still is."""
        self._receive()
        self._ask_to_be_told("all")
        return self._receive_until(lambda: not self._asked and not self._waiting_for, patience_s)

    def wait_own(self, patience_s: float) -> bool:
        """Until nothing that this client has handed over is in flight. False: it still is."""
        self._receive()
        return self._receive_until(lambda: not self._asked, patience_s)

    def wait_written(self, patience_s: float) -> bool:
        """Until nothing of this local rank is being written. What is written and waits for other ranks may wait on: they
        may never come. False: it still is.
        """
        self._receive()
        self._ask_to_be_told("written")
        return self._receive_until(lambda: not self._waiting_for, patience_s)

    def _ask_to_be_told(self, when: str) -> None:
        if self._sock is not None and not self._waiting_for:
            self._waiting_for = self._next_id()
            with contextlib.suppress(SnapshotError):
                self._send({"do": "wait", "id": self._waiting_for, "for": when})

    def wait_for_slot(self, patience_s: float) -> bool:
        """After `Slots.stage` gave none: until the saver has let go of a slot. False: it has not."""
        self._receive()
        before = len(self.writing)
        if not before:  # a predecessor's
            return self.wait_written(patience_s)
        return self._receive_until(lambda: len(self.writing) < before, patience_s)

    def close(self, *, ahead: bool = False) -> None:
        """Say goodbye: what is in flight is finished, and nothing is rescued. Waits for nothing.

        `ahead`: without a goodbye, so that the saver writes the newest step in memory, as after a crash.
        """
        if self._sock is not None and not ahead:
            with contextlib.suppress(OSError):
                packets.send(self._sock, {"do": "bye"})
        self._drop()

    # --- the connection -----------------------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _send(self, packet: packets.Packet, *fds: int) -> None:
        """To a saver that lives: one that has died is replaced once."""
        for last in (False, True):
            if self._sock is None:
                self._connect()
            assert self._sock is not None
            try:
                packets.send(self._sock, packet, fds)
            except BlockingIOError as error:
                raise SnapshotWriteError("the saver does not read: is it stopped?") from error
            except OSError as error:
                self._lost()
                if last:
                    raise SaverLostError(f"the saver cannot be reached: {error.strerror}") from error
            else:
                return

    def _receive(self) -> None:
        """All that has come."""
        while self._sock is not None:
            try:
                got = packets.receive(self._sock)
            except BlockingIOError:
                return
            if got is None:
                self._lost()
                return
            self._take(got[0])

    def _receive_until(self, enough: Any, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while True:
            self._receive()
            if enough():
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._sock is None:
                return False
            poller = select.poll()
            poller.register(self._sock, select.POLLIN)
            poller.poll(left_s * 1000)

    def _take(self, packet: packets.Packet) -> None:
        match packet.get("is"), packet.get("id", 0):
            case "written", number:
                if number in self._asked:
                    self._asked[number].written = True
            case "saved", number:
                self._asked.pop(number, None)
            case "failed", number:
                if self._asked.pop(number, None) is not None:
                    self._failures.append(error_of(str(packet.get("code")), str(packet.get("text"))))
            case "idle", number:
                if number == self._waiting_for:
                    self._waiting_for = 0
            case "news", _:
                self.news.append(str(packet.get("text")))

    def _lost(self) -> None:
        """The saver has died, and with it what it had in hand."""
        self._drop()
        self._waiting_for = 0
        self._lost_at_s = time.monotonic() - RECONNECT_S
        asked, self._asked = self._asked, {}
        for each in asked.values():
            self._failures.append(
                SaverLostError(f"step {each.step} was not saved: the process that wrote it was killed.")
            )

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connect(self) -> None:
        path = self._place.folder / shelf.SOCKET
        try:
            self._sock = _connected(path)
        except OSError as error:
            if not self._place.anchor:
                raise SnapshotMemoryError(f"the agent's saver cannot be reached: {error.strerror}") from error
            try:
                self._sock = _start_detached(self._place)
            except (OSError, subprocess.SubprocessError) as failed:
                raise SnapshotMemoryError(f"no saver can be started: {failed}") from failed
        hello = {"do": "hello", "local_rank": self._place.local_rank, "generation": self._place.generation}
        with contextlib.suppress(OSError):  # then the next packet fails as well, and says so
            packets.send(self._sock, hello)


def read_back(place: SaverAddress, path: Path, patience_s: float) -> None:
    """Have the saver read a committed snapshot and check every byte. For any thread; waits.

    SnapshotError as of `reader.verify`, or when it takes longer; SaverLostError: there is no saver that could.
    """
    try:
        with _connected(place.folder / shelf.SOCKET) as sock:
            packets.send(sock, {"do": "read back", "path": str(path)})
            poller = select.poll()
            poller.register(sock, select.POLLIN)
            if not poller.poll(patience_s * 1000):
                raise SnapshotError(f"{path} was not read back within {patience_s:.0f} s: is the saver stopped?")
            got = packets.receive(sock)
    except OSError as error:
        raise SaverLostError(f"the saver cannot be reached: {error.strerror}") from error
    if got is None:
        raise SaverLostError("the saver has ended meanwhile")
    if got[0].get("code") != "":
        raise error_of(str(got[0].get("code")), str(got[0].get("text")))


def error_of(code: str, text: str) -> SnapshotError:
    """As it was raised elsewhere: in the saver, or by another rank."""
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SnapshotError))
    return next((kind(text) for kind in kinds if kind.code == code), SnapshotWriteError(text))


def _connected(path: Path) -> socket.socket:
    """Raises OSError; never waits, because a full backlog is an error."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock


def _start_detached(place: SaverAddress) -> socket.socket:
    """Start a saver that outlives this process, unless another worker of this node just has. Raises OSError."""
    path = place.folder / shelf.SOCKET
    starting = os.open(place.folder / "starting", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock_within(starting, START_LIMIT_S)
        with contextlib.suppress(OSError):
            return _connected(path)
        path.unlink(missing_ok=True)
        with packets.listen(path) as listening:
            # It waits in the socket until the saver is up; a saver without workers might end at once.
            sock = _connected(path)
            passed = [listening.fileno(), *([place.held.fd] if place.held is not None else [])]
            argv = packets.saver_argv(place.folder, listening=listening.fileno(), anchor=place.anchor)
            try:
                _run_apart(argv, passed)
            except BaseException:
                sock.close()
                raise
            return sock
    finally:
        os.close(starting)


def _run_apart(argv: list[str], passed: list[int]) -> None:
    """A program that leaves this process's session, and this process, at once. Raises OSError, SubprocessError."""
    null = subprocess.DEVNULL
    subprocess.run(
        argv,
        stdin=null,
        stdout=null,
        stderr=null,
        cwd="/",
        pass_fds=passed,
        start_new_session=True,
        check=True,
        timeout=START_LIMIT_S,
    )


def _lock_within(fd: int, limit_s: float) -> None:
    """An exclusive lock. Raises TimeoutError, which is an OSError."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(110, "another worker has been starting it for too long") from None
            time.sleep(LOOK_AGAIN_S)
        else:
            return


def _start_time(pid: int) -> str:
    """Of a process, in clock ticks since boot: a number that is used again belongs to another process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""
