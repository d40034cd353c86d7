"""Finds out, from samples of all ranks, whether a job hangs, which ranks the others wait for, and where.

Pure. The coordinator gets `examine` as a parameter, like the judge of failures.

| found                                                            | kind   | code  |
|------------------------------------------------------------------|--------|-------|
| a rank is stopped by a signal                                    | HUNG   | HF242 |
| a data loader's process is stopped or dead, and its rank waits   | HUNG   | HF243 |
| a rank works, is gone, or is held by a debugger                  | MOVING |       |
| rank 0 computes in one call, and the others wait in a barrier    | MOVING |       |
| the only rank that is left does not move                         | PAUSED | HF246 |
| no rank waits for other ranks                                    | PAUSED |       |
| the others wait for a rank that uses a little CPU time           | PAUSED | HF240 |
| the others wait for a rank that is loading data                  | PAUSED | HF243 |
| some wait for others, and some do not: those are named           | HUNG   | HF240, HF243 for data |
| all wait for others, at different places: the fewest are named   | HUNG   | HF244 |
| all wait for others, at one place                                | STUCK  | HF241 |

HUNG is `slow` while a rank loads data, and for rank 0 when the others wait in a barrier. It is `busy` when a missing
rank computes, perhaps in native code, or, if no rank waits, when a rank uses a little CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from holdfast.diagnosis.places import RankActivity, Where, where_is
from holdfast.protocol.rank_progress import Finding, HangKind, RanksAtPlace, RankStory

HUNG, STUCK, STOPPED, NO_DATA, MISMATCH, ALONE = "HF240", "HF241", "HF242", "HF243", "HF244", "HF246"

RANKS_NAMED_MAX = 4
FIRST_PLACES_MAX = 3
OTHER_PLACES_MAX = 2
_UNSETTLED = (RankActivity.WORKING, RankActivity.GONE, RankActivity.HELD)


def examine(stories: Sequence[RankStory]) -> Finding:
    """The finding for these stories, one of each rank that has not ended."""
    all_of_them = [where_is(story) for story in sorted(stories, key=lambda story: story.rank)]
    kind, code, odd = _judge(all_of_them)
    missing = odd or [each for each in all_of_them if each.doing is not RankActivity.COMMUNICATING]
    others = [each for each in all_of_them if each not in odd]
    signature = blake2b(digest_size=12)
    for each in all_of_them:
        signature.update(f"{each.story.rank} {each.key}\0".encode(errors="replace"))
    named = odd if code and not _is_tie(code, odd, others) else []
    return Finding(
        kind=kind,
        code=code,
        text=_text(kind, odd, others),
        culprits=tuple(each.story.rank for each in named),
        groups=tuple(_groups(odd) + _groups(others)),
        signature=signature.hexdigest(),
        busy=any(each.computes or (each.stirs and not odd) for each in missing),
        slow=kind is HangKind.HUNG and _may_be_slow(odd, others),
    )


def _judge(ranks: Sequence[Where]) -> tuple[HangKind, str, list[Where]]:
    """Kind, code and culprits."""
    stopped = [each for each in ranks if each.doing is RankActivity.STOPPED]
    if stopped:
        return HangKind.HUNG, STOPPED, stopped
    starved = [each for each in ranks if each.doing is RankActivity.LOADING and _loader_is_broken(each.note)]
    if starved:
        return HangKind.HUNG, NO_DATA, starved
    unsettled = [each for each in ranks if each.doing in _UNSETTLED]
    if unsettled:
        return HangKind.MOVING, "", unsettled
    odd = [each for each in ranks if each.doing is not RankActivity.COMMUNICATING]
    if len(ranks) == 1:
        stands = bool(odd) and not _may_work(odd) and not odd[0].computes
        return (HangKind.PAUSED, ALONE, odd) if stands else (HangKind.PAUSED, "", [])
    if len(odd) == len(ranks):
        return HangKind.PAUSED, "", []
    if odd:
        waiting = [each for each in ranks if each not in odd]
        computes = any(each.computes for each in odd)
        if computes and _is_rank_0_alone(odd, waiting):
            return HangKind.MOVING, "", odd
        only_data = all(each.doing is RankActivity.LOADING for each in odd)
        return HangKind.PAUSED if _may_work(odd) else HangKind.HUNG, NO_DATA if only_data else HUNG, odd
    by_place = _by_place(ranks)
    if len(by_place) > 1:
        return HangKind.HUNG, MISMATCH, min(by_place.values(), key=len)
    return HangKind.STUCK, STUCK, []


def _may_work(odd: Sequence[Where]) -> bool:
    """Whether these ranks may be working with sleeps in between. Samples show them asleep, but they or the processes
    that load their data use some CPU time."""
    loads = all(each.doing is RankActivity.LOADING for each in odd) and any(each.computes for each in odd)
    return loads or all(each.stirs for each in odd)


def _may_be_slow(odd: Sequence[Where], others: Sequence[Where]) -> bool:
    """Whether these ranks may only be slow: all wait for data of healthy loader processes, or the others wait for rank
    0 in a barrier."""
    if not odd or _is_rank_0_alone(odd, others):
        return bool(odd)
    return all(each.doing is RankActivity.LOADING and not _loader_is_broken(each.note) for each in odd)


def _is_rank_0_alone(odd: Sequence[Where], others: Sequence[Where]) -> bool:
    """Whether all others wait for rank 0 in a barrier. Programs do that when rank 0 does something long, such as an
    evaluation or writing a file."""
    runs = all(each.doing is RankActivity.STANDING for each in odd)
    return runs and [each.story.rank for each in odd] == [0] and all(each.in_barrier for each in others)


def _loader_is_broken(note: str) -> bool:
    return " is stopped" in note or " is dead" in note


def _is_tie(code: str, odd: Sequence[Where], others: Sequence[Where]) -> bool:
    """Whether as many ranks are in one collective as in another, so that the culprits are unknown."""
    return code == MISMATCH and any(len(group) == len(odd) for group in _by_place(others).values())


# --- words ------------------------------------------------------------------------------------------------------------


def _by_place(ranks: Sequence[Where]) -> dict[tuple[bool, str], list[Where]]:
    found: dict[tuple[bool, str], list[Where]] = {}
    for each in ranks:
        found.setdefault((each.waits, each.place), []).append(each)
    return found


def _by_size(ranks: Sequence[Where]) -> list[list[Where]]:
    """The ranks grouped by place, the largest group first."""
    return sorted(_by_place(ranks).values(), key=len, reverse=True)


def _groups(ranks: Sequence[Where]) -> list[RanksAtPlace]:
    return [RanksAtPlace(tuple(each.story.rank for each in group), group[0].told()) for group in _by_size(ranks)]


def _text(kind: HangKind, odd: Sequence[Where], others: Sequence[Where]) -> str:
    """Text about the culprits, the duration, and the other ranks; without culprits, about all ranks."""
    first, second = (_by_size(odd), _by_size(others)) if odd else (_by_size(others), [])
    first, second = first[:FIRST_PLACES_MAX], second[:OTHER_PLACES_MAX]
    together = kind is HangKind.STUCK and len(others) > 1
    parts = [
        _described(group, f"all {len(group)} ranks" if together else _names(group), detail=True) for group in first
    ]
    parts += [_described(group, f"{len(group)} others" if len(group) > 1 else _names(group)) for group in second]
    left = len(odd) + len(others) - sum(map(len, first + second))
    if left > 0:
        parts.append(f"{left} elsewhere")
    if kind is HangKind.PAUSED and not odd:
        parts.append("no rank waits for another")
    return "; ".join(parts)


def _described(group: Sequence[Where], who: str, *, detail: bool = False) -> str:
    where = group[0]
    text = f"{who} {where.told(len(group))}"
    if not detail:
        return text
    note = f" ({where.note})" if where.note and where.doing is not RankActivity.STOPPED else ""
    how = ", using the processor" if where.busy and not where.waits else ""
    if where.computes:
        how = ", busy outside Python" if not where.waits else ", which is working"
    return f"{text}{note} for {max(each.story.age_s for each in group):.0f} s{how}"


def _names(group: Sequence[Where]) -> str:
    """`rank 3 on node b`, `ranks 4 to 7 on b`, `ranks 1, 9 and 12`, `100 ranks`."""
    ranks = [each.story.rank for each in group]
    hosts = {each.story.host for each in group}
    on = f" on {hosts.pop()}" if len(hosts) == 1 else ""
    if len(ranks) == 1:
        return f"rank {ranks[0]}{on}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}{on}"
    if len(ranks) > RANKS_NAMED_MAX:
        return f"{len(ranks)} ranks{on}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}{on}"
