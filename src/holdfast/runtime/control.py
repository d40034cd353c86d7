"""The agent's control socket: a Unix socket for commands on the same host, which only its user may connect to.

One JSON line in, `{"ask": "profile", "by": …, "about": {…}}`, one JSON line out. Knows who may ask, how large a
question is and how long a client may take: a client that stalls delays nothing else. What a question is about is passed
on unread. `ControlRequests` gives the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec

from holdfast import seqpacket
from holdfast.detached import run_detached
from holdfast.journal import Journal
from holdfast.protocol.errors import ControlRefusedError, ControlSilentError
from holdfast.protocol.messages import ABOUT_BYTES_MAX, QUESTION_CHARS_MAX
from holdfast.protocol.options import RunOptions
from holdfast.protocol.outcome import Outcome
from holdfast.run_folder import RunFolder
from holdfast.runtime import running
from holdfast.runtime.node_extension import Question
from holdfast.runtime.running import ASKED_S, NodeEnd, Reply

REQUEST_BYTES_MAX = ABOUT_BYTES_MAX
BY_CHARACTERS_MAX = 200
ASKED_S_MAX = 3600.0
"""Longest time for which a command may wait for an answer (s)."""
REQUEST_S_MAX = 5.0
"""Limit from the connection to the end of the question (s)."""
TAKE_S_MAX = 10.0
"""Limit for a client to read its answer (s)."""
CLIENTS_MAX = 32
"""Number of clients that are answered at the same time."""
CLOSE_S_MAX = 1.0
"""Limit at the end for answers in progress, and for the removal of socket and entry (s)."""


class ControlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question."""

    ask: Annotated[str, msgspec.Meta(max_length=QUESTION_CHARS_MAX)] | None = None
    """None: the question how the agent ends, answered at its end."""
    by: Annotated[str, msgspec.Meta(max_length=BY_CHARACTERS_MAX)] = ""
    """The asker, in words; empty: the command of the question's name."""
    about: msgspec.Raw = msgspec.Raw(b"{}")
    """The subject of the question, as JSON. Only the extension that answers reads it."""
    within_s: Annotated[float, msgspec.Meta(ge=0, le=ASKED_S_MAX)] = ASKED_S
    """Time for which the command waits (s)."""


Answerer = Callable[[Question], Awaitable[Reply]]


