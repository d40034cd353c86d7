"""A saved state as nested dicts, as `state_dict` functions would give it: for export, and for torch.distributed.checkpoint.

    {"step": 3, "epoch": 0, "model": {fqn: tensor}, "optimizer": {"state": {fqn: {…}}, "param_groups": […]}, …}

State that differs between the ranks (an iterator's, a tracked object's) is rank 0's. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdfast.train import codec
from holdfast.train.reading import Saved
from holdfast.train.sharding import OWN

Get = Callable[[str], torch.Tensor]


def load_all(saved: Saved) -> dict[str, Any]:
    """The whole state, whole tensors. SnapshotError."""
    tensors: dict[str, torch.Tensor] = {}
    same: dict[int, torch.Tensor] = {}
    for key, pieces in saved.pieces.items():
        found = saved.whole_shape(key)
        if found is not None and not key.startswith(OWN):
            shape, dtype = found
            tensors[key] = same.setdefault(id(pieces), torch.empty(shape, dtype=dtype))  # tied tensors are one
    saved.prepare(tensors).load()
    return assembled(saved, lambda key: tensors[key] if key in tensors else saved.fresh(key), saved.fresh)


def assembled(saved: Saved, tensor: Get, array: Get) -> dict[str, Any]:
    """`tensor` gives what stands for a tensor of this name, `array` the bytes of a numpy array."""
    told = min(saved.texts, key=lambda text: int(text["rank"]))
    keys = [key for key in saved.pieces if not key.startswith(OWN)]
    state: dict[str, Any] = {"step": told["step"], "epoch": told["epoch"]}
    for name, rest in codec.section(told, "models").items():
        prefix = f"{name}."
        state[name] = {key.removeprefix(prefix): tensor(key) for key in keys if key.startswith(prefix)}
        state[name].update({fqn: codec.decode(value, tensor, array, plain=True) for fqn, value in rest.items()})
    for name in codec.section(told, "optimizers"):
        state[name] = _optimizer(saved, name, tensor, array)
    for name, tree in codec.section(told, "others").items():
        state[name] = codec.decode(tree, tensor, array, plain=True)
    return state


def _optimizer(saved: Saved, name: str, tensor: Get, array: Get) -> dict[str, Any]:
    """As torch's get_optimizer_state_dict has it: by names of parameters."""
    state: dict[str, Any] = {}
    groups: list[Any] = []
    for text in saved.texts:
        told = codec.section(codec.section(text, "optimizers"), name)
        for fqn, rest in codec.section(told, "state").items():
            if fqn not in state:
                state[fqn] = {
                    what: tensor(f"{name}.state.{fqn}.{what}")
                    if value is None
                    else codec.decode(value[0], tensor, array, plain=True)
                    for what, value in rest.items()
                }
        groups = groups or [
            {**codec.decode(group, tensor, array, plain=True), "params": params}
            for group, params in zip(told.get("groups", []), told.get("params", []), strict=True)
        ]
    return {"state": state, "param_groups": groups}
