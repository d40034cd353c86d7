"""The hosts of a job: as the user names them, as they report themselves, and which differences prevent the start.

Hosts come from `a:8,user@b,[fe80::1]:4` or a hostfile, filtered by --include and --exclude, or from the user's own
program (--host-discovery). LaunchSpec is what the launcher is asked to do. Raises HostsError. Knows no ssh.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes  # noqa: F401 - loaded before any fork, for the one call in the child
import os
import signal
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct, structs

from holdfast.inherited import without_secrets
from holdfast.protocol.errors import HostsError
from holdfast.supervisor.processes import PR_SET_PDEATHSIG, prctl
from holdfast.text import is_loopback, listed, plural

HASH_CHARACTERS = 12
"""Leading characters of a script's hash that a message shows."""


class Expected(Struct, frozen=True, kw_only=True):
    """What every host must have in common. An empty field is unknown on this machine: the first host's value counts."""

    python: str = ""
    holdfast: str = ""
    torch: str = ""
    script: str = ""
    """SHA-256 of the script."""
    path: str = ""
    """The script as on the command line; empty: there is no file to compare (a module)."""
    cwd: str = ""
    interpreter: str = ""
    """Path of the Python on the hosts."""


class LaunchSpec(Struct, frozen=True, kw_only=True):
    """A job on several hosts."""

    hosts: tuple[HostSpec, ...]
    """Empty with discovery."""
    discovery: str
    """A program that prints the current hosts."""
    min_nodes: int
    max_nodes: int
    nproc: int | None
    """Workers on a host without slots; None: each host decides (gpu, auto …)."""
    expected: Expected
    program: bool
    """The script is a program (--no-python)."""
    environ: dict[str, str]
    """Variables that are sent to the hosts, with the job's token."""
    line: Callable[[HostSpec, int | None, str], list[str]]
    """Makes the far agent's command line from the host, its preferred group rank and the endpoint (empty: none)."""
    endpoint: str
    """The endpoint as given; empty: a port of the first host."""
    alone: bool
    """A job of one node, without a rendezvous."""
    succession: bool
    """Whether three hosts or more elect another coordinator if its host is lost."""
    detach: bool
    """Whether the agents go on if the launcher ends or is lost."""
    ssh: tuple[str, ...]
    """The ssh command with the user's options."""
    lock: str
    """Name of the abstract socket that one agent of this run binds on each host. Secret, so that nobody else takes
    it."""
    signals: tuple[int, ...]
    """Signals that end the job (--signals-to-handle, --preempt-signal)."""


class AgentExit(Struct, frozen=True, kw_only=True):
    """The end of one agent, as far as this machine knows it."""

    code: int | None = None
    """The agent's exit code as a shell shows it; None: the connection was lost, so it is unknown."""
    kind: str = ""
    """The kind of the agent's outcome (OutcomeKind); empty when it reported none."""
    text: str = ""
    """The last screen, or why the connection was lost."""


class HostFacts(Struct, frozen=True, kw_only=True):
    """Facts about one host, from far.py."""

    host: str
    """The host's own name for itself."""
    python: str
    holdfast: str = ""
    """Version of holdfast there; empty: not installed."""
    torch: str = ""
    """Version of torch there; empty: not installed."""
    script: str = ""
    """SHA-256 of the script there; empty for modules and programs."""
    trouble: str = ""
    """`cwd: …` or `script: …`: what is missing there, and why."""
    cores: int = 0
    gpus: int = 0
    machine: str = ""
    """An id of the machine: equal for two names of one machine."""
    address: str = ""
    """The host's address at which ssh reached it; empty: ssh did not say."""
    client: str = ""
    """Address of the ssh client, as seen there."""
    port: int = 0
    """A free port, kept for the coordinator."""


def expected_from(expected: Expected, first: HostFacts) -> Expected:
    """Fill the fields that this machine does not know with the first host's: it needs no torch, and with --cwd no
    script."""
    return structs.replace(
        expected,
        python=expected.python or first.python,
        torch=expected.torch or first.torch,
        script=expected.script or first.script,
    )


