"""Makes the verdict on one generation from the evidence of its coordinator.

It compares the failures where one alone does not show the cause: which rank lags in its collectives or is in another
one, and which nodes have a problem while others do not. Pure and deterministic: the same evidence gives the same text
on every node.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence

from msgspec import structs

from holdfast.diagnosis.causes.blame import Blame, agreed, blame, first_own, ranked, speaks_of_peers
from holdfast.diagnosis.causes.exception_text import NO_REASON, ExceptionText, is_of_script
from holdfast.diagnosis.causes.find import SAID_CHARACTERS_MAX, Cause, advice, cause_of
from holdfast.diagnosis.causes.sizes import is_noticed, other_sizes
from holdfast.diagnosis.collectives import ComparedCollectives, compared, newest
from holdfast.diagnosis.places import RankActivity, Where, where_is
from holdfast.protocol.outcome import Evidence, Failure, Verdict
from holdfast.protocol.rank_progress import Finding, RankStory, when_over
from holdfast.text import listed, plural, visible

COMPARED_MAX = 64
"""Number of failures that are compared; enough for a job of any size."""
HOSTS_NAMED_MAX = 3

ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (\d+)")
SEQUENCE = re.compile(r"SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?")
FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+(?:, )?(OpType=\w+(?:,"
    r" TensorShape=\[[^\]]*\])?)"
)
PARAMETERS = re.compile(r"[Rr]ank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params")
SIZES = re.compile(r"in this process with (?:sizes|strides) (\S+ ?[\d, ]*\]?) appears not to match")
POINT_TO_POINT = frozenset(
    ["send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"],
)
"""Operations whose two sides are different calls."""
CALLED = re.compile(r"in (\w+) at (\S+)")
BACKWARD = ("/torch/_tensor.py", "/torch/autograd/__init__.py", "/torch/autograd/graph.py")
NAMED = re.compile(
    r"Ranks?\(?s?\)? \[?([\d, ]+)\]? (?:failed to pass|did(?: not|n't) (?:join|arrive|respond)|ha(?:s"
    r"|ve)(?: not|n't) joined|is missing)"
    r"|\[([\d, ]+)\] finished collective #\d+, but didn't join"
    r"|keys: /?default_pg/\d+//\w+//\d+/(\d+)",
    re.IGNORECASE,
)
CONNECTS = re.compile(
    r"client socket has (?:failed|timed out)|failed to connect to any network address|Name or service not known"
    r"|Unable to resolve|getaddrinfo|name resolution|No address associated|Interrupted system call",
    re.IGNORECASE,
)
"""Texts of a rank that cannot connect to the group's store. The others, which are connected, wait for it."""
CONNECTING = "_create_c10d_store"
"""The function of torch that connects to the group's store."""


def named_ranks(failures: Sequence[Failure]) -> tuple[int, ...]:
    """Ranks that others report as missing."""
    for failure in failures[:COMPARED_MAX]:
        found = NAMED.search(failure.message) or NAMED.search(failure.stderr_tail)
        if found:
            return tuple(int(number) for number in re.findall(r"\d+", found[1] or found[2] or found[3]))
    return ()


def odd_one(failures: Sequence[Failure]) -> tuple[Failure | None, bool] | None:
    """The failure whose collectives differ from the others', and whether it called another one; None: they agree.

    If two differ, it is the one with fewer collectives: the other one waits for it. If they have as many, and no call
    has a majority, it is unknown which one is wrong: no failure is given.
    """
    seen = [(failure, newest) for failure in failures[:COMPARED_MAX] if (newest := _newest_collective(failure))]
    counts = Counter(newest for _, newest in seen)
    if len(counts) < 2:
        return None
    common, times = counts.most_common(1)[0]
    odd = [pair for pair in seen if pair[1] != common]
    if times * 2 <= len(seen):  # without a majority any of them may be the one that lags
        odd = seen
    failure, newest = min(odd, key=lambda pair: pair[1][0])
    if odd is seen and all(other[0] == newest[0] for _, other in seen):
        return None, True
    others = {other[0] for _, other in seen if other != newest}
    return failure, others == {newest[0]}


