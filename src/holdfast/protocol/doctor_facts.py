"""Findings of `holdfast doctor`, and the facts that they are made from: plain data.

The doctor package gathers and judges facts, and cli/doctor shows findings. Nodes that check each other exchange both.
None means "could not be found out", which is never a finding by itself.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class Level(Enum):
    """How bad a finding is. The worst one decides the exit code."""

    PASS = "pass"
    WARN = "warn"
    """The job will run, but slower, with less diagnosis, or only until another problem occurs."""
    RETRY = "retry"
    """The job cannot run now, but perhaps later without any change."""
    FATAL = "fatal"
    """The job cannot run until a user changes something."""

    @property
    def exit_code(self) -> int:
        return list(Level).index(self) * 10


class DoctorFinding(Struct, frozen=True, kw_only=True):
    code: str
    """HF5xx; a check that passes has the code of its possible failure."""
    level: Level
    what: str
    """What was checked, in two or three words."""
    why: str
    """What was found, in one or two lines."""
    fix: str = ""
    node: str = ""
    """The node that the finding is about; empty: this node, or all nodes together."""


class TorchState(Enum):
    OK = "ok"
    ABSENT = "absent"
    BROKEN = "broken"
    SILENT = "silent"
    """The import did not end in time."""


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
    """The CUDA version that torch was built with; empty for a CPU build."""
    nccl: str = ""
    distributed: bool = False
    gloo: bool = False
    gpus: int = 0
    """Number of GPUs that torch can use."""
    gpu_error: str = ""
    """CUDA's error when it was asked for them."""
    unsupported: tuple[str, ...] = ()
    """GPUs whose architecture this build does not support."""


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU as nvidia-smi shows it."""

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
    path: str
    total_bytes: int = 0
    free_bytes: int = 0
    error: str = ""
    """Why the folder is not writable."""


class Interface(Struct, frozen=True, kw_only=True):
    name: str
    up: bool = True
    addresses: tuple[str, ...] = ()
    speed_mbit_s: int = 0
    """0: unknown."""


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
    """The lowest limit of this process' cgroups."""
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
    """Whether it may trace any process (CAP_SYS_PTRACE)."""
    core_pattern: str = ""
    clock_synchronised: bool | None = None
    own_addresses: tuple[str, ...] = ()
    """Addresses to which the own host name resolves."""
    resolve_error: str = ""
    resolve_s: float = 0.0
    interfaces: tuple[Interface, ...] = ()
    default_interface: str = ""
    ephemeral_ports: tuple[int, int] | None = None
    endpoint: str = ""
    endpoint_port: int = 0
    """0: no endpoint was given."""
    endpoint_is_here: bool | None = None
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


class Reached(Enum):
    """How a connection to a peer ended."""

    YES = "yes"
    REFUSED = "refused"
    SILENT = "silent"
    """No answer in time."""
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
    """Address and port."""
    error: str = ""
    names: tuple[str, ...] = ()
    """Addresses to which the other node's host name resolves here."""
    name_error: str = ""
    latency_s: float | None = None
    """Median round trip."""
    clock_offset_s: float | None = None
    """The other node's clock minus this node's, accurate to half of the shortest round trip."""
    bytes_s: float | None = None
    """Bandwidth of one connection."""


class NodeReport(Struct, frozen=True, kw_only=True, tag=True):
    """The results of one node, for the others."""

    summary: Summary
    links: tuple[NodePath, ...] = ()
    findings: tuple[DoctorFinding, ...] = ()
    """Local findings that did not pass."""


class Reduced(Struct, frozen=True, kw_only=True, tag=True):
    """The result of the all-reduce on one node."""

    ok: bool
    error: str = ""
    silent: bool = False
    """It did not end in time."""
    seconds: float = 0.0


class JointCheck(Struct, frozen=True, kw_only=True):
    """The results of all nodes together; the same on all of them."""

    wanted: tuple[int, int]
    """Minimum and maximum number of nodes of the job."""
    came: tuple[str, ...]
    """Names of the nodes that came, by index; the first is at the endpoint."""
    reports: tuple[NodeReport | None, ...] = ()
    """By index; None: the node came but sent no report."""
    reduced: tuple[Reduced | None, ...] | None = None
    """By index; None: no all-reduce was made."""
    no_reduce: str = ""
    """Why no all-reduce was made."""
