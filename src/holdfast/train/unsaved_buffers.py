"""Notices buffers with persistent=False that training changes, as a running scale.

No state has them. A training function that makes its model again after a loss makes them again as well, and most models
have only what is right so: masks, tables of angles, caches. These stay as they are from the first step on, or grow. So
the values after the first step are compared with those after the second one, once in a process.

Knows modules. Knows nothing of snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from holdfast.train import torch_private
from holdfast.train.replicas import total
from holdfast.train.sharding import local_tensor


class UnsavedBuffers:
    """Compares the values of such buffers after two steps."""

    def __init__(self, models: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = [
            (f"{name}.{path}" if path else name, module)
            for name, model in models
            for path, module in model.named_modules()
            if torch_private.unsaved_buffers_of(module)
        ]
        self.any = bool(self._modules)
        """Whether there are such buffers."""
        self._digests: dict[str, str] | None = None

    def at_step(self) -> list[str] | None:
        """A step is complete. Returns the names of the buffers that have changed since the step before; None: this is
        the first step."""
        before, self._digests = self._digests, self._now()
        if before is None:
            return None
        # A cache that has grown has another shape, and is not compared.
        return [name for name, digest in self._digests.items() if before.get(name, digest) != digest]

    def _now(self) -> dict[str, str]:
        """The digests of all such buffers that are plain tensors, by name and shape."""
        found = {}
        for path, module in self._modules:
            for name, each in torch_private.unsaved_buffers_of(module).items():
                if each is not None and each.layout is torch.strided and not each.is_meta:
                    found[f"{path}.{name} {list(each.shape)}"] = total([local_tensor(each)])
        return found
