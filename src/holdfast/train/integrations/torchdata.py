"""torchdata's StatefulDataLoader as a tracked object.

loader = ResumableLoader(StatefulDataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset)))
state = snaps.track(model=model, optimizer=optimizer, loader=loader)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from holdfast.protocol.errors import DataError
from holdfast.train.data import rank_and_world
from holdfast.train.integrations import missing
from holdfast.train.random_numbers import undrawn

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError as error:
    raise missing("torchdata", error) from error


class ResumableLoader:
    """A StatefulDataLoader that continues inside an epoch with the random numbers that training had there.

    `load_state_dict` raises DataError in another world: a rank's own position cannot be divided."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        self._loader = loader
        self._loaded = False
        """Whether a state was loaded, and no pass has begun since."""

    def __iter__(self) -> Iterator[Any]:
        # The beginning of a pass draws a random number. A pass in the middle of an epoch has drawn it already.
        with undrawn() if self._loaded else contextlib.nullcontext():
            batches: Iterator[Any] = iter(self._loader)
        self._loaded = False
        return batches

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler, if it has epochs."""
        if hasattr(self._loader.sampler, "set_epoch"):
            self._loader.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"world": rank_and_world(None)[1], "loader": self._loader.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        world = rank_and_world(None)[1]
        if saved["world"] != world:
            raise DataError(
                f"a StatefulDataLoader's position with {saved['world']} ranks means nothing with {world}: "
                "take ht.DataLoader, or begin the epoch again: resume(optional=['loader'])"
            )
        self._loader.load_state_dict(saved["loader"])
        self._loaded = True
