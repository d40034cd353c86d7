"""One connection without its socket: preamble, handshake, then sealed frames with messages. PURE.

Knows this side's job and the peer's claims about its own; knows no sockets, time or randomness (nonces are arguments).
The shells on both sides are thin, and the property tests feed it any bytes in any chunks. The handshake:

    agent  Hello ──▶  coordinator           without a token
           ◀── Accepted | Refusal

    agent  Hello ──▶  coordinator           with a job token
           ◀── Challenge | Refusal          the coordinator proves first that it knows the token
           Proof ──▶                        or Refusal; only now the job is compared
           ◀── Accepted | Refusal           Accepted and all that follows carry a MAC

A refusal is final and readable for every protocol version. It names the values of both sides, but never the token. If
the job has a token, only a peer that has proved the token gets these values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
from msgspec import Struct

from holdfast.protocol.codec import (
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    PREAMBLE_BYTES,
    PROTOCOL_VERSION,
    FrameReader,
    encode,
    frame,
    one_line,
    preamble,
    read_preamble,
)
from holdfast.protocol.errors import AuthenticationError, HoldfastError, ProtocolError, RefusedError
from holdfast.protocol.policy import JobSpec, NodeSpec
from holdfast.text import shortened

if TYPE_CHECKING:
    from holdfast.protocol.seal import Seal

NONCE_BYTES = 32
REFUSAL_MARK = b"REFUSED\n"
"""Start of a refusal; no MessagePack array begins with it. Code, newline and text follow. It is the same in all
versions."""
REFUSAL_CHARS_MAX = 1000
SHOWN_CHARS_MAX = 64
"""Length to which texts of a peer are cut before they are shown (characters)."""


class Fingerprint(Struct, frozen=True, array_like=True):
    """Values that must be the same on all nodes of a job."""

    min_nodes: int
    max_nodes: int
    backend: str
    fixed_ranks: bool
    requeues: int = 0

    def __str__(self) -> str:
        nodes = str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"
        ranks = ", fixed ranks" if self.fixed_ranks else ""
        life = f", requeued {self.requeues} times" if self.requeues else ""
        return f"--nnodes {nodes}, backend {_shown(self.backend)}{ranks}{life}"


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of an agent; `on_connection` of the listener gets it too."""

    version: int
    run_id: str
    fingerprint: Fingerprint
    host: str
    member: str
    nonce: bytes
    has_token: bool


class Challenge(Struct, frozen=True, array_like=True, tag="challenge"):
    nonce: bytes
    proof: bytes


class Proof(Struct, frozen=True, array_like=True, tag="proof"):
    proof: bytes


class Accepted(Struct, frozen=True, array_like=True, tag="accepted"):
    version: int
    absent: bool = False
    """No coordinator is here."""
    address: str = ""
    """The coordinator's address if it is `absent`, as far as this agent knows; empty: unknown."""
    port: int = 0
    name: str = ""
    """The identity of the agent or witness that answers (`charter.Seat.name`)."""
    witness: bool = False
    term: int = 0
    """The term of the coordinator here."""
    founded: bool = False
    """The coordinator was not elected: the node at the endpoint founded the job, and the voters of an older start may
    elect another one."""
    forms: bool = False
    """The coordinator was not elected and has formed no generation yet: agents report any older start to it."""


T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_proof_decoder = msgspec.msgpack.Decoder(Proof)
_answer_decoder: msgspec.msgpack.Decoder[Challenge | Accepted] = msgspec.msgpack.Decoder(Challenge | Accepted)
_accepted_decoder = msgspec.msgpack.Decoder(Accepted)


class Handshake:
    """One side of the handshake, for a Session. It ends with `done` or with `error`."""

    speaks_first = False

    def __init__(self, token: bytes | None) -> None:
        self._token = token
        self.done = False
        self.error: HoldfastError | None = None
        self.seal: Seal | None = None
        self.accepted = Accepted(PROTOCOL_VERSION)
        """The answer of the accepting side, about itself; valid once `done`."""

    def opening(self) -> list[bytes]:
        """Payloads to send before anything was received."""
        return []

    def meet(self, version: int) -> list[bytes]:
        """Handle the version in the peer's preamble. Returns the payloads to send now."""
        raise NotImplementedError

    def receive(self, payload: bytes) -> list[bytes]:
        """Take a payload; returns what to send now. Never raises: see `error`."""
        try:
            if self.done or self.error is not None:
                raise ProtocolError("the handshake is over")
            return self._receive(payload)
        except HoldfastError as error:
            self.error = error
            return []

    def _receive(self, payload: bytes) -> list[bytes]:
        raise NotImplementedError


