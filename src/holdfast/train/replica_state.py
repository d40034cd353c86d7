"""The state after the last complete step, as far as living replicas have it, when a rank is lost.

Where each shard is on several ranks (HSDP, tensor parallelism with replicas, DDP), the loss of one rank loses no shard.
So each of the others leaves in memory what it has of the last complete step, before its training function is left
(`Saving.leave_alone`). If all parts are there, training goes on from that step, and none is lost; otherwise from the
state in memory before.

No rank enters its optimizer before all ranks have their gradients (step_agreement.py), so the last complete step is
that of all. Without that agreement a rank whose optimizer has begun to step completes this step, and others may be
unable to: then training goes on from the state in memory before. A rank whose parameters have changed since the last
step was complete, in any other way, leaves no tensors.

Plain tensors of the same name may be each rank's own, as the stages of a pipeline by hand. So the ranks compare them
before the first step and after it (`Saving.uncompared`), and until then no rank leaves tensors.

The text of the lost rank is that of another one; its random numbers are in a record that outlives it
(random_numbers.py). Objects of the program's own may be different on each rank, as may buffers that were different
before the first step: with these it is not done. On a GPU neither: work that was queued for a step may still change the
parameters of the step before.

Knows the tracked objects. Knows nothing of process groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.protocol.errors import HoldfastError
from holdfast.train.boundary import Boundary, noted_forward
from holdfast.train.own_objects import unknown_objects
from holdfast.train.random_numbers import RandomRecord
from holdfast.train.save import Saving
from holdfast.train.state import Tracker
from holdfast.train.step_agreement import StepAgreement, StepEntry


class ReplicaState:
    """The state of this rank after its last step, in a world in which each part is on several ranks."""

    def __init__(self, tracker: Tracker, place: str) -> None:
        """`place`: a folder in memory that outlives this process."""
        self._tracker = tracker
        with contextlib.suppress(OSError):  # that of the world before: steps may be done again with other numbers
            Path(RandomRecord.path(place)).unlink()
        self._boundary = Boundary(tracker, place)
        self._hooks = contextlib.ExitStack()
        for model in tracker.models:
            self._hooks.enter_context(noted_forward(model, self._boundary.forward_done))
        self._boundary.mark(tracker.state, begins=True)
        self.stepping = False
        """Whether an optimizer of the tracked models has begun to step since the last step was complete."""
        self.decided = 0
        """The newest step of this world that this rank knows to be done by all; 0: none."""
        self._agreement: StepAgreement | None = None
        """The agreement of all ranks on each step; None: they do not agree."""

    def agree(self, agreement: StepAgreement) -> None:
        """Agree with all ranks on each step."""
        self._agreement = agreement

    def begin_stepping(self, is_cut: Callable[[], bool], is_known: Callable[[int], bool]) -> bool:
        """The optimizer is about to change parameters: wait until all ranks have their gradients. Returns False if a
        rank was lost before: then this step is given up. `is_cut`: whether a rank was lost. `is_known`: whether another
        rank knows that this step is done; it waits for all ranks that are left."""
        if self._agreement is not None:
            step = self._tracker.step + 1
            match self._agreement.enters(step, is_cut):
                case StepEntry.DONE:
                    self.decided = step
                case StepEntry.OPEN if is_known(step):
                    self.decided = step
                case StepEntry.OPEN | StepEntry.LEFT:
                    return False
                case StepEntry.UNKNOWN:
                    self.end_agreement(lost=False)
        # No lock: an interruption just before this comes before the optimizer has changed anything.
        self.stepping = True
        return True

    def end_agreement(self, *, lost: bool) -> None:
        """Agree on no more steps of this world."""
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.end(lost=lost)

    def mark(self) -> None:
        """A step is complete."""
        self._boundary.mark(self._tracker.state)
        self.stepping = False

    def leave(self, saving: Saving) -> None:
        """Leave the state after the last complete step in memory, since a rank was lost. An error costs the steps since
        the state before."""
        self.end_agreement(lost=True)
        with contextlib.suppress(HoldfastError, RuntimeError, ValueError, TypeError):
            clean = not self.stepping and self._boundary.untouched()
            self._boundary.rewind(self._tracker.state)
            self._tracker.set_positions(self._boundary.positions())
            saving.leave_alone(tensors=clean and not saving.uncompared)

    def close(self) -> None:
        """No step follows."""
        self.end_agreement(lost=False)
        self._hooks.close()
        self._boundary.objects.close()


def replica_state(tracker: Tracker, place: str, world: int) -> ReplicaState | None:
    """The state of this rank, if living ranks can have all of it when one is lost; None: they cannot."""
    replicated = world > 1 and all(_has_replicas(model) for model in tracker.models)
    if not (replicated and place) or unknown_objects(tracker.others) or tracker.own_buffers:
        return None
    return ReplicaState(tracker, place)


def _has_replicas(model: nn.Module) -> bool:
    """Whether each parameter and buffer is in main memory, and on several ranks."""
    return all(_is_replicated(each) for each in (*model.parameters(), *model.buffers()))


def _is_replicated(tensor: Any) -> bool:
    if tensor.device.type != "cpu":
        return False
    # DDP's: every rank has all of it.
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    return any(each.is_replicate() and mesh.size(dim) > 1 for dim, each in enumerate(tensor.placements))
