"""A connection between savers, or from a rank to a saver, that carries copies of memory slots; the choice among a
node's addresses; a limit on the bytes per second.

It begins with a proof, from both sides, that they know the key of this life of the job: it comes from the job
token, where there is one, and from a random word of rank 0. After it every frame carries a MAC (protocol/seal.py), and
nothing is unpickled.

    caller → saver   8 bytes MAGIC, 16 random bytes       saver → caller   16 random bytes, its proof       → the proof
    put    {"do": "put", "size_bytes", "generation", "request", "keep"}    → {"is": "ready"} | {"is": "refused", "text"}
           the state                                                       → {"is": "kept"}
    get    {"do": "get", "folder", "state"|null, "rank"} → {"is": "found", "size_bytes", "generation", "request"}
                                                           the state; or {"is": "refused"}
    measure {"do": "measure"}                            → {"is": "found"}, and SAMPLE
    a state: for each chunk {"digest"}, then its bytes

With a job token a digest is a sha256, which nobody between the two can forge. Without a token anybody may connect, so
a digest has to find accidents only: a CRC does, at a fifth of the cost (digest_of_life).

Each address of a node is measured once with a few MB, and the fastest is kept (CopyPaths).

Standard library only."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast.memory_folder import KEY
from holdfast.protocol import seal
from holdfast.protocol.errors import AuthenticationError, CopyError
from holdfast.train.snapshots import disk
from holdfast.train.snapshots.saver_connection import Packet

MAGIC = b"HFCOPY\0\1"
RANDOM_BYTES = 16
PROOF_BYTES = 32
LENGTH_BYTES = 4
FRAME_BYTES_MAX = 128 * 1024
STALL_S = 20.0
"""A chunk that takes longer ends its connection: the other side is stopped, or the network is."""
HANDSHAKE_S = 10.0
"""Limit for the whole proof of a caller, whatever it sends meanwhile: until then it may be anybody."""
SAMPLE = bytes(4 << 20)
"""The bytes by which an address is measured."""
SAMPLE_S_MAX = 1.0
"""Limit for the measurement of one address: one that does not answer costs this time once."""
BETTER_FACTOR = 1.25
"""Another address than the first has to be faster by this factor: one network card may have several addresses, whose
measurements differ by chance."""
Address = tuple[str, int]
"""A host, or the addresses of one, separated by blanks; and a port."""
Digests = Sequence[str]
"""The digests of a state's chunks, in order."""
Digest = Callable[[memoryview], str]
"""Makes the digest of one chunk."""
Write = Callable[[int, memoryview], None]
"""Writes bytes; the number says where in the state they begin."""


