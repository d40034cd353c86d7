"""One host: an ssh client on this machine, and through it far.py and its agent; and the console that shows all hosts.

    start() ► HostFacts ► go() ► beats, signals ► wait() ► AgentExit

    Screen ── Console (one thread)
       └── Feed per host and stream: reads ssh's pipe only when the console has room, so a stalled terminal
           delays only what is shown; on the hosts the log files are the queue

The system's ssh decides how a host is reached: configuration, keys, jumps. It never asks: no terminal, no password, no
unknown key. `explain` converts ssh's own messages into ours. The console shows whole lines in order of arrival. Lines
with the mark of this run are far.py's messages and are not shown. The agents' own lines (`holdfast: …`) are shown with
the host's name; equal lines of several agents are shown once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.launchers.ssh.hosts import AgentExit, HostFacts, HostSpec, LaunchSpec, die_with_launcher
from holdfast.protocol.errors import HostUnreachableError
from holdfast.supervisor.console import SAY_PREFIX, Console, ConsoleStream
from holdfast.supervisor.log_fold import LineCutter

CHUNK_BYTES_MAX = 64 * 1024
ONCE_S = 3.0
"""Equal lines of another host within this time are not shown again."""
EARLY_BYTES_MAX = 16 * 1024
"""Limit for the output before the far side's first message: greetings, or ssh's errors."""

_PREFIX = SAY_PREFIX.encode()


class Screen:
    """The console of a job on several hosts."""

    def __init__(self, mark: str) -> None:
        self.console = Console()
        self.mark = mark.encode()
        self._shown: dict[bytes, tuple[str, float]] = {}
        """Agents' own lines that were shown: the host, and until when other hosts' equal lines are left out."""
        self.drops = False
        """Whether output for which the console has no room is read and dropped."""

    def say(self, text: str) -> None:
        self.console.say(text)

    def feed(
        self, fd: int, host: str, *, error: bool, on_message: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> Feed:
        """Show the output from this descriptor, which the feed then owns.

        `on_message` gets the marked lines, and `on_end` is called when all is read, both in the console's thread.
        """
        feed = Feed(fd, self.console.err if error else self.console.out, self, host, on_message, on_end)
        self.console.attach(feed)
        return feed

    def edit(self, lines: bytes, host: str, now: float) -> bytes:
        """The lines as they are shown: agents' own lines get the host's name, and equal ones of several hosts are
        one."""
        if _PREFIX not in lines:
            return lines
        return b"".join(self._edit_line(line, host, now) for line in lines.splitlines(keepends=True))

    def _edit_line(self, line: bytes, host: str, now: float) -> bytes:
        if not line.startswith(_PREFIX):
            return line
        words = line[len(_PREFIX) :]
        who, until = self._shown.get(words, ("", 0.0))
        if who and who != host and now < until:
            return b""
        self._shown = {text: one for text, one in self._shown.items() if now < one[1]}
        self._shown[words] = (host, now + ONCE_S)
        return _PREFIX + host.encode() + b": " + words

    @property
    def written_bytes(self) -> int:
        return sum(stream.written_bytes for stream in {self.console.out, self.console.err})

    def drop(self) -> None:
        """Stop waiting for the console: the hosts' reports of their end come after the output that it does not take."""
        self.drops = True
        self.console.wake()

    def close(self, stall_s: float) -> None:
        self.console.close(stall_s)


