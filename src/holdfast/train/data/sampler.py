"""DistributedSampler: the one global order, for scripts that keep torch's loader, or a trainer that builds its own.

A sampler sees indices being drawn, often far ahead of the training; so the script reports what was trained."""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from torch.utils.data import DistributedSampler as TorchSampler

from holdfast.protocol.errors import DataError, DataStateError
from holdfast.train.data import (
    EVALUATES,
    SEQUENTIAL,
    SHUFFLED,
    GlobalBatch,
    Position,
    order_of,
    positive,
    rank_and_world,
)
from holdfast.train.data.datasets import part_of

_BLOCK = 4096
"""Number of samples per rank whose order is computed at once."""
UNEQUAL_STEPS = 3
"""A warning comes after this number of steps in a row for which a loader handed out the same number of batches, and
more than a step counts."""


class SamplerPass:
    """A pass of torch's loader over a sampler: what the loader has handed out. It lives as long as the loop's iterator
    (continued_pass.py), so a pass that is over, or was left, has none."""

    def __init__(self, batch_size: int, batches: int) -> None:
        """`batch_size`: the loader's, `batches`: those of the pass; 0: not known."""
        self.batch_size = batch_size
        self.given = 0
        """The number of batches that the loop has got."""
        self.steps = 0
        """The number of steps that have counted batches of it."""
        self.ended = False
        """Whether the loader has said that there is no other batch."""
        self._batches = batches
        self._seen = 0
        """The number of batches that the loop had at the last step."""
        self._gap = self._equal_gaps = 0
        """The number of batches between the last two steps, and that of the steps in a row with it."""

    def per_step(self, counted: int) -> int:
        """The number of batches in a step that counts this many samples."""
        return max(1, counted // self.batch_size) if self.batch_size else 1

    def has_more(self, counted: int) -> bool:
        """Whether the loop has got a batch that no step has counted, if each counts this many samples."""
        return self.given > self.steps * self.per_step(counted)

    def step(self, counted: int) -> bool:
        """Note a step that counts this many samples. Returns whether steps take more than that. Raises DataError if the
        loader's batches cannot be that large."""
        per_step = self.per_step(counted)
        is_short = self.given < min(per_step, self._batches or per_step)
        if self.batch_size and not self.steps and (self.batch_size > counted or counted % self.batch_size or is_short):
            raise DataError(
                f"The loader has batch_size={self.batch_size}, and its sampler batch_size={counted}, the samples that "
                "snaps.step() counts: some would be lost or trained twice.\n"
                "Give both the same; for batches of changing sizes leave batch_size= of the sampler out, and call "
                "sampler.trained(samples) before each snaps.step()."
            )
        gap, self._seen = self.given - self._seen, self.given
        # The first step says nothing: a loop may read some batches ahead, once.
        self._equal_gaps = self._equal_gaps + 1 if self.steps and gap == self._gap else int(self.steps > 0)
        self._gap = gap
        self.steps += 1
        return self._equal_gaps == UNEQUAL_STEPS and gap > per_step


class DistributedSampler(TorchSampler):  # type: ignore[misc]
    """A sampler of every `world`-th index in the epoch's order, from the cursor on: whatever the size and the number of
    batches, the trained samples are the first ones of the order.

        sampler = ht.DistributedSampler(dataset, seed=0, batch_size=32)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        snaps.track(sampler=sampler, …)
        for batch in loader:
            …
            snaps.step()                             # counts a batch

    `batch_size`: that of the loader, in samples of this rank; `snaps.step()` raises DataError if it is another. Without
    it, or without Snapshots, the script calls `trained(samples)` after each batch. Steps count nothing of a sampler
    over which only evaluations go: each of its passes is a whole one. All other arguments are torch's. A sampler gives
    no weights, so the tail cannot be "even": it is filled from the epoch's start as in torch's (`drop_last=False`: up
    to world - 1 samples are trained twice) or left out (`drop_last=True`: up to world - 1 are lost). Epochs change by
    `set_epoch`, or by themselves when the one before was drawn to its end. Raises DataError."""

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        tail: Literal["pad", "drop"] | None = None,
        batch_size: int | None = None,
    ) -> None:
        if tail not in (None, "pad", "drop") or (drop_last and tail == "pad"):
            raise DataError(
                f"A sampler cannot do tail={tail!r}{' with drop_last=True' if drop_last else ''}: "
                "it gives no weights.\n"
                "Use holdfast.train.DataLoader, or tail='pad' or 'drop'."
            )
        if batch_size is not None:
            positive("batch_size", batch_size)
        if (rank is None) != (num_replicas is None):
            raise DataError("rank= and num_replicas= are given together or not at all.")
        self._follows_group = rank is None or num_replicas is None
        rank, world = rank_and_world(None if rank is None or num_replicas is None else (rank, num_replicas))
        seed = operator.index(seed)
        self._position = Position(seed, len(dataset), SHUFFLED if shuffle else SEQUENTIAL, part_of(dataset))
        self._begun = False
        """Whether indices were drawn since the position was last set from outside."""
        self._exhausted = False
        """Whether all of the pass's indices were drawn."""
        self._reported = False
        """Whether it was reported what was trained, in this life of the job or an earlier one."""
        self._batch = 0
        """The number of samples in this rank's last batch; 0: not known."""
        self._batch_size = batch_size or 0
        self._counts = False
        """Whether `snaps.step()` has counted a batch."""
        self._script_counts = False
        """Whether the script has called `trained`."""
        self._coming: weakref.ref[SamplerPass] | None = None
        self._pass: weakref.ref[SamplerPass] | None = None
        """The pass of torch's loader that begins next, and the one that has begun; None: the indices are drawn by
        something else, which does not show what it hands out."""
        self._trains = self._another_trains = False
        """Whether a batch was counted, and whether a step counted one of another tracked sampler or loader."""
        self._has_passed = False
        """Whether a pass came to its end."""
        self._was_evaluation = False
        """Whether it was an evaluation's when the loaded state was saved."""
        self._warned = False
        super().__init__(dataset, world, rank, shuffle, seed, drop_last or tail == "drop")
        self._plan = GlobalBatch(world, world, 1, "drop" if self.drop_last else "pad")
        self._length = 0
        """The number of this rank's indices in the pass that was begun last."""
        self._end = len(dataset)
        """The cursor when everything of the current pass is trained."""

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank for the rest of the epoch."""
        position = self._position
        self._pass, self._coming = self._coming, None
        if self._is_over():
            position.finish()
        elif self._evaluates and position.cursor:
            position.set_epoch(position.epoch + 1)
        self._exhausted = False
        if not position.begin() and not self._evaluates:
            return

        order = order_of(position.length, position.seed, position.epoch, shuffle=self.shuffle)
        start, length, world = position.cursor, position.length, self.num_replicas
        self._length = self._plan.steps(start, length)
        stop = start + self._length * world
        self._end = min(stop, length)
        for block in range(start + self.rank, stop, world * _BLOCK):
            positions = np.arange(block, min(block + world * _BLOCK, stop), world)
            self._begun = True  # not before: in an epoch that is trained to its end there is nothing to draw
            yield from order.take(positions % length).tolist()
        self._exhausted = True
        self._has_passed |= self._pass is None  # otherwise the loader says when the loop has got the last batch

    def _is_over(self) -> bool:
        """Whether the next pass goes over the next epoch. That is so even if less than a batch is left: torch's loader
        leaves it out by its own drop_last, which we do not see."""
        left = self._end - self._position.cursor
        return self._exhausted and (self._evaluates or not self._batch or left < self._batch * self.num_replicas)

    def _continues(self) -> bool:
        """Whether the next pass begins within an epoch, or gives nothing, since the epoch is trained to its end."""
        return not self._is_over() and not self._evaluates and not self._position.begins_epoch

    def _begin_pass(self, batch_size: int, batches: int) -> SamplerPass:
        """The pass that a loader of torch begins."""
        begun = SamplerPass(batch_size, batches)
        self._coming = weakref.ref(begun)
        return begun

    def _end_pass(self, ended: SamplerPass) -> None:
        """Note that the loop has got all of this pass."""
        ended.ended = self._has_passed = True

    @property
    def _evaluates(self) -> bool:
        """Whether only an evaluation goes over it: its passes come to their end, and steps count the batches of others.
        Each pass is a whole one, also after a resume, as with `DataLoader._evaluates`."""
        return not self._trains and (self._was_evaluation or (self._another_trains and self._has_passed))

    def _note_another(self) -> None:
        """Note that a step counts a batch of another tracked sampler or loader."""
        self._another_trains = True

    @property
    def _in_loop(self) -> bool:
        """Whether the training's loop has a batch of it that no step has counted."""
        if not self._begun or self._evaluates:
            return False
        if self._pass is None:
            return True
        found = self._pass()
        return found is not None and found.has_more(self._batch_size)

    def __len__(self) -> int:
        """The number of this rank's indices in the pass that was begun last; after a new position was set, in the rest
        of the epoch. Every rank has the same."""
        return self._length if self._begun else self._plan.steps(self._position.cursor, self._position.length)

    @property
    def epoch(self) -> int:
        """The epoch whose indices are drawn."""
        self._position.known = True
        return self._position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass go over `epoch`, from its start; if a state inside it was loaded just before, over its
        rest. Raises DataError."""
        self._position.set_epoch(epoch)
        self._begun = self._exhausted = False

    def regroup(self, rank: int, world: int) -> None:
        """Go on as this rank of another world, after what was trained. Raises DataError if the sampler was given a rank
        of its own, and DataStateError if it was not reported what was trained."""
        if not self._follows_group:
            raise DataError("The sampler has a rank= and num_replicas= of its own: it cannot follow the process group.")
        self.rank, self.num_replicas = rank_and_world((rank, world))
        self._plan = GlobalBatch(world, world, 1, "drop" if self.drop_last else "pad")
        self.load_state_dict(self.state_dict())

    def trained(self, samples: int | None = None) -> None:
        """Count this many more of this rank's indices as trained, and of every other rank's: the size of the last
        batch.

        Without a number it is one batch of `batch_size=`; that is right for the epoch's last, smaller batch, too. With
        `batch_size=`, `snaps.step()` counts each batch, and the script does not call this. Raises DataError for a batch
        that was counted by `snaps.step()`, and if the size is not known.
        """
        if self._counts:
            raise DataError(
                "trained(): snaps.step() has counted this batch already.\n"
                "Leave trained() out, or batch_size= of the sampler."
            )
        if samples is None:
            samples = self._batch_size
            if not samples:
                raise DataError(
                    "trained(): how many samples? Write trained(batch_size), or give the sampler batch_size=."
                )
        if samples < 0:
            raise DataError(f"trained({samples}): a batch has no negative size.")
        self._script_counts = True
        self._count(samples)

    def _count(self, samples: int) -> None:
        self._reported = self._trains = True
        self._batch = max(samples, 1)
        position = self._position
        position.hand_out(min(position.cursor + samples * self.num_replicas, self._end))
        position.count_pending()

    def _stepped(self) -> None:
        """Count a batch for `snaps.step()`, unless the script counts, or the loop has none of it. Raises DataError if
        batches have another size."""
        if not self._batch_size or self._script_counts or not self._in_loop:
            return
        found = None if self._pass is None else self._pass()
        if found is not None and found.step(self._batch_size) and not self._warned:
            self._warned = True
            warnings.warn(
                "holdfast: each snaps.step() counts one batch of the tracked sampler, and the loop takes more: after a "
                "resume samples would be trained twice.\n"
                "Call snaps.step() once per batch, or give the sampler the batch_size= of all of them together.",
                RuntimeWarning,
                stacklevel=4,
            )
        self._counts = True
        self._count(self._batch_size)

    def _identity(self) -> list[Any] | None:
        """What has to be equal on all ranks; None: the script divides the data."""
        return self._position.identity() if self._follows_group else None

    def _keep_position(self) -> None:
        """Note that the sampler is tracked: with `batch_size=`, what was trained is known from the first step on."""
        self._reported = self._reported or bool(self._batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The position: seed, epoch, cursor, length, the order's name and the batch size; equal on all ranks. Raises
        DataStateError if indices were drawn and it was not reported what was trained."""
        if self._begun and not self._reported:
            raise DataStateError(
                "The sampler knows which indices were drawn, not which were trained: loader workers fetch ahead.\n"
                "Give the sampler batch_size=, and snaps.step() counts each batch; or call sampler.trained(batch_size) "
                "after each; or use holdfast.train.DataLoader. A sampler that only validates need not be tracked."
            )
        state = {**self._position.state_dict(), "batch": self._batch}
        if not self._evaluates:
            return state
        return {**state, "epoch": state["epoch"] + self._is_over(), "cursor": 0, EVALUATES: True}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at this position, in the next pass. Raises DataStateError if the state belongs to another dataset, seed
        or order."""
        self._position.load_state_dict(state)
        self._begun = self._exhausted = False
        self._was_evaluation |= state.get(EVALUATES) is True
        # The rest of the epoch may be less than a batch: torch's loader draws it and hands nothing out, so that there
        # is nothing to report. Then the batch size, or a cursor that has moved, shows that an earlier life reported.
        batch = state.get("batch", 0)
        self._batch = batch if type(batch) is int and batch > 0 else 0
        self._reported = self._reported or bool(self._batch or self._position.cursor)