def not_connected(evidence: Evidence) -> Failure | None:
    """The only rank that cannot connect to the group's store, for example because its MASTER_ADDR is wrong, while
    others are connected to it."""
    found = [each for each in evidence.failures[:COMPARED_MAX] if CONNECTS.search(ExceptionText(each).root)]
    others = [each for each in evidence.failures[:COMPARED_MAX] if each not in found and blame(each) in COMPLAINTS]
    known = others or len(evidence.survivors) > 1 or evidence.hang is not None
    return found[0] if len(found) == 1 and known else None


def waits_for_nobody(evidence: Evidence) -> Failure | None:
    """The rank that waits for a rank that does not exist, while others are further: its WORLD_SIZE is wrong."""
    ranks = {each.rank for each in evidence.failures} | {story.rank for story in evidence.survivors}
    ranks |= set(evidence.done)
    if ranks != set(range(len(ranks))):
        return None  # not all are known
    waits = [
        each for each in evidence.failures[:COMPARED_MAX] if any(rank not in ranks for rank in named_ranks([each]))
    ]
    return waits[0] if len(waits) == 1 and len(ranks) > 1 else None


def did_not_come(survivors: Sequence[RankStory], complaints: int) -> list[Where]:
    """The ranks that were elsewhere when the wait of the others timed out; empty if most were elsewhere, because then
    the waiting rank took another path."""
    seen = [where_is(story) for story in survivors]
    absent = [
        each
        for each in seen
        if each.doing not in (RankActivity.COMMUNICATING, RankActivity.GONE) and _in_script(each.story)
    ]
    return absent if len(absent) <= complaints + len(seen) - len(absent) else []


def _joining(story: RankStory) -> str:
    """What a rank did instead of joining the others, in words."""
    frames = story.samples[-1].frames if story.samples else ()
    if any(frame.function == CONNECTING for frame in frames):
        return f"could not connect to MASTER_ADDR:MASTER_PORT, {where_is(story).place}"
    return f"was {where_is(story).place}"


def _in_script(story: RankStory) -> bool:
    """Whether the rank is at a line of the script. A rank that ends after its own time-out is not."""
    frames = story.samples[-1].frames if story.samples else ()
    return any(is_of_script(frame.file) for frame in frames)


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
    """The culprit and the difference in words if ranks waited in two different calls; None: in the same one, or
    unknown.

    Ranks that take different branches wait for each other for ever: one in backward, one in a barrier.
    """
    kinds = [(each, blame(each)) for each in failures[:COMPARED_MAX]]
    in_vain = any(kind in (Blame.WAITED, Blame.WAITED_LATE) for _, kind in kinds)
    # A rank with a closed connection was in its call, too: the first rank that timed out closed its connections.
    waited = [each for each, kind in kinds if in_vain and kind in (Blame.WAITED, Blame.WAITED_LATE, Blame.CUT)]
    calls = [(each, call, ExceptionText(each).place) for each in waited if (call := _call(each))]
    for story in survivors:
        where = where_is(story)
        found = CALLED.match(where.place)
        if where.doing is RankActivity.COMMUNICATING and found:
            calls.append((stopped(story), found[1], found[2]))
    # Of three different calls it is unknown which one is wrong.
    counts = Counter(call for _, call, _ in calls)
    if len(counts) != 2 or counts.keys() & POINT_TO_POINT:
        return None
    rarest = min(counts.values())
    culprit, call, place = next(each for each in calls if counts[each[1]] == rarest)
    other, others_call, others_place = next(each for each in calls if each[1] != call)
    difference = f"waited in {call}{f' at {place}' if place else ''}, and rank {other.rank} in {others_call}"
    return culprit, difference + (f" at {others_place}" if others_place else "")


def _call(failure: Failure) -> str:
    """The collective that the script called: the first function of torch.distributed inside of the script's frames."""
    for frame in ExceptionText(failure).frames:
        file, _, function = frame.rpartition(" in ")
        if file.endswith(BACKWARD):
            return "backward"
        if "/torch/distributed/" in file and not function.startswith(("_", "wrapper")):
            return function
    return ""


def other_fingerprint(failures: Sequence[Failure]) -> Failure | None:
    """The failure of the only rank whose collective differs from the others', by torch's own check; None: unknown."""
    reports = [(each.rank, *pair) for each in failures[:COMPARED_MAX] for pair in FINGERPRINT.findall(each.message)]
    calls = {int(rank): call for _, rank, call in reports}
    calls |= {by: call for by, rank, call in reports if by == int(rank)}  # a rank knows its own call best
    counts = Counter(calls.values())
    odd = [rank for rank, call in calls.items() if counts[call] == 1]
    if len(odd) != 1:
        return None
    return next((failure for failure in failures if failure.rank == odd[0]), None)


