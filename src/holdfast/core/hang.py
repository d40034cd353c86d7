"""What was found when a job seemed to stand still: every rank's story, and the finding. Plain data.

Whoever makes a finding of the stories is given to the coordinator, as the judge of failures is: see insight/hangs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from msgspec import Struct

from holdfast.core.bounds import Rank
from holdfast.core.stacks import RankSample


class HangKind(Enum):
    HUNG = "hung"
    """Somebody does not come to what the others wait for."""
    STUCK = "stuck"
    """All wait in communication, at one place: nobody can be named."""
    PAUSED = "paused"
    """Nobody waits for anybody, or for somebody who may well work: evaluation, saving, a sleep. No alarm by itself."""
    MOVING = "moving"
    """Somebody for whom the others wait works: no hang while that lasts."""


class RankStory(Struct, frozen=True):
    """One rank as it was seen in a row of looks."""

    rank: int
    host: str
    local_rank: int
    age_s: float
    """Since its last step or beat, at the newest look."""
    samples: tuple[RankSample, ...] = ()
    """Oldest first."""


class RanksAtPlace(Struct, frozen=True, array_like=True):
    """Ranks that were found at one place, and the place in words."""

    ranks: tuple[Rank, ...]
    words: str


class Finding(Struct, frozen=True, kw_only=True):
    kind: HangKind
    code: str
    """HF240 …; empty where there is nothing to explain."""
    text: str
    """One or two lines."""
    culprits: tuple[Rank, ...] = ()
    """Ranks."""
    groups: tuple[RanksAtPlace, ...] = ()
    """The odd ones first, then by size."""
    signature: str = ""
    """Equal in two findings if and only if every rank stands where it stood."""
    busy: bool = False
    """Somebody who does not come computes, in what may be native code: reported late, not ended while that lasts."""
    slow: bool = False
    """What keeps the others waiting may only be slow: reported late."""


Examine = Callable[[Sequence[RankStory]], Finding]
