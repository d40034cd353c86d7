"""Every error that holdfast raises on purpose, with its fault, its code and its exit code.

    HoldfastError
    ├── CallerError   HF1xx  the command line, the configuration or the machine it names   exit 2
    ├── WorkerError   HF2xx  a training process failed                                     its own exit code
    ├── PeerError     HF3xx  another node, or the way to it                                exit 1
    ├── SnapshotError HF4xx  the saved state of a training job, or the disk that holds it  exit 1
    └── InternalError HF9xx  a fault of holdfast itself; crashes loudly                    exit 70

Codes are never reused. The table in docs/errors.md is made from the classes below.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class Fault(Enum):
    """Whose fault an error is."""

    CALLER = "caller"
    WORKER = "worker"
    PEER = "peer"
    STORAGE = "storage"
    OURS = "ours"


EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERNAL = 70
EXIT_REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: the job was preempted, and the scheduler should requeue it."""
EXIT_SIGNAL_BASE = 128
"""The end by signal N has the exit status 128+N, as in every shell."""


class HoldfastError(Exception):
    """Root of the tree. `str(error)` is one or two lines for a person, without the code."""

    code: ClassVar[str] = "HF900"
    fault: ClassVar[Fault] = Fault.OURS
    exit_code: int = EXIT_INTERNAL


class CallerError(HoldfastError):
    """The caller asked for something that cannot be done."""

    code = "HF100"
    fault = Fault.CALLER
    exit_code = EXIT_USAGE


class UsageError(CallerError):
    """The command line itself: unknown flag, missing script, malformed number."""

    code = "HF101"


class ScriptError(CallerError):
    """The training script is missing, is a folder, or cannot be executed."""

    code = "HF102"


class NodesError(CallerError):
    """--nnodes is malformed or impossible."""

    code = "HF103"


class ProcessesError(CallerError):
    """--nproc-per-node is malformed, not positive, or names a device this node lacks."""

    code = "HF104"


class EndpointError(CallerError):
    """The rendezvous endpoint is malformed."""

    code = "HF105"


class RendezvousConfigError(CallerError):
    """--rdzv-conf or --rdzv-backend is malformed or inconsistent."""

    code = "HF106"


class EnvironmentValueError(CallerError):
    """A PET_ or HOLDFAST_ variable holds a value that does not parse."""

    code = "HF107"


class LogDirError(CallerError):
    """The log directory cannot be created or written."""

    code = "HF108"


class PortInUseError(CallerError):
    """The endpoint's port is held by a process that is not this job's coordinator."""

    code = "HF109"


class NoAnswerError(PortInUseError):
    """The endpoint accepts connections but does not answer: another service, or a coordinator that hangs."""

    code = "HF115"


class UnresolvedHostError(CallerError):
    """The endpoint's host name did not resolve before the join deadline."""

    code = "HF110"


class RefusedError(CallerError):
    """The coordinator refused this agent: another job, configuration, version or token."""

    code = "HF111"


class PlatformError(CallerError):
    """Not Linux, or something the platform must offer is missing."""

    code = "HF112"


class LogOptionsError(CallerError):
    """--redirects, --tee or a log filter is malformed."""

    code = "HF113"


class BindingError(CallerError):
    """--numa-binding or --virtual-local-rank asks for what this node does not have."""

    code = "HF114"


class PicklingError(CallerError):
    """holdfast.launch: the function or an argument cannot be sent to another process."""

    code = "HF116"


class MissingPackageError(CallerError):
    """An optional package is needed for this; the message names the extra to install."""

    code = "HF117"


class LaunchTimeoutError(CallerError, TimeoutError):
    """holdfast.launch: the `timeout` that the caller set ran out; the workers were stopped."""

    code = "HF118"


class StoppedError(CallerError):
    """holdfast.launch: a signal from outside ended this node's part of the job; `exit_code` is 128+N."""

    code = "HF119"


class EtcdError(CallerError):
    """etcd cannot be used: it refuses user or password, lacks the API, or holds what holdfast did not write."""

    code = "HF120"


class EtcdUnreachableError(EtcdError):
    """No etcd server answered before the join deadline."""

    code = "HF121"


class BackendError(EtcdError):
    """A third party's rendezvous backend fails, or holds what holdfast did not write."""

    code = "HF122"


class BackendUnreachableError(EtcdUnreachableError):
    """The storage of a third party's rendezvous backend did not answer before the join deadline."""

    code = "HF123"


class DataError(CallerError, ValueError):
    """holdfast.train: a loader or sampler cannot do what was asked, or a dataset contradicts its own description."""

    code = "HF124"


class DataStateError(DataError):
    """holdfast.train: a saved position does not belong to this loader: another dataset size, seed or order."""

    code = "HF125"


class ProcessGroupError(CallerError, ValueError):
    """holdfast.train: the environment does not make a process group, or a model or micro-batch does not fit to it."""

    code = "HF126"


class NoRunError(CallerError):
    """No such job runs on this host, or several do and none was named, or the run that was named has ended."""

    code = "HF127"


class ControlRefusedError(CallerError):
    """A running job refuses a question: the job belongs to another user, or its agent does not know the question."""

    code = "HF128"


class ControlSilentError(CallerError):
    """A job's agent on this host does not answer in time: it is stopped, hangs, or the machine is in trouble."""

    code = "HF129"