class Control:
    """The control socket of one agent. Its errors go to the journal, and the job runs without it."""

    def __init__(self, answer: Answerer, journal: Journal) -> None:
        self._answer = answer
        self._journal = journal
        self._server: asyncio.Server | None = None
        self._entry: running.WrittenEntry | None = None
        self._socket = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        """Clients that are being answered."""
        self._ended: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        """The end of the agent; its result is None after a fault of ours."""

    async def open(self, options: RunOptions, folder: RunFolder, host: str) -> None:
        """Listen, and then publish the socket. Never raises."""
        try:
            await self._open(options, folder, host)
        except Exception as error:  # noqa: BLE001 - the job runs without it as well
            self._journal.fault("control", error)

    async def _open(self, options: RunOptions, folder: RunFolder, host: str) -> None:
        try:
            private: str | None = running.private_folder()
        except OSError as error:
            private = None
            self._journal.write("control", problem=f"no list of running jobs: {error.strerror or error}")
        try:
            listening = self._bind(folder, private)
        except OSError as error:
            self._journal.write("control", problem=f"no control socket: {error.strerror or error}")
            return
        more: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=REQUEST_BYTES_MAX, **more)
        entry = running.RunningAgent(
            run_id=options.job.run_id,
            endpoint=options.meeting_point,
            host=host,
            pid=os.getpid(),
            folder=str(folder.path or ""),
            socket=self._socket,
            began_epoch_s=time.time(),
            script=options.command.target,
        )
        if private is not None:
            try:
                self._entry = running.write(entry, private)
            except OSError as error:
                self._journal.write("control", problem=f"no entry in {private}: {error.strerror or error}")

    async def close(self, outcome: Outcome | None) -> None:
        """Close the socket. `outcome` None: there is none, because a fault of ours ends this process."""
        if not self._ended.done():
            self._ended.set_result(outcome)
        if not (self._entry or self._socket):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                try:
                    await run_detached(self._remove)  # before the socket closes: every job in the list can be asked
                finally:
                    if self._server is not None:
                        self._server.close()
                while self._tasks:
                    await asyncio.wait(self._tasks)
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _remove(self) -> None:
        if self._entry is not None:
            running.remove(self._entry)
        if self._socket:
            with contextlib.suppress(OSError):
                os.unlink(self._socket)

    def _bind(self, folder: RunFolder, private: str | None) -> socket.socket:
        """Bind in the run folder; without one, or where it takes no sockets, in the private folder. Raises OSError."""
        places = [str(folder.path / running.SOCKET_NAME)] if folder.path is not None else []
        if private is not None:
            places.append(os.path.join(private, f"{os.getpid()}-{os.urandom(4).hex()}.sock"))
        error = OSError("there is no folder for it")
        for path in places:
            try:
                listening = _listen(path)
            except OSError as problem:
                error = problem
                continue
            self._socket = path
            return listening
        raise error

    # ---------------------------------------------------------------- one client

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            reply = await self._reply(reader, writer)
            if reply is not None:
                writer.write(msgspec.json.encode(reply) + b"\n")
                async with asyncio.timeout(TAKE_S_MAX):
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the client is gone, or does not read, or we end
        except Exception as error:  # noqa: BLE001 - the client gets no answer, and the job continues
            self._journal.fault("control", error)
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Reply | None:
        """The answer; None: the client is gone."""
        try:
            async with asyncio.timeout(REQUEST_S_MAX):
                line = await reader.readline()
        except (TimeoutError, ValueError):
            return Reply(code=ControlRefusedError.code, text="no question within the limits of time and size")
        # The question is read before any refusal: a client whose socket is closed early cannot read the reason.
        if not line:
            return None
        if _peer_uid(writer) not in (0, os.geteuid()):
            return Reply(code=ControlRefusedError.code, text="this job belongs to another user")
        if len(self._tasks) > CLIENTS_MAX:
            return Reply(code=ControlSilentError.code, text=f"{CLIENTS_MAX} clients are being answered; try again")
        try:
            request = msgspec.json.decode(line, type=ControlRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return Reply(code=ControlRefusedError.code, text=f"not a question: {error}")
        if request.ask is None:
            return await self._until_ended(reader)
        return await self._answer(Question(request.ask, request.by, bytes(request.about), request.within_s))

    async def _until_ended(self, reader: asyncio.StreamReader) -> Reply | None:
        """Wait for the end of the job or of the client, whichever comes first."""
        gone = asyncio.ensure_future(reader.read(1))
        try:
            waiting: set[asyncio.Future[Any]] = {gone, self._ended}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await gone  # a client that disconnected is not an error
        if not self._ended.done():
            return None
        outcome = self._ended.result()
        if outcome is None:
            return Reply(code="HF900", text="the agent ended by a fault of its own")
        cause = outcome.verdict.cause if outcome.verdict is not None else ""
        end = NodeEnd(outcome.kind.value, outcome.exit_code, outcome.message, cause)
        return Reply(body=msgspec.Raw(msgspec.json.encode(end)))


def _listen(path: str) -> socket.socket:
    """A listening socket at this path, which only its owner can connect to from the first moment. Raises OSError."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o600)  # a bound path takes its mode from the socket
        with running.reachable(path) as name:
            listening.bind(name)
        os.chmod(path, 0o600)
        listening.listen()
    except BaseException:
        listening.close()
        raise
    listening.setblocking(False)
    return listening


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    return seqpacket.peer(writer.get_extra_info("socket"))[1]