def other_model(failures: Sequence[Failure]) -> Failure | None:
    """The failure of the only rank whose model differs from the others', by DDP's own comparison; None: unknown."""
    counts: dict[int, str] = {}
    for each in failures[:COMPARED_MAX]:
        for one, its, other, others in PARAMETERS.findall(each.message):
            counts |= {int(one): its, int(other): others}
        sizes = SIZES.search(each.message)
        if sizes:
            counts |= {each.rank: sizes[1], 0: "other"}  # DDP compares each rank with rank 0
    common = Counter(counts.values())
    odd = [rank for rank, count in counts.items() if common[count] == 1]
    if len(odd) != 1 or len(counts) < 3:  # two models differ from each other: none of them is the odd one
        return None
    return next((failure for failure in failures if failure.rank == odd[0]), None)


def _newest_collective(failure: Failure) -> tuple[int, str, str] | None:
    """The number of collectives that the rank has begun, and kind and size of the newest; None: unknown."""
    text = failure.message + "\n" + failure.stderr_tail
    sequence, enqueued = SEQUENCE.search(text), ENQUEUED.search(text)
    if sequence is None:
        return None
    number = int(enqueued[1]) if enqueued else int(sequence[1])
    return number, sequence[2], sequence[3] or ""


def spread(evidence: Evidence, culprit: Failure, cause: Cause) -> str:
    """The nodes with and without a problem of machines, as `; only on b, not on a`; empty if that explains nothing."""
    hosts = dict.fromkeys(evidence.hosts or (failure.host for failure in evidence.failures))
    if not cause.per_node or len(hosts) < 2:
        return ""
    affected = {culprit.host}
    for failure in evidence.failures[:COMPARED_MAX]:
        if failure.host not in affected and blame(failure) <= Blame.OWN_LATE and cause_of(failure).code == cause.code:
            affected.add(failure.host)
    unaffected = [host for host in hosts if host not in affected]
    if not unaffected:
        return "; on all nodes"
    found = [host for host in hosts if host in affected]
    return f"; only on {listed(found, HOSTS_NAMED_MAX)}, not on {listed(unaffected, HOSTS_NAMED_MAX)}"


RANKS_NAMED_MAX = 8
CALLS_SHOWN_MAX = 4

COMPLAINTS = (Blame.LOOSE, Blame.WAITED, Blame.WAITED_LATE, Blame.CUT)


def verdict_on(evidence: Evidence) -> Verdict:
    """The verdict, and with it what has happened to GPUs and network ports at that time."""
    found = _verdict(evidence)
    if not evidence.devices or found.code == NOBODY_FAILED:
        return found
    return structs.replace(found, cause=visible("; ".join([found.cause, *evidence.devices])))


NOBODY_FAILED = "HF200"


def _verdict(evidence: Evidence) -> Verdict:
    """The verdict, by the first row that applies:

    | there is                                                 | then                                                 |
    |----------------------------------------------------------|------------------------------------------------------|
    | a failure with a cause of its own, before the stop       | the first of these is the culprit, or the rank whose |
    |                                                          | error the others repeat                              |
    | a hang that was found                                    | the rank that the others waited for; its exception,  |
    |                                                          | if it had raised one and did not end                 |
    | a lost node                                              | it explains the complaints of its peers              |
    | a failure with a cause of its own, seen during the stop  | the first of these: its victims were reported first  |
    | reports that another rank failed                         | the rank that they name, or whose error they repeat  |
    | complaints about peers                                   | waits come before cut connections; the text lists    |
    |                                                          | missing and lagging ranks, and ranks that left with 0|
    | nothing                                                  | the generation ended although no worker failed   |
    """
    own = first_own(evidence.failures)
    if own is not None:
        return _of_first(evidence, own)
    if evidence.lost_nodes and evidence.hang is None:
        return _lost(evidence)
    order = ranked(evidence.failures)
    kind, first = order[0] if order else (Blame.STOPPED, None)
    if evidence.hang is not None:
        return _hung(evidence, evidence.hang, order)
    if first is None or kind is Blame.STOPPED:
        return evidence.verdict(NOBODY_FAILED, "the generation ended although no worker failed", None)
    if kind in COMPLAINTS:
        found = _unexplained(evidence, [failure for kind, failure in order if kind in COMPLAINTS])
        return _with_collectives(evidence, found)
    return _of_first(evidence, first)


