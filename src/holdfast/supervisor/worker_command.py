"""Derives from the options how workers are started: command line, variables, modules to import ahead,
versions, CPUs.

Starts nothing. Light, because it is used before the agent's own heavy modules are imported: modules that are ordered
early are imported while the nodes still meet.

The versions are facts that should be equal on every node: Python, holdfast, torch, CUDA, NCCL, the script and its
arguments. The coordinator compares them. They are read from a few small files, because the start of a job must not
wait for an import of torch.

The CPUs to which a worker is bound (--numa-binding) are read from any folder that looks like /sys, so that tests bring
their own. As in torchrun, the local rank is the index of the accelerator. Unlike torchrun, variables that hide
accelerators by index are honoured, neither numactl nor torch is needed, and without accelerators the local ranks are
dealt evenly over the NUMA nodes.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast import compile_caches, seqpacket
from holdfast.linux import read_text
from holdfast.protocol.errors import BindingError
from holdfast.protocol.options import CommandKind, RunOptions, WorkerCommand
from holdfast.protocol.train_contract import RUN_ID_VARIABLE
from holdfast.supervisor.fork_server_client import CONTROL_FD
from holdfast.supervisor.supervisor import SupervisorHandle
from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.protocol.messages import Assign, Start

BOOTSTRAP = str(Path(__file__).resolve().parents[1] / "worker" / "bootstrap.py")
"""Run by its path, so that it works under any Python, with or without holdfast installed."""

CALL_FD, RESULT_FD = 3, 4
"""Descriptors of the call and of its result, in a worker that runs a function."""


def worker_argv(options: RunOptions, local_rank: int) -> list[str]:
    """Program and arguments of one worker; the program may still have to be looked up in PATH.

    `${local_rank}` and `$local_rank` become the real local rank (also with --virtual-local-rank) and `$$` becomes `$`,
    in the target and the user's arguments, as in torchrun.
    """
    command = options.command
    # `holdfast launch`: before the own arguments, as torch.distributed.launch puts it.
    legacy = ["--local-rank=${local_rank}"] if command.local_rank_argument else []
    arguments = [_fill_in(argument, local_rank) for argument in (*legacy, *command.args)]
    if command.kind is CommandKind.PROGRAM:
        return [command.target, *arguments]
    return [*bootstrap_argv(options), command.kind.value, _fill_in(command.target, local_rank), *arguments]


def bootstrap_argv(options: RunOptions) -> list[str]:
    """The interpreter and the bootstrap, with which the command line of every Python program of this job begins."""
    command = options.command
    python = command.python or sys.executable
    # torchrun starts no interpreter for --run-path, so its output is buffered there (test_each_kind).
    unbuffered = [] if command.kind is CommandKind.RUN_PATH else ["-u"]
    return [python, *unbuffered, bootstrap_for(python)]


def bootstrap_for(python: str) -> str:
    """The bootstrap to run under this interpreter: its bytecode when it is our own interpreter.

    A program that is run by its path is compiled at every start, which costs several milliseconds of every restart.
    """
    if python != sys.executable:
        return BOOTSTRAP
    cached = cache_from_source(BOOTSTRAP)
    if is_bytecode_of(cached, BOOTSTRAP):
        return cached
    # The loader writes the cache, where it may.
    SourceFileLoader("holdfast.worker.bootstrap", BOOTSTRAP).get_code("holdfast.worker.bootstrap")
    return cached if is_bytecode_of(cached, BOOTSTRAP) else BOOTSTRAP


def is_bytecode_of(cached: str, source: str) -> bool:
    """Whether this bytecode was made from the source as it is now. An environment that forbids to write bytecode may
    have some from the installation, or from an older source: Python does not check what it runs by its path."""
    try:
        with open(cached, "rb") as file:
            magic, flags, time_s, size_bytes = struct.unpack("<4sLLL", file.read(16))
        found = os.stat(source)
    except (OSError, struct.error):
        return False
    by_time = 0  # else the header has a hash of the source
    made_from = (MAGIC_NUMBER, by_time, int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF)
    return (magic, flags, time_s, size_bytes) == made_from


RUN_ID_OF_ALL = "none"
"""torchrun's default of --rdzv-id."""