class HostsError(CallerError):
    """--hosts, --hostfile, --include, --exclude or --host-discovery: malformed, no host, a host twice, or too few."""

    code = "HF140"


class HostUnreachableError(HostsError):
    """ssh cannot reach a host: its name, the network, its host key, or a login that needs a password."""

    code = "HF141"


class HostDiffersError(HostsError):
    """A host differs from the others: another Python, torch, holdfast or script, a missing folder, too few cores."""

    code = "HF142"


class SubmitError(CallerError):
    """`holdfast submit`: the request cannot be expressed for the scheduler, or the scheduler did not accept the job."""

    code = "HF143"


class ConfigFileError(CallerError):
    """holdfast.toml or [tool.holdfast] in pyproject.toml: not TOML, an unknown key, a wrong type, a readable secret."""

    code = "HF144"


class RetentionError(CallerError, ValueError):
    """Keep(…), or `holdfast snaps prune --keep-…`: not a count, a time or a metric."""

    code = "HF139"


class StateTypeError(CallerError):
    """Something in a tracked object's state cannot be stored without pickle; the message names where it is."""

    code = "HF130"


class IntervalError(CallerError):
    """`every=` of Snapshots is neither a time nor a number of steps."""

    code = "HF131"


class ShardingError(CallerError):
    """The tracked objects do not match the saved state: a tensor is missing or has another shape."""

    code = "HF132"


class StateMismatchError(ShardingError):
    """The tracked objects are not the saved ones: objects or tensors are missing, left over, or of another kind."""

    code = "HF134"


class TrackingError(CallerError):
    """An object given to `Snapshots.track` cannot be saved and restored, or the order of the calls is invalid."""

    code = "HF133"


class WorkerError(HoldfastError):
    """A training process failed."""

    code = "HF200"
    fault = Fault.WORKER
    exit_code = EXIT_FAILURE


class WorkerFailedError(WorkerError):
    """holdfast.launch: a worker failed and no restart was left; the cause is the worker's own exception.

    `exit_code` is the first failing worker's own, 128+N for signal N.
    """

    code = "HF206"

    def __init__(self, message: str, *, exit_code: int = EXIT_FAILURE, rank: int | None = None, host: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.rank = rank
        """Rank of the first worker that failed; None: unknown."""
        self.host = host
        self.verdict_code = self.code
        """Code of the verdict (HF201: an exception, HF204: a signal …)."""
        self.log_file = ""
        """The file with the worker's stderr, on its own host; empty: none."""
        self.run_folder = ""
        """The run folder of this node; empty with log_dir="/dev/null"."""


class PeerError(HoldfastError):
    """Another node, or the network to it."""

    code = "HF300"
    fault = Fault.PEER
    exit_code = EXIT_FAILURE


class JoinTimeoutError(PeerError):
    """Too few nodes joined before the join deadline."""

    code = "HF301"


class CoordinatorUnreachableError(PeerError):
    """No coordinator answered at the endpoint before the join deadline."""

    code = "HF302"


class CoordinatorLostError(PeerError):
    """The coordinator was lost and did not come back."""

    code = "HF303"


class ProtocolError(PeerError):
    """A peer sent bytes that violate the protocol."""

    code = "HF304"


class AuthenticationError(PeerError):
    """A peer could not prove that it knows the job token, or a frame's MAC is wrong."""

    code = "HF305"


class SupersededError(PeerError):
    """The scheduler requeued the job but could not end the processes of its earlier start: they end by themselves."""

    code = "HF309"


class SnapshotError(HoldfastError):
    """The saved state of a training job, or the disk that holds it."""

    code = "HF400"
    fault = Fault.STORAGE
    exit_code = EXIT_FAILURE


class SnapshotDamagedError(SnapshotError):
    """A snapshot is damaged: a file is missing, truncated, changed or exchanged. The snapshot is set aside."""

    code = "HF401"


class NoValidSnapshotError(SnapshotError):
    """The folder has damaged or unfinished snapshots and no valid one: training does not start from scratch unasked."""

    code = "HF402"


class SnapshotBusyError(SnapshotError):
    """Another job uses the snapshot folder, or took it over from this one."""

    code = "HF403"


class SnapshotWriteError(SnapshotError):
    """A snapshot could not be written: disk full, read-only, file too large. Older snapshots are unchanged."""

    code = "HF404"


class SnapshotIncompleteError(SnapshotError):
    """Not every rank's part of a snapshot was written in time; it was not committed."""

    code = "HF405"


class SnapshotGoneError(SnapshotError):
    """The snapshot was removed while it was read, by the retention of a running job or by a user."""

    code = "HF406"


class SnapshotVersionError(SnapshotError):
    """The snapshot was written by a newer holdfast. It is not changed."""

    code = "HF407"


class SnapshotFolderError(SnapshotWriteError):
    """The snapshot folder of a running job was removed, renamed or unmounted. No new folder is made."""

    code = "HF408"


class SnapshotMemoryError(SnapshotError):
    """The memory tier cannot be used: /dev/shm is missing or too small for two copies of the state."""

    code = "HF410"


class SaverLostError(SnapshotWriteError):
    """The process that writes snapshots died before it had written this one. The next save starts another."""

    code = "HF411"


class InternalError(HoldfastError):
    """A broken invariant. Carries the last events and commands."""

    code = "HF901"


class SupervisorLostError(InternalError):
    """The process that holds the workers of a node ends again and again, or cannot be started again."""

    code = "HF903"
