"""Converts between messages and bytes: the preamble, frames, and messages, whose texts become safe for a console. PURE.

Knows no sockets and no time. Nothing is ever unpickled or evaluated: the decoders accept exactly the types they are
made for, with numbers within the bounds of protocol.policy. Anything else is a ProtocolError.

The format of preamble and frames never changes between protocol versions, so that two versions can always exchange the
reason of a refusal:

    preamble   b"HOLDFAST" + uint16 version      once, first, from each side
    frame      uint32 length + payload           big-endian, from then on
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.protocol.errors import ProtocolError
from holdfast.protocol.messages import (
    EXTENDED_BYTES_MAX,
    FromAgent,
    FromCoordinator,
    Ping,
    Pong,
    Progress,
    Stopped,
)
from holdfast.protocol.outcome import Failure, Verdict
from holdfast.protocol.rank_progress import Frame, RankSample

MAGIC = b"HOLDFAST"
PROTOCOL_VERSION = 1
"""The version of preamble, handshake and messages together. A peer of another version is refused, with a text that
names both."""
PREAMBLE_BYTES = len(MAGIC) + 2
LENGTH_BYTES = 4

HELLO_BYTES_MAX = 64 * 1024
"""Limit of a frame during the handshake."""
FRAME_BYTES_MAX = 4 * 1024 * 1024
"""Limit of a frame after the handshake."""

STORE_MAGIC = b"\x00\xce\xf7\x85\x3c"
"""First bytes of a torch TCPStore client: query VALIDATE (0), then 0x3C85F7CE in little-endian order."""

_STRANGERS = (
    (STORE_MAGIC, "a torch TCPStore client"),
    (b"\x16\x03", "a TLS client"),
    (b"HTTP/", "an HTTP answer"),
    (b"SSH-", "SSH"),
    *(
        (method, "an HTTP request")
        for method in (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"OPTIONS ", b"CONNECT ", b"PRI ")
    ),
)


def preamble(version: int = PROTOCOL_VERSION) -> bytes:
    return MAGIC + version.to_bytes(2, "big")


def read_preamble(data: bytes | bytearray) -> int | None:
    """The peer's protocol version; None while more bytes are needed.

    Raises ProtocolError as soon as the bytes cannot become a preamble.
    """
    if not MAGIC.startswith(data[: len(MAGIC)]):
        raise ProtocolError(f"not the holdfast protocol ({describe_stranger(bytes(data[:16]))})")
    if len(data) < PREAMBLE_BYTES:
        return None
    return int.from_bytes(data[len(MAGIC) : PREAMBLE_BYTES], "big")


def describe_stranger(first: bytes) -> str:
    """The name of the protocol that begins with these bytes, for a log line."""
    for start, name in _STRANGERS:
        if first.startswith(start):
            return name
    return f"it begins with {first[:16]!r}"


def frame(payload: bytes) -> bytes:
    """The payload as a frame. Raises ProtocolError when it is larger than any peer would accept."""
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {len(payload)} bytes cannot be sent; the limit is {FRAME_BYTES_MAX}")
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class FrameReader:
    """Cuts a stream into payloads. Holds at most one incomplete frame and the bytes of the last chunk."""

    __slots__ = ("_buffer", "limit_bytes_max")

    def __init__(self, limit_bytes_max: int) -> None:
        self._buffer = bytearray()
        self.limit_bytes_max = limit_bytes_max
        """Limit of a frame (bytes). It is raised between two frames, after the handshake."""

    @property
    def torn(self) -> bool:
        """Whether the newest frame is incomplete."""
        return bool(self._buffer)

    def only(self, data: bytes) -> bytes | None:
        """The payload of these new bytes if they are exactly one frame, as nearly always; None: they must be pushed."""
        length = len(data) - LENGTH_BYTES
        if self._buffer or not 0 <= length <= self.limit_bytes_max:
            return None
        return data[LENGTH_BYTES:] if int.from_bytes(data[:LENGTH_BYTES], "big") == length else None

    def push(self, data: bytes) -> None:
        self._buffer += data

    def pop(self) -> bytes | None:
        """The next whole payload; None while more bytes are needed. Raises ProtocolError on an oversized frame."""
        buffer = self._buffer
        if len(buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(buffer[:LENGTH_BYTES], "big")
        if length > self.limit_bytes_max:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {self.limit_bytes_max}")
        end = LENGTH_BYTES + length
        if len(buffer) < end:
            return None
        payload = bytes(buffer[LENGTH_BYTES:end])
        del buffer[:end]
        return payload

    def feed(self, data: bytes) -> list[bytes]:
        """All payloads that these bytes complete. Raises ProtocolError on an oversized frame."""
        self.push(data)
        payloads = []
        while (payload := self.pop()) is not None:
            payloads.append(payload)
        return payloads


# --- texts that are safe for a console --------------------------------------------------------------------------------

NAME_CHARS_MAX = 255
LINE_CHARS_MAX = 4096

NAMES = frozenset({"member", "host", "role"})
SEVERAL_LINES = frozenset({"text", "message", "traceback", "stderr_tail", "stdout_tail", "cause", "advice", "facts"})
"""Fields that may have several lines."""

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])|\x9b[0-?]*[ -/]*[@-~]"
)
"""Escape sequences (colours, titles, cursor movements), matched as a whole so that no rest of them is shown."""

T = TypeVar("T")


def clean(value: T, field: str = "") -> T:
    """The same value with every text in it cleaned: no escape sequences, no line breaks except where they belong. Cheap
    if nothing has to be changed, which is nearly always. The decoders call this once for every message, so that no
    other module has to: host names and reasons may contain any bytes, and holdfast shows them to users.

    >>> clean(("fine", "\\x1b[2Jholdfast: done\\n"))
    ('fine', 'holdfast: done')
    """
    return _mapped(value, field, _text)  # type: ignore[no-any-return]


def _mapped(value: Any, field: str, change: Callable[[str, str], str]) -> Any:
    """The value with each of its texts changed. `change` gets the text and the name of its field."""
    if isinstance(value, str):
        return change(value, field)
    if isinstance(value, Struct):
        old = {name: getattr(value, name) for name in value.__struct_fields__}
        new = {name: mapped for name, item in old.items() if (mapped := _mapped(item, name, change)) is not item}
        return replace(value, **new) if new else value
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, field, change) for item in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        return {_mapped(key, "", change): _mapped(item, field, change) for key, item in value.items()}
    return value


def _text(text: str, field: str) -> str:
    if field in SEVERAL_LINES:
        return text if text.isprintable() else "\n".join(map(_printable, text.split("\n")))
    chars_max = NAME_CHARS_MAX if field in NAMES else LINE_CHARS_MAX
    return text if text.isprintable() and len(text) <= chars_max else one_line(text, chars_max)


def one_line(text: str, chars_max: int = LINE_CHARS_MAX) -> str:
    return _printable(text).strip()[:chars_max]


def _printable(text: str) -> str:
    plain = _ESCAPE.sub("", text)
    return "".join(character if character.isprintable() else " " for character in plain)


# --- messages ---------------------------------------------------------------------------------------------------------

MESSAGE_BYTES_MAX = FRAME_BYTES_MAX - 1024
"""Limit of a message (bytes). The rest of a frame is for the MAC in front of the message."""

TEXT_CHARS_CUTS = (4096, 512, 64)
"""Failure texts are cut to these lengths, one after the other, until the message fits into a frame."""
FAILURES_MAX = 4096
"""Number of failures that are sent in a message that has to be cut."""
CHARS_PER_FRAME = 64
"""Number of characters of a limit for which one frame of a stack is kept."""

TEXTLESS = (Ping, Pong, Progress, Stopped)
"""Frequent messages without texts that have to be cleaned."""

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()


@cache
def _agent_decoder() -> msgspec.msgpack.Decoder[FromAgent]:
    """Made with the first message: it takes 2 ms, and the agent of a job on one node sends none."""
    return msgspec.msgpack.Decoder(FromAgent)


@cache
def _coordinator_decoder() -> msgspec.msgpack.Decoder[FromCoordinator]:
    return msgspec.msgpack.Decoder(FromCoordinator)


def encode(message: Struct) -> bytes:
    """The message in at most MESSAGE_BYTES_MAX bytes. A message with very many failures loses a part of their texts,
    one with very many stacks loses their outer frames.

    Raises ProtocolError when a message without either is too large.
    """
    try:
        data = _encoder.encode(message)
    except UnicodeEncodeError:
        # Texts of a worker may contain bytes that are not valid UTF-8.
        message = _mapped(message, "", lambda text, _: _valid(text))
        data = _encoder.encode(message)
    for shorter in _CUTS:
        if len(data) <= MESSAGE_BYTES_MAX:
            return data
        data = _encoder.encode(_cut(message, shorter))
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a {type(message).__name__} of {len(data)} bytes does not fit into a frame")
    return data


def encode_extended(message: Struct) -> bytes:
    """The body of an Extended. Raises ProtocolError if it is too large for one."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:
        # Names of files need not be valid text.
        body = _encoder.encode(_mapped(message, "", lambda text, _: _valid(text)))
    if len(body) > EXTENDED_BYTES_MAX:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes does not fit into a frame")
    return body