def problems(spec: HostSpec, facts: HostFacts, expected: Expected, nproc: int | None) -> list[str]:
    """The reasons why this host cannot take part, one line each. `nproc`: workers there; None: the host decides."""
    found = []
    if not facts.holdfast:
        found.append(f"holdfast is not installed for {expected.interpreter} there; install the same environment")
    elif facts.holdfast != expected.holdfast:
        found.append(f"holdfast {facts.holdfast} there, {expected.holdfast} here")
    if facts.python != expected.python:
        found.append(f"Python {facts.python} there, {expected.python} elsewhere")
    if facts.torch != expected.torch:
        found.append(f"torch {facts.torch or 'is not installed'} there, {expected.torch or 'none'} elsewhere")
    kind, _, why = facts.trouble.partition(": ")
    if kind == "cwd":
        found.append(f"the working folder {expected.cwd} cannot be entered there ({why}); --cwd names another")
    elif kind == "script":
        found.append(f"the training script {expected.path} cannot be read there ({why}); copy it there")
    elif facts.script != expected.script:
        found.append(
            f"the training script {expected.path} is another one there "
            f"({facts.script[:HASH_CHARACTERS]}, elsewhere {expected.script[:HASH_CHARACTERS]}); copy it there"
        )
    if nproc is not None and facts.cores and nproc > facts.cores:
        found.append(f"{nproc} workers, but {plural(facts.cores, 'CPU core')} there")
    return [f"host {spec}: {text}" for text in found]


def remarks(spec: HostSpec, facts: HostFacts, nproc: int | None) -> list[str]:
    """Warnings about this host, which do not prevent the start."""
    if nproc is not None and 0 < facts.gpus < nproc:
        return [f"host {spec}: {nproc} workers, but {plural(facts.gpus, 'GPU')} there"]
    return []


def same_machine(hosts: Sequence[tuple[HostSpec, HostFacts]]) -> list[tuple[HostSpec, str]]:
    """Hosts that are the same machine as an earlier one, each with a message."""
    seen: dict[str, HostSpec] = {}
    found = []
    for spec, facts in hosts:
        other = seen.setdefault(facts.machine, spec)
        if other is not spec:
            text = f"host {spec} is the same machine as {other} ({facts.host}); name it once, with all its slots"
            found.append((spec, text))
    return found


def rendezvous_address(first: HostFacts, others: Sequence[HostFacts]) -> str:
    """The address at which the other hosts reach the first host; empty: unknown.

    It is the address at which ssh reached it. If that is loopback, the first host is the launcher's own machine, and
    the other hosts know the launcher's address.
    """
    if not is_loopback(first.address):
        return first.address
    if not others:
        return first.address
    return next((each.client for each in others if each.client and not is_loopback(each.client)), "")


HOSTS_MAX = 4096
SLOTS_DIGITS_MAX = 6
IGNORED_KEYS = ("max_slots", "max-slots")
"""Keys of Open MPI's hostfiles about oversubscription, which holdfast does not do."""
DISCOVERY_EVERY_S = 3.0
"""Interval from one answer to the next call."""
DISCOVERY_S = 10.0
ANSWER_BYTES_MAX = 1 << 20


class HostSpec(Struct, frozen=True):
    """One host as the user names it."""

    name: str
    """The argument of ssh: a name of ssh_config, a host name or an address (without brackets), perhaps after
    `user@`."""
    slots: int | None = None
    """Number of workers on this host; None: --nproc-per-node decides."""

    @property
    def host(self) -> str:
        """The name without the user: equal names are the same host."""
        return self.name.rpartition("@")[2].lower()

    def __str__(self) -> str:
        return self.name


def parse_host(text: str, where: str) -> HostSpec:
    """Read `[user@]host[:slots]`, with IPv6 addresses in brackets. `where` names the source in the HostsError.

    >>> parse_host("me@[::1]:4", "--hosts")
    HostSpec(name='me@::1', slots=4)
    """
    user, at, rest = text.strip().rpartition("@")
    if rest.startswith("["):
        host, closed, tail = rest[1:].partition("]")
        if not closed or ":" not in host or (tail and not tail.startswith(":")):
            raise HostsError(f"{where}: {text!r} is not a host; write an IPv6 address as [address] or [address]:slots")
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
            raise HostsError(f"{where}: {text!r} has no valid {what} name; write host, host:slots or user@host:slots")
    return HostSpec(user + at + host, None if slots is None else parse_slots(slots, text, where))


