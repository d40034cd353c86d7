"""What the launcher is asked to do: plain data, made by `cli` of a command line, and what came of it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from holdfast.ssh.hosts import HostSpec


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
    """A job of one node, which meets nobody."""
    detach: bool = False
    ssh: tuple[str, ...] = ("ssh",)
    """The client's command, with the user's options."""
    lock: str
    """Nobody else's name, known to nobody else, the same for all connections of this run."""
    signals: tuple[int, ...] = ()
    """What ends the job (--signals-to-handle, --preempt-signal)."""


class AgentExit(Struct, frozen=True, kw_only=True):
    """How one agent ended."""

    code: int | None = None
    """Its exit code; None: the connection was lost, nobody knows."""
    kind: str = ""
    """Its outcome's kind; empty when it told of none."""
    text: str = ""
    """The last screen; with a lost connection why it was."""
