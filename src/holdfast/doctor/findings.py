"""Findings and the facts from which they are made, as plain data, and how findings are shown.

Nodes that check each other exchange facts and findings. None means "could not be found out", which is never a finding
by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NotRequired, TypedDict

import msgspec
from msgspec import Struct

from holdfast.doctor.machine_state import FullMeasure, MachineState


class Level(Enum):
    """The severity of a finding. The worst one decides the exit code."""

    PASS = "pass"
    WARN = "warn"
    """The job will run, but slower, with less diagnosis, or only until another problem occurs."""
    RETRY = "retry"
    """The job cannot run now, but perhaps later without any change."""
    FATAL = "fatal"
    """The job cannot run until a user changes something."""

    @property
    def exit_code(self) -> int:
        """0, 10, 20 or 30: the order of the members is the order of severity."""
        return list(Level).index(self) * 10


class DoctorFinding(Struct, frozen=True, kw_only=True):
    """The result of one check."""

    code: str
    """The code HF5xx; a check that passes has the code of its possible failure."""
    level: Level
    what: str
    """Name of the check, in two or three words."""
    why: str
    """Result in one or two lines."""
    fix: str = ""
    """Advice; empty if the check passed."""
    node: str = ""
    """The node that the finding is about; empty: this node, or all nodes together."""


class TorchState(Enum):
    """What the import of torch by the workers' Python gave."""

    OK = "ok"
    ABSENT = "absent"
    BROKEN = "broken"
    SILENT = "silent"
    """The import did not end within its time limit."""


class TorchFacts(Struct, frozen=True, kw_only=True):
    """Facts about torch, reported by a separate process."""

    state: TorchState
    error: str = ""
    """The last line of its output if torch is broken."""
    seconds: float = 0.0
    """Duration of the whole process, mostly of the import."""
    cpu_s: float = 0.0
    """CPU time of the process."""
    load: float = 0.0
    """Runnable processes per CPU of the machine, right after its end."""
    version: str = ""
    cuda: str = ""
    """The CUDA version that torch was built with; empty for a CPU build, and for one of ROCm."""
    hip: str = ""
    """The version of ROCm's HIP that torch was built with; empty for others."""
    nccl: str = ""
    distributed: bool = False
    gloo: bool = False
    gpus: int = 0
    """Number of GPUs that torch can use."""
    gpu_error: str = ""
    """CUDA's error when it was asked for the GPUs; empty: none."""
    unsupported: tuple[str, ...] = ()
    """GPUs whose architecture this build does not support."""


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU, in the figures of earlier versions: `machine` has all that is known."""

    index: int
    name: str
    driver: str = ""
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    ecc_errors: int | None = None
    """Uncorrected errors since the driver was loaded; None without ECC."""
    users: tuple[str, ...] = ()
    """Processes on this GPU, as `pid 17 python, 30000 MiB`."""


class Folder(Struct, frozen=True, kw_only=True):
    """A folder that a job writes to, and the room on its file system."""

    path: str
    total_bytes: int = 0
    free_bytes: int = 0
    error: str = ""
    """The reason why the folder is not writable; empty: it is."""


class Interface(Struct, frozen=True, kw_only=True):
    """A network interface of the node."""

    name: str
    up: bool = True
    addresses: tuple[str, ...] = ()
    """IPv4 addresses, then IPv6 addresses, without link-local ones."""
    speed_mbit_s: int = 0
    """Speed of the link; 0: unknown."""


class LocalFacts(Struct, frozen=True, kw_only=True):
    """Facts of one node about itself. The defaults describe a node without problems."""

    host: str
    python: str
    holdfast: str
    nproc: int = 1
    """Number of workers on the command line."""
    nodes: int = 1
    torch: TorchFacts = TorchFacts(state=TorchState.ABSENT)
    driver: str = ""
    """Version of NVIDIA's driver, from /proc; empty without one."""
    machine: MachineState = MachineState()
    """GPUs and network ports."""
    gpu_test: FullMeasure | None = None
    """What the GPUs have computed; None: that was not asked for."""
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    shm: Folder = Folder(path="/dev/shm")
    folders: tuple[Folder, ...] = ()
    """Folders for logs and temporary files."""
    limits: dict[str, int | None] = {}
    """Soft limits by name: nofile nproc memlock core; None: unlimited."""
    infiniband: tuple[str, ...] = ()
    memory_bytes: int = 0
    memory_available_bytes: int = 0
    swap_bytes: int = 0
    memory_limit_bytes: int | None = None
    """The lowest limit of all cgroups above this process; None: there is none."""
    memory_room_bytes: int | None = None
    """Memory that is left within these limits; None: there is none, or it is unknown (cgroups of version 1)."""
    pids_limit: int | None = None
    pids_used: int = 0
    cpus: int = 1
    """CPUs of the machine."""
    cpus_allowed: int = 1
    """CPUs in the affinity mask."""
    cpu_quota: float | None = None
    """CPU quota of the cgroup, in CPUs."""
    overcommit: int = 0
    ptrace_scope: int | None = None
    privileged: bool = False
    """Whether this process may trace any other (CAP_SYS_PTRACE)."""
    core_pattern: str = ""
    clock_synchronised: bool | None = None
    own_addresses: tuple[str, ...] = ()
    """Addresses to which the own host name resolves."""
    resolve_error: str = ""
    """The reason why the own host name does not resolve; empty: it does."""
    resolve_s: float = 0.0
    """Duration of the look-up of the own host name."""
    interfaces: tuple[Interface, ...] = ()
    default_interface: str = ""
    ephemeral_ports: tuple[int, int] | None = None
    endpoint: str = ""
    endpoint_port: int = 0
    """Port of the endpoint; 0: no endpoint was given."""
    endpoint_from: str = ""
    """The address of this node on the way to the endpoint; empty: unknown."""
    endpoint_is_here: bool | None = None
    """Whether the endpoint is an address of this machine; None: not tested."""
    endpoint_holder: str = ""
    """The process that holds the port on this machine; empty: none, or the endpoint is on another machine."""
    variables: dict[str, str] = {}
    """Environment variables that matter to a training job."""


