"""Hugging Face's Trainer: a callback that saves, resumes and stops.

    Trainer(model, args, train_dataset=data, callbacks=[HoldfastCallback("runs/a")]).train()

The Trainer keeps its own loop. It has code to continue in the middle of an epoch, but only for a folder that it has
written itself: the callback calls that code with the position of the snapshot (`TrainerProgress.go_on`).
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

from holdfast import worker
from holdfast.protocol.errors import TrackingError
from holdfast.train.integrations import missing
from holdfast.train.random_numbers import random_state, set_random_state
from holdfast.train.snapshots_api import Snapshots

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise missing("transformers", error) from error

COUNTED = ("total_flos", "num_input_tokens_seen", "best_metric", "best_global_step", "best_model_checkpoint")
"""Names of the fields of the Trainer's state that are saved."""


class HoldfastCallback(TrainerCallback):  # type: ignore[misc]
    """Snapshots of model, optimizer, scheduler, random numbers and the Trainer's progress.

    folder, options    those of `ht.Snapshots`

    `train()` continues from the newest snapshot. The Trainer's logged values (`loss`, `eval_loss` …) are the snapshots'
    metrics, for `ht.Keep(best=("eval_loss", "min"))`. Raises TrackingError for DeepSpeed and FSDP1, and for a Trainer
    that has no `_run_epoch`."""

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        self._folder, self._options = folder, options
        self.snapshots: Snapshots | None = None
        """The job's Snapshots while `train()` runs; None: it does not run."""
        self._progress: TrainerProgress | None = None
        self._pending = False
        """Whether a step is trained and not counted yet."""
        self._metrics: dict[str, float] = {}
        """The values that the Trainer logged last."""
        self._random: dict[str, Any] | None = None
        """The random numbers of the snapshot, until the first batches were fetched; None: nothing is to be restored."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._leave()  # what an exception left open; auto_find_batch_size begins again after one
        trainer = calling_trainer()
        self._progress = progress = TrainerProgress(trainer)
        self.snapshots = snaps = Snapshots(self._folder, **self._options)
        scaler = trainer.accelerator.scaler
        snaps.track(
            model=objects["model"],
            optimizer=objects["optimizer"].optimizer,  # accelerate's has torch's inside
            scheduler=objects["lr_scheduler"],
            trainer=progress,
            **({} if scaler is None else {"scaler": scaler}),
        )
        snaps._position_is_kept()
        self._pending, self._metrics, self._random = False, {}, None
        if snaps.resume() is not None:
            self._random = random_state() if progress.inside_epoch else None
            progress.go_on(str(snaps.path), control)
        worker.at_step(snaps.state.step, of=snaps.state.step + max(0, state.max_steps - state.global_step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step before: it is complete with what was logged and evaluated after it."""
        self._count(control)
        if self._random is not None:  # since resume() batches were fetched, and that draws random numbers
            set_random_state(self._random)
            self._random = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pending = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._count(control)
        if self.snapshots is not None and (control.should_training_stop or state.global_step >= state.max_steps):
            self.snapshots.save()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self._metrics |= {name: value for name, value in (logs or {}).items() if isinstance(value, float)}

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        worker.beat()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.snapshots is not None and self._progress is not None:
            self._progress.leave()
            self.snapshots.close()
            self.snapshots = None

    def _count(self, control: Any) -> None:
        if self._pending and self.snapshots is not None:
            self._pending = False
            self.snapshots.step(**self._metrics)
            control.should_training_stop |= self.snapshots.stopping


