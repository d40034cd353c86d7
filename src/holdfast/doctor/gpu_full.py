"""Judges what the GPUs of one node have computed, copied and reduced (`holdfast doctor --gpu full`). PURE.

Rates are compared with the median of the GPUs of the same model on this node, and in majority.py with the median of all
nodes, never with a table: a site may have set limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from holdfast.doctor.findings import DoctorFinding, fatal, passed, rate, warn
from holdfast.doctor.machine_state import DeviceMeasure, FullMeasure
from holdfast.text import listed

SLOW_SHARE = 0.9
"""A GPU is slow if it computes less than this share of the median."""
SLOW_COPY_SHARE = 0.7
"""The same for copies: a node's GPUs share PCIe switches."""


def judge_full(full: FullMeasure) -> Iterator[DoctorFinding]:
    what = "GPU test"
    if full.error:
        yield warn("HF571", what, f"it was not made: {full.error}", "see whether torch works there: holdfast doctor")
        return
    found = [*_errors(full.devices), *_wrong_bits(full.devices), *_slow(full.devices)]
    yield from found
    if full.devices and not found:
        least, most = (pick(each.tflops for each in full.devices) for pick in (min, max))
        rates = f"{least:.3g} to {most:.3g}" if len(full.devices) > 1 else f"{least:.3g}"
        yield passed("HF571", what, f"{rates} TFLOP/s in bf16, equal bits each time")
    yield from _reduces(full)


def _named(devices: Sequence[DeviceMeasure]) -> str:
    return listed(["the CPU" if each.name == "CPU" else f"GPU {each.index}" for each in devices])


def _errors(devices: Sequence[DeviceMeasure]) -> Iterator[DoctorFinding]:
    for each in devices:
        if each.error:
            why = f"{_named([each])} fails: {each.error}"
            yield fatal("HF571", "GPU test", why, "see dmesg for XIDs; reset the GPU, or leave the node out")


def _wrong_bits(devices: Sequence[DeviceMeasure]) -> Iterator[DoctorFinding]:
    fix = "leave the node out, and have the GPU replaced: training on it gives wrong results without an error"
    unstable = [each for each in devices if len(each.digests) > 1]
    if unstable:
        why = f"{_named(unstable)}: the same product has different bits each time"
        yield fatal("HF571", "GPU test", why, fix)
    for alike in _by_model([each for each in devices if len(each.digests) == 1]):
        (usual, times), *others = Counter(each.digests[0] for each in alike).most_common()
        if not others:
            continue
        odd = [each for each in alike if each.digests[0] != usual] if times * 2 > len(alike) else alike
        yield fatal("HF571", "GPU test", f"{_named(odd)}: a product has other bits than on the others", fix)


def _slow(devices: Sequence[DeviceMeasure]) -> Iterator[DoctorFinding]:
    from statistics import median  # a quick preflight imports this file, and needs none

    fix = "compare clocks, temperature, power limit and PCIe link with the others: nvidia-smi -q"
    kinds: tuple[tuple[str, float, Callable[[DeviceMeasure], float], Callable[[float], str]], ...] = (
        ("computes", SLOW_SHARE, lambda each: each.tflops, lambda value: f"{value:.3g} TFLOP/s"),
        ("copies from the host", SLOW_COPY_SHARE, lambda each: each.to_device_bytes_s, rate),
        ("copies to the host", SLOW_COPY_SHARE, lambda each: each.to_host_bytes_s, rate),
        ("copies in its memory", SLOW_SHARE, lambda each: each.device_bytes_s, rate),
    )
    for alike in _by_model([each for each in devices if not each.error]):
        for verb, share, read, show in kinds:
            usual = median(read(each) for each in alike)
            slow = [each for each in alike if len(alike) > 2 and read(each) < share * usual]
            for each in slow:
                why = f"{_named([each])} {verb} at {show(read(each))}, the median is {show(usual)}"
                yield warn("HF571", "GPU test", why, fix)


def _by_model(devices: Sequence[DeviceMeasure]) -> list[list[DeviceMeasure]]:
    return [[each for each in devices if each.name == name] for name in dict.fromkeys(each.name for each in devices)]


def _reduces(full: FullMeasure) -> Iterator[DoctorFinding]:
    what, direct, around = "all-reduce on node", full.reduce, full.reduce_without_p2p
    if direct is None:
        return
    if direct.error and around is not None and not around.error:
        why = f"fails between these GPUs, and works with NCCL_P2P_DISABLE=1: {direct.error}"
        fix = "disable ACS and the IOMMU for the PCIe switches, check NVLink and fabric manager"
        yield fatal("HF572", what, why, fix)
    elif direct.error:
        yield fatal("HF572", what, f"fails: {direct.error}", "run it with NCCL_DEBUG=INFO; see dmesg for XIDs")
    else:
        yield passed("HF572", what, f"right, {rate(direct.bytes_s)}")


def full_traits(full: FullMeasure | None) -> dict[str, str]:
    """What majority.py compares between nodes."""
    if full is None or full.error or not full.devices or any(each.error for each in full.devices):
        return {}
    values = {
        "tflops": min(each.tflops for each in full.devices),
        "copy_gbyte_s": min(min(each.to_device_bytes_s, each.to_host_bytes_s) for each in full.devices) / 1e9,
        "reduce_gbyte_s": full.reduce.bytes_s / 1e9 if full.reduce is not None and not full.reduce.error else 0.0,
    }
    return {name: f"{value:.4g}" for name, value in values.items() if value > 0}