def decode_from_agent(data: bytes) -> FromAgent:
    """Raises ProtocolError on anything but one well-formed message of an agent."""
    return decode(_agent_decoder(), data, "an agent")


def decode_from_coordinator(data: bytes) -> FromCoordinator:
    """Raises ProtocolError on anything but one well-formed message of a coordinator."""
    return decode(_coordinator_decoder(), data, "a coordinator")


def decode(decoder: msgspec.msgpack.Decoder[Message], data: bytes, sender: str) -> Message:
    """One message, its texts safe for a console. Raises ProtocolError, naming the sender, on anything else."""
    try:
        message = decoder.decode(data)
        return message if isinstance(message, TEXTLESS) else clean(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of {sender}: {error}") from None


def _cut(value: Any, shorter: Callable[[Failure], Failure]) -> Any:
    """The value with its failures made shorter, except the one that a verdict names as the cause: the reader needs it
    most. An outcome travels in a Finish, and in the charter in whatever carries one."""
    if isinstance(value, Failure):
        return shorter(value)
    if isinstance(value, Verdict):
        return replace(value, collateral=_cut(value.collateral, shorter))
    if isinstance(value, Struct):
        return replace(value, **{name: _cut(getattr(value, name), shorter) for name in value.__struct_fields__})
    if isinstance(value, tuple) and value and isinstance(value[0], Struct):
        items = value[:FAILURES_MAX] if isinstance(value[0], Failure) else value
        return tuple(_cut(each, shorter) for each in items)
    return value


def _cut_failure(failure: Failure, chars_max: int) -> Failure:
    """Keep the ends of tracebacks and stderr, and the beginnings of messages: they say the most."""
    return replace(
        failure,
        error_type=failure.error_type[:chars_max],
        message=failure.message[:chars_max],
        traceback=failure.traceback[-chars_max:],
        stderr_tail=failure.stderr_tail[-chars_max:],
        stdout_tail=failure.stdout_tail[-chars_max:],
    )


def _bare(failure: Failure) -> Failure:
    """What is shown of a failure that is a consequence."""
    chars_max = TEXT_CHARS_CUTS[-1]
    return Failure(
        rank=failure.rank,
        local_rank=failure.local_rank,
        host=failure.host,
        pid=failure.pid,
        exit_code=failure.exit_code,
        error_type=failure.error_type[:chars_max],
        message=failure.message[:chars_max],
        after_stop=failure.after_stop,
        started=failure.started,
        timestamp=failure.timestamp,
        stepped=failure.stepped,
    )


_CUTS: tuple[Callable[[Failure], Failure], ...] = (
    *(partial(_cut_failure, chars_max=chars_max) for chars_max in TEXT_CHARS_CUTS),
    _bare,
)


def cut_sample(sample: RankSample, chars_max: int) -> RankSample:
    """Keep the innermost frames."""
    frames = sample.frames[: max(1, chars_max // CHARS_PER_FRAME)]
    return replace(
        sample,
        frames=tuple(Frame(_valid(each.file[-chars_max:]), each.line, _valid(each.function)) for each in frames),
        note=_valid(sample.note[:chars_max]),
        file=_valid(sample.file),
    )


def send_samples(
    send: Callable[[Struct], None], message: Callable[[tuple[RankSample, ...]], Struct], samples: tuple[RankSample, ...]
) -> None:
    """Send these samples in an extension's message. Very many stacks lose their outer frames; if that is not enough,
    none is sent. `send` raises ProtocolError for a message that is too large."""
    for chars_max in (None, *TEXT_CHARS_CUTS):
        fitting = samples if chars_max is None else tuple(cut_sample(each, chars_max) for each in samples)
        try:
            send(message(fitting))
        except ProtocolError:
            continue
        return
    send(message(()))


def _valid(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
