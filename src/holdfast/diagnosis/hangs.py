"""Finds out, from samples of all ranks, whether a job hangs, which ranks the others wait for, and where.

Pure. Called by the extension `hangs`, at the coordinator.

| found                                                            | kind   | code  | ended  |
|------------------------------------------------------------------|--------|-------|--------|
| a rank is stopped by a signal                                    | HUNG   | HF242 |        |
| a data loader's process is stopped or dead, and its rank waits   | HUNG   | HF243 |        |
| a rank works, is gone, or is held by a debugger                  | MOVING |       | never  |
| rank 0 computes, and the others wait in a barrier                | MOVING |       | never  |
| the only rank that is left does not move                         | PAUSED | HF246 |        |
| no rank waits for other ranks                                    | PAUSED |       | lively |
| the others wait for a rank that polls something outside          | PAUSED | HF240 | lively |
| the others wait for a rank that may work                         | PAUSED | HF240 | lively |
| the others wait for a rank that computes in one long call        | HUNG   | HF240 | busy   |
| the others wait for a rank that repeats a few calls              | HUNG   | HF240 | lively |
| the others wait for a rank that is loading data                  | HUNG   | HF243 | lively |
| some wait for others, and some do not: those are named           | HUNG   | HF240 |        |
| all wait for others, in different calls: the fewest are named    | HUNG   | HF244 |        |
| all wait for others, in one call                                 | STUCK  | HF241 |        |

Calls are different if the collectives are, where torch's flight recorder has them (diagnosis/collectives.py); else if
the functions are, by the stacks. Where it has them, a rank is waited for only by ranks that wait in a group of its own.

PAUSED and `busy` are reported late. `lively` is ended late, and `busy` not while that lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from holdfast.diagnosis import collectives
from holdfast.diagnosis.places import RankActivity, Where, where_is
from holdfast.protocol.rank_progress import Finding, HangKind, RanksAtPlace, RankStory

HUNG, STUCK, STOPPED, NO_DATA, MISMATCH, ALONE = "HF240", "HF241", "HF242", "HF243", "HF244", "HF246"

RANKS_NAMED_MAX = 4
FIRST_PLACES_MAX = 3
OTHER_PLACES_MAX = 2
_UNSETTLED = (RankActivity.WORKING, RankActivity.GONE, RankActivity.HELD)


def examine(stories: Sequence[RankStory]) -> Finding:
    """The finding for these stories, one of each rank that has not ended."""
    ranks = [where_is(story) for story in sorted(stories, key=lambda story: story.rank)]
    kind, code, odd = _judge(ranks)
    missing = odd or [each for each in ranks if each.doing is not RankActivity.COMMUNICATING]
    others = [each for each in ranks if each not in odd]

    # Equal as long as no rank moves: the coordinator measures by it how long the job has not moved.
    signature = blake2b(digest_size=12)
    for each in ranks:
        signature.update(f"{each.story.rank} {each.key}\0".encode(errors="replace"))

    named = odd if code and not _is_tie(code, odd, others) else []
    return Finding(
        kind=kind,
        code=code,
        text=_text(kind, odd, others),
        culprits=tuple(each.story.rank for each in named),
        groups=tuple(_groups(odd) + _groups(others)),
        signature=signature.hexdigest(),
        busy=any((each.computes and not each.loops) or (each.may_work and not odd) for each in missing),
        lively=_is_lively(kind, odd, missing),
        collectives=_collectives_text(odd, others),
    )


def _judge(ranks: Sequence[Where]) -> tuple[HangKind, str, list[Where]]:
    """The kind of the finding, its code and the culprits: the rows of the table above, in its order."""
    # A stopped rank comes first, even while another one works: nothing but a signal lets it go on.
    stopped = [each for each in ranks if each.doing is RankActivity.STOPPED]
    if stopped:
        return HangKind.HUNG, STOPPED, stopped
    starved = [each for each in ranks if each.doing is RankActivity.LOADING and each.lacks_child]
    if starved:
        return HangKind.HUNG, NO_DATA, starved
    unsettled = [each for each in ranks if each.doing in _UNSETTLED]
    if unsettled:
        return HangKind.MOVING, "", unsettled

    odd = [each for each in ranks if each.doing is not RankActivity.COMMUNICATING]
    # No rank waits for a rank that is alone, so that only its own work can show that it is slow and does not hang.
    if len(ranks) == 1:
        stands = bool(odd) and not _may_work(odd) and not odd[0].computes
        return (HangKind.PAUSED, ALONE, odd) if stands else (HangKind.PAUSED, "", [])
    if len(odd) == len(ranks):
        return HangKind.PAUSED, "", []
    waiting = [each for each in ranks if each not in odd]
    awaited = collectives.awaited([each.story for each in waiting], [each.story.rank for each in odd])
    odd = [each for each in odd if each.story.rank in awaited]
    if odd:
        # An evaluation on rank 0 in one long native call: all samples are alike, and yet it must never be ended. If
        # rank 0 does not compute, it is named like any other rank.
        computes = any(each.computes for each in odd)
        if computes and _is_rank_0_alone(odd, waiting):
            return HangKind.MOVING, "", odd
        only_data = all(each.doing is RankActivity.LOADING for each in odd)
        return HangKind.PAUSED if _may_work(odd) else HangKind.HUNG, NO_DATA if only_data else HUNG, odd
    by_call = _by_call(waiting)
    if len(by_call) > 1:
        return HangKind.HUNG, MISMATCH, min(by_call.values(), key=len)
    return HangKind.STUCK, STUCK, []


def _may_work(odd: Sequence[Where]) -> bool:
    """Whether all of these ranks may be working: samples show them asleep, but something moves that they may wait for,
    or they poll something outside of the job."""
    loads = all(each.doing is RankActivity.LOADING for each in odd) and any(each.computes for each in odd)
    return loads or all(each.may_work or each.polls for each in odd)


def _is_lively(kind: HangKind, odd: Sequence[Where], missing: Sequence[Where]) -> bool:
    """Whether the missing ranks may go on by themselves. A rank alone, and those whose processes are stopped or dead,
    do not."""
    if kind is HangKind.PAUSED and not odd:
        return True
    return bool(missing) and all(
        each.polls
        or each.loops
        or each.may_work
        or each.awaits_child
        or (each.doing is RankActivity.LOADING and not each.lacks_child)
        for each in missing
    )


def _is_rank_0_alone(odd: Sequence[Where], others: Sequence[Where]) -> bool:
    """Whether all others wait for rank 0 in a barrier. Programs do that when rank 0 does something long, such as an
    evaluation or writing a file."""
    runs = all(each.doing is RankActivity.STANDING for each in odd)
    return runs and [each.story.rank for each in odd] == [0] and all(each.in_barrier for each in others)


def _is_tie(code: str, odd: Sequence[Where], others: Sequence[Where]) -> bool:
    """Whether the smallest group is not the only one of its size: then the culprits are unknown."""
    if code != MISMATCH:
        return False
    waiting = [each for each in (*odd, *others) if each.doing is RankActivity.COMMUNICATING]
    groups = _by_call(waiting).values()
    return sum(len(group) == len(odd) for group in groups) > 1


# --- the text ---------------------------------------------------------------------------------------------------------


def _by_place(ranks: Sequence[Where]) -> dict[tuple[bool, str], list[Where]]:
    found: dict[tuple[bool, str], list[Where]] = {}
    for each in ranks:
        found.setdefault((each.waits, each.place), []).append(each)
    return found


def _by_call(ranks: Sequence[Where]) -> dict[object, list[Where]]:
    """The ranks grouped by the collective in which they wait; where that is not known, by the function.

    The line of the call counts only if all are in the same function: rank 0 often calls it at a line of its own, as in
    `if rank == 0: broadcast(a) else: broadcast(b)`.
    """
    found: dict[object, list[Where]] = {}
    known = collectives.keys([each.story for each in ranks])
    if known:
        for each in ranks:
            if each.story.rank in known:  # others wait for ranks of that group
                found.setdefault(known[each.story.rank], []).append(each)
        return found
    calls = {each.call for each in ranks}
    for each in ranks:
        found.setdefault((each.call, each.place if len(calls) == 1 else ""), []).append(each)
    return found


def _by_size(ranks: Sequence[Where]) -> list[list[Where]]:
    """The ranks grouped by place, the largest group first."""
    return sorted(_by_place(ranks).values(), key=len, reverse=True)


def _groups(ranks: Sequence[Where]) -> list[RanksAtPlace]:
    return [
        RanksAtPlace(tuple(each.story.rank for each in group), group[0].described(), group[0].standing)
        for group in _by_size(ranks)
    ]


def _text(kind: HangKind, odd: Sequence[Where], others: Sequence[Where]) -> str:
    """The text about the culprits, the duration, and the other ranks; without culprits, about all ranks."""
    first, second = (_by_size(odd), _by_size(others)) if odd else (_by_size(others), [])
    first, second = first[:FIRST_PLACES_MAX], second[:OTHER_PLACES_MAX]
    together = kind is HangKind.STUCK and len(others) > 1
    clauses = [
        _group_text(group, f"all {len(group)} ranks" if together else _names(group), detail=True) for group in first
    ]
    clauses += [_group_text(group, f"{len(group)} others" if len(group) > 1 else _names(group)) for group in second]
    not_shown = len(odd) + len(others) - sum(map(len, first + second))
    if not_shown > 0:
        clauses.append(f"{not_shown} elsewhere")
    if kind is HangKind.PAUSED and not odd:
        clauses.append("no rank waits for another")
    return "; ".join(clauses)


def _collectives_text(odd: Sequence[Where], others: Sequence[Where]) -> str:
    """`rank 2 is at collective 812 all_reduce [4096] float32 (train.py:42), 3 others at 813 broadcast [1] float32
    (train.py:44)`; empty: it is not known. Of other groups than that in which most ranks wait, nothing is shown."""
    stories = [each.story for each in (*odd, *others)]
    name = collectives.common_group(stories, {each.story.rank for each in odd})
    members = {story.rank for story in collectives.members_of(stories, name)}
    ranks = [each for each in (*odd, *others) if each.story.rank in members]
    found: dict[tuple[bool, str, bool], list[Where]] = {}
    for each in ranks:
        collective = collectives.collective_of(each.story, name)
        if name and collective is not None:
            what = collectives.described(collective)
            found.setdefault((each not in odd, what, collective.done), []).append(each)
    groups = sorted(found.items(), key=lambda item: (item[0][0], -len(item[1])))
    kind = "collective" if name == collectives.DEFAULT_GROUP else f"group {name}'s collective"
    clauses: list[str] = []
    verb_is_clear = False
    for (_, what, done), group in groups[: FIRST_PLACES_MAX + OTHER_PLACES_MAX]:
        who = f"{len(group)} others" if clauses and len(group) > 1 else _names(group)
        if name == collectives.DEFAULT_GROUP and len(group) == len(ranks) > 1:
            who = f"all {len(group)} ranks"
        number = what if clauses else f"{kind} {what}"
        one, several = ("has done", "have done") if done else ("is at", "are at")
        verb = "at" if verb_is_clear and not done else one if len(group) == 1 else several
        clauses.append(f"{who} {verb} {number}{' and begun no other' if done else _line_of(group)}")
        verb_is_clear = not done
    return ", ".join(clauses)


def _line_of(group: Sequence[Where]) -> str:
    """The line of the program at which all of these wait, as ` (train.py:42)`; empty: there are several."""
    lines = {each.line for each in group}
    return f" ({lines.pop()})" if len(lines) == 1 and "" not in lines else ""


def _group_text(group: Sequence[Where], who: str, *, detail: bool = False) -> str:
    where = group[0]
    text = f"{who} {where.described(len(group))}"
    if not detail:
        return text
    note = f" ({where.note})" if where.note and where.doing is not RankActivity.STOPPED else ""
    how = ", using the processor" if where.busy and not where.waits else ""
    if where.computes and not where.loops:
        how = ", busy outside Python" if not where.waits else ", which is working"
    handles = f", handling {where.handles}," if where.handles else ""
    return f"{text}{note}{handles} for {max(each.story.age_s for each in group):.0f} s{how}"


def _names(group: Sequence[Where]) -> str:
    """The ranks in words: `rank 3 on node b`, `ranks 4 to 7 on b`, `ranks 1, 9 and 12`, `100 ranks`."""
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
