"""One host: an ssh client on this machine, and through it far.py and its agent on the other.

    start() ► Facts ► go() ► beats, signals ► wait() ► End

Knows processes, pipes, the words between the two sides, and why ssh did not get there, from its own words (explain());
knows nothing of other hosts. The system's ssh decides how a
host is reached: configuration, keys, jumps. It can never ask: no terminal, no password, no unknown key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.launchers.ssh.facts import AgentExit, HostFacts, LaunchSpec
from holdfast.launchers.ssh.hosts import HostSpec, die_with_launcher
from holdfast.launchers.ssh.screen import Feed, Screen
from holdfast.protocol.errors import HostUnreachableError

SHOWN_CHARACTERS_MAX = 240
TOO_OLD = "too old for holdfast: Python "
"""What a Python says that cannot even read far.py."""

_KEY_FILE = re.compile(r"Offending \S+ key in (\S+)")
_UNREACHABLE = re.compile(
    r"Connection refused|timed out|No route to host|Network is unreachable|Connection closed|Connection reset"
    r"|kex_exchange_identification|Host is down|banner exchange"
)
_TURNED_AWAY = re.compile(r"^(?:kex|ssh)_exchange_identification: ", re.MULTILINE)
_PARTING = re.compile(r"Timeout, server|Connection (?:to|reset|closed)|client_loop|packet_write|Read from remote|ssh: ")
_NOISE = re.compile(r"^(?:@+.*|Warning: Permanently added .*|\s*|\*\*.*)$")


FAR = Path(__file__).with_name("far.py")
CONNECT_S = 10
"""Limit for the other machine's answer (ssh's ConnectTimeout, whole seconds)."""
LOGIN_S = 30.0
"""Until the far side has reported its host: a login may be slow, but not without limit."""
ALIVE_INTERVAL_S, ALIVE_COUNT_MAX = 3, 3
"""A connection that carries nothing back for so many such intervals is lost (ssh's ServerAlive…)."""
BEAT_S = 3.0
"""Interval of the heartbeats to the far side; well below its SILENCE_S."""
LAST_WORDS_S = 2.0
"""ssh has ended, but its pipes not: some master connection of the user's holds them open."""
END_S = 2.0
"""SIGTERM to SIGKILL, for ssh."""

OPTIONS = {
    "BatchMode": "yes",
    "LogLevel": "INFO",  # its errors are what we report
    "ConnectTimeout": CONNECT_S,
    "ServerAliveInterval": ALIVE_INTERVAL_S,
    "ServerAliveCountMax": ALIVE_COUNT_MAX,
    "ControlMaster": "no",  # one that runs is used; none is left behind
    "ClearAllForwardings": "yes",  # ports of the user's interactive sessions
    "RemoteCommand": "none",
    "ForwardX11": "no",
}
"""What a launcher needs whatever the user's configuration says; all else is left as configured."""


def client_line(
    spec: HostSpec, interpreter: str, source_bytes: int, run_id: str, ssh: Sequence[str] = ("ssh",)
) -> list[str]:
    """The ssh command. The far command is understood by every login shell; it shows in `ps` and holds no value."""
    read = (
        f'import os,sys;sys.version_info<(3,8) and sys.exit("{TOO_OLD}"+sys.version.split()[0]);'
        f's=b"";n={source_bytes};exec("while len(s)<n: s+=os.read(0,n-len(s)) or exit(0)");exec(s)'
    )
    home, path = ("~/", interpreter[2:]) if interpreter.startswith("~/") else ("", interpreter)
    far = f"exec {home}{shlex.quote(path)} -c {shlex.quote(read)} holdfast-agent {shlex.quote(run_id)}"
    options = [f"-o{name}={value}" for name, value in OPTIONS.items()]
    return [*ssh, "-T", *options, "--", spec.name, far]


def client_environment() -> dict[str, str]:
    """No prompts, not even from the clients that it starts for jump hosts, which ignore BatchMode."""
    return {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}


class SshSession:
    """One connection, used once."""

    def __init__(self, spec: HostSpec, order: LaunchSpec, screen: Screen, run_id: str) -> None:
        self.spec = spec
        self.facts: HostFacts | None = None
        self.turned_away = False
        """The host, or the way to it, has too many logins at once."""
        self._order = order
        self._screen = screen
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self._introduced: asyncio.Future[HostFacts] = self._loop.create_future()
        self._end: AgentExit | None = None
        self._went = False
        self._process: asyncio.subprocess.Process | None = None
        self._feeds: list[Feed] = []
        self._open_feeds = 0
        self._all_read = asyncio.Event()

    async def start(self) -> HostFacts:
        """Log in and ask. Raises HostUnreachableError; the connection is closed then."""
        source = FAR.read_bytes()
        expected = self._order.expected
        request = {
            "mark": self._screen.mark.decode(),
            "env": self._order.environ,
            "cwd": expected.cwd,
            "script": expected.path,
            "program": self._order.program,
        }
        try:
            await self._spawn(client_line(self.spec, expected.interpreter, len(source), self._run_id, self._order.ssh))
            self._write(source + json.dumps(request).encode() + b"\n")
            self.facts = await self._introduction(expected.interpreter)
        except BaseException:
            await self.close()
            raise
        for feed in self._feeds:
            feed.show()
        self._screen.console.wake()
        return self.facts

    async def _spawn(self, line: Sequence[str]) -> None:
        pipes = [os.pipe() for _ in range(2)]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *line,
                stdin=asyncio.subprocess.PIPE,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                env=client_environment(),
                start_new_session=True,  # Ctrl-C is ours to pass on, and there is no terminal to ask at
                preexec_fn=die_with_launcher,
            )
        except OSError as error:
            for mine, _ in pipes:
                os.close(mine)
            raise HostUnreachableError(f"ssh cannot be started: {error.strerror} (Debian: openssh-client)") from None
        finally:
            for _, theirs in pipes:
                os.close(theirs)
        self._open_feeds = len(pipes)
        self._feeds = [
            self._screen.feed(mine, self.spec.host, error=error, told=self._told, ended=self._feed_ended)
            for (mine, _), error in zip(pipes, (False, True), strict=True)
        ]

    async def _introduction(self, interpreter: str) -> HostFacts:
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        either: set[asyncio.Future[Any]] = {ended, self._introduced}
        try:
            await asyncio.wait(either, timeout=LOGIN_S, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await self._drained()
            if self._introduced.done():
                return self._introduced.result()
        finally:
            ended.cancel()
        code = self._process.returncode
        if code is None:
            await self.close()
        out, err = (feed.held() for feed in self._feeds)
        self.turned_away = is_turned_away(err)
        raise HostUnreachableError(explain(self.spec, err, code, interpreter, LOGIN_S, out))

    async def _drained(self) -> None:
        """ssh has ended: what it wrote last has been read."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_read.wait(), LAST_WORDS_S)

    def go(self, index: int | None, endpoint: str) -> None:
        """Order the far side to start its agent."""
        self._went = True
        message = {
            "argv": self._order.line(self.spec, index, endpoint),
            "lock": self._order.lock,
            "detach": self._order.detach,
        }
        self._write(json.dumps(message).encode() + b"\n")

    def beat(self) -> None:
        if self.facts is not None:
            self._write(b"beat\n")

    def signal(self, signum: int) -> None:
        """Send a signal to the agent on the host, if there is one yet."""
        self._write(f"signal {int(signum)}\n".encode())

    def kill(self) -> None:
        """Kill the agent on the host and all its processes at once."""
        self._write(b"kill\n")

    async def wait(self) -> AgentExit:
        """Wait until the agent, or the connection, has ended."""
        assert self._process is not None
        code = await self._process.wait()
        await self._drained()
        await self.close()
        if self._end is not None:
            return self._end
        if 0 < code < 255 and self._went:  # 0 without a last word is no success: ssh went into the background
            return AgentExit(code=code)
        return AgentExit(text=parting_words(self._feeds[1].last) or f"ssh ended with {code}")

    async def close(self) -> None:
        """End the ssh client, if it still runs; the far side takes that for a lost connection, unless it never got the
        order to start."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode is None:
            for signum in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signum)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), END_S)
                    break
        for feed in self._feeds:
            self._screen.console.detach(feed)
            feed.close()

    def _write(self, data: bytes) -> None:
        """Dropped where ssh has ended: its end is noticed elsewhere."""
        assert self._process is not None
        assert self._process.stdin is not None
        if self._process.returncode is None and not self._process.stdin.is_closing():
            self._process.stdin.write(data)

    # ---------------------------------------------------------------- the console's thread

    def _told(self, words: bytes) -> None:
        try:
            message: dict[str, Any] = json.loads(words)
        except ValueError:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._observe, message)

    def _feed_ended(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._count_feed)

    # ---------------------------------------------------------------- on the loop

    def _count_feed(self) -> None:
        self._open_feeds -= 1
        if not self._open_feeds:
            self._all_read.set()

    def _observe(self, message: dict[str, Any]) -> None:
        try:
            if "end" in message:
                self._end = AgentExit(code=message.pop("end"), **message)
            elif not self._introduced.done():
                self._introduced.set_result(msgspec.convert(message, HostFacts))
        except (TypeError, msgspec.ValidationError) as error:
            if not self._introduced.done():
                self._introduced.set_exception(HostUnreachableError(f"host {self.spec}: it talks nonsense: {error}"))