class Summary(Struct, frozen=True, kw_only=True):
    """Facts of a node that should be the same on all nodes, or that an all-reduce needs."""

    host: str
    python: str = ""
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    holdfast: str = ""
    interface: str = ""
    """The interface with the address at which the others reach this node."""
    has_torch: bool = False
    """Whether the node has torch with gloo, so that it can take part in an all-reduce."""
    traits: dict[str, str] = {}
    """What most nodes should have alike: majority.py."""


class Reached(Enum):
    """The result of a connection to a peer."""

    YES = "yes"
    REFUSED = "refused"
    SILENT = "silent"
    """No answer came within the time limit."""
    UNREACHABLE = "unreachable"
    STRANGER = "stranger"
    """A program other than the doctor of that node answered."""
    BROKEN = "broken"
    """The connection was made and failed later."""


class NodePath(Struct, frozen=True, kw_only=True):
    """The network path from one node to another, measured by the first."""

    to: int
    """Index of the other node in the roster."""
    reached: Reached
    address: str = ""
    """Address and port that were tried."""
    error: str = ""
    """The system's error, or what the other side did instead of answering."""
    names: tuple[str, ...] = ()
    """Addresses to which the other node's host name resolves here."""
    name_error: str = ""
    latency_s: float | None = None
    """Median of the round trips."""
    clock_offset_s: float | None = None
    """The other node's clock minus this node's, accurate to half of the shortest round trip."""
    bytes_s: float | None = None
    """Bandwidth of one connection."""


class ListEntry(Struct, frozen=True, kw_only=True):
    """An entry of the endpoint list, seen from one node."""

    address: str
    """`host:port` of the entry."""
    own: bool = False
    """Whether the entry is an address of this node."""
    error: str = ""
    """The reason why no witness answers there; empty: one does."""


class NodeReport(Struct, frozen=True, kw_only=True, tag=True):
    """The results of one node, for the others."""

    summary: Summary
    links: tuple[NodePath, ...] = ()
    tried: int = 0
    """The number of links that were tried, if there were too many to send all; `links` has the worst then, and
    `latency_s` and `bytes_s` are the medians of all. 0: `links` has all of them."""
    latency_s: float | None = None
    bytes_s: float | None = None
    findings: tuple[DoctorFinding, ...] = ()
    """Findings about the node itself that did not pass."""
    entries: tuple[ListEntry, ...] = ()
    """The entries of the endpoint list after the first one, in order."""

    @property
    def is_part(self) -> bool:
        """Whether `links` has only the worst links."""
        return self.tried > len(self.links)


class Reduced(Struct, frozen=True, kw_only=True, tag=True):
    """The result of the all-reduce on one node."""

    ok: bool
    error: str = ""
    silent: bool = False
    """Whether it did not end within its time limit."""
    seconds: float = 0.0


class JointCheck(Struct, frozen=True, kw_only=True):
    """The results of all nodes together; the same on all of them."""

    wanted: tuple[int, int]
    """Minimum and maximum number of nodes of the job."""
    came: tuple[str, ...]
    """Names of the nodes that came, by index; the first is at the endpoint."""
    reports: tuple[NodeReport | None, ...] = ()
    """Reports by index of the node; None: the node came but sent no report."""
    reduced: tuple[Reduced | None, ...] | None = None
    """Results by index of the node; None: no all-reduce was made."""
    no_reduce: str = ""
    """The reason why no all-reduce was made; empty: it was."""


