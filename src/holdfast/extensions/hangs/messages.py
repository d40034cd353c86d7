"""The samples of one generation's workers, as they are ordered and sent."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.policy import ITEMS_MAX, WORKERS_PER_NODE_MAX, Count
from holdfast.protocol.rank_progress import RankSample


class Look(Struct, frozen=True, array_like=True):
    """Sample the workers. Answered by one Looked."""

    generation: Count
    number: Count
    store: bool = False
    """The node also tries to connect to the generation's MASTER_ADDR:MASTER_PORT, as the workers do."""


class Looked(Struct, frozen=True, array_like=True):
    """Answer to Look."""

    generation: Count
    number: Count
    """The number of the Look."""
    samples: Annotated[tuple[RankSample, ...], Meta(max_length=WORKERS_PER_NODE_MAX)] = ()
    reach: Annotated[tuple[str, ...], Meta(max_length=ITEMS_MAX)] = ()
    """The reasons why the test connection failed, in words; empty: it was made, or was not ordered."""
