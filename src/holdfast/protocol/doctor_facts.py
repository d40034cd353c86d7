"""What `holdfast doctor` finds, and the facts that it judges: plain data.

Facts are gathered by doctor, judged by doctor and shown by cli/doctor; nodes that check
each other exchange them. None stands for "could not be found out", which is never a finding by itself.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class Level(Enum):
    """How bad a finding is. The worst one decides the exit code."""

    PASS = "pass"
    WARN = "warn"
    """It will run; slower, or with less diagnosis, or until something else happens."""
    RETRY = "retry"
    """Not now; perhaps later, with nothing changed."""
    FATAL = "fatal"
    """Not before somebody changes something."""

    @property
    def exit_code(self) -> int:
        return list(Level).index(self) * 10


class DoctorFinding(Struct, frozen=True, kw_only=True):
    code: str
    """HF5xx; what passes carries the code of what could have failed."""
    level: Level
    what: str
    """What was looked at, in two or three words."""
    why: str
    """What was seen, in one or two lines."""
    fix: str = ""
    node: str = ""
    """Whose finding it is; empty: this node's, or that of all together."""


class TorchState(Enum):
    OK = "ok"
    ABSENT = "absent"
    BROKEN = "broken"
    SILENT = "silent"
    """The import did not end in time."""


class TorchFacts(Struct, frozen=True, kw_only=True):
    """What a process of its own reported about torch."""

    state: TorchState
    error: str = ""
    """The last line of its output, where it is broken."""
    seconds: float = 0.0
    """The whole process, mostly the import."""
    cpu_s: float = 0.0
    """Processor time of it."""
    load: float = 0.0
    """Processes that wanted to run, per CPU of the machine, when it had ended."""
    version: str = ""
    cuda: str = ""
    """That it was built with; empty for a CPU build."""
    nccl: str = ""
    distributed: bool = False
    gloo: bool = False
    gpus: int = 0
    """That torch can use."""
    gpu_error: str = ""
    """What CUDA said when asked for them."""
    unsupported: tuple[str, ...] = ()
    """GPUs for whose architecture this build has no code."""


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU as nvidia-smi shows it."""

    index: int
    name: str
    driver: str = ""
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    ecc_errors: int | None = None
    """Uncorrected, since the driver was loaded; None without ECC."""
    users: tuple[str, ...] = ()
    """`pid 17 python, 30000 MiB`."""


class Folder(Struct, frozen=True, kw_only=True):
    path: str
    total_bytes: int = 0
    free_bytes: int = 0
    error: str = ""
    """Why nothing could be written there."""


class Interface(Struct, frozen=True, kw_only=True):
    name: str
    up: bool = True
    addresses: tuple[str, ...] = ()
    speed_mbit_s: int = 0
    """0: unknown."""


class LocalFacts(Struct, frozen=True, kw_only=True):
    """One node, as it sees itself. The defaults are a node on which all is well."""

    host: str
    python: str
    holdfast: str
    nproc: int = 1
    """Workers that the line asks for."""
    nodes: int = 1
    torch: TorchFacts = TorchFacts(state=TorchState.ABSENT)
    driver: str = ""
    """Of NVIDIA, by /proc; empty without one."""
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    shm: Folder = Folder(path="/dev/shm")
    folders: tuple[Folder, ...] = ()
    """Where logs and temporary files go."""
    limits: dict[str, int | None] = {}
    """Soft limits by name: nofile nproc memlock core; None is unlimited."""
    infiniband: tuple[str, ...] = ()
    memory_bytes: int = 0
    memory_available_bytes: int = 0
    swap_bytes: int = 0
    memory_limit_bytes: int | None = None
    """Of the cgroups above us, the lowest."""
    pids_limit: int | None = None
    pids_used: int = 0
    cpus: int = 1
    """Of the machine."""
    cpus_allowed: int = 1
    """By affinity."""
    cpu_quota: float | None = None
    """CPUs' worth of time by cgroup."""
    overcommit: int = 0
    ptrace_scope: int | None = None
    privileged: bool = False
    """May trace any process: CAP_SYS_PTRACE."""
    core_pattern: str = ""
    clock_synchronised: bool | None = None
    own_addresses: tuple[str, ...] = ()
    """What the own host name resolves to."""
    resolve_error: str = ""
    resolve_s: float = 0.0
    interfaces: tuple[Interface, ...] = ()
    default_interface: str = ""
    ephemeral_ports: tuple[int, int] | None = None
    endpoint: str = ""
    endpoint_port: int = 0
    """0: none was given."""
    endpoint_is_here: bool | None = None
    endpoint_holder: str = ""
    """The process that holds the port on this machine; empty: none, or the port is another machine's."""
    variables: dict[str, str] = {}
    """Those of the environment that matter to a training job."""


class Summary(Struct, frozen=True, kw_only=True):
    """What should be the same on all nodes, and what an all-reduce needs."""

    host: str
    python: str = ""
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    holdfast: str = ""
    interface: str = ""
    """The one that holds the address by which the others reach this node."""
    has_torch: bool = False
    """And with gloo: it can take part in an all-reduce."""


class Reached(Enum):
    """How a connection to a peer ended."""

    YES = "yes"
    REFUSED = "refused"
    SILENT = "silent"
    """No answer in time."""
    UNREACHABLE = "unreachable"
    STRANGER = "stranger"
    """What answered is not the doctor of that node."""
    BROKEN = "broken"
    """The connection was made, and failed later."""


class NodePath(Struct, frozen=True, kw_only=True):
    """The way from one node to another, seen from its beginning."""

    to: int
    """Index of the other in the roster."""
    reached: Reached
    address: str = ""
    """With its port."""
    error: str = ""
    names: tuple[str, ...] = ()
    """What the other's host name resolves to here."""
    name_error: str = ""
    latency_s: float | None = None
    """Median round trip."""
    clock_offset_s: float | None = None
    """The other's clock minus ours, within half of the shortest round trip."""
    bytes_s: float | None = None
    """Bandwidth of one connection."""


class NodeReport(Struct, frozen=True, kw_only=True, tag=True):
    """What one node found, for the others."""

    summary: Summary
    links: tuple[NodePath, ...] = ()
    findings: tuple[DoctorFinding, ...] = ()
    """Local ones that are not a pass."""


class Reduced(Struct, frozen=True, kw_only=True, tag=True):
    """How the all-reduce went on one node."""

    ok: bool
    error: str = ""
    silent: bool = False
    """It did not end in time."""
    seconds: float = 0.0


class JointCheck(Struct, frozen=True, kw_only=True):
    """All that the nodes found out together; the same on all of them."""

    wanted: tuple[int, int]
    """Fewest and most nodes of the job."""
    came: tuple[str, ...]
    """Names, by index; the first is at the endpoint."""
    reports: tuple[NodeReport | None, ...] = ()
    """By index; None: it came, and fell silent."""
    reduced: tuple[Reduced | None, ...] | None = None
    """By index; None: there was no all-reduce."""
    no_reduce: str = ""
    """Why there was none."""
