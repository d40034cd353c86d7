"""Determines the hosts: `a:8,user@b,[fe80::1]:4`, hostfiles, filtered by --include and --exclude, or the output of the
user's own program (--host-discovery).

Raises HostsError with what is wrong and where. Knows the words for a host, and how to run that program; no ssh.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes  # noqa: F401 - loaded before any fork, for the one call in the child
import os
import signal
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct

from holdfast.protocol.errors import HostsError
from holdfast.runtime.inherited import without_secrets
from holdfast.supervisor.processes import PR_SET_PDEATHSIG, prctl
from holdfast.text import listed

HOSTS_MAX = 4096
SLOTS_DIGITS_MAX = 6
IGNORED_KEYS = ("max_slots", "max-slots")
"""Of Open MPI's hostfiles: how far a host may be oversubscribed, which we never do."""
ASK_EVERY_S = 3.0
"""From one answer to the next question."""
ANSWER_S = 10.0
ANSWER_BYTES_MAX = 1 << 20


class HostSpec(Struct, frozen=True):
    """One host as the user names it."""

    name: str
    """What ssh is given: a name of ssh_config, a host name or an address (without brackets), perhaps `user@` before
    it."""
    slots: int | None = None
    """Workers there; None: as --nproc-per-node says."""

    @property
    def host(self) -> str:
        """Without the user: two names with the same one are the same host."""
        return self.name.rpartition("@")[2].lower()

    def __str__(self) -> str:
        return self.name


def parse_host(text: str, where: str) -> HostSpec:
    """`[user@]host[:slots]`, IPv6 addresses in brackets.

    >>> parse_host("me@[::1]:4", "--hosts")
    HostSpec(name='me@::1', slots=4)
    """
    user, at, rest = text.strip().rpartition("@")
    if rest.startswith("["):
        host, closed, tail = rest[1:].partition("]")
        if not closed or ":" not in host or (tail and not tail.startswith(":")):
            raise HostsError(f"{where}: {text!r} is no host; an IPv6 address is written [address] or [address]:slots")
        slots = tail[1:] if tail else None
    elif rest.count(":") > 1:
        raise HostsError(f"{where}: {text!r}: write an IPv6 address in brackets: [{rest}]")
    else:
        host, colon, number = rest.partition(":")
        slots = number if colon else None
    for part, what in ((host, "host"), (user, "user") if at else (host, "host")):
        if (
            not part
            or part.startswith("-")
            or not all(each.isprintable() and each not in " '\"`$\\/;|&<>" for each in part)
        ):
            raise HostsError(f"{where}: {text!r} has no usable {what} name; write host, host:slots or user@host:slots")
    return HostSpec(user + at + host, None if slots is None else parse_slots(slots, text, where))


def parse_slots(slots: str, text: str, where: str) -> int:
    if not (slots.isascii() and slots.isdecimal() and len(slots) <= SLOTS_DIGITS_MAX and int(slots) > 0):
        raise HostsError(f"{where}: {text[:80]!r}: slots are workers on that host, a number from 1")
    return int(slots)


def parse_list(text: str, where: str = "--hosts") -> list[HostSpec]:
    """Hosts separated by commas."""
    words = [word for word in text.split(",") if word.strip()]
    if not words:
        raise HostsError(f"{where} names no host")
    return checked([parse_host(word, where) for word in words], where)


def parse_file(text: str, where: str) -> list[HostSpec]:
    """One host a line, as Open MPI (`host slots=8`), DeepSpeed and `host:8` have it; # begins a comment."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"{where}, line {number}"
        spec = parse_host(words[0], place)
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if key == "slots" and equals and spec.slots is None:
                spec = HostSpec(spec.name, parse_slots(value, line.strip(), place))
            elif key not in IGNORED_KEYS:
                raise HostsError(f"{place}: {word!r} is not understood; a line is `host`, `host slots=8` or `host:8`")
        found.append(spec)
    return checked(found, where)


def checked(hosts: list[HostSpec], where: str) -> list[HostSpec]:
    """Raises HostsError for a host that is there twice."""
    seen: dict[str, HostSpec] = {}
    for spec in hosts:
        if spec.host in seen:
            raise HostsError(f"{where}: host {spec.host} is there twice; give its slots once, as in {spec.host}:8")
        seen[spec.host] = spec
    if len(hosts) > HOSTS_MAX:
        raise HostsError(f"{where}: {len(hosts)} hosts, at most {HOSTS_MAX}")
    return hosts


def select(hosts: Sequence[HostSpec], include: str, exclude: str) -> list[HostSpec]:
    """What is left of them: --include keeps only these, --exclude leaves these out; `*` and `?` as in file names.

    >>> [spec.name for spec in select(parse_list("n1,n2,m1"), "n*", "n2")]
    ['n1']
    """
    chosen = list(hosts)
    for option, text in (("--include", include), ("--exclude", exclude)):
        patterns = [word.strip().lower() for word in text.split(",") if word.strip()]
        for pattern in patterns:
            if not any(fnmatchcase(spec.host, pattern) for spec in hosts):
                raise HostsError(f"{option} {pattern}: no such host; there are {listed([each.host for each in hosts])}")
        if patterns:
            wanted = option == "--include"
            chosen = [each for each in chosen if any(fnmatchcase(each.host, one) for one in patterns) is wanted]
    if not chosen:
        raise HostsError("--include and --exclude leave no host")
    return chosen


def die_with_launcher() -> None:
    """Runs in the child, before ssh or the program that discovers hosts: without its launcher it ends, and so the far
    side learns of it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Discovery:
    """The user's program, which is asked every few seconds, held to a limit, and believed when it ends with 0 and its
    lines are understood. Otherwise its last answer stays true, and the trouble is said once."""

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
