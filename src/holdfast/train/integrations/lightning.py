"""Lightning: a callback that saves, resumes and stops.

    Trainer(strategy="ddp", callbacks=[SnapshotsCallback("runs/a")]).fit(module, loader)

Lightning's loops have a state of their own, and continue from it: it is a tracked object (`Loops`). They do not know
the position of a plain DataLoader, so its sampler leaves out what is trained (`RestOfSampler`).
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import RandomSampler

from holdfast import worker
from holdfast.protocol.errors import TrackingError
from holdfast.train.data.loader import DataLoader
from holdfast.train.integrations import missing
from holdfast.train.random_numbers import random_state, set_random_state
from holdfast.train.snapshots_api import Snapshots

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities import CombinedLoader
except ImportError as error:
    raise missing("lightning", error) from error


class SnapshotsCallback(Callback):  # type: ignore[misc] # Lightning is not followed
    """Snapshots of module, optimizers, schedulers, other callbacks, random numbers and Lightning's loops.

    folder, options    those of `ht.Snapshots`

    `fit()` continues from the newest snapshot. The values that the module logs for each step (`self.log(…)`) are the
    snapshots' metrics."""

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        self._folder, self._options = folder, options
        self.snapshots: Snapshots | None = None
        """The job's Snapshots while `fit()` runs; None: it does not run."""
        self._random: dict[str, Any] | None = None
        """The random numbers of the snapshot, until the first batch was fetched; None: nothing is to be restored."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.snapshots = snaps = Snapshots(self._folder, **self._options)
        self._loops = Loops(trainer)
        optimizers = {f"optimizer{number}": each for number, each in enumerate(trainer.optimizers)}
        schedulers = {f"scheduler{number}": each.scheduler for number, each in enumerate(trainer.lr_scheduler_configs)}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        snaps.track(
            model=pl_module,
            **optimizers,
            **schedulers,
            **({} if scaler is None else {"scaler": scaler}),
            callbacks=Callbacks(trainer, self),
            loops=self._loops,
            **{f"averages{number}": each for number, each in enumerate(_averages(trainer))},
        )
        snaps._position_is_kept()
        self._random = random_state() if snaps.resume() is not None else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._foresee(trainer)
        if self._loops.skip() and self._random is not None:
            # The snapshot was saved at the end of an epoch: the next one draws random numbers as it begins.
            set_random_state(self._random)
            self._random = None
            iter(trainer.fit_loop._data_fetcher)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._random is not None:  # since resume() loaders were started, and that draws random numbers
            set_random_state(self._random)
            self._random = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.snapshots is not None:
            values = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
            self.snapshots.step(**values)
            trainer.should_stop = trainer.should_stop or self.snapshots.stopping

    def _foresee(self, trainer: Any) -> None:
        """Report the number of batches that the job will have, if Lightning knows that of its steps. It is an estimate:
        an epoch's last step may have fewer batches than the others."""
        steps, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
        if self.snapshots is not None and 0 <= steps < math.inf:
            left = (steps - trainer.global_step) * trainer.accumulate_grad_batches
            if epochs is not None and epochs > 0:
                left = min(left, (epochs - trainer.current_epoch) * trainer.num_training_batches)
            done = self.snapshots.state.step
            worker.at_step(done, of=done + max(0, int(left)))

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        worker.beat()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.snapshots is not None:
            self.snapshots.save()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        if self.snapshots is not None:
            self.snapshots.__exit__(None if error is None else type(error), error, None)
            self.snapshots = None


class Loops:
    """Lightning's loops: a tracked object. A position in an epoch counts samples, so that it fits another number of
    ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._batch_then = 0
        """Samples of a batch of all ranks when the loaded state was saved; 0: nothing was loaded, or not known."""

    def state_dict(self) -> dict[str, Any]:
        return {"loops": self._trainer.fit_loop.state_dict(), "batch": self._batch_samples()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(saved["loops"])
        self._batch_then = saved["batch"]

    def skip(self) -> bool:
        """Let plain loaders leave out what is trained in this epoch; it is called before the first batch. Returns
        whether all of the epoch was trained."""
        if any(isinstance(each, DataLoader) for each in self._loaders()):
            raise TrackingError("SnapshotsCallback: with Lightning take torch's or torchdata's loader")
        if not self._batch_then:
            return False

        trainer, then, self._batch_then = self._trainer, self._batch_then, 0
        batches = trainer.fit_loop.epoch_loop.batch_progress
        progress, ready = batches.current, batches.current.ready
        samples = 0 if batches.is_last_batch else ready * then // trainer.world_size
        plain = [each for each in self._loaders() if samples and not hasattr(each, "load_state_dict")]
        plain = [each for each in plain if hasattr(getattr(each, "batch_sampler", None), "sampler")]
        for loader in plain:
            sampler = loader.batch_sampler.sampler
            if isinstance(sampler, RandomSampler):
                warnings.warn(
                    "holdfast: this loader's order cannot be repeated, the rest of the epoch has other samples: "
                    "take a DistributedSampler",
                    RuntimeWarning,
                    stacklevel=2,
                )
            loader.batch_sampler.sampler = RestOfSampler(sampler, samples)

        # With another number of ranks the same samples are another number of batches.
        batch = self._batch_samples()
        if then != batch and batch:
            for name in ("ready", "started", "processed", "completed"):
                setattr(progress, name, ready * then // batch - ready + getattr(progress, name))
        if plain:
            iter(trainer.fit_loop._data_fetcher)  # a new iterator: the one before may have read ahead
        return bool(batches.is_last_batch)

    def _batch_samples(self) -> int:
        """Samples of a batch of all ranks; 0: not known."""
        sizes: list[int] = [getattr(each, "batch_size", None) or 0 for each in self._loaders()]
        return max(sizes, default=0) * int(self._trainer.world_size)

    def _loaders(self) -> list[Any]:
        loaders = self._trainer.train_dataloader
        found: list[Any] = [] if loaders is None else CombinedLoader(loaders).flattened
        return found


def _averages(trainer: Any) -> list[nn.Module]:
    """Averaged weights of callbacks (WeightAveraging), which are not in their `state_dict()`."""
    found = (getattr(each, "_average_model", None) for each in trainer.callbacks)
    return [each for each in found if isinstance(each, nn.Module)]


class RestOfSampler:
    """A sampler that leaves out the first samples of another one, in the first pass only."""

    def __init__(self, sampler: Any, left_out: int) -> None:
        self._sampler, self._left_out = sampler, left_out

    def __iter__(self) -> Iterator[Any]:
        left_out, self._left_out = self._left_out, 0
        for number, each in enumerate(self._sampler):
            if number >= left_out:
                yield each

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class Callbacks:
    """The states of the trainer's other callbacks (early stopping, checkpoints): a tracked object."""

    def __init__(self, trainer: Any, own: SnapshotsCallback) -> None:
        self._callbacks = [each for each in trainer.callbacks if each is not own]

    def state_dict(self) -> dict[str, Any]:
        return {each.state_key: state for each in self._callbacks if (state := each.state_dict())}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for each in self._callbacks:
            if each.state_key in saved:
                each.load_state_dict(saved[each.state_key])