class CopyConnection:
    """One connection, after its proofs. Use it as a context manager. Methods raise CopyError."""

    def __init__(self, sock: socket.socket, sealed: seal.Seal, digest: Digest) -> None:
        self._sock, self._seal, self._digest = sock, sealed, digest

    @classmethod
    def call(
        cls, address: Address, key: bytes, digest: Digest = disk.chunk_digest, *, stall_s: float | None = None
    ) -> CopyConnection:
        """Connect to a saver, and prove to each other who we are. Raises CopyError."""
        with errors(address):
            sock = socket.create_connection(address, stall_s or STALL_S)
        try:
            with errors(address):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = MAGIC + os.urandom(RANDOM_BYTES)
                sock.sendall(hello)
                # The two sides have the names that seal.py knows: the saver is its "coordinator", the caller an
                # "agent".
                transcript = seal.transcript(hello, _exactly(sock, RANDOM_BYTES))
                _check(sock, seal.prove(key, "coordinator", transcript))
                sock.sendall(seal.prove(key, "agent", transcript))
        except BaseException:
            sock.close()
            raise
        return cls(sock, seal.Seal(key, "agent", transcript), digest)

    @classmethod
    def answer(cls, sock: socket.socket, key: bytes, digest: Digest) -> CopyConnection:
        """The same connection, made by the saver on a socket that it accepted; the socket stays the caller's. Raises
        CopyError."""
        with errors():
            end_s = time.monotonic() + HANDSHAKE_S
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = _exactly(sock, len(MAGIC) + RANDOM_BYTES, end_s)
            if not hello.startswith(MAGIC):
                raise AuthenticationError("this is no saver")
            own_random = os.urandom(RANDOM_BYTES)
            transcript = seal.transcript(hello, own_random)
            sock.sendall(own_random + seal.prove(key, "coordinator", transcript))
            _check(sock, seal.prove(key, "agent", transcript), end_s)
            sock.settimeout(STALL_S)
        return cls(sock, seal.Seal(key, "coordinator", transcript), digest)

    def __enter__(self) -> CopyConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def fileno(self) -> int:
        """The descriptor of the socket. What has arrived is in the socket, and nowhere else."""
        return self._sock.fileno()

    def say(self, **message: Any) -> None:
        """Send a message."""
        frame = self._seal.seal(json.dumps(message).encode())
        with errors():
            self._sock.sendall(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)

    def hear(self, expected: str = "") -> Packet:
        """Wait for the next message. `expected`: the value that its "is" must have; otherwise CopyError with its
        text."""
        with errors():
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
        """Send the chunks of a state, each after its digest. Returns the digests.

        `known`: the digests, if they were computed before. `spend` is called with the size of each chunk before it is
        sent, and may wait (`RateLimit.spend`)."""
        digests = list(known)
        for number, begin in enumerate(disk.chunk_begins(len(data))):
            chunk = data[begin : begin + disk.CHUNK_BYTES]
            spend(len(chunk))
            if number == len(digests):
                digests.append(self._digest(chunk))
            self.say(digest=digests[number])
            with errors():
                self._sock.sendall(chunk)
        return digests

    def drain(self, size_bytes: int, limit_s: float) -> int:
        """Read and drop this many bytes, or as many as come within the time. Returns the number of bytes."""
        memory, left, end_s = bytearray(1 << 20), size_bytes, time.monotonic() + limit_s
        with errors():
            while left > 0 and time.monotonic() < end_s and (got := self._sock.recv_into(memory)):
                left -= got
        return size_bytes - left

    def receive_state(self, size_bytes: int, into: memoryview | Write) -> Digests:
        """Receive the chunks of a state, and check each. Returns their digests.

        `into`: memory to fill, or a function that writes a checked chunk; several threads call it, and its OSError is
        raised here. Chunks wait for it in a few buffers, which stay in the processor's cache."""
        threads = disk.hash_threads()
        count = 0 if isinstance(into, memoryview) else threads + 1
        buffers = [memoryview(mmap.mmap(-1, disk.CHUNK_BYTES)) for _ in range(count)]
        digests: list[str] = []
        done: list[Future[None]] = []
        with ThreadPoolExecutor(threads) as pool:
            for number, begin in enumerate(disk.chunk_begins(size_bytes)):
                digests.append(str(self.hear().get("digest")))
                if number >= count > 0:  # the buffer is used again once its chunk is written
                    done[number - count].result()
                memory = into[begin:] if isinstance(into, memoryview) else buffers[number % count]
                chunk = memory[: min(disk.CHUNK_BYTES, size_bytes - begin)]
                with errors():
                    _fill(self._sock, chunk)
                write = None if isinstance(into, memoryview) else into
                done.append(pool.submit(self._finish, chunk, digests[-1], begin, write))
            for each in done:
                each.result()
        return digests

    def _finish(self, chunk: memoryview, digest: str, begin: int, write: Write | None) -> None:
        if self._digest(chunk) != digest:
            raise CopyError("a chunk has changed on its way")
        if write is not None:
            write(begin, chunk)


