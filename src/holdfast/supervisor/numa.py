"""Selects the CPUs to which a worker is bound (--numa-binding), read from /sys.

Reads any folder that looks like /sys, so that tests bring their own. As in torchrun, the local rank is the index of the
accelerator. Unlike torchrun, variables that hide accelerators by index are honoured, neither numactl nor torch is
needed, and without accelerators the local ranks are dealt evenly over the NUMA nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from holdfast.protocol.errors import BindingError
from holdfast.protocol.options import RunOptions

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
