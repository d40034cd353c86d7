"""The worker's side of saving: stages a rank's image in memory, and has it written to the disk.

    tier = open_tier(rank=…, world=…)                    # in_process.py
    memory = tier.stage(step, size_bytes, wait=False)    # None: both slots are still being written
    ...copy into memory...
    tier.commit(request)                                 # if this process dies, the saver writes it
    tier.persist(request)                                # returns at once
    tier.check()                                         # in every step: raises errors of earlier saves

`SaverClient`: a slot in /dev/shm, written by the saver: the copy outlives this process, and so does a save.
Where /dev/shm has no room: in_process.py.

Both keep a staged image unchanged while it is written, and neither waits unless asked. Use them in one thread, except
`reserving` and `read_back`. A forked child must not use them. Standard library only."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast import memory_folder, seqpacket
from holdfast.protocol.errors import (
    SaverLostError,
    SnapshotError,
    SnapshotIncompleteError,
    SnapshotMemoryError,
    SnapshotWriteError,
)
from holdfast.train.snapshots import disk, folder, saver_connection
from holdfast.train.snapshots.changes import PATIENCE_S, SaveRequest
from holdfast.train.snapshots.copy_connection import Address
from holdfast.train.snapshots.copy_service import State, all_slots, is_copy
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.remote import RemotePath, absolute
from holdfast.train.snapshots.saver_connection import SaverAddress
from holdfast.train.snapshots.slots import COUNT, COUNT_MAX, Slot, SlotOwner, Slots, lend

RECONNECT_S = 5.0  # between two attempts to start a saver while nothing is to be saved
SLOWEST_BYTES_S = 20e6  # a disk that reads more slowly is treated as broken


class Tier(Protocol):
    """See the module's docstring. Every method may raise SnapshotError."""

    in_memory: bool
    place: str  # where the next worker on this node finds our slots; agents that share a /dev/shm have one each
    states: int  # it has room for so many

    def regroup(self, rank: int, world: int, generation: int) -> None:
        """This worker goes on as this rank of another generation: what is staged from now on belongs to that."""

    def reserving(self, size_bytes: int) -> Generator[int, None, None]:
        """Take memory piece by piece, so that no `stage` has to; for any threads in turn. Yields how many states have
        room; the one that is staged next is the first. For another size, close it and call this again."""

    def stage(self, step: int, size_bytes: int, *, wait: bool) -> memoryview | None:
        """Memory for an image; None when all is being written and `wait` is false."""

    def commit(self, request: SaveRequest) -> None:
        """The staged image is complete. If this process dies before it is on the disk, it is written as requested."""

    def persist(self, request: SaveRequest) -> None:
        """Write the image that was committed last. Returns at once."""

    @property
    def busy(self) -> bool:
        """Whether an image is being written."""

    def check(self) -> None:
        """Raise errors of the background work."""

    def wait(self) -> None:
        """Wait until every handed-over save is on the disk; raises its errors."""

    def await_previous_worker(self) -> None:
        """Wait until this node writes nothing more of a previous worker; saves that wait for other ranks may continue
        to wait."""

    def held(self, folder: str) -> list[Slot]:
        """The slots of all local ranks that hold this snapshot folder's states, each with its request; with `copies`
        those of other nodes' ranks after them."""

    def forget(self, above_step: int) -> None:
        """Drop states of later steps: training continues from an earlier one."""

    def drop(self, above_step: int) -> None:
        """States of later steps are wrong: nobody may write them, or go on from them."""

    def read_back(self, snapshot: Snapshot) -> None:
        """Read a committed snapshot and check every byte. SnapshotError. For any thread."""

    def close(self, *, ahead: bool) -> None:
        """Release everything. `ahead`: memory is newer than the disk, and the saver shall write the newest state
        without us."""


@dataclass
class _Asked:
    step: int
    written: bool = False


