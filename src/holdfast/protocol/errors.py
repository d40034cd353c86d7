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

from holdfast.protocol.exit_codes import EXIT_FAILURE, EXIT_INTERNAL, EXIT_USAGE


class Fault(Enum):
    """The side that is at fault for an error."""

    CALLER = "caller"
    WORKER = "worker"
    PEER = "peer"
    STORAGE = "storage"
    OURS = "ours"


class HoldfastError(Exception):
    """Root of all errors of holdfast. `str(error)` is one or two lines for a person, without the code."""

    code: ClassVar[str] = "HF900"
    fault: ClassVar[Fault] = Fault.OURS
    exit_code: int = EXIT_INTERNAL

    def __init_subclass__(cls, *, code: str = "") -> None:
        """Set the code of a class; a class without one has its parent's."""
        super().__init_subclass__()
        cls.code = code or cls.code


class CallerError(HoldfastError, code="HF100"):
    """The caller asked for something that cannot be done."""

    fault = Fault.CALLER
    exit_code = EXIT_USAGE


class UsageError(CallerError, code="HF101"):
    """The command line itself: unknown flag, missing script, malformed number."""


class ScriptError(CallerError, code="HF102"):
    """The training script is missing, is a folder, or cannot be executed."""


class NodesError(CallerError, code="HF103"):
    """--nnodes is malformed or impossible."""


class ProcessesError(CallerError, code="HF104"):
    """--nproc-per-node is malformed, not positive, or names a device that this node does not have."""


class EndpointError(CallerError, code="HF105"):
    """The rendezvous endpoint is malformed."""


class RendezvousConfigError(CallerError, code="HF106"):
    """--rdzv-conf or --rdzv-backend is malformed or inconsistent."""


class EnvironmentValueError(CallerError, code="HF107"):
    """A PET_ or HOLDFAST_ variable holds a value that does not parse."""


class LogDirError(CallerError, code="HF108"):
    """The log directory cannot be created or written."""


class PortInUseError(CallerError, code="HF109"):
    """The endpoint's port is held by a process that is not this job's coordinator."""


class NoAnswerError(PortInUseError, code="HF115"):
    """The endpoint accepts connections but does not answer: another service, or a coordinator that hangs."""


class UnresolvedHostError(CallerError, code="HF110"):
    """The endpoint's host name did not resolve before the join deadline."""


class RefusedError(CallerError, code="HF111"):
    """The coordinator refused this agent: another job, configuration, version or token."""


class PlatformError(CallerError, code="HF112"):
    """The platform is not Linux, or lacks a required feature."""


class LogOptionsError(CallerError, code="HF113"):
    """--redirects, --tee or a log filter is malformed."""


class BindingError(CallerError, code="HF114"):
    """--numa-binding or --virtual-local-rank asks for a device or CPU that this node does not have."""


class PicklingError(CallerError, code="HF116"):
    """holdfast.launch: the function or an argument cannot be sent to another process."""


class MissingPackageError(CallerError, code="HF117"):
    """An optional package is needed for this; the message names the extra to install."""


class LaunchTimeoutError(CallerError, TimeoutError, code="HF118"):
    """holdfast.launch: the `timeout` that the caller set ran out; the workers were stopped."""


class StoppedError(CallerError, code="HF119"):
    """holdfast.launch: a signal from outside ended this node's part of the job; `exit_code` is 128+N."""


class EtcdError(CallerError, code="HF120"):
    """etcd cannot be used: it refuses user or password, lacks the API, or has a value that holdfast did not write."""


class EtcdUnreachableError(EtcdError, code="HF121"):
    """No etcd server answered before the join deadline."""


class BackendError(EtcdError, code="HF122"):
    """A third party's rendezvous backend fails, or has a value that holdfast did not write."""


class BackendUnreachableError(EtcdUnreachableError, code="HF123"):
    """The storage of a third party's rendezvous backend did not answer before the join deadline."""


class DataError(CallerError, ValueError, code="HF124"):
    """holdfast.train: a loader or sampler cannot do what was asked, or a dataset contradicts its own description."""


class DataStateError(DataError, code="HF125"):
    """holdfast.train: a saved position does not belong to this loader: another dataset size, part, seed or order."""


class ProcessGroupError(CallerError, ValueError, code="HF126"):
    """holdfast.train: the environment does not make a process group, or a model or micro-batch does not fit it."""


class NoRunError(CallerError, code="HF127"):
    """No such job runs on this host, or several do and none was named, or the run that was named has ended."""


class ControlRefusedError(CallerError, code="HF128"):
    """A running job refuses a question: it belongs to another user, does not know the question, or says why not."""


class ControlSilentError(CallerError, code="HF129"):
    """A job's agent on this host does not answer in time: it is stopped, hangs, or the machine is in trouble."""


class HostsError(CallerError, code="HF140"):
    """--hosts, --hostfile, --include, --exclude or --host-discovery: malformed, no host, a host twice, or too few."""


class HostUnreachableError(HostsError, code="HF141"):
    """ssh cannot reach a host: its name, the network, its host key, or a login that needs a password."""


class HostDiffersError(HostsError, code="HF142"):
    """A host differs from the others: another Python, torch, holdfast or script, a missing folder, too few cores."""


class SubmitError(CallerError, code="HF143"):
    """`holdfast submit`: the request cannot be expressed for the scheduler, or the scheduler did not accept the job."""


