"""Compares the collectives in which ranks are, as torch's flight recorder has them.

Pure. A group's ranks make the same collectives in the same order, so each has a number on all of them. Ranks that wait
in different ones wait for ever. Operations between two ranks have other numbers on each rank, and are not compared.

A rank in a collective waits for the ranks of that group alone. So another rank is to blame for a hang only if it
belongs to a group in which some rank waits; and if all ranks of a group wait in it, the cause is among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from holdfast.protocol.rank_progress import Collective, RankSample, RankStory
from holdfast.text import plural, spans

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


def waits(story: RankStory) -> list[Collective]:
    """The collectives that the rank has begun and that are not done: at most one of each group."""
    return [each for each in newest(story) if not each.done and not each.between_two]


def awaited(stories: Sequence[RankStory], ranks: Sequence[int]) -> set[int]:
    """Those of the ranks for which one of these others may wait. Where it is not known in which collective one of them
    waits, it may wait for any rank."""
    own = [waits(story) for story in stories]
    if not all(own):
        return set(ranks)
    groups = {each.members: each for found in own for each in found}.values()
    return {rank for rank in ranks if any(each.involves(rank) for each in groups)}


def common_group(stories: Sequence[RankStory], culprits: Container[int] = ()) -> str:
    """The group in which the most ranks wait in a collective; empty: in none. Groups in which all ranks wait, but for
    the culprits, come first: those who wait in other groups wait for ranks of these."""
    there = {story.rank for story in stories}
    waiting: dict[str, set[int]] = {}
    member: dict[str, Collective] = {}
    for story in stories:
        for each in waits(story):
            waiting.setdefault(each.group, set()).add(story.rank)
            member.setdefault(each.group, each)
    named = {rank for rank in there if rank in culprits}

    def order(group: str) -> tuple[bool, bool, int, bool]:
        own = {rank for rank in named if member[group].involves(rank)}
        of_culprits = not named or bool(own)
        whole = len(waiting[group] | own) == (member[group].size or len(there))
        return of_culprits and whole, of_culprits, len(waiting[group]), group == DEFAULT_GROUP

    return max(waiting, key=order, default="")


def members_of(stories: Sequence[RankStory], group: str) -> list[RankStory]:
    """Those of the ranks that belong to this group, as far as that is known."""
    own = next((each for story in stories for each in newest(story) if each.group == group), None)
    return [story for story in stories if own is None or own.involves(story.rank)]


def collective_of(story: RankStory, group: str) -> Collective | None:
    """The collective of this group in which the rank waits, else the last one that it has done."""
    own = [each for each in newest(story) if each.group == group and not each.between_two]
    return next((each for each in own if not each.done), own[0] if own else None)


def key_of(collective: Collective) -> Key:
    """Equal for two ranks if and only if they may be in the same collective."""
    sized = collective.operation in SAME_SIZES
    return (collective.number, collective.operation, collective.tensors if sized else "")


def keys(stories: Sequence[RankStory]) -> dict[int, Key]:
    """The collectives of one group in which all its ranks wait, by rank; empty: there is no such group, or that is not
    known."""
    group = common_group(stories)
    found = {story.rank: collective_of(story, group) for story in members_of(stories, group)}
    keys = {rank: key_of(each) for rank, each in found.items() if each is not None and not each.done}
    own = next((each for each in found.values() if each is not None), None)
    return keys if own is not None and len(keys) == (own.size or len(found)) else {}


def described(collective: Collective) -> str:
    """`812 all_reduce [4096] float32`."""
    return f"{collective.number} {collective.operation} {collective.tensors}".strip()


# --- after exceptions -------------------------------------------------------------------------------------------------


class ComparedCollectives(Struct, frozen=True):
    """The first collective in which ranks differ, or the newest of each, if they do not."""

    text: str
    """`rank 2 was at collective 6 all_reduce [8] float32, ranks 0-1, 3 at 6 all_reduce [4096] float32`."""
    odd: int | None = None
    """The only rank that differs from all others; None: there is none, or two ranks differ from each other."""
    called: str = ""
    """What that rank and the others called."""


CLAUSES_MAX = 4


def compared(newest_of: Mapping[int, Sequence[Collective]]) -> ComparedCollectives | None:
    """Compare the newest collectives that each rank has begun, oldest first; None: nothing is known of any.

    Ranks that differ in one collective may have gone on to others, since not every rank waits for all: so the first
    one in which they differ counts.
    """
    ranks_of: dict[str, dict[int, dict[int, Collective]]] = {}
    for rank, newest_ones in newest_of.items():
        for each in newest_ones:
            if not each.between_two:
                ranks_of.setdefault(each.group, {}).setdefault(rank, {})[each.number] = each
    order = sorted(ranks_of, key=lambda group: (-len(ranks_of[group]), group != DEFAULT_GROUP))
    for group in order:
        found = _first_difference(group, ranks_of[group])
        if found is not None:
            return found
    if not order:
        return None
    begun = {rank: of[max(of)] for rank, of in ranks_of[order[0]].items()}
    return ComparedCollectives(_clauses(order[0], begun))


def _first_difference(group: str, ranks: Mapping[int, Mapping[int, Collective]]) -> ComparedCollectives | None:
    for number in sorted({number for of in ranks.values() for number in of}):
        there = {rank: of[number] for rank, of in ranks.items() if number in of}
        counts = Counter(key_of(each) for each in there.values())
        if len(counts) < 2:
            continue
        rare = [rank for rank, each in there.items() if counts[key_of(each)] == 1]
        odd = rare[0] if len(rare) == 1 and len(there) > 2 and len(counts) == 2 else None
        called = ""
        if odd is not None:
            others = [rank for rank in there if rank != odd]
            which = f"as collective {number}" + ("" if group == DEFAULT_GROUP else f" of group {group}")
            own, usual = _call(there[odd]), _call(there[others[0]])
            called = f"called {own} {which}, and {plural(len(others), 'rank')} ({spans(others)}) {usual}"
        return ComparedCollectives(_clauses(group, there), odd, called)
    return None


def _clauses(group: str, at: Mapping[int, Collective]) -> str:
    ranks_at: dict[str, list[int]] = {}
    for rank, each in sorted(at.items()):
        ranks_at.setdefault(described(each), []).append(rank)
    kind = "collective" if group == DEFAULT_GROUP else f"group {group}'s collective"
    clauses: list[str] = []
    for what, ranks in sorted(ranks_at.items(), key=lambda item: len(item[1]))[:CLAUSES_MAX]:
        who = f"rank {ranks[0]} was" if len(ranks) == 1 else f"ranks {spans(ranks)} were"
        clauses.append(f"{who} at {kind} {what}" if not clauses else f"{who.rpartition(' ')[0]} at {what}")
    return ", ".join(clauses)


def _call(collective: Collective) -> str:
    return f"{collective.operation} {collective.tensors}".strip()
