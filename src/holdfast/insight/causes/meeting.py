"""What only several failures together show: which rank lags in its collectives, which nodes have a trouble and which not.

Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from holdfast.core.outcome import Evidence, Failure
from holdfast.insight.causes.blame import Blame, blame
from holdfast.insight.causes.find import Cause, cause_of

LOOKED_AT_MAX = 64
"""Failures that are read for comparison: enough to know, whatever the size of the job."""
HOSTS_NAMED_MAX = 3

ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (\d+)")
SEQUENCE = re.compile(r"SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?")
NAMED = re.compile(
    r"Ranks?\(?s?\)? \[?([\d, ]+)\]? (?:failed to pass|did(?: not|n't) (?:join|arrive|respond)|ha(?:s|ve)(?: not|n't) joined|is missing)"
    r"|\[([\d, ]+)\] finished collective #\d+, but didn't join",
    re.IGNORECASE,
)


def named_ranks(failures: Sequence[Failure]) -> tuple[int, ...]:
    """Ranks of which others say that they did not come."""
    for failure in failures[:LOOKED_AT_MAX]:
        found = NAMED.search(failure.message) or NAMED.search(failure.stderr_tail)
        if found:
            return tuple(int(number) for number in re.findall(r"\d+", found[1] or found[2]))
    return ()


def odd_one(failures: Sequence[Failure]) -> tuple[Failure, bool] | None:
    """(the failure whose collectives are not those of the others, whether it called another one); None: they agree.

    Of two that differ it is the one that is behind: it did not come to what the other waits for.
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


def _place(failure: Failure) -> tuple[int, str, str] | None:
    """How many collectives it has begun, and the newest one's kind and size."""
    text = failure.message + "\n" + failure.stderr_tail
    sequence, enqueued = SEQUENCE.search(text), ENQUEUED.search(text)
    if sequence is None:
        return None
    number = int(enqueued[1]) if enqueued else int(sequence[1])
    return number, sequence[2], sequence[3] or ""


def spread(evidence: Evidence, culprit: Failure, cause: Cause) -> str:
    """`; only on b, not on a`: where a trouble of machines was met and where not. Empty where that says nothing."""
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
    return f"; only on {_some([host for host in hosts if host in met])}, not on {_some(spared)}"


def _some(hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:HOSTS_NAMED_MAX])
    return shown if len(hosts) <= HOSTS_NAMED_MAX else f"{shown} and {len(hosts) - HOSTS_NAMED_MAX} more"
