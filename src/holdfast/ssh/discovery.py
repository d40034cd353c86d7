"""Which hosts there are, as the user's own program says: asked every few seconds, held to a limit, believed when it ends
with 0 and its lines are understood. Otherwise what it said last stays true, and the trouble is said once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from holdfast.core.errors import HostsError
from holdfast.runtime.secret_variables import without_secrets
from holdfast.ssh.hosts import HostSpec, parse_file
from holdfast.ssh.session import die_with_launcher

ASK_EVERY_S = 3.0
"""From one answer to the next question."""
ANSWER_S = 10.0
ANSWER_BYTES_MAX = 1 << 20


class Discovery:
    """One program."""

    def __init__(self, program: str, say: Callable[[str], None]) -> None:
        self._program = program
        self._say = say
        self._trouble = ""
        self._named = False

    async def ask(self) -> list[HostSpec] | None:
        """The hosts; None when there is no answer to believe."""
        try:
            hosts = await self._hosts()
        except (HostsError, OSError, TimeoutError) as error:
            trouble = self._words(error)
            if trouble != self._trouble:
                self._trouble = trouble
                self._say(f"{trouble}; the hosts stay as they are")
            return None
        self._trouble, self._named = "", bool(hosts)
        return hosts

    async def _hosts(self) -> list[HostSpec]:
        hosts = parse_file(await self._output(), f"--host-discovery {self._program}")
        if self._named and not hosts:  # rather a slip of the program's than all of them gone at once
            raise HostsError(f"--host-discovery {self._program} names no host any more")
        return hosts

    async def _output(self) -> str:
        process = await asyncio.create_subprocess_exec(
            self._program,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=without_secrets(os.environ),
            start_new_session=True,
            preexec_fn=die_with_launcher,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                data = await self._all(process.stdout)
                code = await process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # all that it has started: it may have ended before them
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        if code:
            raise HostsError(f"--host-discovery {self._program} ended with {code}")
        return data.decode(errors="replace")

    async def _all(self, stream: asyncio.StreamReader) -> bytes:
        data = b""
        while piece := await stream.read(ANSWER_BYTES_MAX):
            data += piece
            if len(data) > ANSWER_BYTES_MAX:
                raise HostsError(f"--host-discovery {self._program}: more than {ANSWER_BYTES_MAX} bytes")
        return data

    def _words(self, error: Exception) -> str:
        match error:
            case HostsError():
                return str(error)
            case TimeoutError():
                return f"--host-discovery {self._program}: no answer within {ANSWER_S:g} s"
            case _:
                return f"--host-discovery {self._program}: {getattr(error, 'strerror', None) or error}"
