"""Copies of memory slots on other nodes: how savers exchange them, and how a node fetches what it lacks.

What a saver receives lies in slots below the shared-memory folder: `copies/RANK.0|1`. So a copy that was not received
whole is never valid, and the one named by `keep`, which all ranks have, stays until all have a newer one. A newcomer
fetches its rank's state into its own slot; what a job of another size needs beside that lies in `fetched/RANK.0` until
training has its own pages. When memory is short, a copy is refused, and nothing else fails.

A new life of the job brings a new key. It ends all connections of the life before except those that fetch: a newcomer
may still need what it fetches.

**Prefetch.** A node without states fetches them while its workers start, so that they resume at once. The coordinator
reports to the agent which savers have the states of its ranks (HeldStates in extensions/saver/messages.py). The agent
makes the folder `PREFETCH` below its shared-memory folder, starts its workers, and orders its saver to fetch the newest
state of each rank. While that folder exists, a worker that opens its slots asks the saver, and waits: to fetch the rest
of a state takes less time than to begin again. A state that arrived whole is then that worker's own slot. Otherwise the
worker fetches the state on which the ranks agree; therefore an error of a prefetch is not reported.

Standard library only."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.memory_folder import COPIES, FETCHED, PREFETCH, local_ranks, remove_folder, slot_path
from holdfast.protocol.errors import CopyError, SnapshotMemoryError
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.copy_connection import (
    SAMPLE,
    STALL_S,
    Address,
    CopyConnection,
    CopyPaths,
    Digests,
    RateLimit,
    digest_of_life,
    errors,
)
from holdfast.train.snapshots.mapping import Mappings
from holdfast.train.snapshots.saver_connection import Packet, Tell, field_of, key_of_life
from holdfast.train.snapshots.slots import (
    COUNT_MAX,
    Slot,
    SlotOwner,
    Slots,
    committed_slots,
    lend,
    read_descriptor,
    release,
)

BACKLOG = CONNECTIONS_MAX = 256
STRANGERS_MAX = 256
"""Limit of the connections that have not proved yet that they are of this job. They do not count against
CONNECTIONS_MAX: strangers cannot keep out those that have."""
NETWORK_BITS_IPV6 = 64
"""One machine may have all addresses of such a network."""
SHUT_DOWN = (errno.EINVAL, errno.EBADF)
"""Errors of accept for a socket that this process has shut down."""
ACCEPT_AGAIN_S = 0.1
"""Pause after a failed accept (s)."""
GET = "get"
State = tuple[int, int, int]
"""The identity of a state: `SaveRequest.identity`."""


class CopyService:
    """The saver's part: receives copies, gives states to ranks that fetch, and sends copies. Methods may be called by
    any thread."""

    def __init__(self, folder: Path, mappings: Mappings) -> None:
        """`folder`: the shared-memory folder. `mappings`: the mapped files of the node's own slots."""
        self._folder, self._mappings = folder, mappings
        self._lock = threading.Lock()
        """Protects the key, the connections and `_received`."""
        self._key = b""
        """The key of the newest life of the job; empty before the first `serve`."""
        self._digest = digest_of_life(folder)
        self._paths, self._host, self._rate = CopyPaths(), "", RateLimit(0)
        self._listening: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._open: dict[socket.socket, str] = {}
        """Sockets in use, and the request of each; empty: it has made none yet."""
        self._strangers: dict[socket.socket, str] = {}
        """Sockets whose caller has not given its proof yet, the oldest first, and the caller's origin (`_origin`)."""
        self._received: dict[int, tuple[Slots, threading.Lock]] = {}
        """The slots of received copies by rank, each with the lock of the thread that uses them."""
        self._digests: dict[tuple[Path, int], dict[tuple[int, float], Digests]] = {}
        """Digests of slots that were sent or received, by folder and local rank, then by sequence number. A caller that
        fetches such a slot does not wait for them, and notices what has changed in this memory since."""

    def serve(self, key: bytes, host: str, bytes_s: float) -> int:
        """Accept connections with this key, and with no other from now on, at this address of the node. Returns the
        port. OSError.

        `host`: one address, or several separated by blanks; then it listens at all of the node. `bytes_s`: limit of
        the bytes that are sent per second; 0: no limit."""
        with self._lock:
            if key != self._key:
                self._key, self._rate = key, RateLimit(bytes_s)
                # A newcomer that fetches goes on: it needs a state of the life before.
                for each in (sock for sock, asked in self._open.items() if asked != GET):
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

            if self._listening is None or self._host != host:
                if self._listening is not None:
                    self._listening.shutdown(socket.SHUT_RDWR)
                    self._listening = None
                self._listening, self._accepting = self._listen(host)
                self._host = host
            port: int = self._listening.getsockname()[1]
            return port

    def _listen(self, host: str) -> tuple[socket.socket, threading.Thread]:
        """A socket at this address, and the thread that accepts its connections. OSError."""
        family, at = socket.AF_INET6 if ":" in host else socket.AF_INET, "" if " " in host else host
        dual = not at and family == socket.AF_INET6
        listening = socket.create_server((at, 0), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
        accepting = threading.Thread(target=self._accept_all, args=(listening,), daemon=True)
        try:
            accepting.start()
        except RuntimeError:
            listening.close()
            raise OSError(errno.EAGAIN, "the machine allows no more threads now") from None
        return listening, accepting

    def served(self, packet: Packet) -> Packet:
        """The answer to a worker's "serve" (saver_connection.py). Raises ValueError for a wrong packet."""
        word, host, bytes_s = (field_of(packet, *each) for each in (("word", str), ("host", str), ("bytes_s", float)))
        try:
            port, why = self.serve(key_of_life(self._folder, word), host, bytes_s), ""
        except OSError as error:
            port, why = 0, f"{host}: {error.strerror}"
        return {"is": "serving", "port": port, "text": why}

    def close(self) -> None:
        """End all connections, and release the memory; the copies stay."""
        with self._lock:
            accepting, listening = self._accepting, self._listening
            for each in (*self._open, *([listening] if listening is not None else [])):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            received, self._received = self._received, {}
        if accepting is not None:
            accepting.join()
        for slots, in_use in received.values():
            with in_use:
                slots.close()

    def _accept_all(self, listening: socket.socket) -> None:
        with listening:
            while True:
                try:
                    sock, address = listening.accept()
                except OSError as error:
                    if error.errno in SHUT_DOWN:
                        return
                    # No descriptor may be left: ending a stranger's connection frees one.
                    with self._lock:
                        self._drop_stranger()
                    time.sleep(ACCEPT_AGAIN_S)
                    continue
                self._admit(sock, _origin(address[0]))

    def _admit(self, sock: socket.socket, origin: str) -> None:
        """Answer this caller in a thread of its own."""
        with self._lock:
            if len(self._strangers) >= STRANGERS_MAX:
                self._drop_stranger()
            self._strangers[sock] = origin
        try:
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()
        except RuntimeError:  # the machine allows no more threads now
            self._leave_strangers(sock)
            sock.close()

    def _drop_stranger(self) -> None:
        """End the oldest connection without a proof, among those of the origin from which most of them come. The caller
        holds the lock."""
        count = Counter(self._strangers.values())
        sock = max(self._strangers, key=lambda each: count[self._strangers[each]], default=None)  # the first of equals
        if sock is not None:
            del self._strangers[sock]
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _leave_strangers(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(sock, None)

    def _answer(self, sock: socket.socket) -> None:
        """Serve one connection from its proof to its end, in its own thread."""
        with contextlib.suppress(CopyError), sock, self._counted(sock) as key:
            try:
                connection = CopyConnection.answer(sock, key, self._digest)
            finally:
                self._leave_strangers(sock)

            asked = connection.hear()
            with self._lock:
                if sum(map(bool, self._open.values())) >= CONNECTIONS_MAX:
                    return
                self._open[sock] = str(asked.get("do"))
            try:
                if asked.get("do") == "put":
                    self._put(connection, asked)
                elif asked.get("do") == "measure":
                    connection.say(**{"is": "found"})
                    sock.sendall(SAMPLE)
                else:
                    self._get(connection, asked)
            except (OSError, ValueError, SnapshotMemoryError) as error:
                connection.say(**{"is": "refused", "text": str(error)})

    @contextlib.contextmanager
    def _counted(self, sock: socket.socket) -> Iterator[bytes]:
        """Count the socket as in use during the block. Yields the key with which it was accepted."""
        with self._lock:
            self._open[sock] = ""
            key = self._key
        try:
            yield key
        finally:
            with self._lock:
                del self._open[sock]

    # --- receiving and giving -----------------------------------------------------------------------------------------

    def _put(self, connection: CopyConnection, asked: Packet) -> None:
        """Receive a copy. Raises CopyError when the connection fails; ValueError or SnapshotMemoryError: it is
        refused."""
        request = SaveRequest.from_json(field_of(asked, "request", dict))
        size_bytes, generation = _size(asked), field_of(asked, "generation", int)
        keep = None if asked.get("keep") is None else _state(asked["keep"])
        if keep is not None:
            self._drop_others((keep[1], request.attempt))

        with self._slots_of(request.rank) as slots, contextlib.ExitStack() as held:
            slots.regroup(request.rank, request.world, generation)
            # The state that all ranks have must not be overwritten by this one, which may never be complete.
            for slot in slots.committed():
                if slot.request is not None and slot.request.identity == keep:
                    held.callback(release, lend(slot))

            memory = slots.stage(request.step, size_bytes)
            if memory is None:
                raise ValueError("the copies of this rank are being read")
            try:
                connection.say(**{"is": "ready"})
                digests = connection.receive_state(size_bytes, memory)
                slot = slots.commit(request)
            finally:
                slots.abandon()
            self._remember(self._folder / COPIES, slot, digests)
            connection.say(**{"is": "kept"})

    @contextlib.contextmanager
    def _slots_of(self, rank: int, wait_s: float | None = None) -> Iterator[Slots]:
        """The slots of this rank's copies, for the block alone. Raises ValueError when another thread uses them for
        longer than `wait_s`; None: STALL_S."""
        with self._lock:
            if rank not in self._received:
                (self._folder / COPIES).mkdir(mode=0o700, exist_ok=True)
                self._received[rank] = Slots(self._folder / COPIES, SlotOwner(rank)), threading.Lock()
            slots, in_use = self._received[rank]
        if not in_use.acquire(timeout=STALL_S if wait_s is None else wait_s):
            raise ValueError("another copy of this rank is being received")
        try:
            yield slots
        finally:
            in_use.release()

    def _get(self, connection: CopyConnection, asked: Packet) -> None:
        """Give the caller a state. Raises CopyError when the connection fails; ValueError: there is none."""
        wanted = None if asked.get("state") is None else _state(asked["state"])
        rank, path = field_of(asked, "rank", int), field_of(asked, "folder", str)
        for folder, slot, request in self._slots_with(path, rank, wanted):
            with contextlib.suppress(ValueError), self._lent(folder, slot) as found:
                about = {"size_bytes": len(found.data), "generation": found.generation, "request": request.to_json()}
                connection.say(**{"is": "found", **about})
                connection.send_state(found.data, self._known(folder, slot))
                return
        raise ValueError(f"{'a state' if wanted is None else f'step {wanted[0]}'} of rank {rank} is not here")

    def _slots_with(self, path: str, rank: int, wanted: State | None) -> Iterable[tuple[Path, Slot, SaveRequest]]:
        """The slots with this rank's state of the snapshot folder `path`. `wanted`: None: all its states, the newest
        first."""
        # Copies come first: most callers are newcomers in the place of a lost node, and this node is its partner.
        beside = [self._folder / COPIES, self._folder / FETCHED]
        theirs = ((folder, slot) for folder in beside for slot in committed_slots(folder, rank))
        found = (
            (folder, slot, slot.request)
            for folder, slot in chain(theirs, all_slots(self._folder, beside=False))
            if slot.request is not None and (slot.request.folder, slot.request.rank) == (path, rank)
        )
        if wanted is None:
            return sorted(found, key=lambda each: each[2].identity, reverse=True)
        return (each for each in found if each[2].identity == wanted)

    @contextlib.contextmanager
    def _lent(self, folder: Path, slot: Slot) -> Iterator[Slot]:
        """The slot with its bytes, protected during the block. Raises ValueError when it was staged into since."""
        fd = lend(slot)
        try:
            with self._lock:
                received = self._received.get(slot.local_rank) if folder.name == COPIES else None
            # A received copy is mapped already: to map it again would cost half as much processor time as to send it.
            found = None if received is None else received[0].mapped(slot.number)
            if found is None:
                # Only mappings of this node's own slots are kept: one of a copy would keep the memory of a removed
                # file.
                found = read_descriptor(fd, mappings=self._mappings if folder == self._folder else None)
            if found is None or found.sequence != slot.sequence:
                raise ValueError("the slot has changed")
            yield found
        finally:
            release(fd)

    def _known(self, folder: Path, slot: Slot) -> Digests:
        """The digests of this slot; empty: it was neither sent nor received."""
        return self._digests.get((folder, slot.local_rank), {}).get((slot.sequence, slot.unix_s), ())

    def _remember(self, folder: Path, slot: Slot, digests: Digests) -> None:
        """Keep the digests of this slot, and of as many older ones as can still be valid."""
        known = self._digests.get((folder, slot.local_rank), {})
        newest = sorted(known)[1 - COUNT_MAX :]
        # With the time: a worker after one whose newest states were dropped gives their sequence numbers again.
        state = slot.sequence, slot.unix_s
        self._digests[folder, slot.local_rank] = {**{each: known[each] for each in newest}, state: digests}

    def forget(self, above_step: int, tell: Tell = lambda _: None) -> None:
        """Drop copies of later steps, since training goes on from this one. It may wait; `tell` gets the answer."""
        for rank in local_ranks(self._folder / COPIES):
            with contextlib.suppress(ValueError), self._slots_of(rank) as slots:
                slots.forget(above_step=above_step)
        tell({"is": "forgotten"})

    def _drop_others(self, lives: Collection[int]) -> None:
        """Give back the memory of copies that are of none of these lives (attempt numbers): they are not needed any
        more."""
        for rank in local_ranks(self._folder / COPIES):
            # A rank whose copy is being received is left out: that copy is of the newest life.
            with contextlib.suppress(ValueError), self._slots_of(rank, wait_s=0) as slots:
                if not any(slot.request and slot.request.attempt in lives for slot in slots.committed()):
                    slots.discard()

    # --- sending ------------------------------------------------------------------------------------------------------

    def sending(self, packet: Packet, fds: list[int]) -> Callable[[Tell], None]:
        """The work that a worker's "copy" asks for, to be run in a thread; its result is the packet for the agent. It
        takes the last descriptor. Raises ValueError for a wrong packet."""
        request = SaveRequest.from_json(field_of(packet, "request", dict))
        sequence, beside, keep = field_of(packet, "sequence", int), field_of(packet, "beside", str), packet.get("keep")
        host, port = field_of(packet, "to", list)
        to: Address = (host, port)
        if beside not in ("", COPIES):
            raise ValueError(f"beside: {beside!r}"[:200])
        fd = fds.pop()

        def work(tell: Tell) -> None:
            began_s, size_bytes, why = time.monotonic(), 0, ""
            address = self._paths.fastest(to, self._key)
            try:
                size_bytes = self.send(fd, sequence, request, address, keep, beside)
            except CopyError as error:
                why = str(error)
                self._paths.forget(to)
            took_s = round(time.monotonic() - began_s, 3)
            kept = -1 if keep is None else keep[0]
            about = {"step": request.step, "rank": request.rank, "to": address[0], "kept": kept}
            tell({"is": "copy", **about, "size_bytes": size_bytes, "took_s": took_s, "why": why})

        return work

    def send(
        self, fd: int, sequence: int, request: SaveRequest, to: Address, keep: State | None, beside: str = ""
    ) -> int:
        """Send a slot to another node's saver. Returns the number of bytes; the descriptor is closed. Raises CopyError.

        `keep`: the state that the other saver must keep beside this one. `beside`: COPIES, when the slot is itself a
        copy."""
        try:
            slot = read_descriptor(fd, mappings=None if beside else self._mappings)
            if slot is None or slot.sequence != sequence:
                raise CopyError("its memory slot has changed")
            with CopyConnection.call(to, self._key, self._digest) as connection, self._counted(connection._sock):
                about = {"size_bytes": len(slot.data), "generation": slot.generation, "keep": keep}
                connection.say(do="put", request=request.to_json(), **about)
                connection.hear("ready")
                known = self._known(self._folder / beside, slot)
                digests = connection.send_state(slot.data, known, self._rate.spend)
                connection.hear("kept")
            self._remember(self._folder / beside, slot, digests)
            return len(slot.data)
        finally:
            release(fd)


def fetch(
    folder: Path,
    offered: Address,
    key: bytes,
    path: str,
    state: State | None,
    rank: int,
    into: Slots | None = None,
    paths: CopyPaths | None = None,
) -> str:
    """Fetch this rank's state from another node. Returns the host that it came from. CopyError, SnapshotMemoryError.

    `folder`: this node's shared-memory folder. `path`: the snapshot folder. `state`: None: the newest one there.
    `into`: the slots that get it; None: those in `FETCHED`."""
    address = (paths or CopyPaths()).fastest(offered, key)
    with CopyConnection.call(address, key, digest_of_life(folder)) as connection, contextlib.ExitStack() as closing:
        connection.say(do=GET, folder=path, state=state, rank=rank)
        found = connection.hear("found")
        with errors(address):
            request = SaveRequest.from_json(field_of(found, "request", dict))
            if (request.rank, request.folder) != (rank, path) or state not in (None, request.identity):
                raise ValueError("it gives another state than it was asked for")
            size_bytes, generation = _size(found), field_of(found, "generation", int)

        if into is None:
            (folder / FETCHED).mkdir(mode=0o700, exist_ok=True)
            slots = Slots(folder / FETCHED, SlotOwner(rank, rank), 1)
            closing.callback(slots.close)
        else:
            slots = into
            closing.callback(slots.regroup, *into.owner[1:])

        # The slot's header says whose state it is: for the commit these slots belong to the rank that saved it.
        slots.regroup(rank, request.world, generation)
        closing.callback(slots.abandon)
        with slots.writing(request.step, size_bytes) as write:
            connection.receive_state(size_bytes, write)
        slots.commit(request)
    return address[0]


# --- ahead of the workers ---------------------------------------------------------------------------------------------


class WantedState(NamedTuple):
    """One rank's state, and the savers that have it."""

    local_rank: int
    rank: int
    sources: Sequence[tuple[str, int, str, str]]
    """Host and port of each saver that has it, the random word of the life that left it (`key_of_life`), and its
    snapshot folder."""


class Prefetch:
    """The prefetches that the saver was ordered to make. For its main thread only."""

    def __init__(self, folder: Path, in_thread: Callable[..., None]) -> None:
        """`in_thread(work, tell=)`: `Saver._in_thread`."""
        self._folder, self._in_thread = folder, in_thread
        self._paths = CopyPaths()
        self._under_way = 0
        """The number of ranks whose state is being fetched."""
        self._fetched: dict[int, Packet] = {}
        """What was fetched, by local rank, until its worker has asked for it."""
        self._waiting: list[tuple[int, Tell]] = []
        """Workers that wait for their answer: local rank, and the function that sends it."""

    def begin(self, packet: Packet) -> None:
        """Carry out the agent's order. Raises ValueError for a wrong packet."""
        for each in field_of(packet, "states", list):
            self._under_way += 1
            self._in_thread(partial(prefetch, self._folder, WantedState(*each), self._paths), tell=self._over)

    def when_over(self, local_rank: int, answer: Tell) -> None:
        """Call `answer` with what was fetched for this local rank, once nothing is under way any more."""
        self._waiting.append((local_rank, answer))
        self._answer()

    def _over(self, fetched: Packet) -> None:
        self._under_way -= 1
        if fetched:
            self._fetched[fetched.pop("local_rank")] = fetched
        self._answer()

    def _answer(self) -> None:
        if self._under_way:
            return
        waiting, self._waiting = self._waiting, []
        for local_rank, answer in waiting:
            answer({"is": "prefetched", "fetched": self._fetched.pop(local_rank, {})})
        if not self._fetched:  # no worker has to ask any more, and they see it by the folder
            with contextlib.suppress(OSError):
                remove_folder(self._folder / PREFETCH)


def prefetch(folder: Path, wanted: WantedState, paths: CopyPaths, tell: Tell) -> None:
    """Fetch the newest state of this rank into its worker's slot, which no worker uses yet. `tell` gets a description
    of the state; an empty one when none was fetched."""
    fetched: Packet = {}
    try:
        for source in wanted.sources if not committed_slots(folder, wanted.local_rank) else ():
            with contextlib.suppress(CopyError, SnapshotMemoryError, OSError):
                fetched = _fetched(folder, wanted, source, paths)
                break
    finally:
        tell(fetched)


def _fetched(folder: Path, wanted: WantedState, source: Sequence[Any], paths: CopyPaths) -> Packet:
    """Fetch from one saver. Returns a description of the state. CopyError, SnapshotMemoryError, OSError."""
    began_s = time.monotonic()
    host, port, word, path = source
    slots = Slots(folder / PREFETCH, SlotOwner(wanted.local_rank, wanted.rank), 1)
    try:
        key = key_of_life(folder, word)
        source_host = fetch(folder, (host, port), key, path, None, wanted.rank, slots, paths)
        (slot,) = slots.committed()
        assert slot.request is not None
        fetched = slot_path(folder / PREFETCH, wanted.local_rank, 0)
        os.link(fetched, slot_path(folder, wanted.local_rank, 0))  # fails if the worker has made one meanwhile
        os.unlink(fetched)
    finally:
        slots.close()
    about = {"local_rank": wanted.local_rank, "rank": wanted.rank, "step": slot.step, "of": source_host}
    return {**about, "state": slot.request.identity, "took_s": round(time.monotonic() - began_s, 3)}


# --- what is here -----------------------------------------------------------------------------------------------------


def skipped(step: int) -> Packet:
    """The agent's packet when no rank copies this step."""
    why = "the copy before it is still on its way"
    return {"is": "copy", "step": step, "rank": -1, "to": "", "size_bytes": 0, "took_s": 0.0, "why": why}


def all_slots(folder: Path, *, beside: bool = True) -> Iterator[tuple[Path, Slot]]:
    """The valid slots of this shared-memory folder, each with the folder that it is in. `beside`: with those of other
    nodes' ranks."""
    for each in ("", COPIES, FETCHED) if beside else ("",):
        for number in local_ranks(folder / each):
            for slot in committed_slots(folder / each, number):
                yield folder / each, slot


def is_copy(path: Path) -> bool:
    """Whether this slot holds a state of another node's rank."""
    return path.parent.name in (COPIES, FETCHED)


def _origin(host: str) -> str:
    """The caller's address, or its network where one machine has many."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((int(address), NETWORK_BITS_IPV6), strict=False))
    return host


def _size(message: Packet) -> int:
    """The size of the announced state in bytes. Raises ValueError."""
    size_bytes: int = field_of(message, "size_bytes", int)
    if size_bytes <= 0:
        raise ValueError(f"a state of {size_bytes} bytes")
    return size_bytes


def _state(value: object) -> State:
    """The identity of a state, from a message. Raises ValueError."""
    if isinstance(value, list) and len(value) == 3 and all(type(each) is int for each in value):
        return value[0], value[1], value[2]
    raise ValueError(f"a state {value!r}"[:200])