def parse_slots(slots: str, text: str, where: str) -> int:
    if not (slots.isascii() and slots.isdecimal() and len(slots) <= SLOTS_DIGITS_MAX and int(slots) > 0):
        raise HostsError(f"{where}: {text[:80]!r}: slots must be the number of workers on that host, 1 or more")
    return int(slots)


def parse_list(text: str) -> list[HostSpec]:
    """The hosts of --hosts, separated by commas."""
    words = [word for word in text.split(",") if word.strip()]
    if not words:
        raise HostsError("--hosts names no host")
    return checked([parse_host(word, "--hosts") for word in words], "--hosts")


def parse_file(text: str, where: str) -> list[HostSpec]:
    """Read a hostfile, one host per line: `host slots=8` as in Open MPI and DeepSpeed, or `host:8`; # begins a
    comment."""
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
                raise HostsError(f"{place}: {word!r} is not valid; a line is `host`, `host slots=8` or `host:8`")
        found.append(spec)
    return checked(found, where)


def checked(hosts: list[HostSpec], where: str) -> list[HostSpec]:
    """The same hosts. Raises HostsError for a host that is listed twice, or for too many hosts."""
    seen: set[str] = set()
    for spec in hosts:
        if spec.host in seen:
            raise HostsError(f"{where}: host {spec.host} is listed twice; write its slots once, as in {spec.host}:8")
        seen.add(spec.host)
    if len(hosts) > HOSTS_MAX:
        raise HostsError(f"{where}: {len(hosts)} hosts, at most {HOSTS_MAX}")
    return hosts


def select(hosts: Sequence[HostSpec], include: str, exclude: str) -> list[HostSpec]:
    """The hosts that --include and --exclude leave; `*` and `?` as in file names.

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
    """Tie a child's life to the launcher's, before it becomes ssh or the discovery program.

    A launcher that is killed sends no message. The end of its ssh clients closes the connections, which the far sides
    see.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Discovery:
    """The user's discovery program, which is called every few seconds, with a time limit.

    Its answer counts if it exits with 0 and all lines are valid. Otherwise the last answer stays valid, and the problem
    is reported once.
    """

    def __init__(self, program: str, say: Callable[[str], None]) -> None:
        self._program = program
        self._say = say
        self._trouble = ""
        """The problem of the last call, which is not reported again; empty: the call succeeded."""
        self._had_hosts = False
        """Whether the last valid answer named a host."""

    async def ask(self) -> list[HostSpec] | None:
        """Call the program once. Returns the current hosts; None: there is no valid answer."""
        try:
            hosts = await self._hosts()
        except (HostsError, OSError, TimeoutError) as error:
            trouble = self._describe(error)
            if trouble != self._trouble:
                self._trouble = trouble
                self._say(f"{trouble}; the hosts stay as they are")
            return None
        self._trouble, self._had_hosts = "", bool(hosts)
        return hosts

    async def _hosts(self) -> list[HostSpec]:
        hosts = parse_file(await self._output(), f"--host-discovery {self._program}")
        # An empty answer after a full one is more probably an error of the program than the loss of all hosts.
        if self._had_hosts and not hosts:
            raise HostsError(f"--host-discovery {self._program} no longer names any host")
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
            async with asyncio.timeout(DISCOVERY_S):
                data = await self._all(process.stdout)
                code = await process.wait()
        except BaseException:
            # The whole group: the program may have ended already while a process that it started keeps the pipe open.
            with contextlib.suppress(ProcessLookupError):
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

    def _describe(self, error: Exception) -> str:
        match error:
            case HostsError():
                return str(error)
            case TimeoutError():
                return f"--host-discovery {self._program}: no answer within {DISCOVERY_S:g} s"
            case _:
                return f"--host-discovery {self._program}: {getattr(error, 'strerror', None) or error}"