def is_turned_away(text: str) -> bool:
    """By sshd, before it had anything to do with us: it has too many logins at once (MaxStartups), of which a jump host
    sees those to all others."""
    return _TURNED_AWAY.search(text) is not None


def explain(spec: HostSpec, text: str, code: int | None, python: str, limit_s: float, out: str = "") -> str:
    """`text`: ssh's stderr; `code`: its exit code, None: it was given up after `limit_s`; `out`: what came to
    stdout."""
    return f"host {spec}: {_why(spec, text, code, python, limit_s, out)}"


def _why(spec: HostSpec, text: str, code: int | None, python: str, limit_s: float, out: str) -> str:
    said = last_words(text)
    if "Could not resolve hostname" in text:
        return f"its name does not resolve ({said.rpartition(': ')[2]}); neither ssh_config nor DNS knows it"
    if "IDENTIFICATION HAS CHANGED" in text:
        found = _KEY_FILE.search(text)
        where = f" (known by {found[1]})" if found else ""
        fix = f"if it is right: ssh-keygen -R {spec.host}"
        return f"its host key has changed{where}: a new machine, or somebody in between; {fix}"
    if "Host key verification failed" in text:
        return f"its host key is not known here yet; log in once by hand to check it: ssh {spec}"
    if "Permission denied" in text or "Too many authentication failures" in text:
        trial = f"ssh -o BatchMode=yes {spec} true"
        return f"no login without a password ({said}); set up a key or an agent until `{trial}` works"
    if code is None:
        return f"no login within {limit_s:g} s{f' ({said})' if said else ''}"
    if code == 255 and _UNREACHABLE.search(text):
        return f"cannot be reached by ssh ({said})"
    if code == 255:
        return f"ssh failed ({said or 'it does not say why'})"
    if code in (126, 127):
        return f"{python} cannot be started there ({said}); the same Python environment must be at the same path"
    if code < 0:
        return f"ssh was killed by signal {-code}"
    if said.startswith(TOO_OLD):
        return f"{python} is Python {said.removeprefix(TOO_OLD)} there; install the same environment"
    reason = said or last_words(out) or "nor did anybody else"
    return f"{python} ended with {code} there before it said anything ({reason})"


def last_words(text: str) -> str:
    """The last line that says something.

    >>> last_words("Warning: Permanently added 'a'.\\nssh: no.\\r\\n")
    'ssh: no'
    """
    lines = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
    return lines[-1].rstrip(".")[:SHOWN_CHARACTERS_MAX] if lines else ""


def parting_words(line: str) -> str:
    """What ssh says of a connection that it has lost; empty when the line is not ssh's.

    >>> parting_words("Timeout, server n1 not responding.\\r")
    'Timeout, server n1 not responding'
    """
    return line.strip().rstrip(".")[:SHOWN_CHARACTERS_MAX] if _PARTING.match(line) else ""
