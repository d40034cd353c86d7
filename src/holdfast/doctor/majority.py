"""Compares the nodes of a job: which of them has less than most others have, or something else. PURE.

A trait is compared between nodes that know it, and of GPUs only between nodes with the same model: clusters may be
mixed on purpose. More than half of at least three nodes must agree. A value that is not known is no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from holdfast.text import listed

if TYPE_CHECKING:
    from holdfast.doctor.machine_state import GpuState, MachineState  # the coordinator compares, and reads no machine

NODES_MIN = 3
VALUE_CHARACTERS_MAX = 200


class Weight(Enum):
    """What a difference costs."""

    SLOWS = "slows"
    """Every step of all nodes waits for this one, or its workers fail."""
    NOTE = "note"
    """The nodes differ, and perhaps none is worse."""


class Trait(NamedTuple):
    name: str
    words: str
    """The trait in words, with {value} for its value."""
    weight: Weight
    of_gpus: bool = True
    """It is compared between nodes with GPUs of the same model."""
    less: bool = True
    """Only a node that has less than the others differs; else any other value does."""
    share: float = 1.0
    """Values above this share of the majority's are equal to it."""
    measured: bool = False
    """No two nodes have the same value: it is compared with the median."""


TRAITS = (
    Trait("gpus", "{value} GPUs", Weight.SLOWS),
    Trait("gpu_memory_gib", "GPUs with {value} GiB", Weight.SLOWS),
    Trait("mig", "MIG {value}", Weight.SLOWS, less=False),
    Trait("nvlinks", "{value} active NVLinks per GPU", Weight.SLOWS),
    Trait("pcie_lanes", "{value} PCIe lanes per GPU", Weight.SLOWS),
    Trait("pcie_generation", "PCIe {value}", Weight.SLOWS),
    Trait("power_w", "a power limit of {value} W", Weight.SLOWS, share=0.98),
    Trait("ports", "{value} active InfiniBand ports", Weight.SLOWS, of_gpus=False),
    Trait("port_gbit_s", "InfiniBand at {value} Gbit/s", Weight.SLOWS, of_gpus=False),
    Trait("nic_mbit_s", "a network of {value} Mbit/s", Weight.SLOWS, of_gpus=False),
    Trait("tflops", "{value} TFLOP/s on its slowest GPU", Weight.SLOWS, share=0.9, measured=True),
    Trait("copy_gbyte_s", "{value} GB/s between host and GPU", Weight.SLOWS, share=0.7, measured=True),
    Trait("reduce_gbyte_s", "{value} GB/s in all-reduces on the node", Weight.SLOWS, share=0.9, measured=True),
    Trait("gpu", "{value}", Weight.NOTE, of_gpus=False, less=False),
    Trait("driver", "driver {value}", Weight.NOTE, less=False),
    Trait("vbios", "VBIOS {value}", Weight.NOTE, less=False),
    Trait("persistence", "persistence {value}", Weight.NOTE, less=False),
)

Profile = Mapping[str, str]
"""The traits of a node that are known, by name."""


class NodeDifference(Struct, frozen=True):
    """One node differs from most of the others."""

    node: str
    trait: str
    text: str
    weight: Weight

    @property
    def slows(self) -> bool:
        return self.weight is Weight.SLOWS


def profile(state: MachineState, gpus: tuple[GpuState, ...], nic_mbit_s: int = 0) -> dict[str, str]:
    """The traits of a node whose workers use these GPUs. `nic_mbit_s`: speed of its network, 0: unknown."""
    active = [port for port in state.ports if port.state == "ACTIVE"]
    rates = [port.rate_gbit_s for port in active if port.rate_gbit_s is not None]
    found: dict[str, object] = {
        "gpus": len(gpus) or None,
        "gpu_memory_gib": _least([None if each.memory_bytes is None else each.memory_bytes >> 30 for each in gpus]),
        "mig": _one([None if each.mig is None else "on" if each.mig else "off" for each in gpus]),
        "nvlinks": _least([each.links_active for each in gpus]),
        "pcie_lanes": _least([each.pcie_width for each in gpus]),
        "pcie_generation": _least([each.pcie_generation_max for each in gpus]),
        "power_w": _least([each.power_limit_w for each in gpus]),
        "ports": len(active) if state.ports else None,
        "port_gbit_s": round(min(rates)) if rates else None,
        "nic_mbit_s": nic_mbit_s or None,
        "gpu": _one([each.name or None for each in gpus]),
        "driver": state.driver or None,
        "vbios": _one([each.vbios or None for each in gpus]),
        "persistence": _one(
            [None if each.persistence is None else "on" if each.persistence else "off" for each in gpus]
        ),
    }
    return {name: str(value)[:VALUE_CHARACTERS_MAX] for name, value in found.items() if value is not None}


def _least(values: list[int | None]) -> int | None:
    """The least one; None: not all are known."""
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None


def _one(values: list[str | None]) -> str | None:
    """All different values as one text, in order."""
    known = sorted({value for value in values if value is not None})
    return listed(known) if known and None not in values else None


def differences(profiles: Mapping[str, Profile]) -> list[NodeDifference]:
    """The differences of all nodes, in the order of the nodes and of the traits."""
    values: dict[tuple[str, str], list[str]] = {}
    for own in profiles.values():
        for trait in TRAITS:
            if trait.name in own:
                values.setdefault((trait.name, _group(trait, own)), []).append(own[trait.name])
    usual = {
        (trait.name, group): _usual(trait, known)
        for trait in TRAITS
        for (name, group), known in values.items()
        if name == trait.name
    }
    found = []
    for node, own in profiles.items():
        for trait in (trait for trait in TRAITS if trait.name in own):
            value, (common, who) = own[trait.name], usual[trait.name, _group(trait, own)]
            if common and _differs(trait, value, common):
                has, others = trait.words.format(value=value), trait.words.format(value=common)
                found.append(NodeDifference(node, trait.name, f"has {has}, {who} {others}", trait.weight))
    return found


def _usual(trait: Trait, known: Sequence[str]) -> tuple[str, str]:
    """The value to compare with, and whose it is in words; empty: there is none."""
    if len(known) < NODES_MIN:
        return "", ""
    if trait.measured:
        from statistics import median  # only the coordinator's node compares

        numbers = [number for value in known if (number := _number(value)) is not None]
        return (f"{median(numbers):.4g}", "the median is") if numbers else ("", "")
    common, times = Counter(known).most_common(1)[0]
    return (common, f"{times} of {len(known)} nodes have") if times * 2 > len(known) else ("", "")


def _group(trait: Trait, own: Profile) -> str:
    """The nodes that are compared with each other."""
    return own.get("gpu", "") if trait.of_gpus else ""


def _differs(trait: Trait, value: str, usual: str) -> bool:
    if not trait.less:
        return value != usual
    own, others = _number(value), _number(usual)
    return own is not None and others is not None and own < trait.share * others


def _number(value: str) -> float | None:
    """None: it is none. It came from the network."""
    try:
        return float(value)
    except ValueError:
        return None
