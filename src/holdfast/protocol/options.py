"""The options of one launch, resolved from flags, PET_ variables, configuration files and defaults.

Plain data, built by `cli`, read by `runtime`. Other code does not read options from the environment.
"""

from __future__ import annotations

from enum import Enum, IntFlag

from msgspec import Struct

from holdfast.protocol.policy import JobSpec, Limits


class CommandKind(Enum):
    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"
    RUN_PATH = "run_path"


class Std(IntFlag):
    """torchrun's stream numbers for --redirects and --tee."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class WorkerCommand(Struct, frozen=True, kw_only=True):
    kind: CommandKind
    target: str
    """Script path, module name or program."""
    args: tuple[str, ...] = ()
    python: str = ""
    """Interpreter for SCRIPT, MODULE and RUN_PATH (PYTHON_EXEC or sys.executable); one path, never split."""
    local_rank_argument: bool = False
    """Pass `--local-rank=N` before the user's arguments, as the legacy `launch` does."""


class LogOptions(Struct, frozen=True, kw_only=True):
    log_dir: str | None
    """Absolute path of the folder that holds run folders; None for `--log-dir /dev/null`: no files at all."""
    log_dir_named: bool = True
    """The user has named it; otherwise it is our default, and another one will do."""
    redirects: dict[int, Std] = {}
    """Streams that go to files only, by local rank; none of a rank that is not in it."""
    tee: dict[int, Std] = {}
    """Streams that go to files and, with torchrun's prefix, to the console, by local rank."""
    local_ranks_filter: frozenset[int] | None = None
    """Local ranks shown on the console; None: all."""
    ranks_filter: frozenset[int] | None = None
    """Ranks of the job shown on the console; None: all."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None
    """--log-line-prefix-template; macros: ${role_name} ${rank} ${local_rank} ${hostname} ${node}."""
    dedup: bool = True
    """Show a line that many ranks print once, and do not repeat a traceback that the verdict shows."""


class Endpoint(Struct, frozen=True, kw_only=True):
    host: str
    """Name or address, without brackets."""
    port: int
    """0: pick a free one."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class EtcdOptions(Struct, frozen=True, kw_only=True):
    """The etcd servers with the coordinator's lease (backends etcd and etcd-v2)."""

    api: str
    """`v3` (falls back to v2 if the servers have no v3) or `v2`."""
    endpoints: tuple[Endpoint, ...]
    prefix: str = "/holdfast"
    lease_ttl_s: int = 5
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    user: str | None = None
    password: str | None = None


class SharedValueOptions(Struct, frozen=True, kw_only=True):
    """Options of a rendezvous backend that offers a shared value, such as that of an installed package; its name is the
    job's `backend`."""

    endpoint: str
    """The endpoint as given: the backend defines its form."""
    conf: dict[str, str]
    """The backend's own keys of --rdzv-conf."""
    lease_ttl_s: int = 5


class CallFds(Struct, frozen=True, kw_only=True):
    """Descriptors of the agent that its workers inherit, for a function that runs instead of a script."""

    call: int
    """The pickled call; the same for all workers."""
    results: tuple[int, ...]
    """The descriptor to which each worker writes its result, by local rank."""


class Preload(Struct, frozen=True, kw_only=True):
    """Modules that a node imports once, so that its workers are forked with them (--preload)."""

    modules: tuple[str, ...] = ()
    """Modules that are imported before the first worker is forked, in this order; empty: every worker is started by
    exec."""
    later: tuple[str, ...] = ()
    """Modules that are imported once the workers run, for the workers of a restart."""
    why: str = "not asked for"
    """The reason for this choice, in words."""
    torch: str = ""
    """The package by which the program imports torch, preloaded or not; empty: its source shows no such import."""


