"""What the node of a straggler is asked, and what it answers: how fast its GPUs run now."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.policy import ITEMS_MAX, Count, LocalRank, Rank

TEXT_CHARACTERS_MAX = 200


class ReadClocks(Struct, frozen=True, tag="read_clocks"):
    """Read the clocks of the GPUs of these local ranks."""

    generation: Count
    ranks: Annotated[dict[Rank, LocalRank], Meta(max_length=ITEMS_MAX)]
    """The local rank of each rank."""


class GpuClocks(Struct, frozen=True, tag="clocks"):
    """The clocks of one rank's GPU. A rank without a GPU that can be read has no answer."""

    generation: Count
    rank: Rank
    gpu: Count
    text: Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
    """`345 of 1980 MHz, 91 °C, hardware thermal slowdown`."""