class Feed:
    """One pipe from ssh, a Source of the console.

    The constructor, `early_output` and `show` belong to the event loop's thread, all else to the console's.
    """

    def __init__(
        self,
        fd: int,
        stream: ConsoleStream,
        screen: Screen,
        host: str,
        on_message: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        os.set_blocking(fd, False)
        self.progress = 0
        """Number of reads; the console sees by it whether the feed moves."""
        self.last = ""
        """The last line that was read. It is ssh's own message if the connection is lost."""
        self._fd: int | None = fd
        self._stream = stream
        self._screen = screen
        self._host = host
        self._on_message = on_message
        self._on_end = on_end
        self._cutter = LineCutter()
        self._lock = threading.Lock()
        self._early: deque[bytes] | None = deque()
        """Lines from before `show`, at most EARLY_BYTES_MAX, for the message if the login fails; None: shown
        directly."""
        self._early_bytes = 0

    def early_output(self) -> str:
        """The output from before `show`, its newest EARLY_BYTES_MAX bytes."""
        with self._lock:
            return b"".join(self._early or ()).decode(errors="replace")

    def show(self) -> None:
        """Show the output from now on. Earlier output was a login shell's greetings, and is not shown."""
        with self._lock:
            self._early = None

    def fileno(self) -> int | None:
        return self._fd if self._stream.free or self._screen.drops or self._early is not None else None

    def pump(self, now: float) -> float | None:
        while (fd := self._fd) is not None and self.fileno() is not None:
            try:
                data = os.read(fd, CHUNK_BYTES_MAX)
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            self.progress += 1
            self._take(self._cutter.feed(data) if data else self._cutter.flush(), now)
            if not data:
                self.close()
        return None

    def _take(self, lines: bytes, now: float) -> None:
        messages: list[bytes] = []
        if self._screen.mark in lines:
            lines = b"".join(self._unmarked(line, messages) for line in lines.splitlines(keepends=True))
        if lines:
            self._put(lines, now)
        # Afterwards: the event loop may call `show` at once, and what came before the message is a greeting.
        for words in messages:
            self._on_message(words)

    def _put(self, lines: bytes, now: float) -> None:
        self.last = lines[lines.rfind(b"\n", 0, -1) + 1 :].decode(errors="replace")
        with self._lock:
            if self._early is not None:
                self._early.append(lines)
                self._early_bytes += len(lines)
                while self._early_bytes > EARLY_BYTES_MAX:
                    self._early_bytes -= len(self._early.popleft())
                return
        if self._stream.free or not self._screen.drops:
            self._stream.put(self._screen.edit(lines, self._host, now))

    def _unmarked(self, line: bytes, messages: list[bytes]) -> bytes:
        """The line without a message of far.py, which may follow an unfinished line of a worker. `messages` gets it."""
        before, mark, words = line.partition(self._screen.mark)
        if mark:
            messages.append(words)
            return before + b"\n" if before else b""
        return line

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)
            self._on_end()


SHOWN_CHARACTERS_MAX = 240
TOO_OLD = "too old for holdfast: Python "
"""Beginning of the message of a Python that is too old to read far.py; its version follows."""

_KEY_FILE = re.compile(r"Offending \S+ key in (\S+)")
_UNREACHABLE = re.compile(
    r"Connection refused|timed out|No route to host|Network is unreachable|Connection closed|Connection reset"
    r"|kex_exchange_identification|Host is down|banner exchange"
)
_TOO_MANY_LOGINS = re.compile(r"^(?:kex|ssh)_exchange_identification: ", re.MULTILINE)
_CONNECTION = re.compile(
    r"Timeout, server|Connection (?:to|reset|closed)|client_loop|packet_write|Read from remote|ssh: "
)
_NOISE = re.compile(r"^(?:@+.*|Warning: Permanently added .*|\s*|\*\*.*)$")


FAR = Path(__file__).with_name("far.py")
CONNECT_S = 10
"""Limit for the answer of the other machine (ssh's ConnectTimeout, whole seconds)."""
LOGIN_S = 30.0
"""Limit until the far side has reported its host: a login may be slow."""
ALIVE_INTERVAL_S, ALIVE_COUNT_MAX = 3, 3
"""A connection is lost after this many intervals (s) without an answer (ssh's ServerAliveInterval, …CountMax)."""
BEAT_S = 3.0
"""Interval of the heartbeats to the far side; well below its SILENCE_S."""
PIPES_END_S = 2.0
"""Limit for the end of ssh's pipes after its own end: a master connection of the user may keep them open."""
END_S = 2.0
"""Time from SIGTERM to SIGKILL for the ssh client."""

OPTIONS = {
    "BatchMode": "yes",
    "LogLevel": "INFO",  # its errors are what we report
    "ConnectTimeout": CONNECT_S,
    "ServerAliveInterval": ALIVE_INTERVAL_S,
    "ServerAliveCountMax": ALIVE_COUNT_MAX,
    "ControlMaster": "no",  # an existing one is used; no new one is left behind
    "ClearAllForwardings": "yes",  # ports of the user's interactive sessions
    "RemoteCommand": "none",
    "ForwardX11": "no",
}
"""Options that the launcher needs in every configuration; the others stay as the user configured them."""


