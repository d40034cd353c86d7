"""What the launcher is asked to do, what hosts report of themselves before anything starts, which of it keeps a job
from starting, and how agents ended. PURE: plain data and its rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from holdfast.launchers.ssh.hosts import HostSpec
from holdfast.text import is_loopback

SHOWN_CHARACTERS = 12
"""Of a hash."""


class Expected(Struct, frozen=True, kw_only=True):
    """How every host should be. Empty: this machine does not know, so the first host says."""

    python: str = ""
    holdfast: str = ""
    torch: str = ""
    script: str = ""
    """SHA-256 of the script."""
    path: str = ""
    """The script as it is said on the command line; empty: nothing to look for (a module)."""
    cwd: str = ""
    interpreter: str = ""
    """Path of the Python that is started there."""


class LaunchSpec(Struct, frozen=True, kw_only=True):
    """A job on several hosts."""

    hosts: tuple[HostSpec, ...]
    """Empty with discovery."""
    discovery: str = ""
    """A program that prints the hosts that there are."""
    min_nodes: int
    max_nodes: int
    nproc: int | None = None
    """Workers on a host without slots; None: each decides (gpu, auto …)."""
    expected: Expected
    program: bool = False
    """The script is a program (--no-python)."""
    environ: dict[str, str] = {}
    """What is sent along, the job's token included."""
    line: Callable[[HostSpec, int | None, str], list[str]]
    """The far agent's command line: host, group rank it wishes for, endpoint (empty: it needs none)."""
    endpoint: str = ""
    """As the user gave it; empty: a port of the first host."""
    alone: bool = False
    """A job of one node, without a rendezvous."""
    detach: bool = False
    ssh: tuple[str, ...] = ("ssh",)
    """The client's command, with the user's options."""
    lock: str
    """A name that is unique and secret, the same for all connections of this run."""
    signals: tuple[int, ...] = ()
    """What ends the job (--signals-to-handle, --preempt-signal)."""


class AgentExit(Struct, frozen=True, kw_only=True):
    """How one agent ended."""

    code: int | None = None
    """Its exit code; None: the connection was lost, so it is unknown."""
    kind: str = ""
    """Its outcome's kind; empty when it reported none."""
    text: str = ""
    """The last screen; with a lost connection why it was."""


class HostFacts(Struct, frozen=True, kw_only=True):
    """One host, as far.py found it."""

    host: str
    """What it calls itself."""
    python: str
    holdfast: str = ""
    """Empty: it is not installed there."""
    torch: str = ""
    script: str = ""
    """SHA-256; empty for modules and programs."""
    trouble: str = ""
    """`cwd: …` or `script: …`: that is not there, and why."""
    cores: int = 0
    gpus: int = 0
    machine: str = ""
    """The same for two names of one machine."""
    address: str = ""
    """Where ssh reached it."""
    client: str = ""
    """Where ssh came from, as it sees it."""
    port: int = 0
    """A free one, held for the coordinator."""


def expected_from(expected: Expected, first: HostFacts) -> Expected:
    """What this machine does not know (it needs no torch, and no script with --cwd) the first host says."""
    return Expected(
        python=expected.python or first.python,
        holdfast=expected.holdfast,
        torch=expected.torch or first.torch,
        script=expected.script or first.script,
        path=expected.path,
        cwd=expected.cwd,
        interpreter=expected.interpreter,
    )


def problems(spec: HostSpec, facts: HostFacts, expected: Expected, nproc: int | None) -> list[str]:
    """What keeps this host from taking part, each in one line that names it; `nproc`: workers there, None: it
    decides."""
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
            f"({facts.script[:SHOWN_CHARACTERS]}, elsewhere {expected.script[:SHOWN_CHARACTERS]}); copy it there"
        )
    if nproc is not None and facts.cores and nproc > facts.cores:
        found.append(f"{nproc} workers, but {facts.cores} CPU core{'s' if facts.cores > 1 else ''} there")
    return [f"host {spec}: {text}" for text in found]


def remarks(spec: HostSpec, facts: HostFacts, nproc: int | None) -> list[str]:
    """What is worth saying and keeps nothing from starting."""
    if nproc is not None and 0 < facts.gpus < nproc:
        return [f"host {spec}: {nproc} workers, but {facts.gpus} GPU{'s' if facts.gpus > 1 else ''} there"]
    return []


def same_machine(hosts: Sequence[tuple[HostSpec, HostFacts]]) -> list[tuple[HostSpec, str]]:
    """Further names of one machine, and what to say of them."""
    seen: dict[str, HostSpec] = {}
    found = []
    for spec, facts in hosts:
        other = seen.setdefault(facts.machine, spec)
        if other is not spec:
            text = f"host {spec} is the same machine as {other} ({facts.host}); name it once, with all its slots"
            found.append((spec, text))
    return found


def meeting_address(first: HostFacts, others: Sequence[HostFacts]) -> str:
    """Under which address the others reach the first host; empty: unknown.

    It is the one by which ssh reached it. Where that is the loopback, the first host is the launcher's own machine, and
    the others know where the launcher came from.
    """
    if not is_loopback(first.address):
        return first.address
    if not others:
        return first.address
    return next((each.client for each in others if each.client and not is_loopback(each.client)), "")