class TrainerProgress:
    """The Trainer's progress: a tracked object. A position in an epoch counts samples, so that it fits another number
    of ranks."""

    def __init__(self, trainer: Any) -> None:
        if trainer.is_deepspeed_enabled:
            raise TrackingError("HoldfastCallback: DeepSpeed keeps the optimizer's state; save with the Trainer itself")
        if not hasattr(trainer, "_run_epoch"):
            raise TrackingError("HoldfastCallback needs a newer transformers: this one cannot begin inside an epoch")
        self._trainer = trainer
        args, loader = trainer.args, trainer.callback_handler.train_dataloader
        self._micro_batches = args.gradient_accumulation_steps
        self._batch = args.train_batch_size * args.world_size
        self._epoch_batches = len(loader) if has_length(loader) else args.max_steps * self._micro_batches
        self._epoch, self._batches = 0, 0

    def state_dict(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        epoch, batches = divmod(round(state.epoch * self._epoch_batches), self._epoch_batches)
        return {
            "step": state.global_step,
            "epoch": epoch,
            "batches": batches,
            "batch": self._batch,
            "micro_batches": self._micro_batches,
            "counted": {name: getattr(state, name) for name in COUNTED},
            "log_history": state.log_history,
            "loss": [trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged],
            "callbacks": {name: each.state()["attributes"] for name, each in self._callbacks().items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer, state = self._trainer, self._trainer.state
        self._epoch, self._batches = saved["epoch"], saved["batches"] * saved["batch"] // self._batch
        self._batches -= self._batches % self._micro_batches
        step: int = saved["step"]
        if saved["batch"] * saved["micro_batches"] != self._batch * self._micro_batches:
            warnings.warn(
                f"holdfast: an optimizer step had {saved['batch'] * saved['micro_batches']} samples and has "
                f"{self._batch * self._micro_batches}: the learning rate's schedule counts steps\n"
                "keep it with per_device_train_batch_size or gradient_accumulation_steps",
                RuntimeWarning,
                stacklevel=2,
            )
            if trainer.args.max_steps <= 0:  # the Trainer's last step follows from the epochs
                step = (
                    self._epoch * -(-self._epoch_batches // self._micro_batches) + self._batches // self._micro_batches
                )

        for name in COUNTED:
            setattr(state, name, saved["counted"][name])
        state.log_history = saved["log_history"]
        loss, trainer._total_loss_scalar, last_logged = saved["loss"]
        trainer._tr_loss = loss.to(trainer.args.device)
        trainer._globalstep_last_logged = step - (saved["step"] - last_logged)
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen
        state.global_step = trainer._initial_global_step = step
        state.epoch = self._epoch + self._batches / self._epoch_batches
        for name, each in self._callbacks().items():
            for attribute, value in saved["callbacks"].get(name, {}).items():
                setattr(each, attribute, value)

    @property
    def inside_epoch(self) -> bool:
        return self._batches > 0

    def go_on(self, folder: str, control: Any) -> None:
        """Let the Trainer skip what is trained, as it does for a checkpoint of its own in this folder."""
        trainer, run = self._trainer, self._trainer._run_epoch
        control.should_training_stop = trainer.state.global_step >= trainer.state.max_steps

        def run_epoch(*, epoch: int, **given: Any) -> None:
            if epoch >= self._epoch and not control.should_training_stop:
                given |= {
                    "resume_from_checkpoint": folder,
                    "epochs_trained": self._epoch,
                    "steps_trained_in_current_epoch": self._batches,
                }
                run(epoch=epoch, **given)

        trainer._run_epoch = run_epoch

    def leave(self) -> None:
        """Give the Trainer its own loop back: the next `train()` begins from zero, if it finds no snapshot."""
        vars(self._trainer).pop("_run_epoch", None)

    def _callbacks(self) -> dict[str, Any]:
        """The callbacks that have a state, by the names of their classes; of two of one class, the last."""
        found = self._trainer.callback_handler.callbacks
        return {type(each).__name__: each for each in found if isinstance(each, ExportableState)}


def calling_trainer() -> Any:
    """The Trainer that has called this callback. It passes all its objects to a callback except itself, so it is found
    among the callers. Raises TrackingError."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back
    raise TrackingError("HoldfastCallback: give it to a transformers.Trainer: callbacks=[…] or add_callback()")
