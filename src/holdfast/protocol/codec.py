"""Encodes and decodes messages: those of protocol.messages, and others with a decoder of their own. PURE.

Knows msgpack and the message types. Nothing is ever unpickled or evaluated: the decoders accept exactly the types they
are made for, with numbers within protocol.bounds. Anything else is a ProtocolError.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.protocol.errors import ProtocolError
from holdfast.protocol.framing import FRAME_BYTES_MAX
from holdfast.protocol.messages import (
    Finish,
    FromAgent,
    FromCoordinator,
    Looked,
    ReplacementFailed,
    WorkerDone,
    WorkersFailed,
)
from holdfast.protocol.outcome import TEXT_BYTES_MAX, Failure, Outcome
from holdfast.protocol.rank_progress import Frame, RankSample
from holdfast.protocol.words import clean

MESSAGE_BYTES_MAX = FRAME_BYTES_MAX - 1024
"""The rest of a frame is for the MAC in front of the message."""

TEXT_CHARS_CUTS = (4096, 512, 64)
"""Failure texts are cut to these lengths, one after the other, until the message fits into a frame."""
FAILURES_MAX = 4096
"""If that is not enough, at most this many failures are sent."""
CHARS_PER_FRAME = 64
"""Stacks are cut to one frame per this many characters of the limit."""

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()
_agent_decoder: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_coordinator_decoder: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)


def encode(message: Struct) -> bytes:
    """The message in at most MESSAGE_BYTES_MAX bytes. A message with very many failures loses the ends of their texts,
    one with very many stacks loses their outer frames.

    Raises ProtocolError when a message without either is too large.
    """
    try:
        data = _encoder.encode(message)
    except UnicodeEncodeError:
        # Texts of a worker may contain bytes that are not valid UTF-8.
        data = _encoder.encode(_cut(message, TEXT_BYTES_MAX))
    for chars_max in TEXT_CHARS_CUTS:
        if len(data) <= MESSAGE_BYTES_MAX:
            return data
        data = _encoder.encode(_cut(message, chars_max))
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a {type(message).__name__} of {len(data)} bytes does not fit into a frame")
    return data


def decode_from_agent(data: bytes) -> FromAgent:
    """Raises ProtocolError on anything but one well-formed message of an agent."""
    return decode(_agent_decoder, data, "an agent")


def decode_from_coordinator(data: bytes) -> FromCoordinator:
    """Raises ProtocolError on anything but one well-formed message of a coordinator."""
    return decode(_coordinator_decoder, data, "a coordinator")


def decode(decoder: msgspec.msgpack.Decoder[Message], data: bytes, sender: str) -> Message:
    """One message, its texts safe for a console. Raises ProtocolError, naming the sender, on anything else."""
    try:
        return clean(decoder.decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of {sender}: {error}") from None


def _cut(message: Struct, chars_max: int) -> Struct:
    if isinstance(message, WorkerDone) and message.left is not None:
        return replace(message, left=_cut_failure(message.left, chars_max))
    if isinstance(message, WorkersFailed | ReplacementFailed):
        return replace(message, failures=_cut_failures(message.failures, chars_max))
    if isinstance(message, Finish):
        return replace(message, outcome=_cut_outcome(message.outcome, chars_max))
    if isinstance(message, Looked):
        return replace(message, samples=tuple(_cut_sample(sample, chars_max) for sample in message.samples))
    return message


def _cut_outcome(outcome: Outcome, chars_max: int) -> Outcome:
    """Cut all texts except the culprit's, which the reader needs most."""
    if outcome.verdict is None:
        return outcome
    collateral = _cut_failures(outcome.verdict.collateral, chars_max)
    return replace(outcome, verdict=replace(outcome.verdict, collateral=collateral))


def _cut_failures(failures: tuple[Failure, ...], chars_max: int) -> tuple[Failure, ...]:
    return tuple(_cut_failure(failure, chars_max) for failure in failures[:FAILURES_MAX])


def _cut_failure(failure: Failure, chars_max: int) -> Failure:
    """Keep the ends of tracebacks and stderr, and the beginnings of messages: they say the most."""
    return replace(
        failure,
        error_type=_clean(failure.error_type[:chars_max]),
        message=_clean(failure.message[:chars_max]),
        traceback=_clean(failure.traceback[-chars_max:]),
        stderr_tail=_clean(failure.stderr_tail[-chars_max:]),
    )


def _cut_sample(sample: RankSample, chars_max: int) -> RankSample:
    """Keep the innermost frames."""
    frames = sample.frames[: max(1, chars_max // CHARS_PER_FRAME)]
    return replace(
        sample,
        frames=tuple(Frame(_clean(each.file[-chars_max:]), each.line, _clean(each.function)) for each in frames),
        note=_clean(sample.note[:chars_max]),
        file=_clean(sample.file),
    )


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