class ClientHandshake(Handshake):
    """The agent's side. Its `error` is a RefusedError (final) or a ProtocolError."""

    speaks_first = True

    def __init__(self, job: JobSpec, node: NodeSpec, token: bytes | None, nonce: bytes) -> None:
        super().__init__(token)
        self._name = f"{_shown(node.host)} (this node)"
        self._hello = _encoder.encode(
            Hello(
                version=PROTOCOL_VERSION,
                run_id=_portable(job.run_id),
                fingerprint=fingerprint_of(job),
                host=node.host,
                member=node.member,
                nonce=nonce,
                has_token=token is not None,
            )
        )

    def opening(self) -> list[bytes]:
        return [self._hello]

    def meet(self, version: int) -> list[bytes]:
        if version != PROTOCOL_VERSION:
            self.error = RefusedError(_version_text(ours=version, theirs=PROTOCOL_VERSION, name=self._name))
        return []

    def _receive(self, payload: bytes) -> list[bytes]:
        refusal = read_refusal(payload)
        if refusal is not None:
            raise RefusedError(refusal[1])
        if self.seal is not None:
            self.accepted = _decode(_accepted_decoder, self.seal.open(payload))
            self.done = True
            return []
        answer = _decode(_answer_decoder, payload)
        if isinstance(answer, Challenge):
            return self._answer_challenge(answer)
        if self._token is not None:
            raise RefusedError(_token_presence_text(name=self._name, has_token=True))
        self.accepted, self.done = answer, True
        return []

    def _answer_challenge(self, challenge: Challenge) -> list[bytes]:
        if self._token is None or len(challenge.nonce) != NONCE_BYTES:
            raise ProtocolError("an unexpected challenge")
        from holdfast.protocol.seal import Seal, prove, same, transcript  # hashing is loaded only for a token

        covered = transcript(self._hello, challenge.nonce)
        if not same(challenge.proof, prove(self._token, "coordinator", covered)):
            # The coordinator gets the reason for its log. It says nothing that a stranger does not know already.
            text = _token_differs_text(self._name)
            self.error = RefusedError(text)
            return [write_refusal(AuthenticationError.code, text)]
        self.seal = Seal(self._token, "agent", covered)
        return [_encoder.encode(Proof(prove(self._token, "agent", covered)))]


