"""One look at all workers of a world, under way: who has answered, what they said. Bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core.stacks import RankSample


@dataclass(slots=True)
class Round:
    number: int
    asked_s: float
    awaited: set[str]
    """Members that have not answered."""
    samples: dict[int, RankSample] = field(default_factory=dict)
    """By rank."""
    reach: list[str] = field(default_factory=list)
    """What nodes that cannot reach the store have said."""
