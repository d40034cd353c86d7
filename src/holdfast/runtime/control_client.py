"""A command's side of the control socket: one question, one answer, and never a wait without an end.

Plain sockets: a command that asks one agent one thing needs no event loop.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from typing import TypeVar

import msgspec

from holdfast.core.errors import ControlRefusedError, ControlSilentError, NoRunError
from holdfast.core.protocol import Question
from holdfast.linux import process_stat
from holdfast.runtime import running
from holdfast.runtime.running import RunningAgent
from holdfast.wire.words import clean

ANSWER_S_MAX = 5.0
STACKS_S_MAX = 12.0
"""Both longer than an agent waits for its coordinator."""
ANSWER_BYTES_MAX = 64 * 1024 * 1024
CHUNK_BYTES = 256 * 1024

Body = TypeVar("Body")


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an agent answers."""

    whole: bool = True
    """False: the coordinator could not be asked; the answer is this node's alone."""
    body: msgspec.Raw = msgspec.Raw(b"null")
    code: str = ""
    """Of an error: the question was not answered, and `text` says why."""
    text: str = ""

    def read(self, kind: type[Body]) -> Body:
        """The body as what it should be. Raises ControlRefusedError."""
        try:
            return clean(msgspec.json.decode(self.body, type=kind))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ControlRefusedError(f"the answer is of another version of holdfast: {error}") from None


class Call:
    """One connection to an agent, with the question asked. A context manager."""

    def __init__(self, entry: RunningAgent, ask: Question | None) -> None:
        """`ask` None: how does it end? Raises NoRunError, ControlRefusedError, ControlSilentError."""
        self._entry = entry
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._received = bytearray()
        self._limit_s = STACKS_S_MAX if ask is Question.STACKS else ANSWER_S_MAX
        self._socket.settimeout(self._limit_s)
        try:
            with running.reachable(entry.socket) as name:
                self._socket.connect(name)
            self._socket.sendall(msgspec.json.encode({"ask": ask}) + b"\n")
        except OSError as error:
            self._socket.close()
            raise self._reason(error) from None

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Can be read when the answer comes, or the agent has gone."""
        return self._socket.fileno()

    def answer(self, limit_s: float | None = None) -> Reply | None:
        """None: the agent has ended without an answer. Raises ControlSilentError after `limit_s` (or what is usual for the
        question), ControlRefusedError."""
        self._limit_s = limit_s or self._limit_s
        end = time.monotonic() + self._limit_s
        while b"\n" not in self._received:
            try:
                self._socket.settimeout(max(0.001, end - time.monotonic()))
                chunk = self._socket.recv(CHUNK_BYTES)
            except ConnectionResetError:
                return None
            except OSError as error:
                raise self._reason(error) from None
            if not chunk:
                return None
            self._received += chunk
            if len(self._received) > ANSWER_BYTES_MAX:
                raise ControlRefusedError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        try:
            reply = msgspec.json.decode(bytes(self._received), type=Reply)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ControlRefusedError(
                f"what listens at {self._entry.socket} is no agent of holdfast's: {error}"
            ) from None
        if reply.code:
            kind = ControlSilentError if reply.code == ControlSilentError.code else ControlRefusedError
            raise kind(f"the agent of {self._entry.name} (pid {self._entry.pid}): {reply.text}")
        return reply

    def _reason(self, error: OSError) -> NoRunError | ControlRefusedError | ControlSilentError:
        entry = self._entry
        if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
            return ControlSilentError(
                f"the agent of {entry.name} (pid {entry.pid}) does not answer within {self._limit_s:g} s{_plight(entry.pid)}"
            )
        if error.errno in (*running.MISSING, errno.EPIPE, errno.ECONNRESET):
            return NoRunError(f"{entry.name} has ended")
        if isinstance(error, PermissionError):
            return ControlRefusedError(f"{entry.socket} belongs to another user{_whose(entry.socket)}")
        return ControlSilentError(f"the agent of {entry.name} cannot be asked: {error.strerror or error}")


def ask(entry: RunningAgent, question: Question) -> Reply:
    """One question. Raises NoRunError, ControlRefusedError, ControlSilentError."""
    with Call(entry, question) as call:
        reply = call.answer()
    if reply is None:
        raise NoRunError(f"{entry.name} has just ended")
    return reply


def ask_any(entries: list[RunningAgent], question: Question) -> tuple[RunningAgent, Reply]:
    """Of the first agent of a job that answers. Raises what the last one's silence is."""
    *others, last = entries
    for entry in others:
        with contextlib.suppress(ControlSilentError, NoRunError):
            return entry, ask(entry, question)
    return last, ask(last, question)


def _plight(pid: int) -> str:
    """What the kernel says of a process that does not answer."""
    stat = process_stat(pid)
    match stat and stat.state:
        case None:
            return ""
        case "T" | "t":
            return f": it was stopped by a signal; `kill -CONT {pid}` lets it go on"
        case "D":
            return ": it waits in the kernel, for a disk perhaps"
        case _:
            return f"; `kill -9 {pid}` ends its part of the job, workers and all"


def _whose(path: str) -> str:
    with contextlib.suppress(OSError):
        return f" (uid {os.stat(os.path.dirname(path)).st_uid})"
    return ""