class ServerHandshake(Handshake):
    """The coordinator's side. After `done` it has the `hello`; the text of its `error` is safe for the log."""

    def __init__(
        self,
        job: JobSpec | None,
        token: bytes | None,
        nonce: bytes,
        answer: Callable[[Hello], Accepted] = lambda _: Accepted(PROTOCOL_VERSION),
    ) -> None:
        """`job` None: any job is welcome (a witness). `answer` makes the Accepted for a peer."""
        super().__init__(token)
        self._job = job
        self._answer = answer
        self._nonce = nonce
        self._transcript = b""
        """The text that proofs cover."""
        self.hello: Hello | None = None
        """The peer's hello; None: it has not come yet."""

    def meet(self, version: int) -> list[bytes]:
        if version == PROTOCOL_VERSION:
            return []
        return self._refuse(RefusedError(_version_text(ours=PROTOCOL_VERSION, theirs=version, name="the node")))

    def _receive(self, payload: bytes) -> list[bytes]:
        return self._handle_hello(payload) if self.hello is None else self._handle_proof(payload)

    def _handle_hello(self, payload: bytes) -> list[bytes]:
        hello = _decode(_hello_decoder, payload)
        if len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError("a hello with a malformed nonce")
        self.hello = hello
        contradiction = self._contradiction(hello) if self._token is None else self._unproven(hello)
        if contradiction is not None:
            return self._refuse(RefusedError(contradiction))
        if self._token is None:
            return [self._accept(hello)]
        from holdfast.protocol.seal import prove, transcript  # hashing is loaded only for a token

        self._transcript = transcript(payload, self._nonce)
        return [_encoder.encode(Challenge(self._nonce, prove(self._token, "coordinator", self._transcript)))]

    def _handle_proof(self, payload: bytes) -> list[bytes]:
        assert self._token is not None  # without a token the handshake is over with the hello
        assert self.hello is not None
        from holdfast.protocol.seal import Seal, prove, same

        refusal = read_refusal(payload)
        if refusal is not None:
            self.error = AuthenticationError(refusal[1])
            return []
        proof = _decode(_proof_decoder, payload)
        if not same(proof.proof, prove(self._token, "agent", self._transcript)):
            return self._refuse(AuthenticationError(_token_differs_text(_shown(self.hello.host))))
        # The job is compared only now: a refusal names its values, which a stranger must not get.
        contradiction = self._contradiction(self.hello)
        if contradiction is not None:
            return self._refuse(RefusedError(contradiction))
        self.seal = Seal(self._token, "coordinator", self._transcript)
        return [self.seal.seal(self._accept(self.hello))]

    def _accept(self, hello: Hello) -> bytes:
        self.accepted, self.done = self._answer(hello), True
        return _encoder.encode(self.accepted)

    def _unproven(self, hello: Hello) -> str | None:
        """The reason to refuse a peer that has not proved the token yet, without any value of the job; None: there is
        none."""
        name = _shown(hello.host)
        if hello.version != PROTOCOL_VERSION:
            return _version_text(ours=PROTOCOL_VERSION, theirs=hello.version, name=name)
        return None if hello.has_token else _token_presence_text(name=name, has_token=False)

    def _contradiction(self, hello: Hello) -> str | None:
        """The most important reason why this node cannot belong to this job; None: it can."""
        name = _shown(hello.host)
        if hello.version != PROTOCOL_VERSION:
            return _version_text(ours=PROTOCOL_VERSION, theirs=hello.version, name=name)
        if self._job is not None and (differs := _differs(self._job, hello, name)):
            return differs
        if hello.has_token != (self._token is not None):
            return _token_presence_text(name=name, has_token=hello.has_token)
        return None

    def _refuse(self, error: HoldfastError) -> list[bytes]:
        self.error = error
        return [write_refusal(error.code, str(error))]


def _differs(job: JobSpec, hello: Hello, name: str) -> str:
    """The difference between the job of this node and ours, in words; empty: there is none."""
    if hello.run_id != _portable(job.run_id):
        return (
            f"this endpoint serves the job with --rdzv-id {_shown(job.run_id)}, "
            f"but {name} asks for {_shown(hello.run_id)}"
        )
    ours = fingerprint_of(job)
    if hello.fingerprint != ours:
        return f"the nodes were started differently: the coordinator with {ours}; {name} with {hello.fingerprint}"
    return ""


def fingerprint_of(job: JobSpec) -> Fingerprint:
    return Fingerprint(job.min_nodes, job.max_nodes, job.backend, job.fixed_ranks, job.requeues)


def write_refusal(code: str, text: str) -> bytes:
    return REFUSAL_MARK + f"{code}\n{text[:REFUSAL_CHARS_MAX]}".encode("utf-8", "replace")


def read_refusal(payload: bytes) -> tuple[str, str] | None:
    """Code and text of a refusal, without control characters; None: the payload is not a refusal."""
    if not payload.startswith(REFUSAL_MARK):
        return None
    code, _, text = payload[len(REFUSAL_MARK) :].decode("utf-8", "replace").partition("\n")
    return one_line(code[:16]), one_line(text[:REFUSAL_CHARS_MAX]) or "the coordinator gave no reason"


def _version_text(*, ours: int, theirs: int, name: str) -> str:
    return (
        f"the coordinator speaks version {ours} of the protocol, {name} version {theirs}; "
        "install the same holdfast on all nodes"
    )