class NodeData(TypedDict):
    """A node that came. It has a Summary's fields, or `silent`."""

    name: str
    silent: NotRequired[bool]
    """It came, but sent no report."""
    host: NotRequired[str]
    python: NotRequired[str]
    torch: NotRequired[str]
    cuda: NotRequired[str]
    nccl: NotRequired[str]
    holdfast: NotRequired[str]
    interface: NotRequired[str]
    has_torch: NotRequired[bool]
    traits: NotRequired[dict[str, str]]


PairData = TypedDict(
    "PairData",
    {
        "from": str,
        "to": str,
        "reached": Reached,
        "address": str,
        "error": str,
        "names": list[str],
        "name_error": str,
        "latency_s": float | None,
        "clock_offset_s": float | None,
        "bytes_s": float | None,
    },
)
"""A NodePath, with the names of both nodes."""


class CheckedData(TypedDict):
    """The result of `holdfast doctor`."""

    host: str
    level: Level
    """The worst level of all findings."""
    exit_code: int
    findings: list[DoctorFinding]
    facts: LocalFacts
    nodes: NotRequired[list[NodeData]]
    """The nodes, if several were checked together."""
    pairs: NotRequired[list[PairData]]


JSON_FORMS = {"doctor": ((CheckedData,),)}

KIB, MIB, GIB = 2**10, 2**20, 2**30


def passed(code: str, what: str, why: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.PASS, what=what, why=why)


def warn(code: str, what: str, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.WARN, what=what, why=why, fix=fix)


def retry(code: str, what: str, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.RETRY, what=what, why=why, fix=fix)


def fatal(code: str, what: str, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.FATAL, what=what, why=why, fix=fix)


def size(bytes_: float) -> str:
    """Write a size with three digits: `1.5 GiB`, `64 MiB`."""
    if bytes_ >= GIB:
        return f"{bytes_ / GIB:.3g} GiB" if bytes_ < 1000 * GIB else f"{bytes_ / GIB / 1024:.3g} TiB"
    return f"{bytes_ / MIB:.3g} MiB" if bytes_ >= MIB else f"{bytes_ / KIB:.3g} KiB"


def rate(bytes_s: float) -> str:
    """Write a rate in bits per second, as network links are named: `940 Mbit/s`."""
    bits = bytes_s * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def span(seconds: float) -> str:
    """Write a duration: `0.12 ms`, `3.4 s`."""
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


MARKS = {Level.PASS: "ok", Level.WARN: "WARN", Level.RETRY: "RETRY", Level.FATAL: "FATAL"}
WHAT_WIDTH = 20


def worst(findings: Sequence[DoctorFinding]) -> Level:
    return max((finding.level for finding in findings), key=lambda level: level.exit_code, default=Level.PASS)


def exit_code(findings: Sequence[DoctorFinding], *, strict: bool) -> int:
    """Exit code of `holdfast doctor`. With `strict` a warning stops `doctor LINE && run LINE`, too."""
    level = worst(findings)
    return 0 if level is Level.WARN and not strict else level.exit_code


def render(findings: Sequence[DoctorFinding], *, strict: bool = False) -> str:
    """One line for all passed checks, then the problems with their fixes: this node's first, then the other nodes'."""
    lines = [line for finding in findings for line in lines_of(finding)]
    return "\n".join([*lines, "", conclusion(findings, strict=strict)])


def lines_of(finding: DoctorFinding) -> list[str]:
    what = f"{finding.node}: {finding.what}" if finding.node else finding.what
    code = "" if finding.level is Level.PASS else f"{finding.code} "
    lines = [f"{MARKS[finding.level]:6}{printable(what):{WHAT_WIDTH}} {code}{printable(finding.why)}"]
    if finding.fix:
        lines.append(f"{'':{6 + WHAT_WIDTH}} → {printable(finding.fix)}")
    return lines


def conclusion(findings: Sequence[DoctorFinding], *, strict: bool = False) -> str:
    """The last line: the worst level, the number of findings of each, and where to read more."""
    level = worst(findings)
    if level is Level.PASS:
        return f"all well: {len(findings)} checks passed"
    nouns = {Level.FATAL: "to fix first", Level.RETRY: "to retry", Level.WARN: "to note"}
    counts = [(sum(finding.level is each for finding in findings), noun) for each, noun in nouns.items()]
    shown = ", ".join(f"{count} {noun}" for count, noun in counts if count)
    codes = sorted({finding.code for finding in findings if finding.level is level})
    exits = exit_code(findings, strict=strict)
    return f"{level.value}: {shown}; holdfast explain {codes[0]} explains it (exit code {exits})"


def as_json(findings: Sequence[DoctorFinding], *, strict: bool = False) -> dict[str, Any]:
    level = worst(findings)
    return {
        "level": level.value,
        "exit_code": exit_code(findings, strict=strict),
        "findings": msgspec.to_builtins(findings),
    }


def printable(text: str) -> str:
    """The text without control characters: texts of other nodes come from the network."""
    return "".join(character if character.isprintable() else " " for character in text)
