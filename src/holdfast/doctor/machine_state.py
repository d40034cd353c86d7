"""The state of a machine's GPUs and network ports, as their drivers report it. Plain data, whatever it was read from.

None means everywhere that the driver does not report it: an old driver, a consumer card, a container without the right.
Rules take None for no fault (gpu_rules.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from msgspec import Struct


class Recovery(Enum):
    """What the driver asks for before a GPU may be used again."""

    NONE = "none"
    RESET = "reset of the GPU"
    REBOOT = "reboot of the node"
    DRAIN_P2P = "drain of peer-to-peer traffic"
    DRAIN_AND_RESET = "drain, then reset of the GPU"
    RECOVER_DOMAIN = "recovery of the IMEX domain"
    BUS_RESET = "reset of the bus"
    SYSTEM_REBOOT = "reboot of the system"


class Fabric(Enum):
    """Registration of a GPU at the NVLink switches' fabric manager."""

    NOT_SUPPORTED = "not supported"
    NOT_STARTED = "not started"
    IN_PROGRESS = "in progress"
    COMPLETED = "completed"


class Slowdown(Enum):
    """Reasons for low clocks that matter. Idle clocks and caps that a user has set are none."""

    HARDWARE = "hardware slowdown"
    HARDWARE_THERMAL = "hardware thermal slowdown"
    POWER_BRAKE = "hardware power brake"
    SOFTWARE_THERMAL = "software thermal slowdown"
    POWER_CAP = "power cap"


class Virtual(Enum):
    """Whether this is a whole GPU."""

    NO = "no"
    PASSTHROUGH = "passthrough"
    VGPU = "vgpu"


class GpuUser(Struct, frozen=True):
    """A process that computes on a GPU."""

    pid: int
    used_bytes: int | None = None
    name: str = ""


class GpuState(Struct, frozen=True, kw_only=True):
    """One GPU."""

    index: int
    error: str = ""
    """The driver cannot use this GPU any more: `GPU is lost`; empty: it can."""
    name: str = ""
    uuid: str = ""
    bus: str = ""
    """Its address on the PCI bus, as `0000:3b:00`."""
    vbios: str = ""
    virtual: Virtual | None = None
    mig: bool | None = None
    persistence: bool | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    users: tuple[GpuUser, ...] = ()
    power_limit_w: int | None = None
    """The enforced limit."""
    power_default_w: int | None = None
    recovery: Recovery | None = None
    remap_pending: bool | None = None
    """Rows of its memory are replaced at the next reset."""
    remap_failed: bool | None = None
    """No spare rows are left for memory that has failed."""
    remapped: int | None = None
    """Rows that were replaced."""
    retirement_pending: bool | None = None
    """Pages of its memory are retired at the next reset (GPUs before Ampere)."""
    ecc_uncorrected: int | None = None
    """Uncorrected memory errors since the driver was loaded, or since the last reset."""
    sram_worn: bool | None = None
    """The uncorrected errors of its SRAM exceed NVIDIA's limit."""
    links: int | None = None
    """NVLinks that the GPU has."""
    links_active: int | None = None
    link_errors: int | None = None
    """CRC errors, replays and recoveries of all NVLinks, since the driver was loaded."""
    fabric: Fabric | None = None
    fabric_error: int | None = None
    """NVML's error of the registration; 0: none."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation_max: int | None = None
    pcie_replays: int | None = None
    slowdowns: frozenset[Slowdown] = frozenset()
    celsius: int | None = None
    celsius_slowdown: int | None = None
    """Temperature from which the hardware lowers the clocks."""
    sm_mhz: int | None = None
    sm_mhz_max: int | None = None


class NetworkPort(Struct, frozen=True, kw_only=True):
    """One port of an InfiniBand or RoCE adapter."""

    name: str
    """`mlx5_0/1`."""
    ethernet: bool = False
    state: str = ""
    """The logical state, as `ACTIVE`, `INIT`, `DOWN`."""
    linked: bool | None = None
    """The cable has a signal: the physical state is LinkUp."""
    rate_gbit_s: float | None = None
    downed: int | None = None
    """Times that the link went down, since the adapter was started."""


class NetworkCard(Struct, frozen=True, kw_only=True):
    """One network interface that reaches other machines, and its counters since it was made."""

    name: str
    """`eth0`."""
    routed: bool = False
    """A route leads through it, or through the bond or bridge that it belongs to."""
    up: bool | None = None
    carrier_losses: int | None = None
    """Times that its carrier was lost. Kernels before 4.16 do not count them."""
    carrier_changes: int | None = None
    """Times that its carrier was lost or came back."""
    packets: int | None = None
    """Packets that it has sent and received."""
    errors: int | None = None
    """Packets that it could not send, or that have arrived damaged."""
    drops: int | None = None
    """Packets that were dropped, because there was no room for them or because nobody wanted them."""


class MachineState(Struct, frozen=True, kw_only=True):
    """All GPUs and ports of one machine. The defaults describe a machine without any."""

    source: str = ""
    """The source of the GPUs: `NVML`, `nvidia-smi`, `sysfs`; empty: there are none."""
    driver: str = ""
    gpus: tuple[GpuState, ...] = ()
    error: str = ""
    """The driver as a whole does not answer, or cannot; empty: it does, or there is none."""
    ports: tuple[NetworkPort, ...] = ()


class DeviceMeasure(Struct, frozen=True, kw_only=True):
    """One GPU; on a node without GPUs the processor."""

    index: int
    name: str
    error: str = ""
    tflops: float = 0.0
    """Products of bf16 matrices."""
    digests: tuple[str, ...] = ()
    """Digests of the results of one product, which was computed many times."""
    to_device_bytes_s: float = 0.0
    to_host_bytes_s: float = 0.0
    device_bytes_s: float = 0.0


class ReduceMeasure(Struct, frozen=True, kw_only=True):
    """All-reduces between all devices of the node."""

    bytes_s: float = 0.0
    error: str = ""


class FullMeasure(Struct, frozen=True, kw_only=True):
    """The measurements of one node."""

    kind: str = ""
    """`cuda` or `cpu`."""
    devices: tuple[DeviceMeasure, ...] = ()
    reduce: ReduceMeasure | None = None
    reduce_without_p2p: ReduceMeasure | None = None
    error: str = ""
    """The reason why nothing was measured; empty: it was."""


def used_gpus(state: MachineState, environ: Mapping[str, str]) -> tuple[GpuState, ...]:
    """The GPUs that workers with this environment see, in their order."""
    names = ("CUDA_VISIBLE_DEVICES",) if state.source != "sysfs" else VISIBLE
    return visible_gpus(state.gpus, next((environ[name] for name in names if name in environ), None))


VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that choose GPUs; NVIDIA's driver knows the last one alone."""


def visible_gpus(gpus: tuple[GpuState, ...], visible: str | None) -> tuple[GpuState, ...]:
    """The GPUs that workers use with this value of such a variable; None: none is set.

    A faulty GPU that no worker uses keeps no node from training. What cannot be resolved leaves all of them.
    """
    if visible is None:
        return gpus
    found: list[GpuState] = []
    for item in (part.strip() for part in visible.split(",")):
        fits = [each for each in gpus if item == str(each.index) or (item and each.uuid.startswith(item))]
        # As CUDA itself: the list ends at the first entry that names no GPU
        # (test_gpus_that_workers_do_not_use_are_left_out).
        if len(fits) != 1:
            return gpus if item.startswith("MIG-") else tuple(found)
        found.append(fits[0])
    return tuple(found)
