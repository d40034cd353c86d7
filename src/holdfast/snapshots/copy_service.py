"""Copies of memory slots on other nodes: how savers exchange them, and how a rank fetches what its node lacks.

A connection begins with a proof, from both sides, that they know the key of this life of the job: it comes from the job
token, where there is one, and from a random word of rank 0. After it every frame carries a MAC (protocol/seal.py), and
nothing is unpickled.

    caller → saver   8 bytes MAGIC, 16 bytes of chance    saver → caller   16 bytes of chance, its proof    → the proof
    put    {"do": "put", "size_bytes", "generation", "request", "keep"}    → {"is": "ready"} | {"is": "refused", "text"}
           the state                                                       → {"is": "kept"}
    get    {"do": "get", "folder", "state", "rank"}      → {"is": "found", "size_bytes", "generation", "request"}
                                                           the state; or {"is": "refused"}
    a state: for each chunk {"digest"}, then its bytes

What a saver receives lies in slots below the shared-memory folder: `copies/RANK.0|1`. So a copy that was not received
whole is never valid, and the one named by `keep`, which all ranks have, stays until all have a newer one. What a rank
fetches lies in `fetched/RANK.0` until training has its own pages. Memory that is short refuses a copy, nothing else.

A new key ends all connections of the life before: what it finds here is what stays. Standard library only."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast.protocol import seal
from holdfast.protocol.errors import AuthenticationError, CopyError, SnapshotMemoryError
from holdfast.snapshots import disk
from holdfast.snapshots.changes import SaveRequest
from holdfast.snapshots.mapping import Mappings
from holdfast.snapshots.memory_folder import COPIES, FETCHED, KEY, Packet, field
from holdfast.snapshots.slots import (
    COUNT_MAX,
    Slot,
    SlotOwner,
    Slots,
    committed_slots,
    lend,
    local_ranks,
    read_descriptor,
    release,
)

MAGIC = b"HFCOPY\0\1"
CHANCE_BYTES = 16
PROOF_BYTES = 32
LENGTH_BYTES = 4
FRAME_BYTES_MAX = 128 * 1024
STALL_S = 20.0
"""A chunk that takes longer ends its connection: the other side is stopped, or the network is."""
BACKLOG = CONNECTIONS_MAX = 256
State = tuple[int, int, int]
"""SaveRequest.identity."""
Address = tuple[str, int]
Digests = Sequence[str]
"""Of the chunks of a state."""


def key_of_life(folder: Path, word: str) -> bytes:
    """The key of one life of the job. `word`: rank 0's; the agent has left what it derived from the job token in this
    shared-memory folder. OSError."""
    held = b"no token"
    with contextlib.suppress(FileNotFoundError):
        held = (folder / KEY).read_bytes()
    return hmac.digest(held, b"holdfast copies " + word.encode(), "sha256")


class CopyConnection:
    """One connection, after its proofs. Use it as a context manager. Methods raise CopyError."""

    def __init__(self, sock: socket.socket, sealed: seal.Seal) -> None:
        self._sock, self._seal = sock, sealed

    @classmethod
    def call(cls, address: Address, key: bytes) -> CopyConnection:
        """Connect to a saver. CopyError."""
        with _errors(address):
            sock = socket.create_connection(address, STALL_S)
        try:
            with _errors(address):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = MAGIC + os.urandom(CHANCE_BYTES)
                sock.sendall(hello)
                said = seal.transcript(hello, _exactly(sock, CHANCE_BYTES))
                _check(sock, seal.prove(key, "coordinator", said))
                sock.sendall(seal.prove(key, "agent", said))
        except BaseException:
            sock.close()
            raise
        return cls(sock, seal.Seal(key, "agent", said))

    @classmethod
    def answer(cls, sock: socket.socket, key: bytes) -> CopyConnection:
        """The saver's side. The socket stays the caller's. CopyError."""
        with _errors():
            sock.settimeout(STALL_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = _exactly(sock, len(MAGIC) + CHANCE_BYTES)
            if not hello.startswith(MAGIC):
                raise AuthenticationError("this is no saver")
            chance = os.urandom(CHANCE_BYTES)
            said = seal.transcript(hello, chance)
            sock.sendall(chance + seal.prove(key, "coordinator", said))
            _check(sock, seal.prove(key, "agent", said))
        return cls(sock, seal.Seal(key, "coordinator", said))

    def __enter__(self) -> CopyConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def say(self, **message: Any) -> None:
        frame = self._seal.seal(json.dumps(message).encode())
        with _errors():
            self._sock.sendall(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)

    def hear(self, expected: str = "") -> Packet:
        """The next message. `expected`: what it has to be; CopyError with its text if it is another."""
        with _errors():
            length = int.from_bytes(_exactly(self._sock, LENGTH_BYTES), "big")
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {length} bytes")
            message = json.loads(self._seal.open(_exactly(self._sock, length)))
            if not isinstance(message, dict):
                raise ValueError("a frame that is no object")  # noqa: TRY004 - the content is wrong
        if expected and message.get("is") != expected:
            raise CopyError(f"it was refused: {message.get('text', '')}"[:500])
        return message

    def send_state(
        self, data: memoryview, known: Digests = (), spend: Callable[[int], None] = lambda _: None
    ) -> Digests:
        """`known`: the digests, if they are. `spend` is called with the size of each chunk before it is sent, and may
        wait. Returns the digests."""
        digests = list(known)
        for number, begin in enumerate(disk.chunk_begins(len(data))):
            chunk = data[begin : begin + disk.CHUNK_BYTES]
            spend(len(chunk))
            if number == len(digests):
                digests.append(disk.chunk_digest(chunk))
            self.say(digest=digests[number])
            with _errors():
                self._sock.sendall(chunk)
        return digests

    def receive_state(self, memory: memoryview) -> Digests:
        """Fill this memory. Returns the digests of its chunks, which were checked."""
        digests: list[str] = []
        with ThreadPoolExecutor(disk.hash_threads()) as pool:
            found = []
            for begin in disk.chunk_begins(len(memory)):
                digests.append(str(self.hear().get("digest")))
                chunk = memory[begin : begin + disk.CHUNK_BYTES]
                with _errors():
                    _fill(self._sock, chunk)
                found.append(pool.submit(disk.chunk_digest, chunk))
            if [each.result() for each in found] != digests:
                raise CopyError("a chunk has changed on its way")
        return digests


@contextlib.contextmanager
def _errors(address: Address | None = None) -> Iterator[None]:
    place = "" if address is None else f"{address[0]} port {address[1]}: "
    try:
        yield
    except TimeoutError as error:
        raise CopyError(f"{place}it does not answer, or takes nothing, for {STALL_S:g} s") from error
    except OSError as error:
        raise CopyError(f"{place}{error.strerror or error}") from error
    except (ValueError, RecursionError, AuthenticationError) as error:
        raise CopyError(f"{place}{error}") from error


def _check(sock: socket.socket, proof: bytes) -> None:
    if not seal.same(_exactly(sock, PROOF_BYTES), proof):
        raise AuthenticationError("it does not know the key of this job")


def _exactly(sock: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    _fill(sock, memoryview(data))
    return bytes(data)


def _fill(sock: socket.socket, memory: memoryview) -> None:
    while memory:
        got = sock.recv_into(memory)
        if not got:
            raise ConnectionResetError(104, "the connection was closed")
        memory = memory[got:]


class Pace:
    """Limits the bytes that all threads together send."""

    def __init__(self, bytes_s: float) -> None:
        """`bytes_s`: bytes per second; 0: no limit."""
        self._bytes_s = bytes_s
        self._turn = threading.Lock()
        self._free_s = 0.0

    def spend(self, size_bytes: int) -> None:
        """Returns when so many more bytes may be sent."""
        if not self._bytes_s:
            return
        with self._turn:
            now_s = time.monotonic()
            begin_s = max(self._free_s, now_s)
            self._free_s = begin_s + size_bytes / self._bytes_s
        time.sleep(begin_s - now_s)


class CopyService:
    """The saver's part: receives copies, gives states to ranks that fetch, and sends copies. For any thread."""

    def __init__(self, folder: Path, mappings: Mappings) -> None:
        """`mappings`: of the node's own slots."""
        self._folder, self._mappings = folder, mappings
        self._lock = threading.Lock()
        self._key = b""
        self._pace = Pace(0)
        self._listening: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._open: set[socket.socket] = set()
        """Sockets of the present key."""
        self._received: dict[int, tuple[Slots, threading.Lock]] = {}
        """By rank."""
        self._digests: dict[tuple[Path, int], dict[int, Digests]] = {}
        """Of slots that were sent or received, by folder and local rank, then by sequence: who fetches one does not
        wait for them, and sees what has changed in this memory since."""

    def serve(self, key: bytes, host: str, bytes_s: float) -> int:
        """Accept connections with this key, and no others any more, at this address of the node. The port. OSError."""
        with self._lock:
            if key != self._key:
                self._key, self._pace = key, Pace(bytes_s)
                for each in self._open:
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
                self._open.clear()
            if self._listening is None or self._listening.getsockname()[0] != host:
                if self._listening is not None:
                    self._listening.shutdown(socket.SHUT_RDWR)
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._listening = socket.create_server((host, 0), family=family, backlog=BACKLOG)
                self._accepting = threading.Thread(target=self._accept_all, args=(self._listening,), daemon=True)
                self._accepting.start()
            port: int = self._listening.getsockname()[1]
            return port

    def served(self, packet: Packet) -> Packet:
        """The answer to a worker's "serve"."""
        key, host = field(packet, "key", str), field(packet, "host", str)
        try:
            port, why = self.serve(bytes.fromhex(key), host, field(packet, "bytes_s", float)), ""
        except OSError as error:
            port, why = 0, f"{host}: {error.strerror}"
        return {"is": "serving", "port": port, "text": why}

    def close(self) -> None:
        """End all connections, and let go of the memory; the copies stay."""
        with self._lock:
            accepting, listening = self._accepting, self._listening
            for each in (*self._open, *([listening] if listening is not None else [])):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            received, self._received = self._received, {}
        if accepting is not None:
            accepting.join()
        for slots, turn in received.values():
            with turn:
                slots.close()

    def _accept_all(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError), listening:  # it was shut down
            while True:
                sock, _ = listening.accept()
                if len(self._open) >= CONNECTIONS_MAX:
                    sock.close()
                    continue
                threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with contextlib.suppress(CopyError), sock, self._counted(sock) as key:
            connection = CopyConnection.answer(sock, key)
            asked = connection.hear()
            try:
                if asked.get("do") == "put":
                    self._put(connection, asked)
                else:
                    self._get(connection, asked)
            except (OSError, ValueError, SnapshotMemoryError) as error:
                connection.say(**{"is": "refused", "text": str(error)})

    @contextlib.contextmanager
    def _counted(self, sock: socket.socket) -> Iterator[bytes]:
        """While the socket is in use; the key that it is for."""
        with self._lock:
            self._open.add(sock)
            key = self._key
        try:
            yield key
        finally:
            with self._lock:
                self._open.discard(sock)

    # --- receiving and giving -----------------------------------------------------------------------------------------

    def _put(self, connection: CopyConnection, asked: Packet) -> None:
        """CopyError; ValueError, SnapshotMemoryError: refused."""
        request = SaveRequest.from_json(field(asked, "request", dict))
        size_bytes, generation = _size(asked), field(asked, "generation", int)
        keep = None if asked.get("keep") is None else _state(asked["keep"])
        if keep is not None:
            self._drop_others((keep[1], request.attempt))
        with self._slots_of(request.rank) as slots, contextlib.ExitStack() as held:
            slots.regroup(request.rank, request.world, generation)
            for slot in slots.committed():
                if slot.request is not None and slot.request.identity == keep:
                    held.callback(release, lend(self._folder / COPIES, slot))
            memory = slots.stage(request.step, size_bytes)
            if memory is None:
                raise ValueError("the copies of this rank are being read")
            try:
                connection.say(**{"is": "ready"})
                digests = connection.receive_state(memory)
                slot = slots.commit(request)
            finally:
                slots.abandon()
            self._remember(self._folder / COPIES, slot, digests)
            connection.say(**{"is": "kept"})

    @contextlib.contextmanager
    def _slots_of(self, rank: int, wait_s: float | None = None) -> Iterator[Slots]:
        """ValueError when it is in use for longer; None: STALL_S."""
        with self._lock:
            if rank not in self._received:
                (self._folder / COPIES).mkdir(mode=0o700, exist_ok=True)
                self._received[rank] = Slots(self._folder / COPIES, SlotOwner(rank)), threading.Lock()
            slots, turn = self._received[rank]
        if not turn.acquire(timeout=STALL_S if wait_s is None else wait_s):
            raise ValueError("another copy of this rank is being received")
        try:
            yield slots
        finally:
            turn.release()

    def _get(self, connection: CopyConnection, asked: Packet) -> None:
        wanted, rank, path = _state(asked.get("state")), field(asked, "rank", int), field(asked, "folder", str)
        for folder, slot in all_slots(self._folder):
            request = slot.request
            if request is None or (request.folder, request.rank, request.identity) != (path, rank, wanted):
                continue
            with contextlib.suppress(ValueError), self._lent(folder, slot) as found:
                said = {"size_bytes": len(found.data), "generation": found.generation, "request": request.to_json()}
                connection.say(**{"is": "found", **said})
                known = self._digests.get((folder, slot.local_rank), {}).get(slot.sequence, ())
                connection.send_state(found.data, known)
                return
        raise ValueError(f"step {wanted[0]} of rank {rank} is not here")

    @contextlib.contextmanager
    def _lent(self, folder: Path, slot: Slot) -> Iterator[Slot]:
        """ValueError when it was staged into since."""
        fd = lend(folder, slot)
        try:
            # A mapping that is kept would keep the memory of a copy that is removed.
            found = read_descriptor(fd, mappings=self._mappings if folder == self._folder else None)
            if found is None or found.sequence != slot.sequence:
                raise ValueError("the slot has changed")
            yield found
        finally:
            release(fd)

    def _remember(self, folder: Path, slot: Slot, digests: Digests) -> None:
        known = self._digests.get((folder, slot.local_rank), {})
        newest = sorted(known)[1 - COUNT_MAX :]
        self._digests[folder, slot.local_rank] = {**{each: known[each] for each in newest}, slot.sequence: digests}

    def forget(self, above_step: int, tell: Callable[[Packet], None] = lambda _: None) -> None:
        """Drop copies of later steps: training goes on from this one. May wait; `tell` gets the answer."""
        for rank in local_ranks(self._folder / COPIES):
            with contextlib.suppress(ValueError), self._slots_of(rank) as slots:
                slots.forget(above_step=above_step)
        tell({"is": "forgotten"})

    def _drop_others(self, lives: Collection[int]) -> None:
        """Give back the memory of copies that are of none of these lives (attempts): they are needed no more."""
        for rank in local_ranks(self._folder / COPIES):
            with contextlib.suppress(ValueError), self._slots_of(rank, wait_s=0) as slots:  # else it is being received
                if not any(slot.request and slot.request.attempt in lives for slot in slots.committed()):
                    slots.discard()

    # --- sending ------------------------------------------------------------------------------------------------------

    def carry_out(
        self,
        fd: int,
        sequence: int,
        request: SaveRequest,
        to: Address,
        keep: State | None,
        tell: Callable[[Packet], None],
    ) -> None:
        """Send a slot, and tell the agent's packet."""
        began_s, size_bytes, why = time.monotonic(), 0, ""
        try:
            size_bytes = self.send(fd, sequence, request, to, keep)
        except CopyError as error:
            why = str(error)
        took_s = round(time.monotonic() - began_s, 3)
        about = {"step": request.step, "rank": request.rank, "to": to[0], "kept": -1 if keep is None else keep[0]}
        tell({"is": "copy", **about, "size_bytes": size_bytes, "took_s": took_s, "why": why})

    def send(self, fd: int, sequence: int, request: SaveRequest, to: Address, keep: State | None) -> int:
        """Send a slot to another node's saver; how many bytes. The descriptor is closed. CopyError."""
        try:
            slot = read_descriptor(fd, mappings=self._mappings)
            if slot is None or slot.sequence != sequence:
                raise CopyError("its memory slot has changed")
            with CopyConnection.call(to, self._key) as connection, self._counted(connection._sock):
                about = {"size_bytes": len(slot.data), "generation": slot.generation, "keep": keep}
                connection.say(do="put", request=request.to_json(), **about)
                connection.hear("ready")
                digests = connection.send_state(slot.data, spend=self._pace.spend)
                connection.hear("kept")
            self._remember(self._folder, slot, digests)
            return len(slot.data)
        finally:
            release(fd)


