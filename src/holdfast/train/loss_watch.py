"""Ends a job whose loss is not finite any more.

The metrics of `snaps.step()` with "loss" in their names are watched, in every life and for its whole length. Metrics of
an evaluation ("val_loss", "best_loss") are not: in many scripts they are infinite until the first evaluation. A step is
bad if none of its watched losses is finite. Several bad steps in a row end the job: few if the optimizer stepped in
them, many if it did not, because a GradScaler that searches for its scale skips steps, and so does a script that checks
its gradients. `micro.loss` in a step without `micro.backward()` is not the loss of the training, and does not count.

A loss on a GPU is not waited for: it is copied in the background, and read when it has arrived, some steps later.

Knows metrics and the numbers of steps. Knows nothing of snapshots.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.protocol.errors import NotFiniteError
from holdfast.train.accumulation import NO_LOSS

BAD_STEPS_MAX = 3
"""The job ends after this number of bad steps in a row in which an optimizer stepped: its parameters are not finite."""
SKIPPED_STEPS_MAX = 100
"""The same for steps in which none stepped. A scaler halves its scale in each: after 40 of them it has come from 2**16
to 2**-24."""
UNREAD_MAX = 64
"""Limit of the losses on their way from a device. Beyond it the oldest is waited for."""
OF_EVALUATION = re.compile(
    r"(?:^|[_/.\s-])(?:val|valid|validation|eval|evaluation|test|dev|best|min|max)(?:[_/.\s-]|$)"
)


@dataclass
class _Reading:
    """The losses of one step, which may not have arrived yet."""

    step: int
    stepped: bool
    finite: bool | torch.Tensor
    """Whether one of the losses is finite."""
    arrived: torch.Event | None = None


class LossWatch:
    """One rank's watch."""

    def __init__(self) -> None:
        self._unread: deque[_Reading] = deque()
        self._bad: list[_Reading] = []
        """The newest bad steps, in a row."""

    def step(self, step: int, metrics: Mapping[str, Any], *, stepped: bool) -> None:
        """Watch the losses of a complete step; `stepped`: an optimizer stepped in it. Raises NotFiniteError."""
        losses = [
            number
            for name, each in metrics.items()
            if is_watched(name) and each is not NO_LOSS and (number := _number(each)) is not None
        ]
        if losses:
            self._unread.append(_reading(step, stepped, losses))
        while self._unread and (_is_here(self._unread[0]) or len(self._unread) > UNREAD_MAX):
            self._count(self._unread.popleft())

    def read_all(self) -> None:
        """Wait for all losses. Raises NotFiniteError."""
        while self._unread:
            self._count(self._unread.popleft())

    def _count(self, reading: _Reading) -> None:
        if reading.arrived is not None:
            reading.arrived.synchronize()
        if bool(reading.finite):
            self._bad.clear()
            return
        self._bad.append(reading)
        stepped = sum(each.stepped for each in self._bad)
        if stepped >= BAD_STEPS_MAX or len(self._bad) >= SKIPPED_STEPS_MAX:
            raise NotFiniteError(
                f"the loss is not finite in steps {self._bad[0].step} to {reading.step}\n"
                "The next start goes on from the newest state whose values are finite. If the training is sound, look "
                "at what snaps.step(loss=…) gets: micro.loss is nan where loss.backward() was called, and not "
                "micro.backward(loss)."
            )


def is_watched(name: str) -> bool:
    """Whether a metric of this name is the loss of a training step."""
    lower = name.lower()
    return "loss" in lower and OF_EVALUATION.search(lower) is None


def _number(value: Any) -> float | torch.Tensor | None:
    """The value as a number, or a tensor of one number; None: it is neither."""
    if isinstance(value, torch.Tensor):
        local = value.detach().to_local() if isinstance(value, DTensor) else value.detach()
        return local if local.numel() == 1 else None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    except OverflowError:  # a whole number that is too large for a float
        return 0.0


def _reading(step: int, stepped: bool, losses: list[float | torch.Tensor]) -> _Reading:
    away = [each for each in losses if isinstance(each, torch.Tensor) and not each.is_cpu]
    here = [each for each in losses if not (isinstance(each, torch.Tensor) and not each.is_cpu)]
    if not away or any(math.isfinite(each) for each in here):
        return _Reading(step, stepped, any(math.isfinite(each) for each in here))
    finite = torch.stack([torch.isfinite(each).reshape(()).to(away[0].device) for each in away]).any()
    here_soon = torch.empty((), dtype=torch.bool, pin_memory=True)
    here_soon.copy_(finite, non_blocking=True)
    arrived = torch.Event(finite.device)
    arrived.record()
    return _Reading(step, stepped, here_soon, arrived)


def _is_here(reading: _Reading) -> bool:
    return reading.arrived is None or bool(reading.arrived.query())