def _of_first(evidence: Evidence, first: Failure) -> Verdict:
    """The verdict on the first worker that did not complain about a connection, or on the one whose error it
    repeats."""
    found = agreed(evidence.failures, first)
    if found is None:
        return _of_one(evidence, first)
    culprit, seen = found.culprit, found.seen
    if found.reported:
        cause = cause_of(seen)
        line = f"{_who(culprit)} failed, as rank {first.rank} reports: {found.reported}{_where(first)}"
        return evidence.verdict(cause.code, line, culprit, cause.advice)
    verdict = _of_one(evidence, culprit, seen)
    return structs.replace(verdict, culprit=structs.replace(culprit, traceback=seen.traceback or culprit.traceback))


def _of_one(evidence: Evidence, culprit: Failure, seen: Failure | None = None) -> Verdict:
    """The verdict on a worker that failed with a cause of its own. `seen` is its failure with the part of the text that
    shows the cause; None: the whole one does."""
    cause = cause_of(seen or culprit)
    if cause.code == "HF225" and is_noticed(culprit):
        return _with_collectives(evidence, _mismatch(evidence, culprit, cause))
    other = other_model(evidence.failures) if cause.code == "HF227" else None
    if other is not None and other is not culprit:
        line = f"{_who(other)} has another model than its peers; rank {culprit.rank} {cause.line}{_where(culprit)}"
        return evidence.verdict(cause.code, line, other, cause.advice)
    line = f"{_who(culprit)} {cause.line}{_where(seen or culprit)}{spread(evidence, culprit, cause)}"
    return evidence.verdict(cause.code, line, culprit, cause.advice)


def _mismatch(evidence: Evidence, noticed: Failure, cause: Cause) -> Verdict:
    """The verdict if a check found that ranks called different collectives.

    The rank that differs is the culprit, not the one whose check found it. If it is unknown which rank differs, there
    is no culprit.
    """
    found = f"rank {noticed.rank} {cause.line}{_where(noticed)}"
    odd = other_fingerprint(evidence.failures)
    if odd is not None:
        line = f"{_who(odd)} called another collective than its peers; {found}"
        return evidence.verdict(cause.code, line, odd, cause.advice)
    recorded = _of_recorders(evidence)
    if recorded is not None:
        return evidence.verdict(cause.code, f"{recorded[1]}; {found}", recorded[0], cause.advice)
    call = other_sizes(evidence.failures[:COMPARED_MAX])
    if call is not None:
        where = _where(call.failure) if call.failure is not noticed else ""
        line = f"{_who(call.failure)} {call.difference}{where}; {found}"
        return evidence.verdict(cause.code, line, call.failure, cause.advice)
    calls = [f"rank {each.rank} {each.collective}" for each in evidence.failures[:COMPARED_MAX] if each.collective]
    known = f" ({listed(calls, CALLS_SHOWN_MAX)})" if calls else ""
    line = f"it is unknown which rank is wrong{known}: {found}"
    return evidence.verdict(cause.code, line, None, cause.advice, noticed_by=noticed)


def _compared(evidence: Evidence) -> ComparedCollectives | None:
    """The collectives of all ranks, as torch's flight recorders have them: of those that raised, and of those whose
    samples were taken."""
    sampled = {story.rank: sorted(newest(story), key=lambda each: each.number) for story in evidence.survivors}
    raised = {each.rank: each.collectives for each in evidence.failures[:COMPARED_MAX] if each.collectives}
    return compared({**sampled, **raised})


def _of_recorders(evidence: Evidence) -> tuple[Failure, str] | None:
    """The only rank that called another collective than its peers, by torch's flight recorders, and how it differs;
    None: that is not known."""
    found = _compared(evidence)
    if found is None or found.odd is None:
        return None
    culprit = next((each for each in evidence.failures if each.rank == found.odd), None)
    story = next((each for each in evidence.survivors if each.rank == found.odd), None)
    culprit = culprit or (stopped(story) if story is not None else None)
    return (culprit, f"{_who(culprit)} {found.called}{_where(culprit)}") if culprit is not None else None


def _with_collectives(evidence: Evidence, verdict: Verdict) -> Verdict:
    """The verdict with what torch's flight recorders have, if ranks have failed in collectives."""
    found = _compared(evidence)
    return structs.replace(verdict, collectives=found.text) if found is not None else verdict


