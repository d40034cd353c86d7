"""The worker's side of saving: it stages a rank's image in memory, and has it written to the disk.

    tier = open_tier(rank=…, world=…)                    # in_process.py
    memory = tier.stage(step, size_bytes, wait=False)    # None: both slots are still being written
    ...copy into memory...
    tier.commit(request)                                 # if this process dies, the saver writes it
    tier.persist(request)                                # returns at once
    tier.check()                                         # in every step: raises errors of earlier saves

There are two tiers. `SaverClient` stages into a slot in /dev/shm, which the saver writes: the copy outlives this
process, and so does a save. Where /dev/shm has no room, in_process.py stages into memory of this process.

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
    NotFiniteError,
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
from holdfast.train.snapshots.refusals import Refusals
from holdfast.train.snapshots.remote import RemotePath, absolute
from holdfast.train.snapshots.saver_connection import SaverAddress
from holdfast.train.snapshots.slots import COUNT, COUNT_MAX, Slot, SlotOwner, Slots, lend

RECONNECT_S = 5.0
"""Time between two attempts to start a saver while nothing is to be saved."""
STAGE_AGAIN_S = 0.01
"""Pause before a slot is tried again that is not being saved, and is in use all the same (s)."""
SLOWEST_BYTES_S = 20e6
"""A disk that reads more slowly than this counts as broken (bytes per second)."""


class Tier(Protocol):
    """The memory in which states are staged; the module's docstring shows the order of the calls. Every method may
    raise SnapshotError."""

    in_memory: bool
    """Whether states outlive this process."""
    place: str
    """The folder in which the next worker on this node finds our slots; agents that share a /dev/shm have one each.
    Empty: no state outlives this process."""
    states: int
    """The number of states for which it has room."""
    not_finite_step: int
    """The step of the last save that was refused because a value is not finite; -1: none was."""

    def regroup(self, rank: int, world: int, generation: int) -> None:
        """Go on as this rank of another generation: states that are staged from now on belong to it."""

    def reserving(self, size_bytes: int) -> Generator[int, None, None]:
        """Take memory piece by piece, so that no `stage` has to; any threads may do it in turn. Yields the number of
        states that have room; the first of them is the one that is staged next. For another size, close the generator
        and call this again."""

    def stage(self, step: int, size_bytes: int, *, wait: bool) -> memoryview | None:
        """Memory for an image; None: all of it is being written, and `wait` is false."""

    def commit(self, request: SaveRequest) -> None:
        """Declare the staged image complete. If this process dies before the image is on the disk, it is written as
        requested."""

    def persist(self, request: SaveRequest) -> None:
        """Write the image that was committed last. Returns at once."""

    @property
    def busy(self) -> bool:
        """Whether an image is being written."""

    def check(self) -> None:
        """Raise errors of the background work."""

    def wait(self) -> None:
        """Wait until every save that was handed over is on the disk. Raises its errors."""

    def await_previous_worker(self) -> None:
        """Wait until this node writes nothing of a previous worker any more. Saves of it that wait for other ranks may
        go on waiting."""

    def held(self, folder: str) -> list[Slot]:
        """The slots of all local ranks with states of this snapshot folder, each with its request; with `copies` those
        of other nodes' ranks after them."""

    def forget(self, above_step: int) -> None:
        """Drop the states of later steps that were in memory when this life began: training continues from an earlier
        one."""

    def drop(self, above_step: int) -> None:
        """Drop all states of later steps, since they are wrong: they must not be written or resumed from."""

    def read_back(self, snapshot: Snapshot) -> None:
        """Read a committed snapshot and check every byte. Any thread may call it."""

    def close(self, *, ahead: bool) -> None:
        """Release everything. `ahead`: memory is newer than the disk, and the saver shall write the newest state after
        the end of this process."""


