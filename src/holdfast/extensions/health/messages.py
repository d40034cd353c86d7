"""What a node reports about its health."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.policy import Count

REASON_CHARACTERS_MAX = 300


class Unfit(Struct, frozen=True, tag="unfit"):
    """The check has failed: this node takes no part."""

    generation: Count
    reason: Annotated[str, Meta(max_length=REASON_CHARACTERS_MAX)]


class Recovered(Struct, frozen=True, tag="recovered"):
    """A node that was unfit has passed the check."""
