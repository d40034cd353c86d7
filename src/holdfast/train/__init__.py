"""What a training script needs to survive, in plain PyTorch: parts, each usable alone, none of them a trainer.

    import holdfast.train as ht

Importing the package costs nothing: the public names load what they need on first use (PEP 562). docs/train.md shows them
at work. This is the only package of holdfast that imports torch, and nobody else of holdfast imports it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HOMES = {
    "DataLoader": "data.loader",
    "DistributedSampler": "data.sampler",
    "GuardWarning": "guards",
    "Keep": "snapshots",
    "MicroBatch": "accumulation",
    "ProcessGroup": "group",
    "Resumed": "snapshots",
    "ShardedDataset": "data.shards",
    "Snapshots": "snapshots",
    "accumulate": "accumulation",
    "ddp": "wrap",
    "guarded": "guards",
    "mid_accumulation": "accumulation",
    "process_group": "group",
    "sample_seed": "data.seeds",
    "steps": "schedule",
    "watch": "guards",
}
"""Where each name is. No module has the name of a function here: importing it would hide the function."""

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
