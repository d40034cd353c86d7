"""What happens to GPUs, network ports and network cards while a job runs: the driver's XIDs, and counters that grow.
PURE.

An event is severe if workers may fail or wait because of it: verdicts name it. Others are written down.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from holdfast.doctor.gpu_rules import HARDWARE
from holdfast.doctor.machine_state import (
    GpuState,
    MachineState,
    NetworkCard,
    NetworkPort,
    Recovery,
    Slowdown,
)
from holdfast.text import plural

XIDS = {
    48: "uncorrected memory error",
    63: "memory rows or pages are to be replaced",
    64: "memory rows or pages could not be replaced",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's own processor does not answer",
    120: "error of the GPU's own processor",
}
"""XIDs of faults of the hardware, and what they say. Others mostly follow from the program: 13, 31, 43, 45."""
REPLAYS_MIN = 100
"""PCIe replays between two readings that are worth an event; a few are normal."""
PACKETS_MIN = 20
"""Bad packets of a network card between two readings that are worth an event."""
BAD_SHARE = 0.001
"""Share of bad packets that is worth an event: TCP's rate falls with it."""
BAD_SHARE_SEVERE = 0.01
"""Share of damaged packets with which a connection is so slow that all nodes wait for this one."""


class DeviceEvent(Struct, frozen=True):
    """Something has happened to a GPU, a port or a network card of this node."""

    device: str
    """`GPU 3`, `mlx5_0/1`, `eth0`."""
    text: str
    severe: bool
    xid: int = 0
    """The driver's number; 0: it comes from a counter or a state."""

    def on(self, host: str) -> str:
        return f"{self.text} on {self.device} of node {host}"


def of_xid(index: int | None, xid: int) -> DeviceEvent:
    """
    >>> of_xid(3, 79).on("b")
    'XID 79 (the GPU has fallen off the bus) on GPU 3 of node b'
    """
    says = f" ({XIDS[xid]})" if xid in XIDS else ""
    return DeviceEvent("a GPU" if index is None else f"GPU {index}", f"XID {xid}{says}", xid in XIDS, xid)


def changes(before: MachineState, after: MachineState) -> Iterator[DeviceEvent]:
    """What has happened between two readings. A value that is unknown in one of them has not changed."""
    gpus = {gpu.index: gpu for gpu in before.gpus}
    for gpu in after.gpus:
        if gpu.index in gpus:
            for text, severe in _of_gpu(gpus[gpu.index], gpu):
                yield DeviceEvent(f"GPU {gpu.index}", text, severe)
    ports = {port.name: port for port in before.ports}
    for port in after.ports:
        if port.name in ports:
            for text, severe in _of_port(ports[port.name], port):
                yield DeviceEvent(port.name, text, severe)


def _of_gpu(before: GpuState, after: GpuState) -> Iterator[tuple[str, bool]]:
    if after.error:
        # It stays lost, and was reported (test_a_gpu_that_stays_lost_is_reported_once).
        if not before.error:
            yield after.error, True
        return
    if before.error:
        return
    if grown := _grown(before.ecc_uncorrected, after.ecc_uncorrected):
        yield plural(grown, "uncorrected memory error"), True
    # None is no False: what was unknown before may be old (test_what_is_normal_or_unknown_is_no_event).
    if after.remap_pending and before.remap_pending is False:
        yield "memory rows are to be replaced", True
    if after.remap_failed and before.remap_failed is False:
        yield "memory rows could not be replaced", True
    if before.recovery is Recovery.NONE and after.recovery not in (None, Recovery.NONE):
        yield f"the driver asks for a {after.recovery.value}", True
    # This number falls, unlike the others.
    if lost := _grown(after.links_active, before.links_active):
        yield f"{plural(lost, 'NVLink')} went down", True
    if grown := _grown(before.link_errors, after.link_errors):
        yield f"{grown} NVLink errors", False
    if (grown := _grown(before.pcie_replays, after.pcie_replays)) >= REPLAYS_MIN:
        yield f"{grown} PCIe replays", False
    slow = [each for each in Slowdown if each in after.slowdowns - before.slowdowns and each in SLOWS]
    if slow:
        # The general bit is set with each of the others.
        shown = next((each for each in slow if each is not Slowdown.HARDWARE), Slowdown.HARDWARE)
        yield f"{shown.value}: {clock_text(after)}", False


SLOWS = (*HARDWARE, Slowdown.SOFTWARE_THERMAL)


def _of_port(before: NetworkPort, after: NetworkPort) -> Iterator[tuple[str, bool]]:
    # The counter also shows a link that is up again by now; the state is for ports without it.
    if grown := _grown(before.downed, after.downed):
        yield f"the link went down {plural(grown, 'time')}", True
    elif before.state == "ACTIVE" and after.state not in ("ACTIVE", ""):
        yield f"the port is {after.state}", True


def of_link(before: NetworkCard, after: NetworkCard) -> DeviceEvent | None:
    """What has become of the carrier of this card between two readings.

    >>> of_link(NetworkCard(name="eth0", up=True, carrier_changes=4), NetworkCard(name="eth0", carrier_changes=7)).text
    'the link lost its carrier 2 times'
    """
    if None in (before.carrier_losses, after.carrier_losses):
        # Losses and returns take turns, so half of the changes are losses; of an odd number the first one decides.
        changes = _grown(before.carrier_changes, after.carrier_changes)
        losses = (changes + (before.up is not False)) // 2
    else:
        losses = _grown(before.carrier_losses, after.carrier_losses)
    if not losses:
        return None
    return DeviceEvent(after.name, f"the link lost its carrier {plural(losses, 'time')}", before.routed or after.routed)


def of_packets(before: NetworkCard, after: NetworkCard, seconds: float) -> DeviceEvent | None:
    """Whether this card damages or drops so many packets that connections are slow; `seconds` lie between the two
    readings. Drops alone are not severe: packets that nobody wants are counted, too."""
    packets = _grown(before.packets, after.packets)
    for grown, what in (
        (_grown(before.errors, after.errors), "were damaged"),
        (_grown(before.drops, after.drops), "were dropped"),
    ):
        if grown >= PACKETS_MIN and grown >= BAD_SHARE * (packets + grown):
            severe = what == "were damaged" and after.routed and grown >= BAD_SHARE_SEVERE * (packets + grown)
            return DeviceEvent(after.name, f"{grown} of {packets + grown} packets {what} in {seconds:.0f} s", severe)
    return None


def _grown(before: int | None, after: int | None) -> int:
    return max(0, after - before) if before is not None and after is not None else 0


def clock_text(gpu: GpuState) -> str:
    """Its clocks, with the reasons that lower them.

    >>> clock_text(GpuState(index=0, sm_mhz=345, sm_mhz_max=1980, celsius=91))
    '345 of 1980 MHz, 91 °C'
    """
    parts = []
    if gpu.sm_mhz is not None:
        parts.append(f"{gpu.sm_mhz} of {gpu.sm_mhz_max} MHz" if gpu.sm_mhz_max else f"{gpu.sm_mhz} MHz")
    if gpu.celsius is not None:
        parts.append(f"{gpu.celsius} °C")
    return (
        ", ".join([*parts, *(each.value for each in Slowdown if each in gpu.slowdowns)]) or "its clocks are not known"
    )