@dataclass
class _Asked:
    """A save that was handed over to the saver."""

    step: int
    request: SaveRequest
    written: bool = False
    """Whether this rank's file is durable: its slot is free then."""


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
        """The port at which the saver exchanges copies; 0: it does not."""
        self.copy_error = ""
        """The reason why one of the last copies did not arrive, or why the saver exchanges none; empty: there is
        none."""
        self._serve: saver_connection.Packet | None = None
        """The last "serve", for a saver that is started later."""
        self._copying: set[int] = set()
        """Ids of copies on their way to another node."""
        self._kept: tuple[State | None, ...] = ()
        """The states that must not be staged into: the one that all ranks have sent, and the one that is or was sent
        last."""
        self._copies = copies
        self._committed: Slot | None = None
        """The slot that was committed last."""
        self._newest_step = -1
        """The newest step that was in memory when this life began; -1: none."""
        self._reserving = threading.Lock()
        """Held by the thread that takes a piece of memory, and during `close`."""
        self._closing = threading.Event()
        self._making_huge: threading.Thread | None = None
        self._sock: socket.socket | None = None
        self._asked: dict[int, _Asked] = {}
        """Saves without a final answer."""
        self._awaited: set[str] = set()
        """Answers to other requests that are still to come: "forgotten", "idle", "prefetched", "serving"."""
        self._last_id = 0
        self._failures: list[SnapshotError] = []
        self._refusals = Refusals()
        self._lost_at_s: float | None = None
        """The time at which the saver was lost, or its restart was tried last (monotonic s)."""
        self._news: list[str] = []
        """What is to be said of saves: results of a previous worker's, warnings."""
        self.not_finite_step = -1
        self.prefetched: saver_connection.Packet = {}
        """A description of the state that was fetched for this rank before it started (copy_service.py); empty: none
        was."""

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
        # The saver may still write a slot of a previous worker. Then the third slot is needed: only the state that all
        # ranks have sent stays.
        if memory is None and wait and self._kept and not self.copying:
            self.slots.hold(self._kept[0])
            self._kept, self.copy_error = (), "its memory slot was needed for a newer state"
            memory = self.slots.stage(step, size_bytes)
        deadline = time.monotonic() + PATIENCE_S
        while memory is None and wait:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self.wait_for_slot(left_s):
                self.check()
                raise SnapshotIncompleteError(f"step {step} was not saved: earlier saves are still being written")
            memory = self.slots.stage(step, size_bytes)
            if memory is None:
                time.sleep(STAGE_AGAIN_S)  # no save has it: another node reads it, and nobody reports the end of that
        return memory

    def commit(self, request: SaveRequest | None) -> None:
        """Declare the staged image complete. `request`: None: it is not written if this process dies."""
        self._committed = self.slots.commit(request)
        if self._making_huge is None and self.slots.has_room:
            # The thread needs ordinary priority: others that touch a page wait for it. So this thread starts it, and
            # not the one that reserves, from which it would inherit a low priority.
            work, given = self.slots.make_huge, (self._closing,)
            self._making_huge = threading.Thread(target=work, args=given, name="holdfast-huge", daemon=True)
            self._making_huge.start()

    def held(self, folder: str) -> list[Slot]:
        committed = (slot for _, slot in all_slots(self._address.folder, beside=self._copies))
        found = [slot for slot in committed if slot.request is not None and slot.request.folder == folder]
        self._newest_step = max((slot.step for slot in found), default=-1)
        return found

    def forget(self, above_step: int) -> None:
        self._forget(above_step)

    def drop(self, above_step: int) -> None:
        self._newest_step = above_step + 1
        # A state that was sent to another node is wrong there and here: it must not be the one that is left.
        self._forget(above_step, locked=True)

    def _forget(self, above_step: int, *, locked: bool = False) -> None:
        if self._newest_step > above_step:  # a read costs a few milliseconds
            self.slots.forget(above_step=above_step, locked=locked)
            if self._copies:
                self._ask({"do": "forget", "above_step": above_step}, "forgotten")
                self._wait_for("forgotten")  # a copy of such a step that comes later is new, and must stay

    # --- copies on other nodes ----------------------------------------------------------------------------------------

    def serve(self, word: str, host: str, bytes_s: float, folder: str, rank_of_world: tuple[int, int]) -> None:
        """Let the saver exchange copies with others of this life (`key_of_life`) at this address; see `await_served`.
        A rescue of this folder's states that waits for other nodes ends: this life has its states in memory.
        `rank_of_world`: rank, world."""
        about = {"word": word, "host": host, "bytes_s": float(bytes_s), "folder": folder}
        self._serve = {"do": "serve", **about, "rank": rank_of_world[0], "world": rank_of_world[1]}
        self.await_served()
        self.port, self.copy_error = 0, ""
        with contextlib.suppress(SnapshotError):
            self._ask(self._serve, "serving")

    def await_served(self) -> None:
        """Wait until the saver has answered the last `serve`: `port` or `copy_error` is known then."""
        self._wait_for("serving")  # a saver that is just being started takes a moment
        self._awaited.discard("serving")

    @property
    def copying(self) -> bool:
        """Whether a copy is on its way to another node."""
        return bool(self._copying)

    def copy(self, to: Address, keep: State | None, slot: Slot | None = None) -> None:
        """Send a slot to another node's saver, which keeps the state `keep` as well. It does not wait: see `copying`,
        `copy_error`. `slot`: one of `held`; None: the state that was committed last."""
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
            # Both stay in memory until all ranks are known to have sent the new one.
            self.keep(keep, request.identity)
        except (SnapshotError, ValueError) as error:
            self.copy_error = str(error)
        finally:
            os.close(lent)

    def keep(self, *states: State | None) -> None:
        """Do not stage into the slots of these states."""
        self._kept = states
        self.slots.hold(*states)

    def tell_agent(self, packet: saver_connection.Packet) -> None:
        """Let the saver pass this packet on to the agent. Errors are ignored."""
        with contextlib.suppress(SnapshotError):
            self._send({"do": "tell", "packet": packet})

    def drop_fetched(self) -> None:
        """Remove the states that were fetched for this resume: training has its own memory now."""
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
        """Hand the committed slot over to the saver, which writes it; after the return, the end of this process does
        not prevent that.

        The slot is not staged into until it is written. The request's folder is made absolute. On rank 0 the saver
        commits when the other ranks' files exist, within `patience_s`. This never waits. Raises SnapshotWriteError when
        no saver accepts it, ValueError when the slot was staged into since, or the request exceeds
        seqpacket.MESSAGE_BYTES_MAX."""
        assert self._committed is not None
        slot = self._committed
        request = replace(request, folder=str(absolute(request.folder)))
        lent = lend(slot)
        try:
            packet = {
                "do": "persist",
                "id": self._next_id(),
                "sequence": slot.sequence,
                "request": request.to_json(),
                "patience_s": float(patience_s),
                "stage": self._stage,
            }
            self._receive()
            self._send(packet, lent)
            self._asked[self._last_id] = _Asked(slot.step, request)
        finally:
            os.close(lent)

    def check(self) -> None:
        """Raise the errors since the last call, one at a time: SnapshotError. This never waits."""
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
        """Wait until the saver has released a slot, after `Slots.stage` had none. Returns whether it has."""
        self._receive()
        before = len(self.writing)
        if not before:
            return self._previous_worker_written(patience_s)
        return self._receive_until(lambda: len(self.writing) < before, patience_s)

    def _previous_worker_written(self, patience_s: float) -> bool:
        """Wait until nothing of a previous worker is being written. Returns whether that is so. A save that is written
        and waits for other ranks is not waited for: they may never come."""
        self._receive()
        if self._sock is not None and "idle" not in self._awaited:
            with contextlib.suppress(SnapshotError):
                self._ask({"do": "wait", "id": self._next_id()}, "idle")
        return self._wait_for("idle", patience_s)

    def read_back(self, snapshot: Snapshot) -> None:
        """Let the saver read it: hashing threads in this process would delay training, by the interpreter's lock and
        by the lock of its memory map. Without a saver this thread reads it alone."""
        if isinstance(snapshot.path, RemotePath):
            return folder.confirm(snapshot)
        patience_s = PATIENCE_S + snapshot.manifest.size_bytes / SLOWEST_BYTES_S
        try:
            saver_connection.read_back(self._address.folder, snapshot.path, patience_s)
        except SaverLostError:
            folder.verify(snapshot, lambda: None)
        return None

    def close(self, *, ahead: bool = False) -> None:
        """Release slots, saver and folder. Saves in flight are finished, and nothing is rescued. It waits for no save.

        `ahead`: no "bye" is sent, so that the saver writes the newest step in memory, as after a crash."""
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
        """Send a packet with descriptors. A saver that is dead is replaced once. Raises SnapshotError."""
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
        """Send a request that has an answer of this kind; see `_wait_for`."""
        self._awaited.add(answer)
        self._send(packet)
        # Again: if the saver was lost meanwhile, `_lost` has cleared it, and the new saver got the request.
        self._awaited.add(answer)

    def _wait_for(self, answer: str, patience_s: float = PATIENCE_S) -> bool:
        """Wait for the answer to the last request of this kind. Returns False if the saver is gone or took too long."""
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
        """Handle packets until this is true. Returns False if the saver is gone, or took too long."""
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
        """Handle one packet of the saver; saver_connection.py lists them."""
        self._awaited.discard(str(packet.get("is")))
        match packet.get("is"), packet.get("id", 0):
            case "prefetched", _:
                self.prefetched = packet.get("fetched", {})
            case "written", number:
                if number in self._asked:
                    self._asked[number].written = True
            case "saved", number:
                self._asked.pop(number, None)
                if text := str(packet.get("warning", "")):
                    self._news.append(text)
            case "failed", number:
                code, text = str(packet.get("code")), str(packet.get("text"))
                if (asked := self._asked.pop(number, None)) is None:
                    pass
                elif code == SnapshotIncompleteError.code and packet.get("made_good") is True:
                    self._news.append(text)
                else:
                    if code == NotFiniteError.code:
                        self.not_finite_step = asked.step
                    self._failures.append(disk.error_of(code, text))
            case "serving", _:
                self.port, self.copy_error = int(packet.get("port", 0)), str(packet.get("text", ""))
            case "copied", number:
                if number in self._copying:
                    self._copying.discard(number)
                    self.copy_error = str(packet.get("text")) or self.copy_error
            case "news", _:
                self._news.append(str(packet.get("text")))

    def _lost(self) -> None:
        """Handle the death of the saver: its saves and copies have failed."""
        self._drop()
        self._awaited.discard("idle")  # the saves of a previous worker have ended with the saver
        if self.copying:
            self.copy_error = "the process that sent it was killed"
            self._copying.clear()
        self.port = 0
        self._lost_at_s = time.monotonic() - RECONNECT_S
        asked, self._asked = self._asked, {}
        for each in asked.values():
            why = f"step {each.step} was not saved: the process that wrote it was killed."
            self._failures.append(SaverLostError(why))
            self._refusals.insist(each.request, why)  # otherwise rank 0 would wait for this rank's part

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connect(self) -> None:
        """Connect to the saver; where no agent starts it, start it. Raises SnapshotMemoryError."""
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
        with contextlib.suppress(OSError):  # if this fails, the next packet fails as well, and that is reported
            seqpacket.send(sock, hello)
            if self._serve is not None and not self.port:
                seqpacket.send(sock, self._serve)