def _unexplained(evidence: Evidence, complaints: Sequence[Failure]) -> Verdict:
    """The verdict if all workers complain about their peers."""
    culprit = complaints[0]
    # A time-out of something else (a file lock, a database) is the worker's own, whatever its peers did.
    if blame(culprit) is Blame.LOOSE and not speaks_of_peers(culprit):
        return _of_one(evidence, culprit)
    if evidence.done:
        return _left(evidence, culprit)
    alone = not_connected(evidence) or waits_for_nobody(evidence)
    if alone is not None:
        return _of_one(evidence, alone)

    odd = odd_one(complaints)
    if odd is not None:
        differs, another = odd
        if differs is None:
            calls = [f"rank {each.rank} {newest[1]}" for each in complaints if (newest := _newest_collective(each))]
            shown = listed(calls, CALLS_SHOWN_MAX)
            line = f"it is unknown which rank is wrong: they waited in different collectives ({shown})"
            return evidence.verdict("HF225", line, None, advice()["HF225"], noticed_by=culprit)
        culprit = differs
        if another:
            line = f"{_who(culprit)} called another collective than its peers, which waited for it until the time-out"
            return evidence.verdict("HF225", line, culprit, advice()["HF225"])
        cause = cause_of(culprit)
        line = f"{_who(culprit)} is behind: the others were waiting in a later collective; it {cause.line}"
        return evidence.verdict(cause.code, line, culprit, cause.advice)
    recorded = _of_recorders(evidence)
    if recorded is not None:
        return evidence.verdict("HF225", recorded[1], recorded[0], advice()["HF225"])
    call = other_sizes(complaints[:COMPARED_MAX])
    if call is not None:
        line = f"{_who(call.failure)} {call.difference}{_where(call.failure)}"
        return evidence.verdict("HF225", line, call.failure, advice()["HF225"])
    # Stacks of survivors say more than the texts of the ranks that waited: a rank that sleeps elsewhere raised nothing.
    absent = did_not_come(evidence.survivors, len(complaints))
    if absent and speaks_of_peers(culprit):
        return _absent(evidence, culprit, absent)
    other = other_calls(complaints, evidence.survivors)
    if other:
        culprit = other[0]
        return evidence.verdict("HF225", f"{_who(culprit)} {other[1]}", culprit, advice()["HF225"])

    # Nothing shows which rank is wrong; torch's text may name the one that did not come.
    cause = cause_of(culprit)
    named = [rank for rank in named_ranks(complaints) if rank != culprit.rank]
    unheard = next((each for each in evidence.survivors if each.rank in named[:1]), None)
    if unheard is not None:
        line = f"rank {unheard.rank} on {unheard.host} did not join: it {_joining(unheard)}"
        line += f", while rank {culprit.rank} {cause.line}{_where(culprit)}"
        return evidence.verdict(cause.code, line, stopped(unheard), cause.advice)
    accused = next((each for each in evidence.failures if named and each.rank == named[0]), None)
    if accused is not None and accused not in complaints:
        line = f"{_who(accused)} did not join: rank {culprit.rank} {cause.line}{_where(culprit)}"
        return evidence.verdict(cause.code, line, accused, cause.advice)
    missing = f"; missing: rank {', '.join(map(str, named[:8]))}" if named else ""
    line = f"{_who(culprit)} {cause.line}{_where(culprit)}{missing}"
    return evidence.verdict(cause.code, line, culprit, cause.advice)


def _absent(evidence: Evidence, victim: Failure, absent: Sequence[Where]) -> Verdict:
    """The verdict if a collective timed out, and the stacks of that moment show which ranks were elsewhere. The first
    of them is the culprit, and not the ranks that waited."""
    culprit = stopped(absent[0].story)
    others = _some([each.story.rank for each in absent[1:]])
    more = f", as were {others}" if absent[1:] else ""
    waited = f"rank {victim.rank} waited for it until the time-out{_where(victim)}"
    line = f"{_who(culprit)} did not join: it was {absent[0].place}{more}, while {waited}"
    return evidence.verdict("HF209", line, culprit, advice()["HF209"])