class ConfigFileError(CallerError, code="HF144"):
    """holdfast.toml or [tool.holdfast] in pyproject.toml: not TOML, an unknown key, a wrong type, a readable secret."""


class CacheDirError(CallerError, code="HF145"):
    """--cache-dir or --cache-from names a folder that cannot be made, belongs to another user, or that others may
    change."""


class RetentionError(CallerError, ValueError, code="HF139"):
    """Keep(…), or `holdfast snaps prune --keep-…`: not a count, a time or a metric."""


class StateTypeError(CallerError, code="HF130"):
    """Something in a tracked object's state cannot be stored without pickle; the message names where it is."""


class IntervalError(CallerError, code="HF131"):
    """An interval or a limit of Snapshots is not usable: `every="5min"` and `every="500 steps"` have their unit."""


class ShardingError(CallerError, code="HF132"):
    """The tracked objects do not match the saved state: a tensor is missing or has another shape."""


class SnapshotURLError(CallerError, ValueError, code="HF135"):
    """The URL given to Snapshots or `holdfast snaps` is not one of an object store, or holds a password or a query."""


class StateMismatchError(ShardingError, code="HF134"):
    """The tracked objects are not the saved ones: objects or tensors are missing, left over, or of another kind."""


class TrackingError(CallerError, code="HF133"):
    """An object given to `Snapshots.track` cannot be saved and restored, or the order of the calls is invalid."""


class MadeBeforeError(TrackingError, code="HF136"):
    """`ht.survive`: what ends with the ranks that it was made for, as a sharded model, was made before the function."""


class WorkerError(HoldfastError, code="HF200"):
    """A training process failed."""

    fault = Fault.WORKER
    exit_code = EXIT_FAILURE


class WorkerFailedError(WorkerError, code="HF206"):
    """holdfast.launch: a worker failed and no restart was left; the cause is the worker's own exception.

    `exit_code` is the first failing worker's own, 128+N for signal N.
    """

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


class PeerError(HoldfastError, code="HF300"):
    """Another node, or the network to it."""

    fault = Fault.PEER
    exit_code = EXIT_FAILURE


class JoinTimeoutError(PeerError, code="HF301"):
    """Too few nodes joined before the join deadline."""


class UnfitNodesError(PeerError, code="HF310"):
    """Too few nodes are fit to take part: a check of others has failed, such as --health-command."""


class CoordinatorUnreachableError(PeerError, code="HF302"):
    """No coordinator answered at the endpoint before the join deadline."""


class CoordinatorLostError(PeerError, code="HF303"):
    """The coordinator was lost and did not come back."""


class ProtocolError(PeerError, code="HF304"):
    """A peer sent bytes that violate the protocol."""


class AuthenticationError(PeerError, code="HF305"):
    """A peer could not prove that it knows the job token, or a frame's MAC is wrong."""


class SupersededError(PeerError, code="HF309"):
    """The scheduler requeued the job but could not end the processes of its earlier start: they end by themselves."""


class SnapshotError(HoldfastError, code="HF400"):
    """The saved state of a training job, or the disk that holds it."""

    fault = Fault.STORAGE
    exit_code = EXIT_FAILURE


class SnapshotDamagedError(SnapshotError, code="HF401"):
    """A snapshot is damaged: a file is missing, truncated, changed or exchanged. The snapshot is set aside."""


class NoSnapshotError(SnapshotError, code="HF415"):
    """The folder that a program reads from has no valid snapshot, or none of the step that it asked for."""


class NoValidSnapshotError(SnapshotError, code="HF402"):
    """The folder has damaged or unfinished snapshots and no valid one: training does not start from scratch unasked."""


class SnapshotBusyError(SnapshotError, code="HF403"):
    """Another job uses the snapshot folder, or took it over from this one."""


class SnapshotWriteError(SnapshotError, code="HF404"):
    """A snapshot could not be written: disk full, read-only, file too large. Older snapshots are unchanged."""


class SnapshotIncompleteError(SnapshotError, code="HF405"):
    """A snapshot was not committed: not every rank's part of it was written in time."""


class SnapshotGoneError(SnapshotError, code="HF406"):
    """The snapshot was removed while it was read, by the retention of a running job or by a user."""


class SnapshotVersionError(SnapshotError, code="HF407"):
    """The snapshot was written by a newer holdfast. It is not changed."""


class SnapshotFolderError(SnapshotWriteError, code="HF408"):
    """The snapshot folder of a running job was removed, renamed or unmounted, or the nodes do not share it. It is not
    created again."""


class SnapshotMemoryError(SnapshotError, code="HF410"):
    """The memory tier cannot be used: /dev/shm is missing or too small for two copies of the state."""


class SaverLostError(SnapshotWriteError, code="HF411"):
    """The process that writes snapshots died before it had written this one. The next save starts another."""


class NotFiniteError(SnapshotError, code="HF412"):
    """The loss was not finite in several steps in a row, or, with nonfinite="stop", a value in a save to the disk. The
    next start prefers a state whose values are finite."""


class ReplicasDifferError(SnapshotError, code="HF414"):
    """Ranks have different values of a tensor that should be equal. A snapshot would mix them, so none is made."""


class CopyError(SnapshotError, code="HF413"):
    """A state in memory could not be copied to another node, or fetched from it."""


class InternalError(HoldfastError, code="HF901"):
    """A broken invariant. Carries the last events and commands."""


class SupervisorLostError(InternalError, code="HF903"):
    """The process that holds the workers of a node ends again and again, or cannot be started again."""
