"""Compares the collectives in which ranks are, as torch's flight recorder has them.

Pure. A group's ranks make the same collectives in the same order, so each has a number on all of them. Ranks that wait
in different ones wait for ever. Operations between two ranks have other numbers on each rank, and are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from holdfast.protocol.rank_progress import Collective, RankSample, RankStory

SAME_SIZES = frozenset(
    (
        "all_reduce",
        "allreduce_coalesced",
        "broadcast",
        "reduce",
        "all_gather",
        "_all_gather_base",
        "reduce_scatter",
        "_reduce_scatter_base",
    )
)
"""Collectives to which all ranks give tensors of the same size and type."""
DEFAULT_GROUP = "default_pg"

Key = tuple[int, str, str]
"""What is the same on all ranks of a collective: number, operation, and the tensors if their sizes have to be equal."""


def newest(story: RankStory) -> tuple[Collective, ...]:
    """The collectives of the rank's newest sample."""
    return story.samples[-1].collectives if story.samples else ()


def advance(samples: Sequence[RankSample]) -> bool:
    """Whether the rank has begun another collective between every two samples."""
    pairs = list(pairwise(samples))
    return bool(pairs) and all(_begun(earlier) and _is_after(later, earlier) for earlier, later in pairs)


def _begun(sample: RankSample) -> dict[tuple[str, bool], int]:
    numbers: dict[tuple[str, bool], int] = {}
    for each in sample.collectives:
        kind = (each.group, each.between_two)
        numbers[kind] = max(each.number, numbers.get(kind, 0))
    return numbers


def _is_after(later: RankSample, earlier: RankSample) -> bool:
    before = _begun(earlier)
    return any(number > before.get(kind, number) for kind, number in _begun(later).items())


def common_group(stories: Sequence[RankStory]) -> str:
    """The group in which the most ranks wait in a collective; empty: in none."""
    waits = Counter(each.group for story in stories for each in newest(story) if not each.done and not each.between_two)
    return max(waits, key=lambda group: (waits[group], group == DEFAULT_GROUP), default="")


def collective_of(story: RankStory, group: str) -> Collective | None:
    """The collective of this group in which the rank waits, else the last one that it has done."""
    own = [each for each in newest(story) if each.group == group and not each.between_two]
    return next((each for each in own if not each.done), own[0] if own else None)


def key_of(collective: Collective) -> Key:
    """Equal for two ranks if and only if they may be in the same collective."""
    sized = collective.operation in SAME_SIZES
    return (collective.number, collective.operation, collective.tensors if sized else "")


def keys(stories: Sequence[RankStory]) -> list[Key] | None:
    """The collective of one group in which each of these ranks waits; None: not all of them wait in one, or that is not
    known."""
    group = common_group(stories)
    found = [collective_of(story, group) for story in stories]
    waits = [each for each in found if each is not None and not each.done]
    return [key_of(each) for each in waits] if group and len(waits) == len(stories) else None


def described(collective: Collective) -> str:
    """`812 all_reduce [4096] float32`."""
    return f"{collective.number} {collective.operation} {collective.tensors}".strip()
