"""How much of which epoch has been trained: (seed, epoch, cursor, length), equal on all ranks.

The first `cursor` positions of the epoch's order are trained and no others, so a position means the same to any number of
ranks and workers. Knows no dataset, no rank and no torch.

What counts as trained. A loader hands a batch out; the loop's body trains it. It counts, exactly once, as soon as

- `trained()` says so (`snaps.step()` calls it), or
- the next batch is asked for, or
- `state_dict()` is called while nobody has ever called `trained()` on this loader: then a state taken in the body counts
  the batch that the body has, as torchdata's stateful loader does.

Batches that were only fetched ahead never count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import DataError, DataStateError


class Position:
    """Where a loader or sampler is. One mutator: the process that trains."""

    def __init__(self, seed: int, length: int, order: str) -> None:
        self.seed = seed
        self.length = length
        self.order = order
        self.epoch = 0
        self.cursor = 0
        self._in_hand: int | None = None
        """The cursor as it will be when the batch in the loop's body is trained."""
        self._told = False
        self._as_loaded = False
        """A state was loaded and nothing trained since."""
        self._behind = False
        """The epoch that was asked for had been trained to its end before the loaded state was saved."""

    def begin(self) -> bool:
        """A pass over the rest of the epoch begins. False: nothing is left of it."""
        self._in_hand = None
        behind, self._behind = self._behind, False
        return not behind

    def hand_out(self, cursor: int) -> None:
        """The loop's body gets a batch; when it is trained the cursor will be `cursor`."""
        self._in_hand = cursor

    def trained(self) -> None:
        """The batch that the loop's body has is trained. Saying it twice counts it once."""
        self._told = True
        self.settle()

    def settle(self) -> None:
        """The next batch was asked for."""
        if self._in_hand is not None:
            self.cursor, self._in_hand = self._in_hand, None
            self._as_loaded = False

    def finish(self) -> None:
        """The pass came to the epoch's end."""
        self.settle()
        self._begin_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The next pass goes over `epoch` from its start; over its rest when a state inside it was loaded just before."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise DataError(f"Epochs are whole numbers from 0; {epoch!r} is none.")
        if self._as_loaded and epoch <= self.epoch:
            self._behind = epoch < self.epoch
        else:
            self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self.cursor = epoch, 0
        self._in_hand, self._as_loaded, self._behind = None, False, False

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and a word; the same on all ranks."""
        if not self._told:
            self.settle()
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "length": self.length,
            "order": self.order,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises DataStateError, and changes nothing, when the state belongs to something else."""
        if missing := {"seed", "epoch", "cursor", "length", "order"} - set(state):
            raise DataStateError(f"This is not a loader's state: {', '.join(sorted(missing))} missing.")
        for name in ("seed", "epoch", "cursor", "length"):
            value = state[name]
            if isinstance(value, bool) or not isinstance(value, int) or (value < 0 and name != "seed"):
                raise DataStateError(f"The loader's state is damaged: {name} is {value!r}.")
        if state["length"] != self.length:
            raise DataStateError(
                f"The snapshot's dataset had {state['length']:,} samples, this one has {self.length:,}: the position means nothing here.\n"
                "Train on with the dataset of the snapshot, or have the loader begin at the epoch's start: "
                "snaps.resume(optional=['loader']), by the name that it is tracked with."
            )
        for name, argument in (("seed", "seed="), ("order", "shuffle= or the shards")):
            if state[name] != getattr(self, name):
                raise DataStateError(
                    f"The snapshot's {name} is {state[name]!r}, the loader's {getattr(self, name)!r}: samples would be lost and repeated.\n"
                    f"Give the loader the {argument} of the snapshot."
                )
        if state["cursor"] > self.length:
            raise DataStateError(
                f"The loader's state is damaged: {state['cursor']:,} of {self.length:,} samples trained."
            )
        self._begin_epoch(state["epoch"])
        self.cursor = state["cursor"]
        self._as_loaded = True
