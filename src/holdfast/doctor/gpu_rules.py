"""Judges the state of one machine's GPUs and network ports. PURE.

A fault that keeps a GPU from computing, or makes its results doubtful, is to be retried or fatal: a node with it is
parked before a generation. What only makes it slow is a warning here: whether it is slow shows the comparison with the
other nodes (majority.py). A value that is not known is no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from holdfast.doctor.findings import DoctorFinding, Level, fatal, passed, warn
from holdfast.doctor.machine_state import Fabric, GpuState, MachineState, NetworkPort, Recovery, Slowdown, Virtual
from holdfast.text import listed

GPUS_NAMED_MAX = 8
BUSY_BYTES = 2**30
"""Memory above which a GPU counts as used: drivers and desktops use less."""
RESET = "reset the GPU (nvidia-smi -r) or reboot the node"
REPLACE = "reset the GPU, and have it replaced: the driver cannot repair it"


class GpuFault(NamedTuple):
    """What is wrong with one GPU."""

    level: Level
    code: str
    what: str
    text: str
    fix: str


def gpu_health(state: MachineState, gpus: Sequence[GpuState]) -> Iterator[DoctorFinding]:
    """The findings about these GPUs of the machine: those that workers use."""
    if state.error:
        yield fatal("HF504", "GPU health", f"{state.source}: {state.error}", "see dmesg; reset the GPU or reboot")
    groups: dict[GpuFault, list[GpuState]] = {}
    for gpu in gpus:
        for fault in faults(gpu, gpus):
            groups.setdefault(fault, []).append(gpu)
    for fault, found in groups.items():
        yield DoctorFinding(
            code=fault.code, level=fault.level, what=fault.what, why=f"{named(found)}: {fault.text}", fix=fault.fix
        )
    if gpus and not state.error and not any(fault.code == "HF504" for fault in groups):
        yield passed("HF504", "GPU health", f"{kinds(gpus)}, no fault is reported by {state.source}")


def named(gpus: Sequence[GpuState]) -> str:
    """`GPU 3`, `GPUs 0, 2`."""
    numbers = listed([str(gpu.index) for gpu in gpus], GPUS_NAMED_MAX)
    return f"GPU{'s' if len(gpus) > 1 else ''} {numbers}"


def kinds(gpus: Iterable[GpuState]) -> str:
    """`8 × NVIDIA H100 80GB HBM3`."""
    counts = Counter(gpu.name or "GPU" for gpu in gpus)
    return listed([f"{count} × {name}" for name, count in counts.items()])


def faults(gpu: GpuState, all_gpus: Sequence[GpuState]) -> Iterator[GpuFault]:
    """The faults of one GPU. `all_gpus`: those of the machine that workers use."""
    what = "GPU health"
    if gpu.error:  # nothing else can be read
        yield GpuFault(Level.FATAL, "HF504", what, gpu.error, "see dmesg for its XID; reboot the node")
        return
    if gpu.recovery not in (None, Recovery.NONE):
        yield GpuFault(Level.FATAL, "HF504", what, f"the driver asks for a {gpu.recovery.value}", RESET)
    yield from _memory_faults(gpu)
    if not (gpu.mig or gpu.virtual is Virtual.VGPU):  # parts of a GPU have no NVLink
        yield from _link_faults(gpu, all_gpus)
    yield from _slow_clocks(gpu)
    if _is_below(gpu.pcie_width, gpu.pcie_width_max):
        text = f"its PCIe link has {gpu.pcie_width} of {gpu.pcie_width_max} lanes"
        yield GpuFault(Level.WARN, "HF508", "PCIe", text, "compare with the other nodes; reseat the GPU or its riser")


def _memory_faults(gpu: GpuState) -> Iterator[GpuFault]:
    what = "GPU health"
    if gpu.remap_failed:
        text = "rows of its memory have failed, and none is left to replace them"
        yield GpuFault(Level.FATAL, "HF504", what, text, REPLACE)
    elif gpu.remap_pending:
        text = "rows of its memory have failed, and are replaced only by a reset"
        yield GpuFault(Level.FATAL, "HF504", what, text, RESET)
    if gpu.retirement_pending:
        text = "pages of its memory have failed, and are retired only by a reset"
        yield GpuFault(Level.FATAL, "HF504", what, text, RESET)
    if gpu.ecc_uncorrected:
        text = f"{gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded"
        yield GpuFault(Level.FATAL, "HF504", what, text, f"{RESET}; replace it if they come back")
    if gpu.sram_worn:
        text = "the uncorrected errors of its SRAM exceed NVIDIA's limit"
        yield GpuFault(Level.FATAL, "HF504", what, text, REPLACE)


def _link_faults(gpu: GpuState, all_gpus: Sequence[GpuState]) -> Iterator[GpuFault]:
    what = "NVLink"
    if gpu.fabric in (Fabric.NOT_STARTED, Fabric.IN_PROGRESS):
        text = f"its registration at the NVLink switches is {gpu.fabric.value}: CUDA does not start"
        fix = "start nvidia-fabricmanager of the driver's version, and wait for it"
        yield GpuFault(Level.RETRY, "HF506", what, text, fix)
    elif gpu.fabric is Fabric.COMPLETED and gpu.fabric_error:
        text = f"its registration at the NVLink switches failed with NVML's error {gpu.fabric_error}"
        yield GpuFault(Level.FATAL, "HF506", what, text, "see the log of nvidia-fabricmanager; reboot the node")
    alike = [other for other in all_gpus if other.name == gpu.name and other.links_active is not None]
    usual = _usual([other.links_active or 0 for other in alike])
    if usual is None or not _is_below(gpu.links_active, usual):
        return
    text = f"{gpu.links_active} of its NVLinks are active, {usual} on the others"
    # Cards with bridges: a pair without one is not broken.
    if gpu.links_active or gpu.fabric is Fabric.COMPLETED:
        yield GpuFault(Level.FATAL, "HF506", what, text, "see dmesg for XID 74; reset all GPUs, or reboot the node")
    else:
        yield GpuFault(Level.WARN, "HF506", what, text, "check the NVLink bridges, if there should be one")


def _usual(values: Sequence[int]) -> int | None:
    """The value of more than half; None: there is none."""
    if not values:
        return None
    value, times = Counter(values).most_common(1)[0]
    return value if times * 2 > len(values) else None


def _is_below(value: int | None, other: int | None) -> bool:
    return value is not None and other is not None and value < other


def _slow_clocks(gpu: GpuState) -> Iterator[GpuFault]:
    what = "GPU clocks"
    by_hardware = [each for each in Slowdown if each in gpu.slowdowns and each in HARDWARE]
    if by_hardware:
        # The general bit is set with each of the others.
        shown = [each.value for each in by_hardware if each is not Slowdown.HARDWARE] or [Slowdown.HARDWARE.value]
        text = f"its clocks are lowered: {listed(shown)}"
        yield GpuFault(Level.RETRY, "HF507", what, text, "check its cooling, power supplies and power cables")
    elif gpu.celsius is not None and gpu.celsius_slowdown and gpu.celsius >= gpu.celsius_slowdown:
        text = f"{gpu.celsius} °C, and its clocks are lowered from {gpu.celsius_slowdown} °C"
        yield GpuFault(Level.RETRY, "HF507", what, text, "check its cooling")
    elif Slowdown.SOFTWARE_THERMAL in gpu.slowdowns:
        text = "the driver lowers its clocks, because it is warm"
        yield GpuFault(Level.WARN, "HF507", what, text, "check its cooling")


HARDWARE = (Slowdown.HARDWARE, Slowdown.HARDWARE_THERMAL, Slowdown.POWER_BRAKE)


def gpu_use(gpus: Sequence[GpuState]) -> Iterator[DoctorFinding]:
    """Whether others use the GPUs. Cards without a report of memory have no result."""
    what = "GPU use"
    busy = [gpu for gpu in gpus if gpu.users or (gpu.memory_used_bytes or 0) > BUSY_BYTES]
    if busy:
        fix = "wait for those jobs, end processes that were left behind, or use other GPUs"
        yield warn("HF505", what, "; ".join(map(_use, busy)), fix)
    elif gpus:
        yield passed("HF505", what, "all free")


def _use(gpu: GpuState) -> str:
    mib = [round((each or 0) / 2**20) for each in (gpu.memory_used_bytes, gpu.memory_bytes)]
    users = [
        f"pid {each.pid} {each.name}".strip() + ("" if each.used_bytes is None else f", {each.used_bytes >> 20} MiB")
        for each in gpu.users
    ]
    by = f" by {listed(users, 3)}" if users else ""
    return f"GPU {gpu.index}: {mib[0]} of {mib[1]} MiB in use{by}"


def port_health(ports: Sequence[NetworkPort]) -> Iterator[DoctorFinding]:
    """A port without a cable is no fault. Whether it should have one shows the comparison with the other nodes."""
    what = "InfiniBand"
    waiting = [port for port in ports if port.linked and not port.ethernet and port.state not in ("ACTIVE", "")]
    for port in waiting:
        why = f"{port.name} has a link, but is {port.state}"
        yield warn("HF509", what, why, "start the subnet manager, and check the switch port")
    active = [port for port in ports if port.state == "ACTIVE" and port.rate_gbit_s]
    if active and not waiting:
        rates = Counter(f"{port.rate_gbit_s:g} Gbit/s" for port in active)
        yield passed("HF509", what, listed([f"{count} × {rate}" for rate, count in rates.items()]))


def examine_machine(state: MachineState, gpus: Sequence[GpuState]) -> tuple[DoctorFinding, ...]:
    """All findings about the machine and these GPUs of it."""
    return (*gpu_health(state, gpus), *gpu_use(gpus), *port_health(state.ports))
