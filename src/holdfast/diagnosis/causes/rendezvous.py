"""Compares several failures: which rank lags in its collectives, and which nodes have a problem while others do not.

Pure.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence

from holdfast.diagnosis.causes.blame import Blame, blame
from holdfast.diagnosis.causes.exception_text import LIBRARY, OURS, listen
from holdfast.diagnosis.causes.find import Cause, cause_of
from holdfast.diagnosis.places import RankActivity, Where, where_is
from holdfast.protocol.outcome import Evidence, Failure
from holdfast.protocol.rank_progress import RankStory
from holdfast.text import listed

LOOKED_AT_MAX = 64
"""Failures that are compared; enough for a job of any size."""
HOSTS_NAMED_MAX = 3

ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (\d+)")
SEQUENCE = re.compile(r"SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?")
FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+(?:, )?(OpType=\w+(?:,"
    r" TensorShape=\[[^\]]*\])?)"
)
POINT_TO_POINT = frozenset(
    ["send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"],
)
"""Operations whose two sides are different calls."""
CALLED = re.compile(r"in (\w+) at (\S+)")
BACKWARD = ("/torch/_tensor.py", "/torch/autograd/__init__.py", "/torch/autograd/graph.py")
NAMED = re.compile(
    r"Ranks?\(?s?\)? \[?([\d, ]+)\]? (?:failed to pass|did(?: not|n't) (?:join|arrive|respond)|ha(?:s"
    r"|ve)(?: not|n't) joined|is missing)"
    r"|\[([\d, ]+)\] finished collective #\d+, but didn't join",
    re.IGNORECASE,
)


def named_ranks(failures: Sequence[Failure]) -> tuple[int, ...]:
    """Ranks that others report as missing."""
    for failure in failures[:LOOKED_AT_MAX]:
        found = NAMED.search(failure.message) or NAMED.search(failure.stderr_tail)
        if found:
            return tuple(int(number) for number in re.findall(r"\d+", found[1] or found[2]))
    return ()


def odd_one(failures: Sequence[Failure]) -> tuple[Failure, bool] | None:
    """(the failure whose collectives differ from the others', whether it called another one); None: they agree.

    If two differ, it is the one with fewer collectives: the other one waits for it.
    """
    seen = [(failure, place) for failure in failures[:LOOKED_AT_MAX] if (place := _place(failure)) is not None]
    counts = Counter(place for _, place in seen)
    if len(counts) < 2:
        return None
    common, times = counts.most_common(1)[0]
    odd = [pair for pair in seen if pair[1] != common]
    if times * 2 <= len(seen):
        odd = seen
    failure, place = min(odd, key=lambda pair: pair[1][0])
    others = {other[0] for _, other in seen if other != place}
    return failure, others == {place[0]}


def did_not_come(survivors: Sequence[RankStory], complaints: int) -> list[Where]:
    """Ranks that were elsewhere when the wait of the others timed out. Empty if most were elsewhere: then the waiting
    rank took another path."""
    seen = [where_is(story) for story in survivors]
    absent = [
        each
        for each in seen
        if each.doing not in (RankActivity.COMMUNICATING, RankActivity.GONE) and _in_script(each.story)
    ]
    return absent if len(absent) <= complaints + len(seen) - len(absent) else []


def _in_script(story: RankStory) -> bool:
    """Whether the rank is at a line of the script. A rank that ends after its own time-out is not."""
    frames = story.samples[-1].frames if story.samples else ()
    return any(not (LIBRARY.search(frame.file) or OURS.search(frame.file)) for frame in frames)


def stopped(story: RankStory) -> Failure:
    """A Failure for a culprit that was only stopped because of the others."""
    pid = story.samples[-1].pid if story.samples else 0
    return Failure(
        rank=story.rank,
        local_rank=story.local_rank,
        host=story.host,
        pid=pid,
        exit_code=-signal.SIGTERM,
        after_stop=True,
    )


def other_calls(failures: Sequence[Failure], survivors: Sequence[RankStory] = ()) -> tuple[Failure, str] | None:
    """(the culprit, the difference) if ranks waited in two different calls; None: in the same one, or unknown.

    Ranks that take different branches wait for each other for ever: one in backward, one in a barrier.
    """
    kinds = [(each, blame(each)) for each in failures[:LOOKED_AT_MAX]]
    in_vain = any(kind in (Blame.WAITED, Blame.WAITED_LATE) for _, kind in kinds)
    # A rank with a closed connection was in its call, too: the first rank that timed out closed its connections.
    waited = [each for each, kind in kinds if in_vain and kind in (Blame.WAITED, Blame.WAITED_LATE, Blame.CUT)]
    calls = [(each, call, listen(each).place) for each in waited if (call := _call(each))]
    for story in survivors:
        where = where_is(story)
        found = CALLED.match(where.place)
        if where.doing is RankActivity.COMMUNICATING and found:
            calls.append((stopped(story), found[1], found[2]))
    counts = Counter(call for _, call, _ in calls)
    if len(counts) != 2 or counts.keys() & POINT_TO_POINT:
        return None
    rarest = min(counts.values())
    culprit, call, place = next(each for each in calls if counts[each[1]] == rarest)
    other, others_call, others_place = next(each for each in calls if each[1] != call)
    told = f"waited in {call}{f' at {place}' if place else ''}, and rank {other.rank} in {others_call}"
    return culprit, told + (f" at {others_place}" if others_place else "")


def _call(failure: Failure) -> str:
    """The collective as the script called it: the first function of torch.distributed inside of the script's frames."""
    for frame in listen(failure).frames:
        file, _, function = frame.rpartition(" in ")
        if file.endswith(BACKWARD):
            return "backward"
        if "/torch/distributed/" in file and not function.startswith(("_", "wrapper")):
            return function
    return ""


def other_fingerprint(failures: Sequence[Failure]) -> Failure | None:
    """The failure of the only rank whose collective differs from the others', by torch's own check; None: unknown."""
    told = [(each.rank, *pair) for each in failures[:LOOKED_AT_MAX] for pair in FINGERPRINT.findall(each.message)]
    calls = {int(rank): call for _, rank, call in told}
    calls |= {by: call for by, rank, call in told if by == int(rank)}  # each rank knows its own call
    counts = Counter(calls.values())
    odd = [rank for rank, call in calls.items() if counts[call] == 1]
    if len(odd) != 1:
        return None
    return next((failure for failure in failures if failure.rank == odd[0]), None)


def _place(failure: Failure) -> tuple[int, str, str] | None:
    """Number of collectives that it has begun, and kind and size of the newest."""
    text = failure.message + "\n" + failure.stderr_tail
    sequence, enqueued = SEQUENCE.search(text), ENQUEUED.search(text)
    if sequence is None:
        return None
    number = int(enqueued[1]) if enqueued else int(sequence[1])
    return number, sequence[2], sequence[3] or ""


def spread(evidence: Evidence, culprit: Failure, cause: Cause) -> str:
    """`; only on b, not on a`: nodes with and without a problem of machines. Empty if that explains nothing."""
    hosts = dict.fromkeys(evidence.hosts or (failure.host for failure in evidence.failures))
    if not cause.per_node or len(hosts) < 2:
        return ""
    met = {culprit.host}
    for failure in evidence.failures[:LOOKED_AT_MAX]:
        if failure.host not in met and blame(failure) <= Blame.OWN_LATE and cause_of(failure).code == cause.code:
            met.add(failure.host)
    spared = [host for host in hosts if host not in met]
    if not spared:
        return "; on all nodes"
    found = [host for host in hosts if host in met]
    return f"; only on {listed(found, HOSTS_NAMED_MAX)}, not on {listed(spared, HOSTS_NAMED_MAX)}"