def client_line(
    spec: HostSpec, interpreter: str, source_bytes: int, run_id: str, ssh: Sequence[str] = ("ssh",)
) -> list[str]:
    """The ssh command. Every login shell understands the far command. It is visible in `ps` and contains no secret.

    The far Python reads `source_bytes` of standard input, which are far.py, and executes them.
    """
    # The program is exactly `source_bytes` long, so that the request behind it stays on standard input for far.py.
    # The program reads exactly `source_bytes`, so that the request behind them stays on standard input for far.py.
    read = (
        f'import os,sys;sys.version_info<(3,8) and sys.exit("{TOO_OLD}"+sys.version.split()[0]);'
        f's=b"";n={source_bytes};exec("while len(s)<n: s+=os.read(0,n-len(s)) or exit(0)");exec(s)'
    )
    home, path = ("~/", interpreter[2:]) if interpreter.startswith("~/") else ("", interpreter)
    far = f"exec {home}{shlex.quote(path)} -c {shlex.quote(read)} holdfast-agent {shlex.quote(run_id)}"
    options = [f"-o{name}={value}" for name, value in OPTIONS.items()]
    return [*ssh, "-T", *options, "--", spec.name, far]


def client_environment() -> dict[str, str]:
    """The environment of ssh: no prompts, also not from its clients for jump hosts, which ignore BatchMode."""
    return {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}


