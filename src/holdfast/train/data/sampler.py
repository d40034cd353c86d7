"""DistributedSampler: the one global order, for those who keep torch's loader (or a trainer that builds its own).

A sampler sees indices being drawn, often far ahead of the training; so the script reports what was trained."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from torch.utils.data import DistributedSampler as TorchSampler

from holdfast.protocol.errors import DataError, DataStateError
from holdfast.train.data import SEQUENTIAL, SHUFFLED, GlobalBatch, Position, order_of, place, positive

_BLOCK = 4096
"""Samples per rank whose order is computed at once."""


class DistributedSampler(TorchSampler):  # type: ignore[misc]
    """Every `world`-th sample of the epoch's order, from the cursor on; any number of batches of any size leaves a
    prefix trained.

        sampler = ht.DistributedSampler(dataset, seed=0, batch_size=32)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        snaps.track(sampler=sampler, …)
        for batch in loader:
            …
            snaps.step()                             # counts a batch

    `batch_size`: the loader's, samples of this rank. Without it, or without Snapshots, the script calls
    `trained(samples)` after each batch. All else is as torch's, but a sampler gives no weights, so the tail is not
    "even": it is filled from the epoch's start as torch's is (`drop_last=False`: up to world - 1 samples trained
    twice) or left out (`drop_last=True`: up to world - 1 lost). Epochs change by `set_epoch`, or by themselves when
    the one before was drawn to its end."""

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
        rank, world = place(None if rank is None or num_replicas is None else (rank, num_replicas))
        seed = operator.index(seed)
        self._position = Position(seed, len(dataset), SHUFFLED if shuffle else SEQUENTIAL)
        self._begun = False
        """Indices were drawn since the position was last set from outside."""
        self._exhausted = False
        """All of the pass's indices were drawn."""
        self._reported = False
        """Somebody has reported what was trained, in this life of the job or an earlier one."""
        self._batch = 0
        """Samples of this rank's last batch; 0: not known."""
        self._batch_size = batch_size or 0
        self._counts = False
        """`snaps.step()` has counted a batch."""
        self._script_counts = False
        """The script has called `trained`."""
        super().__init__(dataset, world, rank, shuffle, seed, drop_last or tail == "drop")
        self._plan = GlobalBatch(world, world, 1, "drop" if self.drop_last else "pad")
        self._end = len(dataset)
        """The cursor when everything of the current pass is trained."""

    def __iter__(self) -> Iterator[int]:
        """Indices of this rank for the rest of the epoch."""
        position = self._position
        if self._is_over():
            position.finish()
        self._exhausted = False
        if not position.begin():
            return
        order = order_of(position.length, position.seed, position.epoch, shuffle=self.shuffle)
        start, length, world = position.cursor, position.length, self.num_replicas
        stop = start + len(self) * world
        self._end = min(stop, length)
        for block in range(start + self.rank, stop, world * _BLOCK):
            positions = np.arange(block, min(block + world * _BLOCK, stop), world)
            self._begun = True  # not before: in an epoch that is trained to its end there is nothing to draw
            yield from order.take(positions % length).tolist()
        self._exhausted = True

    def _is_over(self) -> bool:
        """Whether the next pass is over the next epoch. Less than a batch may be left: torch's loader leaves it out by
        its own drop_last, which we do not see."""
        position = self._position
        return self._exhausted and (not self._batch or self._end - position.cursor < self._batch * self.num_replicas)

    def _continues(self) -> bool:
        """Whether the next pass begins within an epoch, or has nothing, since the epoch is trained to its end."""
        return not self._is_over() and not self._position.begins_epoch

    def __len__(self) -> int:
        """Indices of this rank in the rest of the epoch, the same number on every rank."""
        return self._plan.steps(self._position.cursor, self._position.length)

    @property
    def epoch(self) -> int:
        """The epoch whose indices are drawn."""
        return self._position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """The next pass goes over `epoch` from its start; over its rest when a state inside it was loaded just
        before."""
        self._position.set_epoch(epoch)
        self._begun = self._exhausted = False

    def regroup(self, rank: int, world: int) -> None:
        """Go on as this rank of another world, behind what was trained. Raises DataError where the sampler was given a
        rank of its own, and DataStateError when nobody has reported what was trained."""
        if not self._follows_group:
            raise DataError("The sampler has a rank= and num_replicas= of its own: it cannot follow the process group.")
        self.rank, self.num_replicas = place((rank, world))
        self._plan = GlobalBatch(world, world, 1, "drop" if self.drop_last else "pad")
        self.load_state_dict(self.state_dict())

    def trained(self, samples: int | None = None) -> None:
        """This rank has trained `samples` more of its indices, and so has every other: the size of the last batch.

        Without a number one batch of `batch_size=`. That does for the epoch's last, smaller batch too. With
        `batch_size=`, `snaps.step()` counts each batch, and the script does not call this. Raises DataError for a batch
        that was counted so, and where the size is not known.
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
        self._reported = True
        self._batch = max(samples, 1)
        position = self._position
        position.hand_out(min(position.cursor + samples * self.num_replicas, self._end))
        position.settle()

    def _stepped(self) -> None:
        """`snaps.step()`: a batch is trained, unless the script counts or indices are only drawn elsewhere."""
        if self._batch_size and self._begun and not self._script_counts:
            self._counts = True
            self._count(self._batch_size)

    def _keep_position(self) -> None:
        """The sampler is tracked: with `batch_size=` what was trained is known from the first step on."""
        self._reported = self._reported or bool(self._batch_size)

    def state_dict(self) -> dict[str, Any]:
        """(seed, epoch, cursor, length), the order's name and the batch size, equal on all ranks. Raises
        DataStateError when indices were drawn and nobody has reported what was trained."""
        if self._begun and not self._reported:
            raise DataStateError(
                "The sampler knows which indices were drawn, not which were trained: loader workers fetch ahead.\n"
                "Give the sampler batch_size=, and snaps.step() counts each batch; or call sampler.trained(batch_size) "
                "after each; or use holdfast.train.DataLoader. A sampler that only validates need not be tracked."
            )
        return {**self._position.state_dict(), "batch": self._batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there, in the next pass. Raises DataStateError when the state belongs to another dataset, seed or
        order."""
        self._position.load_state_dict(state)
        self._begun = self._exhausted = False
        # The rest of the epoch may be less than a batch: torch's loader draws it and hands nothing out, so that there
        # is nothing to report. Older snapshots do not have the size; their cursor moved because somebody reported.
        batch = state.get("batch", 0)
        self._batch = batch if type(batch) is int and batch > 0 else 0
        self._reported = self._reported or bool(self._batch or self._position.cursor)