def _left(evidence: Evidence, victim: Failure) -> Verdict:
    """The verdict if a rank ended with 0 while others still needed it. That rank is the culprit."""
    gone = _some(evidence.done)
    if not evidence.left:
        line = f"{_who(victim)} still needed its peers when {gone} had ended with exit code 0"
        return evidence.verdict("HF229", line, victim, advice()["HF229"])
    culprit = evidence.left[0]
    step = f" after {plural(culprit.step, 'step')}" if culprit.step else ""
    more = f", as did {gone} in all" if len(evidence.done) > 1 else ""
    said = _last_words(culprit.stderr_tail) or _last_words(culprit.stdout_tail)
    last = f"; its last line was: {said[:SAID_CHARACTERS_MAX]}" if said else ""
    # If both ranks have done the same number of steps, the line gives it once.
    where = _where(structs.replace(victim, step=0) if victim.step == culprit.step else victim)
    needed = f"rank {victim.rank} still needed it{where}{last}"
    line = f"{_who(culprit)} ended with exit code 0{step}{more}, while {needed}"
    return evidence.verdict("HF229", line, culprit, advice()["HF229"])


def _last_words(text: str) -> str:
    """The last line that is the program's own."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line and not NO_REASON.search(line)), "")


def _hung(evidence: Evidence, hang: Finding, order: Sequence[tuple[Blame, Failure]]) -> Verdict:
    """The verdict if a time-out (of a collective, or --hang-timeout) ended a hang, in which the awaited rank is known.

    If that rank had raised an exception but did not end, the exception is the cause.
    """
    raised = next((each for _, each in order if each.rank in hang.culprits and _raised_before(each)), None)
    explained = raised or not_connected(evidence)
    if explained is not None:
        return structs.replace(_of_one(evidence, explained), hang=True)
    culprit = evidence.hung or next((each for _, each in order if each.rank in hang.culprits), None)
    if culprit is None and order:
        culprit = order[0][1]
    if culprit is not None and culprit is evidence.hung:
        culprit, evidence = _with_its_end(evidence, culprit)
    # A job of which no rank waits for another has no code of its own: `threading._shutdown` on all ranks.
    code = hang.code or "HF246"
    line = when_over(" ".join(hang.text.split()))

    # A thread that died is often why the rank hangs, but its end alone is no proof: it is only mentioned.
    threads = [(each, ExceptionText(each).thread) for _, each in order]
    died = next(((each, name, trace) for each, (name, trace) in threads if trace), None)
    if died is not None:
        said = died[2].strip().splitlines()[-1][:SAID_CHARACTERS_MAX]
        line += f"; before, rank {died[0].rank} lost its thread {died[1]!r}: {said}"
    found = evidence.verdict(code, line, culprit, advice().get(code, ""))
    return structs.replace(found, hang=True, collectives=hang.collectives)


def _with_its_end(evidence: Evidence, hung: Failure) -> tuple[Failure, Evidence]:
    """The rank that hung with its last output, which its agent has reported, and the evidence without that report."""
    end = next((each for each in evidence.failures if each.rank == hung.rank), None)
    if end is None:
        return hung, evidence
    hung = structs.replace(hung, stderr_tail=end.stderr_tail, stderr_file=end.stderr_file, step=end.step)
    others = tuple(each for each in evidence.failures if each is not end)
    return hung, structs.replace(evidence, failures=others)


def _raised_before(failure: Failure) -> bool:
    """Whether it was killed after it had recorded an exception of its own that is not about its peers."""
    return failure.exit_code < 0 and bool(failure.error_type) and not speaks_of_peers(failure)


def _lost(evidence: Evidence) -> Verdict:
    ranks = f": {_some(evidence.lost_ranks)}" if evidence.lost_ranks else ""
    return evidence.verdict("HF306", f"lost {', '.join(evidence.lost_nodes)}{ranks}", None, advice()["HF306"])


def _where(failure: Failure) -> str:
    """Place and step of a failure, as far as known: `, at train.py:18 …, after 7 steps`."""
    place = ExceptionText(failure).place
    return (f", at {place}" if place else "") + (f", after {plural(failure.step, 'step')}" if failure.step else "")


def _some(ranks: Sequence[int]) -> str:
    """The ranks in words: `rank 5`, `ranks 4, 5, 6 …`."""
    shown = ", ".join(map(str, ranks[:RANKS_NAMED_MAX])) + (" …" if len(ranks) > RANKS_NAMED_MAX else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _who(failure: Failure) -> str:
    return f"rank {failure.rank} on {failure.host}"