class CopyPaths:
    """The fastest address of each saver, as this process has measured it. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held by the thread that measures: the others wait for its result."""
        self._chosen: dict[Address, Address] = {}
        """The address that was chosen among the offered ones."""

    def fastest(self, offered: Address, key: bytes) -> Address:
        """The fastest of a saver's addresses, which `offered` has separated by blanks. It measures them once."""
        hosts, port = offered[0].split(), offered[1]
        if len(hosts) < 2:
            return offered
        with self._lock:
            if offered not in self._chosen:
                found = {host: _bytes_s((host, port), key) for host in hosts}
                best = max(hosts, key=lambda host: found[host] * (BETTER_FACTOR if host == hosts[0] else 1))
                if not found[best]:
                    return hosts[0], port  # none is reached now
                self._chosen[offered] = best, port
            return self._chosen[offered]

    def forget(self, offered: Address) -> None:
        """Measure again at the next use: the chosen address does not work any more."""
        with self._lock:
            self._chosen.pop(offered, None)


class RateLimit:
    """Limits the bytes that all threads together send."""

    def __init__(self, bytes_s: float) -> None:
        """`bytes_s`: bytes per second; 0: no limit."""
        self._bytes_s = bytes_s
        self._lock = threading.Lock()
        self._next_s = 0.0
        """The time at which the next bytes may be sent (monotonic s)."""

    def spend(self, size_bytes: int) -> None:
        """Wait until this many more bytes may be sent."""
        if not self._bytes_s:
            return
        with self._lock:
            now_s = time.monotonic()
            begin_s = max(self._next_s, now_s)
            self._next_s = begin_s + size_bytes / self._bytes_s
        time.sleep(begin_s - now_s)


def digest_of_life(folder: Path) -> Digest:
    """The digest for chunks on their way to another node: one that nobody can forge if the job has a token, otherwise a
    cheap one."""
    return disk.chunk_digest if (folder / KEY).exists() else disk.chunk_crc


@contextlib.contextmanager
def errors(address: Address | None = None) -> Iterator[None]:
    """Turn what goes wrong in the block into a CopyError, which names the address if there is one."""
    peer = "" if address is None else f"{address[0]} port {address[1]}: "
    try:
        yield
    except TimeoutError as error:
        raise CopyError(f"{peer}it does not answer, or takes nothing, for {STALL_S:g} s") from error
    except OSError as error:
        raise CopyError(f"{peer}{error.strerror or error}") from error
    except (ValueError, RecursionError, AuthenticationError) as error:
        raise CopyError(f"{peer}{error}") from error


def _check(sock: socket.socket, proof: bytes, end_s: float | None = None) -> None:
    if not seal.same(_exactly(sock, PROOF_BYTES, end_s), proof):
        raise AuthenticationError("it does not know the key of this job")


def _exactly(sock: socket.socket, size_bytes: int, end_s: float | None = None) -> bytes:
    data = bytearray(size_bytes)
    _fill(sock, memoryview(data), end_s)
    return bytes(data)


def _fill(sock: socket.socket, memory: memoryview, end_s: float | None = None) -> None:
    """Receive until the memory is full. `end_s`: the time at which all of it must be there (monotonic s); None: the
    socket's own limit holds for each piece."""
    while memory:
        if end_s is not None:
            sock.settimeout(max(0.001, end_s - time.monotonic()))
        got = sock.recv_into(memory)
        if not got:
            raise ConnectionResetError(104, "the connection was closed")
        memory = memory[got:]


def _bytes_s(address: Address, key: bytes) -> float:
    """The measured bytes per second of this address; 0: it is not reached."""
    with contextlib.suppress(CopyError), CopyConnection.call(address, key, stall_s=SAMPLE_S_MAX) as connection:
        connection.say(do="measure")
        connection.hear("found")
        began_s = time.monotonic()
        return connection.drain(len(SAMPLE), SAMPLE_S_MAX) / max(time.monotonic() - began_s, 1e-6)
    return 0.0