class SshSession:
    """One connection, used once: a host that is tried again gets another session."""

    def __init__(self, spec: HostSpec, launch: LaunchSpec, screen: Screen, run_id: str) -> None:
        self.spec = spec
        self.facts: HostFacts | None = None
        """What the far side reported about its host; None before that."""
        self.too_many_logins = False
        """Whether the login failed because the host, or a jump host, had too many at once: a later one may succeed."""
        self._launch = launch
        self._screen = screen
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self._introduced: asyncio.Future[HostFacts] = self._loop.create_future()
        """The far side's first message, or the reason why it cannot be read."""
        self._end: AgentExit | None = None
        """The far side's report of the agent's end; None: none came yet."""
        self._ordered_start = False
        self._process: asyncio.subprocess.Process | None = None
        self._feeds: list[Feed] = []
        self._open_feeds = 0
        self._all_read = asyncio.Event()

    async def start(self) -> None:
        """Log in and get the facts. On HostUnreachableError the connection is closed."""
        source = FAR.read_bytes()
        expected = self._launch.expected
        request = {
            "mark": self._screen.mark.decode(),
            "env": self._launch.environ,
            "cwd": expected.cwd,
            "script": expected.path,
            "program": self._launch.program,
        }
        try:
            await self._spawn(client_line(self.spec, expected.interpreter, len(source), self._run_id, self._launch.ssh))
            self._write(source + json.dumps(request).encode() + b"\n")
            self.facts = await self._introduction(expected.interpreter)
        except BaseException:
            await self.close()
            raise
        for feed in self._feeds:
            feed.show()
        self._screen.console.wake()

    async def _spawn(self, line: Sequence[str]) -> None:
        pipes = [os.pipe() for _ in range(2)]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *line,
                stdin=asyncio.subprocess.PIPE,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                env=client_environment(),
                start_new_session=True,  # the launcher passes Ctrl-C on, and ssh has no terminal for questions
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
            self._screen.feed(mine, self.spec.host, error=error, on_message=self._on_message, on_end=self._feed_ended)
            for (mine, _), error in zip(pipes, (False, True), strict=True)
        ]

    async def _introduction(self, interpreter: str) -> HostFacts:
        """Wait for the far side's facts. Raises HostUnreachableError if ssh ends first, or after LOGIN_S."""
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
        out, err = (feed.early_output() for feed in self._feeds)
        self.too_many_logins = has_too_many_logins(err)
        raise HostUnreachableError(explain(self.spec, err, code, interpreter, out))

    async def _drained(self) -> None:
        """Wait until all output of ssh, which has ended, is read."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_read.wait(), PIPES_END_S)

    def go(self, index: int | None, endpoint: str) -> None:
        """Order the far side to start its agent."""
        self._ordered_start = True
        message = {
            "argv": self._launch.line(self.spec, index, endpoint),
            "lock": self._launch.lock,
            "detach": self._launch.detach,
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
        # No report came. ssh passes the far side's exit code on; 255 is its own. 0 is no success: the user's ssh_config
        # can send ssh into the background.
        if 0 < code < 255 and self._ordered_start:
            return AgentExit(code=code)
        return AgentExit(text=connection_message(self._feeds[1].last) or f"ssh ended with {code}")

    async def close(self) -> None:
        """End the ssh client if it still runs. A far side that has started its agent takes this as a lost launcher."""
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
        """Write to ssh. Dropped if ssh has ended, which `wait` notices."""
        assert self._process is not None
        assert self._process.stdin is not None
        if self._process.returncode is None and not self._process.stdin.is_closing():
            self._process.stdin.write(data)

    # ---------------------------------------------------------------- the console's thread

    def _on_message(self, words: bytes) -> None:
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
                self._introduced.set_exception(HostUnreachableError(f"host {self.spec}: malformed answer: {error}"))


def has_too_many_logins(text: str) -> bool:
    """Whether sshd refused the connection at its start because of too many logins at once (MaxStartups).

    A jump host sees the logins to all hosts behind it.
    """
    return _TOO_MANY_LOGINS.search(text) is not None


def explain(spec: HostSpec, text: str, code: int | None, python: str, out: str = "") -> str:
    """The reason why a login failed, and what to do.

    `text` and `out` are ssh's stderr and stdout, `code` is its exit code (None: abandoned after LOGIN_S).
    """
    return f"host {spec}: {_reason(spec, text, code, python, out)}"


def _reason(spec: HostSpec, text: str, code: int | None, python: str, out: str) -> str:
    last = last_message(text)
    if "Could not resolve hostname" in text:
        return f"its name does not resolve ({last.rpartition(': ')[2]}); neither ssh_config nor DNS knows it"
    if "IDENTIFICATION HAS CHANGED" in text:
        found = _KEY_FILE.search(text)
        where = f" (known by {found[1]})" if found else ""
        fix = f"if this is expected: ssh-keygen -R {spec.host}"
        return f"its host key has changed{where}: it is a new machine, or somebody intercepts the connection; {fix}"
    if "Host key verification failed" in text:
        return f"its host key is not known here; log in once by hand to check it: ssh {spec}"
    if "Permission denied" in text or "Too many authentication failures" in text:
        trial = f"ssh -o BatchMode=yes {spec} true"
        return f"no login without a password ({last}); set up a key or an agent until `{trial}` works"
    if code is None:
        return f"no login within {LOGIN_S:g} s{f' ({last})' if last else ''}"
    if code == 255 and _UNREACHABLE.search(text):
        return f"cannot be reached by ssh ({last})"
    if code == 255:
        return f"ssh failed ({last or 'without a message'})"
    if code in (126, 127):
        return f"{python} cannot be started there ({last}); the same Python environment must be at the same path"
    if code < 0:
        return f"ssh was killed by signal {-code}"
    if last.startswith(TOO_OLD):
        return f"{python} is Python {last.removeprefix(TOO_OLD)} there; install the same environment"
    reason = last or last_message(out) or "without a message"
    return f"{python} ended with {code} there before it reported anything ({reason})"


def last_message(text: str) -> str:
    """The last line with information.

    >>> last_message("Warning: Permanently added 'a'.\\nssh: no.\\r\\n")
    'ssh: no'
    """
    lines = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
    return lines[-1].rstrip(".")[:SHOWN_CHARACTERS_MAX] if lines else ""


def connection_message(line: str) -> str:
    """The line if it is ssh's message about a lost connection; empty: it is not from ssh.

    >>> connection_message("Timeout, server n1 not responding.\\r")
    'Timeout, server n1 not responding'
    """
    return line.strip().rstrip(".")[:SHOWN_CHARACTERS_MAX] if _CONNECTION.match(line) else ""
