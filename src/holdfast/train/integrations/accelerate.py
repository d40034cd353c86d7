"""Hugging Face accelerate: snapshots of all that an Accelerator has prepared.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    snaps = snapshots(accelerator, "runs/a")
    snaps.resume()
    for epoch in snaps.state.epochs(10):
        for batch in loader:
            ...
            snaps.step(loss=loss)

accelerate's loaders do not know their position: `LoaderPosition` counts, and lets accelerate skip what is trained.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from holdfast.protocol.errors import TrackingError
from holdfast.train.integrations import missing
from holdfast.train.random_numbers import undrawn
from holdfast.train.snapshots_api import Snapshots

try:
    from accelerate import skip_first_batches
    from accelerate.data_loader import DataLoaderShard
except ImportError as error:
    raise missing("accelerate", error) from error


def snapshots(accelerator: Any, folder: str | os.PathLike[str], **options: Any) -> Snapshots:
    """The Snapshots that track all that is prepared, and all that is registered with `register_for_checkpointing`.

    folder, options    those of `ht.Snapshots`

    Call it after `accelerator.prepare()` and before `resume()`. More objects may be tracked. Raises TrackingError if no
    model is prepared, and for what cannot be tracked: FSDP1, the optimizers of DeepSpeed and Megatron-LM."""
    if not accelerator._models:
        raise TrackingError("snapshots(accelerator, …) comes after accelerator.prepare(model, optimizer, loader)")
    found = {
        "model": accelerator._models,
        "optimizer": [each.optimizer for each in accelerator._optimizers],  # accelerate's have torch's inside
        "scheduler": accelerator._schedulers,
        "loader": [LoaderPosition(each) for each in accelerator._dataloaders if _has_position(each)],
        "custom": accelerator._custom_objects,
        "scaler": [each for each in [accelerator.scaler] if each is not None],
    }
    snaps = Snapshots(folder, **options)
    snaps.track(**{f"{kind}{number or ''}": each for kind, all_ in found.items() for number, each in enumerate(all_)})
    snaps._position_is_kept()
    return snaps


def _has_position(loader: Any) -> bool:
    """Whether LoaderPosition can follow this loader; it warns if not. Raises TrackingError for a stateful one."""
    if getattr(loader, "use_stateful_dataloader", False):
        raise TrackingError(
            "snapshots(accelerator, …) keeps the loaders' positions: without use_stateful_dataloader=True"
        )
    followed = isinstance(getattr(loader, "batch_sampler", None), BatchSampler) and type(loader) is DataLoaderShard
    if not followed:
        warnings.warn(
            "holdfast: a prepared loader of an iterable dataset, or with dispatch_batches=True, is not followed: "
            "it begins again in each life",
            RuntimeWarning,
            stacklevel=3,
        )
    return followed


class LoaderPosition:
    """The position of a prepared loader: a tracked object. It counts samples, so it fits another number of ranks."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._epoch, self._batches = 0, 0
        sampler = loader.get_sampler()
        # With one process accelerate gives the sampler no generator: without one the order cannot be repeated.
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(torch.initial_seed())
        self._generator: torch.Generator | None = loader.synchronized_generator or getattr(sampler, "generator", None)
        self._order: torch.Tensor | None = None
        """State of the generator at the beginning of the epoch; None: there is none."""
        self._loaded = False
        """Whether a state was loaded, and no epoch has begun since."""

    def state_dict(self) -> dict[str, Any]:
        batch = self._loader.total_batch_size
        return {"epoch": self._epoch, "batches": self._batches, "batch": batch, "order": self._order}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._epoch, self._order = saved["epoch"], saved["order"]
        self._batches = saved["batches"] * saved["batch"] // self._loader.total_batch_size
        self._loaded = True

    resumable = True

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def remaining(self) -> int:
        """The number of batches left in this epoch."""
        return len(self) - self._batches

    def trained(self) -> None:
        """Count the batch in the loop's body as trained, if it is this loader's. Raises TrackingError if that cannot be
        known."""
        state = self._loader.gradient_state
        if len([each for each in state.dataloader_references if each is not None]) > 1:
            raise TrackingError(
                "snapshots(accelerator, …): several prepared loaders are read at once, or a loop over one was left by "
                "break: it is not known whose batch was trained\n"
                "read one at a time and to its end, or track an ht.DataLoader that is not prepared"
            )
        if state.active_dataloader is self._loader:
            self._batches += 1

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, or go on inside it if that was loaded just before."""
        self._loader.set_epoch(epoch)
        if self._loaded and epoch == self._epoch:
            if self._generator is not None and self._order is not None:
                self._generator.set_state(self._order)
            if self._batches:
                self._loader.base_dataloader = RestOfEpoch(self._loader, self._batches)
        else:
            self._epoch, self._batches = epoch, 0
            self._order = None if self._generator is None else self._generator.get_state()
        self._loaded = False


class RestOfEpoch:
    """The rest of an epoch: it replaces the loader inside a prepared one, for one pass."""

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader, self._whole = loader, loader.base_dataloader
        self._rest = skip_first_batches(loader, batches).base_dataloader

    def __iter__(self) -> Iterator[Any]:
        self._loader.base_dataloader = self._whole
        with undrawn():  # the beginning of a pass draws a random number, which this epoch has drawn already
            return iter(self._rest)

    def __len__(self) -> int:
        return len(self._whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)
