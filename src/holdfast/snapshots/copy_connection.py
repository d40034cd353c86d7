"""A connection between savers, or from a rank to a saver, over which copies of memory slots travel.

It begins with a proof, from both sides, that they know the key of this life of the job: it comes from the job
token, where there is one, and from a random word of rank 0. After it every frame carries a MAC (protocol/seal.py), and
nothing is unpickled.

    caller → saver   8 bytes MAGIC, 16 bytes of chance    saver → caller   16 bytes of chance, its proof    → the proof
    put    {"do": "put", "size_bytes", "generation", "request", "keep"}    → {"is": "ready"} | {"is": "refused", "text"}
           the state                                                       → {"is": "kept"}
    get    {"do": "get", "folder", "state"|null, "rank"} → {"is": "found", "size_bytes", "generation", "request"}
                                                           the state; or {"is": "refused"}
    measure {"do": "measure"}                            → {"is": "found"}, and SAMPLE (copy_paths.py)
    a state: for each chunk {"digest"}, then its bytes

With a job token a digest is a sha256, which nobody on the way can forge. Without one nobody is kept out, and a CRC
finds what goes wrong by itself, at a fifth of the cost (memory_folder.py: digest_of_life).

Standard library only."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from holdfast.protocol import seal
from holdfast.protocol.errors import AuthenticationError, CopyError
from holdfast.snapshots import disk
from holdfast.snapshots.memory_folder import Packet

MAGIC = b"HFCOPY\0\1"
CHANCE_BYTES = 16
PROOF_BYTES = 32
LENGTH_BYTES = 4
FRAME_BYTES_MAX = 128 * 1024
STALL_S = 20.0
"""A chunk that takes longer ends its connection: the other side is stopped, or the network is."""
Address = tuple[str, int]
"""A host, or the addresses of one, separated by blanks; and a port."""
Digests = Sequence[str]
"""Of the chunks of a state."""
Digest = Callable[[memoryview], str]
Write = Callable[[int, memoryview], None]
"""Bytes, and where in the state they begin."""


class CopyConnection:
    """One connection, after its proofs. Use it as a context manager. Methods raise CopyError."""

    def __init__(self, sock: socket.socket, sealed: seal.Seal, digest: Digest) -> None:
        self._sock, self._seal, self._digest = sock, sealed, digest

    @classmethod
    def call(
        cls, address: Address, key: bytes, digest: Digest = disk.chunk_digest, *, stall_s: float | None = None
    ) -> CopyConnection:
        """Connect to a saver. CopyError."""
        with errors(address):
            sock = socket.create_connection(address, stall_s or STALL_S)
        try:
            with errors(address):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = MAGIC + os.urandom(CHANCE_BYTES)
                sock.sendall(hello)
                said = seal.transcript(hello, _exactly(sock, CHANCE_BYTES))
                _check(sock, seal.prove(key, "coordinator", said))
                sock.sendall(seal.prove(key, "agent", said))
        except BaseException:
            sock.close()
            raise
        return cls(sock, seal.Seal(key, "agent", said), digest)

    @classmethod
    def answer(cls, sock: socket.socket, key: bytes, digest: Digest) -> CopyConnection:
        """The saver's side. The socket stays the caller's. CopyError."""
        with errors():
            sock.settimeout(STALL_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = _exactly(sock, len(MAGIC) + CHANCE_BYTES)
            if not hello.startswith(MAGIC):
                raise AuthenticationError("this is no saver")
            chance = os.urandom(CHANCE_BYTES)
            said = seal.transcript(hello, chance)
            sock.sendall(chance + seal.prove(key, "coordinator", said))
            _check(sock, seal.prove(key, "agent", said))
        return cls(sock, seal.Seal(key, "coordinator", said), digest)

    def __enter__(self) -> CopyConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def say(self, **message: Any) -> None:
        frame = self._seal.seal(json.dumps(message).encode())
        with errors():
            self._sock.sendall(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)

    def hear(self, expected: str = "") -> Packet:
        """The next message. `expected`: what it has to be; CopyError with its text if it is another."""
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
        """`known`: the digests, if they are. `spend` is called with the size of each chunk before it is sent, and may
        wait. Returns the digests."""
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
        """Read so much, or for so long. How many bytes came."""
        memory, left, end_s = bytearray(1 << 20), size_bytes, time.monotonic() + limit_s
        with errors():
            while left > 0 and time.monotonic() < end_s and (got := self._sock.recv_into(memory)):
                left -= got
        return size_bytes - left

    def receive_state(self, size_bytes: int, into: memoryview | Write) -> Digests:
        """Fill memory, or have each chunk written as soon as it was checked, by several threads; OSError of `into`.
        Returns the digests of the chunks.

        What is written waits in a few buffers, which stay in the processor's cache."""
        threads = disk.hash_threads()
        count = 0 if isinstance(into, memoryview) else threads + 1
        buffers = [memoryview(mmap.mmap(-1, disk.CHUNK_BYTES)) for _ in range(count)]
        digests: list[str] = []
        done: list[Future[None]] = []
        with ThreadPoolExecutor(threads) as pool:
            for number, begin in enumerate(disk.chunk_begins(size_bytes)):
                digests.append(str(self.hear().get("digest")))
                if number >= count > 0:
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


@contextlib.contextmanager
def errors(address: Address | None = None) -> Iterator[None]:
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
