"""Parts with which a plain PyTorch script survives failures: each can be used alone, and none of them is a trainer.

    import holdfast.train as ht

Importing the package costs nothing: the public names load what they need on first use (PEP 562). docs/train.md shows
them at work. Types that a script is given and does not make are in their modules (`holdfast.train.group.ProcessGroup`).
Beside the handler for torchrun it is the only package of holdfast that imports torch. Who may import it is listed in
pyproject.toml.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from holdfast.train.accumulation import accumulate
    from holdfast.train.data.datasets import ShardedDataset
    from holdfast.train.data.loader import DataLoader
    from holdfast.train.data.sampler import DistributedSampler
    from holdfast.train.group import ddp, process_group
    from holdfast.train.guards import GuardWarning
    from holdfast.train.remaking import multiple_of
    from holdfast.train.replica_check import check_replicas
    from holdfast.train.snapshots_api import Keep, SnapshotOptions, Snapshots
    from holdfast.train.storage import SnapshotReader, SnapshotWriter
    from holdfast.train.survival import survive
    from holdfast.train.weights import load_weights

__all__ = [
    "DataLoader",
    "DistributedSampler",
    "GuardWarning",
    "Keep",
    "ShardedDataset",
    "SnapshotOptions",
    "SnapshotReader",
    "SnapshotWriter",
    "Snapshots",
    "accumulate",
    "check_replicas",
    "ddp",
    "load_weights",
    "multiple_of",
    "process_group",
    "survive",
]

_HOMES = {
    "DataLoader": "data.loader",
    "DistributedSampler": "data.sampler",
    "GuardWarning": "guards",
    "Keep": "snapshots_api",
    "ShardedDataset": "data.datasets",
    "SnapshotOptions": "snapshots_api",
    "SnapshotReader": "storage",
    "SnapshotWriter": "storage",
    "Snapshots": "snapshots_api",
    "accumulate": "accumulation",
    "check_replicas": "replica_check",
    "ddp": "group",
    "load_weights": "weights",
    "multiple_of": "remaking",
    "process_group": "group",
    "survive": "survival",
}
"""The module of each name. No module has the name of a function: importing it would hide the function."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
