"""Writes to parameters that torch does not count.

A rank that is interrupted before its optimizer's step has the parameters of the step before: unless the program has
changed them in between. torch counts changes in place (kept.WatchedTensors), but not those through `parameter.data` in
place, as many adversarial training scripts make them, and not those of a CUDA graph that is replayed. So the values
themselves are looked at, in a few steps: the 1st, 2nd, 4th, 8th … of a process. A program that writes so does it in
its first steps, or from an epoch on.

A look reads all parameters once, and waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ValueProbe:
    """The values of some parameters, as sums over their bits."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = [each for each in parameters if each.numel()]
        self._steps = 0
        self._sums: list[int] | None = None

    @property
    def looks(self) -> bool:
        """Whether the values are looked at in this step."""
        return self._sums is not None

    def begin_step(self) -> None:
        """The next step begins."""
        self._steps += 1
        is_power_of_two = self._steps & (self._steps - 1) == 0
        self._sums = self._now() if is_power_of_two else None

    def changed(self) -> bool:
        """Whether a value is another one than at the step's begin. False in a step without a look."""
        return self._sums is not None and self._sums != self._now()

    def _now(self) -> list[int]:
        with torch.no_grad():
            sums = [_bits(each).sum(dtype=torch.int64) for each in self._parameters]
            by_device: dict[torch.device, list[torch.Tensor]] = {}
            for each in sums:
                by_device.setdefault(each.device, []).append(each)
            return [value for some in by_device.values() for value in torch.stack(some).tolist()]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As whole numbers of the same size: a sum of floats would hide small changes."""
    plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return plain.view(_INTEGERS[plain.element_size()])