class RunOptions(Struct, frozen=True, kw_only=True):
    job: JobSpec
    limits: Limits
    nproc: int
    command: WorkerCommand
    logs: LogOptions
    endpoint: Endpoint
    more_endpoints: tuple[Endpoint, ...] = ()
    """Further entries of --rdzv-endpoint: places where a newcomer may ask, and witnesses."""
    succession: bool = False
    """The nodes elect a successor when the coordinator is lost, so every agent listens."""
    agent_port: int = 0
    """Port at which the agent listens for other nodes (--agent-port); 0: any free port."""
    standalone: bool = False
    """One node that no other can join: it listens on loopback only."""
    is_host: bool | None = None
    """rdzv-conf is_host: force or forbid hosting the coordinator; None: decided by binding."""
    token: bytes | None = None
    etcd: EtcdOptions | None = None
    """None: the coordinator is at the endpoint itself, or found by `shared_value`."""
    shared_value: SharedValueOptions | None = None
    """The coordinator is found by a shared value; `endpoint` is not used then."""
    role: str = "default"
    node_rank: int | None = None
    switches: tuple[str, ...] = ()
    """NodeSpec.switches."""
    local_addr: str | None = None
    signals: tuple[int, ...] = ()
    """Signals that end this node's part (--signals-to-handle), as numbers."""
    signals_text: str = ""
    """The same as given, for TORCHELASTIC_SIGNALS_TO_HANDLE."""
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    share_store: bool = True
    """False: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, rank 0's worker serves the store itself."""
    omp_num_threads: int | None = None
    """Value of OMP_NUM_THREADS for the workers; None: it stays as it is (it is set, or there is one process)."""
    compile_threads: int | None = None
    """Number of processes that compile kernels for one worker's torch.compile; None: it is not set for the workers."""
    cache_dir: str | None = None
    """Absolute path of the folder in which workers keep compiled kernels; None: each library has its own place."""
    cache_from: str | None = None
    """Absolute path of the folder from which an empty `cache_dir` is filled, and to which this job adds (--cache-from);
    None: there is none."""
    start_method: str = "spawn"
    event_log_handler: str = "null"
    metrics: Endpoint | None = None
    """Address at which Prometheus metrics are served; None: they are not."""
    health: Endpoint | None = None
    """Address at which health checks are answered; None: they are not."""
    dashboard: Endpoint | None = None
    """Address at which the node of the coordinator serves the dashboard; None: it does not."""
    otel: str | None = None
    """The URL of the OTLP/HTTP receiver of spans (--otel); None: there are none."""
    notify: tuple[str, ...] = ()
    """URLs and commands that get a notice at each turn of the job (--notify)."""
    health_command: str = ""
    """A command that is run on this node before each generation (--health-command); empty: there is none."""
    preflight: str = "off"
    """The checks of this node before its first generation (--preflight): `off`, `quick` or `full`."""
    watch_devices: bool = False
    """This machine has GPUs or InfiniBand, whose faults are reported while workers run."""
    watch_cards: bool = False
    """The job has several nodes: faults of this machine's network cards are reported while workers run."""
    health_if_free: bool = False
    """Health checks were requested by torchrun's variable: a port in use is only reported."""
    monitor_interval_s: float = 0.1
    """Value of --monitor-interval, which is accepted for compatibility. Nothing polls."""
    preload: Preload = Preload()
    standby: bool = False
    """Keep forked workers waiting for the next generation while one runs (--standby)."""
    preempt_signal: int | None = None
    """A signal to the agent that announces a preemption; workers ignore it. None: there is none."""
    call_fds: CallFds | None = None
    """Set only by holdfast.launch; there is no option for it."""
    how_others_join: str = ""
    """Advice for users while nodes are missing: what to do on the other nodes. Empty: there is nothing to do."""
    notices: tuple[str, ...] = ()
    """Lines to show before the start: abbreviations, flags without effect, nearest keys."""

    @property
    def is_elected(self) -> bool:
        """The agents elect the one that hosts the coordinator, by a storage that all of them reach."""
        return self.etcd is not None or self.shared_value is not None

    @property
    def meeting_point(self) -> str:
        """--rdzv-endpoint in words."""
        if self.shared_value is not None:
            return self.shared_value.endpoint or "(no endpoint)"
        return ",".join(map(str, (self.endpoint, *self.more_endpoints)))