def fetch(folder: Path, of: Address, key: bytes, path: str, state: State, rank: int) -> None:
    """Bring this rank's state from another node into `FETCHED` of this shared-memory folder. CopyError,
    SnapshotMemoryError."""
    (folder / FETCHED).mkdir(mode=0o700, exist_ok=True)
    with CopyConnection.call(of, key) as connection, contextlib.ExitStack() as closing:
        connection.say(do="get", folder=path, state=state, rank=rank)
        found = connection.hear("found")
        with _errors(of):
            request = SaveRequest.from_json(field(found, "request", dict))
            if (request.rank, request.identity) != (rank, state):
                raise ValueError("it gives another state than it was asked for")
            size_bytes, generation = _size(found), field(found, "generation", int)
        slots = Slots(folder / FETCHED, SlotOwner(rank, rank, request.world, generation), 1)
        closing.callback(slots.close)
        memory = slots.stage(request.step, size_bytes)
        if memory is None:
            raise CopyError(f"the memory for rank {rank}'s state is in use")
        connection.receive_state(memory)
        slots.commit(request)


def skipped(step: int) -> Packet:
    """No rank copies this step: the agent's packet."""
    why = "the copy before it is still on its way"
    return {"is": "copy", "step": step, "rank": -1, "to": "", "size_bytes": 0, "took_s": 0.0, "why": why}


def all_slots(folder: Path, *, beside: bool = True) -> Iterator[tuple[Path, Slot]]:
    """The valid slots of this shared-memory folder, each with its own folder. `beside`: with those of other nodes'
    ranks."""
    for each in ("", COPIES, FETCHED) if beside else ("",):
        for number in local_ranks(folder / each):
            for slot in committed_slots(folder / each, number):
                yield folder / each, slot


def is_copy(path: Path) -> bool:
    """Whether this slot's file holds a state of another node's rank."""
    return path.parent.name in (COPIES, FETCHED)


def drop_fetched(folder: Path) -> None:
    """Remove what was fetched; mappings stay valid."""
    shutil.rmtree(folder / FETCHED, ignore_errors=True)


def _size(message: Packet) -> int:
    size_bytes: int = field(message, "size_bytes", int)
    if size_bytes <= 0:
        raise ValueError(f"a state of {size_bytes} bytes")
    return size_bytes


def _state(value: object) -> State:
    if isinstance(value, list) and len(value) == 3 and all(type(each) is int for each in value):
        return value[0], value[1], value[2]
    raise ValueError(f"a state {value!r}"[:200])