def _token_presence_text(*, name: str, has_token: bool) -> str:
    advice = "set HOLDFAST_TOKEN or --rdzv-conf token_file= on all nodes, or on none"
    if has_token:
        return f"{name} has a job token, the coordinator has none; {advice}"
    return f"the coordinator has a job token, {name} has none; {advice}"


def _token_differs_text(name: str) -> str:
    return f"the job token of {name} and that of the coordinator or witness differ"


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a malformed handshake: {error}") from None


def _portable(text: str) -> str:
    """The text with invalid UTF-8 bytes escaped: arguments of the command line may contain some."""
    return text.encode("utf-8", "backslashreplace").decode()


def _shown(text: str) -> str:
    """A peer's text for a log line: short, quoted, without control characters."""
    return repr(shortened(text, SHOWN_CHARS_MAX))


Received = TypeVar("Received")


class Session(Generic[Received]):
    """Turns received bytes into messages, and messages into bytes to send.

    After each `feed`: write what it returned, look at `error` (then the connection is over) and at
    `established`, and `take` the messages. `only` is the short way for one message.
    """

    def __init__(self, handshake: Handshake, decode: Callable[[bytes], Received]) -> None:
        self._handshake = handshake
        self._decode = decode
        self._first = bytearray()
        """The beginning of the peer's preamble."""
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._messages: list[Received] = []
        self.met = False
        """The peer's preamble has arrived: the peer is a holdfast, perhaps of another version."""
        self.established = False
        self.error: HoldfastError | None = None

    @property
    def accepted(self) -> Accepted:
        """The answer of the accepting side, about itself; valid once `established`."""
        return self._handshake.accepted

    @property
    def torn(self) -> bool:
        """Whether the received bytes end in the middle of a preamble or a frame."""
        return self._reader.torn or bool(self._first)

    def opening(self) -> bytes:
        """The bytes to send when the connection is made."""
        if not self._handshake.speaks_first:
            return b""
        return preamble() + b"".join(map(frame, self._handshake.opening()))

    def feed(self, data: bytes) -> bytes:
        """Take received bytes. Returns the bytes to send now. Never raises: see `error`."""
        if self.error is not None:
            return b""
        out = bytearray()
        try:
            if not self.met:
                self._first += data
                data = self._meet(out)
            self._reader.push(data)
            while self.error is None and (payload := self._reader.pop()) is not None:
                self._handle(payload, out)
        except (ProtocolError, AuthenticationError) as error:
            self.error = error
        return bytes(out)

    def only(self, data: bytes) -> Received | None:
        """The message in these new bytes if they are exactly one, as nearly always; None: they must be fed. A bad one
        sets `error`. Never raises."""
        if not self.established or self.error is not None or (payload := self._reader.only(data)) is None:
            return None
        try:
            return self._open(payload)
        except (ProtocolError, AuthenticationError) as error:
            self.error = error
            return None

    def take(self) -> list[Received]:
        """The messages received since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages

    def pack(self, message: Struct) -> bytes:
        """The bytes of this message. They must be sent in the order of the calls."""
        payload = encode(message)
        seal = self._handshake.seal
        return frame(payload if seal is None else seal.seal(payload))

    def _meet(self, out: bytearray) -> bytes:
        """Read the peer's preamble, if it has arrived. Returns the bytes that follow it."""
        version = read_preamble(self._first)
        if version is None:
            return b""
        self.met = True
        rest = bytes(self._first[PREAMBLE_BYTES:])
        self._first.clear()
        if not self._handshake.speaks_first:
            out += preamble()
        self._answer(self._handshake.meet(version), out)
        return rest

    def _handle(self, payload: bytes, out: bytearray) -> None:
        if self.established:
            self._messages.append(self._open(payload))
        else:
            self._answer(self._handshake.receive(payload), out)

    def _open(self, payload: bytes) -> Received:
        seal = self._handshake.seal
        return self._decode(payload if seal is None else seal.open(payload))

    def _answer(self, payloads: list[bytes], out: bytearray) -> None:
        for payload in payloads:
            out += frame(payload)
        self.error = self._handshake.error
        if self._handshake.done:
            self.established = True
            self._reader.limit_bytes_max = FRAME_BYTES_MAX