def worker_environment(
    options: RunOptions,
    assign: Assign,
    start: Start,
    local_rank: int,
    *,
    error_file: str,
    parent: Mapping[str, str],
) -> dict[str, str]:
    """Variables to set for one worker of `assign`, in addition to its agent's environment `parent`. `error_file` empty:
    none.

    Raises BindingError when --virtual-local-rank finds too few entries in CUDA_VISIBLE_DEVICES.
    """
    environment = {
        "RANK": str(assign.rank_base + assign.place(local_rank)),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(assign.world_size),
        "LOCAL_WORLD_SIZE": str(options.nproc if assign.local_ranks is None else len(assign.local_ranks)),
        "GROUP_RANK": str(assign.group_rank),
        "NODE_RANK": str(assign.group_rank),
        "GROUP_WORLD_SIZE": str(assign.group_world_size),
        "ROLE_NAME": options.role,
        "ROLE_RANK": str(assign.role_rank_base + assign.place(local_rank)),
        "ROLE_WORLD_SIZE": str(assign.role_world_size),
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "TORCHELASTIC_RUN_ID": options.job.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(assign.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(options.job.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(options.share_store),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_text,
        **_read_at_import(options, parent),
    }
    # The default of --rdzv-id is the same for all jobs: it would mix their curves in one run of a logger.
    if (run_id := parent.get(RUN_ID_VARIABLE) or options.job.run_id) != RUN_ID_OF_ALL:
        environment[RUN_ID_VARIABLE] = run_id
    if start.job_uid:
        environment["HOLDFAST_JOB_UID"] = start.job_uid
    if start.before:
        environment["HOLDFAST_PREVIOUS_END"] = start.before
    if options.virtual_local_rank:
        environment["LOCAL_RANK"] = "0"
        environment["CUDA_VISIBLE_DEVICES"] = _own_device(parent, "CUDA_VISIBLE_DEVICES", local_rank)
        if "HIP_VISIBLE_DEVICES" in parent:  # ROCm reads it first and would ignore the variable above
            environment["HIP_VISIBLE_DEVICES"] = _own_device(parent, "HIP_VISIBLE_DEVICES", local_rank)
    return environment


def _read_at_import(options: RunOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that libraries read when they are imported, so that the fork server needs them as well."""
    found = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
    if options.omp_num_threads is not None:
        found["OMP_NUM_THREADS"] = str(options.omp_num_threads)
    if options.compile_threads is not None:
        found["TORCHINDUCTOR_COMPILE_THREADS"] = str(options.compile_threads)
    return found


def _own_device(parent: Mapping[str, str], variable: str, local_rank: int) -> str:
    """The only device that a worker with virtual local rank 0 may see."""
    visible = parent.get(variable)
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise BindingError(
            f"--virtual-local-rank: local rank {local_rank} has no device in {variable}={visible!r}.\n"
            f"It names {len(devices)}; start at most that many processes."
        )
    return devices[local_rank].strip()


def worker_fds(options: RunOptions, local_rank: int) -> dict[int, int]:
    """Number in the worker -> descriptor of ours, in addition to its standard streams."""
    fds = options.call_fds
    return {} if fds is None else {CALL_FD: fds.call, RESULT_FD: fds.results[local_rank]}


def _fill_in(argument: str, local_rank: int) -> str:
    if "$" not in argument:
        return argument
    from string import Template  # lazily: most commands have no `$`, and its pattern takes time to compile

    return Template(argument).safe_substitute(local_rank=str(local_rank))


FOLDER = str(Path(__file__).resolve().parents[1] / "worker")
"""The folder of the fork server's program."""
IMPORT_S = 120.0
"""Time after which it is reported that imports for restarts are not done (s). torch._inductor takes 3 s, and 40 s on
a machine with ten busy processes per core."""


def begin(supervisor: SupervisorHandle, options: RunOptions) -> None:
    """Send the supervisor what holds for all workers, and the order for the fork server if there is one.

    No other thread uses its socket yet. Blocks until both are sent.
    """
    out = seqpacket.Outbox()
    if options.preempt_signal is not None:
        out.add({"do": "ignore", "signum": options.preempt_signal})
    order = order_for(options, os.environ)
    if order is not None:
        out.add(order)
    # If the supervisor is gone, the agent will notice and start another one.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        out.flush(supervisor.sock)
    out.clear()


def order_for(options: RunOptions, environ: Mapping[str, str]) -> seqpacket.Message | None:
    """The order for the fork server; None when workers are to be started by exec."""
    # Nothing to share: a fork server would cost a process and save nothing.
    if not options.preload.modules:
        return None
    return {
        "do": "start_fork_server",
        "argv": [*bootstrap_argv(options), "fork-server", FOLDER, str(CONTROL_FD)],
        "env_set": common_environment(options, environ),
        "modules": list(options.preload.modules),
        "later": list(options.preload.later),
        "later_s": IMPORT_S,
        "standby": options.nproc if options.standby else 0,
        "worker": {"argv": worker_argv(options, 0), "first_path": first_path(options)},
    }


def script_argv(options: RunOptions) -> list[str]:
    """The command line before a script of ours that is forked from the same fork server as the workers."""
    return [*bootstrap_argv(options), CommandKind.SCRIPT.value]


def common_environment(options: RunOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that all workers get and that libraries read at import."""
    common = _read_at_import(options, environ)
    # torch reads one of them when it is imported: without them the fork server could make no worker.
    if options.cache_dir is not None:
        common |= compile_caches.variables(options.cache_dir, environ)
    return common


def first_path(options: RunOptions) -> str:
    """The program's sys.path[0]: modules beside the program come before all others, in the fork server too."""
    if options.command.kind is CommandKind.MODULE:
        try:
            return os.getcwd()
        except OSError:  # the folder was deleted
            return ""
    # As Python itself: a folder with __main__.py is its own entry, and links are followed to the folder of the real
    # script.
    path = os.path.abspath(options.command.target)
    return path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))


HASH_CHARACTERS = 12
SCRIPT_BYTES_MAX = 1 << 20

_VERSION = r"^__version__ *(?::[^=\n]*)?= *['\"]([^'\"]+)"
_CUDA = r"^(?:cuda|hip) *(?::[^=\n]*)?= *['\"]([^'\"]+)"
_NCCL = r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)"


def node_versions(command: WorkerCommand, path: Sequence[str] | None = None) -> dict[str, str]:
    """Versions by name; missing or unreadable ones are left out. Takes a fraction of a millisecond.

    `path`: the module search path; by default this interpreter's own.
    """
    found = {"holdfast": __version__, "script": script_hash(command), "arguments": arguments_hash(command)}
    # Another interpreter has its own Python and torch, which could be found out only by starting it.
    if command.kind is not CommandKind.PROGRAM and command.python in ("", sys.executable):
        found["python"] = ".".join(map(str, sys.version_info[:3]))
        found |= torch_versions(sys.path if path is None else path)
    return {name: version for name, version in found.items() if version}


def script_hash(command: WorkerCommand) -> str:
    """Hash of the script's bytes; empty for modules and programs."""
    if command.kind not in (CommandKind.SCRIPT, CommandKind.RUN_PATH):
        return ""
    try:
        if not stat.S_ISREG(os.stat(command.target).st_mode):
            return ""  # what is read from a pipe would be lost to the worker
        with open(command.target, "rb") as file:
            return _hash(file.read(SCRIPT_BYTES_MAX))
    except (OSError, ValueError):
        return ""


def arguments_hash(command: WorkerCommand) -> str:
    """Hash of the rest of the command: its arguments, and the name of a module or program."""
    name = "" if command.kind in (CommandKind.SCRIPT, CommandKind.RUN_PATH) else command.target
    words = "\0".join((command.kind.value, name, *command.args))
    return _hash(words.encode(errors="surrogateescape"))


def _hash(data: bytes) -> str:
    import hashlib  # lazily: the fork server is ordered without it

    return hashlib.sha256(data).hexdigest()[:HASH_CHARACTERS] if data else ""


def torch_versions(path: Sequence[str]) -> dict[str, str]:
    """Versions of the torch that an import would find first."""
    found = _first_torch(path)
    if found is None:
        return {}
    folder, version, cuda = found
    header = read_text(os.path.join(folder, "nvidia", "nccl", "include", "nccl.h"))
    nccl = ".".join(re.findall(_NCCL, header)[:3])
    return {"torch": version, "cuda": cuda, "nccl": nccl}


def _first_torch(path: Sequence[str]) -> tuple[str, str, str] | None:
    """The folder of the torch that an import would find first, its version, and that of CUDA; None: there is none."""
    for folder in path:
        text = read_text(os.path.join(folder, "torch", "version.py"))
        version = re.search(_VERSION, text, re.MULTILINE)
        if version is None:
            # Another folder that is called torch, or a torch without this file.
            continue
        cuda = re.search(_CUDA, text, re.MULTILINE)
        return folder, version[1], cuda[1] if cuda else ""
    return None


NCCL2_SWITCH = "TORCH_DIST_USE_NCCL2"
"""torch 2.15: 0 lets the backend `nccl` be the one of earlier versions. `_register_builtin_nccl_backend` of
torch.distributed.distributed_c10d reads it when the first group is made."""


def backends_text(path: Sequence[str], environ: Mapping[str, str]) -> str:
    """What the backends of init_process_group are with the torch that an import would find first: `nccl` is another
    one from torch 2.15 on. Read from its files, since an import takes seconds; empty: there is no torch."""
    found = _first_torch(path)
    if found is None:
        return ""
    folder, _, cuda = found
    if not cuda:
        return "gloo (torch is built without GPUs)"
    if not _has_nccl2(folder):
        return "gloo on CPUs, nccl on GPUs"
    if environ.get(NCCL2_SWITCH) == "0":
        return f"gloo on CPUs, nccl on GPUs, which is nccl-legacy by {NCCL2_SWITCH}=0"
    return f"gloo on CPUs, nccl on GPUs, which is nccl2 ({NCCL2_SWITCH}=0 for nccl-legacy)"


def nccl_is_nccl2(path: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the backend `nccl` of that torch is nccl2."""
    found = _first_torch(path)
    return found is not None and _has_nccl2(found[0]) and environ.get(NCCL2_SWITCH) != "0"


def _has_nccl2(folder: str) -> bool:
    return NCCL2_SWITCH in read_text(os.path.join(folder, "torch", "distributed", "distributed_c10d.py"))


MODES = ("node", "socket", "exclusive", "core-complex")
SYS = Path("/sys")
PROC_GPUS = Path("/proc/driver/nvidia/gpus")
DEV = Path("/dev")
INTEL = "0x8086"
DISPLAY, ACCELERATOR = "0x03", "0x12"
"""PCI base classes: GPUs of all vendors have the first, other compute devices (Gaudi, Ascend) the second."""
NOT_FOR_TRAINING = frozenset(["intel_vpu", "amdxdna"])
"""Drivers of inference units inside processors; torch has no device for them."""


class NumaTopology(Struct, frozen=True, kw_only=True):
    """The machine's facts that binding needs."""

    sys: Path
    allowed: frozenset[int]
    """CPUs that this process may use."""
    gpus: tuple[str, ...]
    """PCI addresses as in /sys/bus/pci/devices, by the index of the accelerator; empty: none."""

    @classmethod
    def this(cls, environment: Mapping[str, str] = os.environ) -> NumaTopology:
        """The topology of this machine, with the accelerators that its environment lets workers see."""
        gpus = accelerators(environment, sys=SYS, proc_gpus=PROC_GPUS, dev=DEV)
        return cls(sys=SYS, allowed=frozenset(os.sched_getaffinity(0)), gpus=gpus)


def accelerators(environment: Mapping[str, str], *, sys: Path, proc_gpus: Path, dev: Path) -> tuple[str, ...]:
    """PCI addresses by the index that workers use, of one vendor: torch, too, is built for one."""
    if nvidia := nvidia_gpus(proc_gpus, dev):
        return visible_gpus(nvidia, environment.get("CUDA_VISIBLE_DEVICES"))
    if amd := amd_gpus(sys):
        # ROCm honours both, its own name first.
        variable = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environment else "CUDA_VISIBLE_DEVICES"
        return visible_gpus(amd, environment.get(variable))
    by_card = environment.get("ZE_FLAT_DEVICE_HIERARCHY") == "COMPOSITE"
    if intel := intel_gpus(sys, dev, by_card=by_card):
        return in_affinity_mask(intel, environment.get("ZE_AFFINITY_MASK"))
    return other_accelerators(sys)


def nvidia_gpus(folder: Path, dev: Path) -> tuple[str, ...]:
    """PCI addresses of the GPUs that the driver lists, in PCI order (as CUDA with CUDA_DEVICE_ORDER=PCI_BUS_ID).

    A container sees the driver's whole list, but device files for its own GPUs only: the others are left out.
    """
    try:
        return tuple(sorted(entry.name.lower() for entry in folder.iterdir() if _has_device_file(entry, dev)))
    except OSError:
        return ()


def amd_gpus(sys: Path) -> tuple[str, ...]:
    """PCI addresses of AMD's accelerators, in the order of the driver's topology, which is also ROCm's."""
    nodes = sys / "class" / "kfd" / "kfd" / "topology" / "nodes"
    found: list[str] = []
    try:
        for node in sorted(nodes.iterdir(), key=lambda path: int(path.name)):
            pairs = (line.split() for line in (node / "properties").read_text().splitlines())
            properties = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
            # The other nodes of this topology are the processors.
            if properties.get("simd_count"):
                place = properties.get("location_id", 0)
                address = f"{properties.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
                found.append(address)
    except (OSError, ValueError):
        return ()
    return tuple(found)


def intel_gpus(sys: Path, dev: Path, *, by_card: bool) -> tuple[str, ...]:
    """PCI addresses in the order of torch.xpu: discrete cards where there are any, else integrated GPUs. A card appears
    once for each of its tiles, unless `by_card`. A container sees all of them, but device files for its own only."""
    found = [
        device
        for device in _pci_devices(sys, DISPLAY)
        if _text(device / "vendor") == INTEL
        and any((dev / "dri" / node.name).exists() for node in device.glob("drm/renderD*"))
    ]
    cards = [device for device in found if not device.name.startswith("0000:00:")]  # bus 0: inside the processor
    if not cards:
        return tuple(device.name for device in found)
    return tuple(card.name for card in cards for _ in range(1 if by_card else _tiles(card)))


def _tiles(card: Path) -> int:
    """The number of tiles of a card, for the driver xe or i915."""
    return len(list(card.glob("tile[0-9]*"))) or len(list(card.glob("drm/card*/gt/gt[0-9]*"))) or 1


def in_affinity_mask(gpus: Sequence[str], mask: str | None) -> tuple[str, ...]:
    """The GPUs that ZE_AFFINITY_MASK names by index, in their own order; for `1.0`, a part of a card, the card."""
    items = [] if mask is None else [item.strip().partition(".")[0] for item in mask.split(",") if item.strip()]
    if not items or not all(item.isdecimal() for item in items):
        return tuple(gpus)
    return tuple(gpu for index, gpu in enumerate(gpus) if str(index) in items)


def other_accelerators(sys: Path) -> tuple[str, ...]:
    """PCI addresses of other compute devices that have a driver, in PCI order."""
    drivers = ((device.name, device / "driver") for device in _pci_devices(sys, ACCELERATOR))
    return tuple(name for name, driver in drivers if driver.exists() and driver.resolve().name not in NOT_FOR_TRAINING)


def _pci_devices(sys: Path, base_class: str) -> list[Path]:
    devices = sorted((sys / "bus" / "pci" / "devices").glob("*"))
    return [device for device in devices if _text(device / "class").startswith(base_class)]


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _has_device_file(gpu: Path, dev: Path) -> bool:
    for line in (gpu / "information").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Device Minor":
            return (dev / f"nvidia{value.strip()}").exists()
    return True


def visible_gpus(gpus: Sequence[str], visible: str | None) -> tuple[str, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names by index, in its order; CUDA ends the list at the first bad entry."""
    if visible is None:
        return tuple(gpus)
    chosen: list[str] = []
    for text in visible.split(","):
        item = text.strip()
        if not item.isdecimal():
            # GPU-… and MIG-… need the driver to be resolved: bind as if nothing were hidden.
            return tuple(gpus) if item.startswith(("GPU-", "MIG-")) else tuple(chosen)
        if int(item) >= len(gpus):
            break
        chosen.append(gpus[int(item)])
    return tuple(chosen)


def binding_for(options: RunOptions, machine: NumaTopology | None = None) -> dict[int, list[int]]:
    """CPU numbers of every local rank, as --numa-binding asks; empty without it. Reads /sys. Raises BindingError."""
    if options.numa_binding is None:
        return {}
    here = machine or NumaTopology.this()
    return {rank: cpus_for(options.numa_binding, rank, options.nproc, here) for rank in range(options.nproc)}


def cpus_for(mode: str, local_rank: int, nproc: int, machine: NumaTopology) -> list[int]:
    """CPU numbers, sorted, for one worker of `nproc` on this machine. Raises BindingError."""
    if mode not in MODES:
        raise BindingError(f"--numa-binding {mode!r} is unknown; there are: {', '.join(MODES)}.")
    try:
        layout = _Layout(machine, nproc)
        node = layout.node_of(local_rank)
        chosen = {
            "node": lambda: layout.cpus_of(node),
            "socket": lambda: layout.cpus_of_socket(node),
            "exclusive": lambda: layout.share_of_cores(node, local_rank),
            "core-complex": lambda: layout.core_complex(node, local_rank),
        }[mode]()
    except (OSError, ValueError) as error:
        raise BindingError(f"--numa-binding {mode}: the layout of this machine cannot be read: {error}") from error
    if not chosen:
        raise BindingError(f"--numa-binding {mode}: local rank {local_rank} may use no CPU of NUMA node {node}.")
    return sorted(chosen)


class _Layout:
    """Reads from /sys what the modes need. Raises OSError and ValueError where it is not as expected."""

    def __init__(self, machine: NumaTopology, nproc: int) -> None:
        self._machine = machine
        self._system = machine.sys / "devices" / "system"
        self._nodes = sorted(
            node
            for entry in (self._system / "node").glob("node[0-9]*")
            if self.cpus_of(node := int(entry.name.removeprefix("node")))
        )
        if not self._nodes:
            raise ValueError("no NUMA node has a CPU that may be used")
        ranks = range(len(machine.gpus) if machine.gpus else nproc)
        self._node_by_rank = {rank: self._find_node(rank, len(ranks)) for rank in ranks}

    def _find_node(self, rank: int, ranks: int) -> int:
        # Without accelerators nothing is near or far: ranks are dealt evenly
        # (test_without_gpus_ranks_are_dealt_over_the_nodes).
        if not self._machine.gpus:
            return self._nodes[rank * len(self._nodes) // ranks]
        file = self._machine.sys / "bus" / "pci" / "devices" / self._machine.gpus[rank] / "numa_node"
        return max(int(file.read_text()), 0)  # -1: a machine with one node

    def node_of(self, local_rank: int) -> int:
        if local_rank not in self._node_by_rank:
            raise BindingError(
                f"--numa-binding: local rank {local_rank} has no accelerator of its own; "
                f"workers see {len(self._machine.gpus)}."
            )
        return self._node_by_rank[local_rank]

    def cpus_of(self, node: int) -> set[int]:
        return parse_cpu_list((self._system / "node" / f"node{node}" / "cpulist").read_text()) & self._machine.allowed

    def cpus_of_socket(self, node: int) -> set[int]:
        socket = self._socket_of(node)
        return {cpu for other in self._nodes if self._socket_of(other) == socket for cpu in self.cpus_of(other)}

    def _socket_of(self, node: int) -> int:
        cpus = self.cpus_of(node)
        if not cpus:
            raise ValueError(f"no CPU of NUMA node {node} may be used")
        return int((self._cpu(min(cpus)) / "topology" / "physical_package_id").read_text())

    def share_of_cores(self, node: int, local_rank: int) -> set[int]:
        """The node's physical cores split evenly among its ranks; the lowest ranks get the remainder."""
        cores = [cpus for _, cpus in sorted(_grouped(self.cpus_of(node), self._core_of).items())]
        sharers = self._sharers(node)
        each, over = divmod(len(cores), len(sharers))
        if each < 1:
            raise BindingError(
                f"--numa-binding exclusive: NUMA node {node} has {len(cores)} usable cores for {len(sharers)} "
                "workers.\n"
                "Start fewer processes on this node, or bind by `node`."
            )
        index = sharers.index(local_rank)
        first = index * each + min(index, over)
        return {cpu for core in cores[first : first + each + (index < over)] for cpu in core}

    def core_complex(self, node: int, local_rank: int) -> set[int]:
        """One group of CPUs that share the last-level cache; ranks take the groups in turn, the largest first."""
        groups = sorted(
            _grouped(self.cpus_of(node), self._cache_of).items(), key=lambda group: (-len(group[1]), group[0])
        )
        return groups[self._sharers(node).index(local_rank) % len(groups)][1] if groups else set()

    def _sharers(self, node: int) -> list[int]:
        return [rank for rank, its_node in self._node_by_rank.items() if its_node == node]

    def _core_of(self, cpu: int) -> int:
        return min(parse_cpu_list((self._cpu(cpu) / "topology" / "thread_siblings_list").read_text()))

    def _cache_of(self, cpu: int) -> int:
        levels: dict[int, Path] = {}
        for index in (self._cpu(cpu) / "cache").glob("index[0-9]*"):
            # A cache of instructions alone says nothing about data.
            if (index / "type").read_text().strip() in ("Unified", "Data"):
                levels[int((index / "level").read_text())] = index
        if not levels:
            raise ValueError(f"CPU {cpu} has no cache listed")
        return min(parse_cpu_list((levels[max(levels)] / "shared_cpu_list").read_text()))

    def _cpu(self, cpu: int) -> Path:
        return self._system / "cpu" / f"cpu{cpu}"


def _grouped(cpus: Iterable[int], key: Callable[[int], int]) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(key(cpu), set()).add(cpu)
    return groups


def parse_cpu_list(text: str) -> set[int]:
    """Parse the kernel's list format.

    >>> sorted(parse_cpu_list("0-2,7"))
    [0, 1, 2, 7]
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