class SaverClient:
    """One rank's memory slots and its connection to the node's saver, which is started again when it has died."""

    in_memory = True

    def __init__(
        self,
        address: SaverAddress,
        *,
        rank: int = 0,
        world: int = 1,
        remote: bool = False,
        stage: str = "",
        copies: bool = False,
    ) -> None:
        """Connect. `copies`: other nodes get copies. SnapshotMemoryError when there is no saver and none can be
        started."""
        self._address, self._remote, self._stage = address, remote, stage
        self.place = str(address.folder)
        owner = SlotOwner(address.local_rank, rank, world, address.generation)
        self.states = COUNT_MAX if copies else COUNT
        self.port = 0
        """Where the saver exchanges copies; 0: nowhere."""
        self.copy_error = ""
        """Why one of the last did not arrive, or why the saver cannot exchange copies."""
        self._serve: saver_connection.Packet | None = None
        self._copying: set[int] = set()
        """Ids of copies on their way to another node."""
        self._kept: tuple[State | None, ...] = ()
        """The state that all ranks have sent, and the one that is or was sent last."""
        self._copies = copies
        self._committed: Slot | None = None
        self._newest_step = -1
        """The newest step that was held when this life began."""
        self._reserving = threading.Lock()
        """Held by a thread that takes a piece of memory, and during `close`."""
        self._closing = threading.Event()
        self._making_huge: threading.Thread | None = None
        self._sock: socket.socket | None = None
        self._asked: dict[int, _Asked] = {}
        """Saves without a final answer."""
        self._awaited: set[str] = set()
        """Answers to other requests that are still to come: "forgotten", "idle", "prefetched", "serving"."""
        self._last_id = 0
        self._failures: list[SnapshotError] = []
        self._lost_at_s: float | None = None
        self._news: list[str] = []
        """Results of a previous worker's saves."""
        self.prefetched: saver_connection.Packet = {}
        """What was fetched for this rank before; see copy_service.py."""
        self._connect()
        if (address.folder / memory_folder.PREFETCH).exists():
            with contextlib.suppress(SnapshotError):  # it is fetched later then
                self._ask({"do": "prefetched"}, "prefetched")
                self._wait_for("prefetched")
        self.slots = Slots(address.folder, owner, self.states)

    # --- memory -------------------------------------------------------------------------------------------------------

    def regroup(self, rank: int, world: int, generation: int) -> None:
        self.slots.regroup(rank, world, generation)
        self._address = replace(self._address, generation=generation)
        if self._sock is not None:
            self._say_hello(self._sock)

    def reserving(self, size_bytes: int) -> Generator[int, None, None]:
        with contextlib.closing(self.slots.reserving(size_bytes)) as pieces:
            while True:
                with self._reserving:
                    ready = None if self._closing.is_set() else next(pieces, None)
                if ready is None:
                    return
                yield ready

    def stage(self, step: int, size_bytes: int, *, wait: bool = False) -> memoryview | None:
        memory = self.slots.stage(step, size_bytes)
        if memory is None and wait and self._kept and not self.copying:  # the saver still has one of a previous worker
            self.slots.hold(self._kept[0])
            self._kept, self.copy_error = (), "its memory slot was needed for a newer state"
            memory = self.slots.stage(step, size_bytes)
        deadline = time.monotonic() + PATIENCE_S
        while memory is None and wait:
            if not self.wait_for_slot(max(deadline - time.monotonic(), 0.0)):
                self.check()
                raise SnapshotIncompleteError(f"step {step} was not saved: earlier saves are still being written")
            memory = self.slots.stage(step, size_bytes)
        return memory

    def commit(self, request: SaveRequest | None) -> None:
        """See Tier. None: it is not written if this process dies."""
        self._committed = self.slots.commit(request)
        if self._making_huge is None and self.slots.has_room:
            # By a thread of ordinary priority, which a low-priority thread could not start: a thread that touches a
            # page waits for it.
            work, given = self.slots.make_huge, (self._closing,)
            self._making_huge = threading.Thread(target=work, args=given, name="holdfast-huge", daemon=True)
            self._making_huge.start()

    def held(self, folder: str) -> list[Slot]:
        committed = (slot for _, slot in all_slots(self._address.folder, beside=self._copies))
        found = [slot for slot in committed if slot.request is not None and slot.request.folder == folder]
        self._newest_step = max((slot.step for slot in found), default=-1)
        return found

    def forget(self, above_step: int) -> None:
        if self._newest_step > above_step:  # a read costs a few milliseconds
            self.slots.forget(above_step=above_step)
            if self._copies:
                self._ask({"do": "forget", "above_step": above_step}, "forgotten")
                self._wait_for("forgotten")  # before a copy of such a step comes

    def drop(self, above_step: int) -> None:
        self._newest_step = above_step + 1
        self.forget(above_step)

    # --- copies on other nodes ----------------------------------------------------------------------------------------

    def serve(self, word: str, host: str, bytes_s: float, folder: str, place: tuple[int, int]) -> None:
        """Have the saver exchange copies with others of this life (`key_of_life`), at this address; see `await_served`.
        A rescue of states in this folder, which waits for others, ends: this life has memory. `place`: rank, world."""
        about = {"word": word, "host": host, "bytes_s": float(bytes_s), "folder": folder}
        self._serve = {"do": "serve", **about, "rank": place[0], "world": place[1]}
        self.await_served()
        self.port, self.copy_error = 0, ""
        with contextlib.suppress(SnapshotError):
            self._ask(self._serve, "serving")

    def await_served(self) -> None:
        """Until the saver has answered the last `serve`: `port` or `copy_error` is known then."""
        self._wait_for("serving")  # it may just have been started
        self._awaited.discard("serving")

    @property
    def copying(self) -> bool:
        """Whether a copy is on its way to another node."""
        return bool(self._copying)

    def copy(self, to: Address, keep: State | None, slot: Slot | None = None) -> None:
        """Send a slot of `held`, or the committed state, to the saver there, which keeps the state `keep` as well. See
        `copying`."""
        slot = slot or self._committed
        assert slot is not None
        assert slot.path is not None
        request = slot.request
        assert request is not None
        try:
            lent = lend(slot)
        except ValueError as error:
            self.copy_error = str(error)
            return
        try:
            packet = {"do": "copy", "id": self._next_id(), "sequence": slot.sequence, "to": list(to), "keep": keep}
            beside = slot.path.parent.name if is_copy(slot.path) else ""
            self._send({**packet, "request": request.to_json(), "beside": beside}, lent)
            self.copy_error = self.copy_error if self.copying else ""
            self._copying.add(self._last_id)
            # Until all ranks are known to have sent it, and then in place of the other.
            self.keep(keep, request.identity)
        except (SnapshotError, ValueError) as error:
            self.copy_error = str(error)
        finally:
            os.close(lent)

    def keep(self, *states: State | None) -> None:
        """Stage into none of these."""
        self._kept = states
        self.slots.hold(*states)

    def tell_agent(self, packet: saver_connection.Packet) -> None:
        with contextlib.suppress(SnapshotError):
            self._send({"do": "tell", "packet": packet})

    def drop_fetched(self) -> None:
        if self._copies:
            with contextlib.suppress(OSError):
                memory_folder.remove_folder(self._address.folder / memory_folder.FETCHED)  # mappings stay valid

    # --- saves --------------------------------------------------------------------------------------------------------

    @property
    def writing(self) -> list[int]:
        """Steps that were handed over and whose slot is not free yet."""
        return sorted(asked.step for asked in self._asked.values() if not asked.written)

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def persist(self, request: SaveRequest, *, patience_s: float = PATIENCE_S) -> None:
        """Have the committed slot written; after the return, the end of this process does not prevent it.

        The slot is not staged into until it is written. The request's folder is made absolute. On rank 0 the saver
        commits when the other ranks' files exist, within `patience_s`. Never waits. Raises SnapshotWriteError when no
        saver accepts it, ValueError when the slot was staged into since, or the request exceeds
        seqpacket.MESSAGE_BYTES_MAX."""
        assert self._committed is not None
        slot = self._committed
        lent = lend(slot)
        try:
            packet = {
                "do": "persist",
                "id": self._next_id(),
                "sequence": slot.sequence,
                "request": {**request.to_json(), "folder": str(absolute(request.folder))},
                "patience_s": float(patience_s),
                "stage": self._stage,
            }
            self._receive()
            self._send(packet, lent)
            self._asked[self._last_id] = _Asked(slot.step)
        finally:
            os.close(lent)

    def check(self) -> None:
        """Raise the errors since the last call, one at a time: SnapshotError. Never waits."""
        self._receive()
        if self._sock is None and self._lost_at_s is not None and time.monotonic() > self._lost_at_s + RECONNECT_S:
            self._lost_at_s = time.monotonic()
            with contextlib.suppress(SnapshotError):  # it may succeed later; a save that needs it raises the error
                self._connect()
        if self._failures:
            raise self._failures.pop(0)
        while self._news:
            warnings.warn(f"holdfast: {self._news.pop(0)}", RuntimeWarning, stacklevel=3)

    def wait(self, patience_s: float = PATIENCE_S) -> None:
        idle = self._receive_until(lambda: not self._asked, patience_s)
        self.check()
        if not idle:
            raise SnapshotIncompleteError(f"after {patience_s:g} s the saver is still writing")

    def await_previous_worker(self, patience_s: float = PATIENCE_S) -> None:
        self._previous_worker_written(patience_s)
        self.check()

    def wait_for_slot(self, patience_s: float) -> bool:
        """After `Slots.stage` gave none: wait until the saver has released a slot. False: it has not."""
        self._receive()
        before = len(self.writing)
        if not before:
            return self._previous_worker_written(patience_s)
        return self._receive_until(lambda: len(self.writing) < before, patience_s)

    def _previous_worker_written(self, patience_s: float) -> bool:
        """A save that is written and waits for other ranks may continue to wait: they may never come."""
        self._receive()
        if self._sock is not None and "idle" not in self._awaited:
            with contextlib.suppress(SnapshotError):
                self._ask({"do": "wait", "id": self._next_id()}, "idle")
        return self._wait_for("idle", patience_s)

    def read_back(self, snapshot: Snapshot) -> None:
        """By the saver: hashing threads in this process would delay training by the interpreter's lock and its memory
        map."""
        if isinstance(snapshot.path, RemotePath):
            return folder.confirm(snapshot)
        patience_s = PATIENCE_S + snapshot.manifest.size_bytes / SLOWEST_BYTES_S
        try:
            saver_connection.read_back(self._address.folder, snapshot.path, patience_s)
        except SaverLostError:
            folder.verify(snapshot, lambda: None)
        return None

    def close(self, *, ahead: bool = False) -> None:
        """Release slots, saver and folder: saves in flight are finished, and nothing is rescued. Waits for no save.

        `ahead`: without "bye", so that the saver writes the newest step in memory, as after a crash."""
        self._closing.set()
        if self._sock is not None and not ahead:
            with contextlib.suppress(OSError):
                seqpacket.send(self._sock, {"do": "bye"})
        self._drop()
        if self._making_huge is not None:
            self._making_huge.join()
        with self._reserving:
            self.slots.close()
        self._address.close()

    # --- the connection -----------------------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _send(self, packet: saver_connection.Packet, *fds: int) -> None:
        """Send to a living saver: a dead one is replaced once."""
        for last in (False, True):
            if self._sock is None:
                self._connect()
            assert self._sock is not None
            try:
                seqpacket.send(self._sock, packet, fds)
            except BlockingIOError as error:
                raise SnapshotWriteError("the saver does not read: is it stopped?") from error
            except OSError as error:
                self._lost()
                if last:
                    raise SaverLostError(f"the saver cannot be reached: {error.strerror}") from error
            else:
                return

    def _ask(self, packet: saver_connection.Packet, answer: str) -> None:
        """Send a request; see `_wait_for`."""
        self._awaited.add(answer)
        self._send(packet)
        self._awaited.add(answer)  # again: a saver that was lost meanwhile was replaced, and got the request as well

    def _wait_for(self, answer: str, patience_s: float = PATIENCE_S) -> bool:
        """Wait for the answer to what was asked last. False: the saver is gone, or it took too long."""
        return answer not in self._awaited or self._receive_until(lambda: answer not in self._awaited, patience_s)

    def _receive(self) -> None:
        """Handle all received packets."""
        while self._sock is not None:
            try:
                got = seqpacket.receive(self._sock)
            except BlockingIOError:
                return
            if got is None:
                self._lost()
                return
            self._take(got[0])

    def _receive_until(self, enough: Callable[[], bool], patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while True:
            self._receive()
            if enough():
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._sock is None:
                return False
            seqpacket.is_readable(self._sock, left_s)

    def _take(self, packet: saver_connection.Packet) -> None:
        self._awaited.discard(str(packet.get("is")))
        match packet.get("is"), packet.get("id", 0):
            case "prefetched", _:
                self.prefetched = packet.get("fetched", {})
            case "written", number:
                if number in self._asked:
                    self._asked[number].written = True
            case "saved", number:
                self._asked.pop(number, None)
            case "failed", number:
                if self._asked.pop(number, None) is not None:
                    self._failures.append(disk.error_of(str(packet.get("code")), str(packet.get("text"))))
            case "serving", _:
                self.port, self.copy_error = int(packet.get("port", 0)), str(packet.get("text", ""))
            case "copied", number:
                if number in self._copying:
                    self._copying.discard(number)
                    self.copy_error = str(packet.get("text")) or self.copy_error
            case "news", _:
                self._news.append(str(packet.get("text")))

    def _lost(self) -> None:
        """The saver has died, and its saves with it."""
        self._drop()
        self._awaited.discard("idle")  # what it wrote for a previous worker has ended with it
        if self.copying:
            self.copy_error = "the process that sent it was killed"
            self._copying.clear()
        self.port = 0
        self._lost_at_s = time.monotonic() - RECONNECT_S
        asked, self._asked = self._asked, {}
        for each in asked.values():
            why = f"step {each.step} was not saved: the process that wrote it was killed."
            self._failures.append(SaverLostError(why))

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connect(self) -> None:
        try:
            self._sock = saver_connection.connect(self._address.folder)
        except OSError as error:
            if not self._address.anchor:
                raise SnapshotMemoryError(f"the agent's saver cannot be reached: {error.strerror}") from error
            try:
                self._sock = saver_connection.start_saver(self._address)
            except (OSError, subprocess.SubprocessError) as failed:
                raise SnapshotMemoryError(f"no saver can be started: {failed}") from failed
        self._say_hello(self._sock)

    def _say_hello(self, sock: socket.socket) -> None:
        hello: saver_connection.Packet = {"do": "hello", "local_rank": self._address.local_rank}
        hello["generation"] = self._address.generation
        if self._remote:
            hello |= {"packages": sys.path, "environ": dict(os.environ)}
        with contextlib.suppress(OSError):  # then the next packet fails as well, and reports it
            seqpacket.send(sock, hello)
            if self._serve is not None and not self.port:
                seqpacket.send(sock, self._serve)
