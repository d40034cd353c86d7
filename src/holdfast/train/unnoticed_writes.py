"""Notices writes to parameters that torch does not count.

A rank that is interrupted before its optimizer's step has the parameters of the step before, unless the program has
changed them in between. torch counts changes in place (kept.WatchedTensors), but not those through `parameter.data` in
place, which many adversarial training scripts make, and not those of a CUDA graph that is replayed. So the values
themselves are compared, in a few steps: the 1st, 2nd, 4th, 8th … of a process. A program that writes in such a way does
it in its first steps, or from an epoch on.

A comparison reads all parameters twice, and waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdfast.train.replicas import total


class ValueProbe:
    """Compares the values of some parameters during a step, by a digest."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = [each for each in parameters if each.numel()]
        self._steps = 0
        self._digest = ""
        self.looks = False
        """Whether the values are compared in this step."""

    def begin_step(self) -> None:
        """Begin the next step."""
        self._steps += 1
        self.looks = self._steps & (self._steps - 1) == 0  # a power of two
        if self.looks:
            self._digest = total(self._parameters)

    def changed(self) -> bool:
        """Whether a value differs from that at the beginning of the step. False in a step without a comparison."""
        return self.looks and self._digest != total(self._parameters)
