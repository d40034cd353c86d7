"""Notices writes to parameters that torch does not count.

A rank that is interrupted before its optimizer's step has the parameters of the step before, unless the program has
changed them in between. torch counts changes in place (kept.WatchedTensors), but not those through `parameter.data` in
place, which many adversarial training scripts make, and not those of a CUDA graph that is replayed. So the values
themselves are compared, in a few steps. A program that writes in such a way does it in its first steps, or from an
epoch or a step on, and adversarial training then has one more forward pass in a step. So the values are compared

- in the 1st, 2nd, 4th, 8th … step of a process
- in the first step of an epoch, and in a new world
- after a step with more forward passes than any step that was examined, until such a step is; a rank that is
  interrupted in a step with so many does not count as unchanged

A comparison reads all parameters twice, and waits for the GPU.

Knows tensors and counts. Must not know what follows from a change.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdfast.train.replicas import total

LOOKS_MAX = 8
"""Limit of the steps in a row that are examined because a step had more forward passes than before."""


class ValueProbe:
    """Compares the values of some parameters during a step, by a digest."""

    def __init__(self) -> None:
        self.looks = False
        """Whether the values are compared in this step."""
        self._parameters: list[torch.Tensor] = []
        self._digest = ""
        self._steps = 0
        self._passes: int | None = None
        """The largest number of forward passes in a step that was examined in this world; None: none was."""
        self._due = 0
        """The number of steps that are still to be examined, since one had more."""

    def begin_world(self) -> None:
        """Forget the number of forward passes: in another world a step may have another number of micro-batches."""
        self._passes, self._due = None, 0

    def begin_step(self) -> bool:
        """Begin the next step. Returns whether it is to be examined, by a call of `look`."""
        self._steps += 1
        self.looks = False
        return self._passes is None or self._due > 0 or self._steps & (self._steps - 1) == 0  # a power of two

    def look(self, parameters: Iterable[torch.Tensor]) -> None:
        """Compare the values in this step, from now on. `parameters`: those that the program has now."""
        if not self.looks:
            self.looks = True
            self._parameters = [each for each in parameters if each.numel()]
            self._digest = total(self._parameters)

    def changed(self) -> bool:
        """Whether a value differs from that at the beginning of the step. False in a step without a comparison."""
        return self.looks and self._digest != total(self._parameters)

    def end_step(self, passes: int) -> None:
        """The step is complete, with this number of forward passes."""
        is_new = self.is_new(passes)
        if self.looks:
            self._due = max(0, self._due - 1)
            if self._passes is None or is_new:
                self._passes, self._due = passes, 0
        elif is_new:
            self._due = LOOKS_MAX

    def is_new(self, passes: int) -> bool:
        """Whether no step with so many forward passes was examined, though others were."""
        return self._passes is not None and passes > self._passes
