"""Makes the verdict on one generation from the evidence of its coordinator.

Pure and deterministic: the same evidence gives the same words on every node.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.diagnosis.causes.blame import Blame, blame, first_own, ranked, speaks_of_peers
from holdfast.diagnosis.causes.exception_text import listen
from holdfast.diagnosis.causes.find import SAID_CHARACTERS_MAX, cause_of
from holdfast.diagnosis.causes.rendezvous import (
    did_not_come,
    named_ranks,
    odd_one,
    other_calls,
    other_fingerprint,
    spread,
    stopped,
)
from holdfast.diagnosis.causes.rules import advice
from holdfast.diagnosis.places import Where
from holdfast.protocol.outcome import Evidence, Failure, Verdict
from holdfast.protocol.rank_progress import Finding

RANKS_NAMED_MAX = 8

COMPLAINTS = (Blame.LOOSE, Blame.WAITED, Blame.WAITED_LATE, Blame.CUT)


def verdict_on(evidence: Evidence) -> Verdict:
    """First match wins.

    | there is                                                 | then                                                 |
    |----------------------------------------------------------|------------------------------------------------------|
    | a failure with a cause of its own, before the stop       | the first of these is the culprit                    |
    | a hang that was found                                    | the rank that the others waited for; its exception,  |
    |                                                          | if it had raised one and did not end                 |
    | a lost node                                              | it explains the complaints of its peers              |
    | a failure with a cause of its own, seen during the stop  | the first of these: its victims were reported first  |
    | complaints about peers                                   | waits come before cut connections; the text lists    |
    |                                                          | missing and lagging ranks, and ranks that left with 0|
    | nothing                                                  | the generation was ended although no worker failed   |
    """
    own = first_own(evidence.failures)
    if own is not None:
        return _of_one(evidence, own)
    if evidence.lost_nodes and evidence.hang is None:
        return _lost(evidence)
    order = ranked(evidence.failures)
    kind, first = order[0] if order else (Blame.STOPPED, None)
    if evidence.hang is not None:
        return _hung(evidence, evidence.hang, order)
    if first is None or kind is Blame.STOPPED:
        return evidence.verdict("HF200", "the generation was ended although no worker failed", None)
    if kind in COMPLAINTS:
        return _unexplained(evidence, [failure for kind, failure in order if kind in COMPLAINTS])
    return _of_one(evidence, first)


def _of_one(evidence: Evidence, culprit: Failure) -> Verdict:
    """The verdict on a worker that failed with a cause of its own."""
    cause = cause_of(culprit)
    odd = other_fingerprint(evidence.failures) if cause.code == "HF225" else None
    if odd is not None and odd is not culprit:
        line = (
            f"{_who(odd)} called another collective than its peers; rank {culprit.rank} {cause.line}{_where(culprit)}"
        )
        return evidence.verdict(cause.code, line, odd, cause.advice)
    line = f"{_who(culprit)} {cause.line}{_where(culprit)}{spread(evidence, culprit, cause)}"
    return evidence.verdict(cause.code, line, culprit, cause.advice)


def _unexplained(evidence: Evidence, complaints: Sequence[Failure]) -> Verdict:
    """The verdict if all workers complain about their peers."""
    culprit = complaints[0]
    if blame(culprit) is Blame.LOOSE and not speaks_of_peers(culprit):
        return _of_one(evidence, culprit)
    if evidence.done:
        return _left(evidence, culprit)
    odd = odd_one(complaints)
    if odd is not None:
        culprit, another = odd
        if another:
            line = f"{_who(culprit)} called another collective than its peers, who waited for it in vain"
            return evidence.verdict("HF225", line, culprit, advice()["HF225"])
        cause = cause_of(culprit)
        line = f"{_who(culprit)} is behind: the others were waiting in a later collective; it {cause.line}"
        return evidence.verdict(cause.code, line, culprit, cause.advice)
    absent = did_not_come(evidence.survivors, len(complaints))
    if absent and speaks_of_peers(culprit):
        return _absent(evidence, culprit, absent)
    other = other_calls(complaints, evidence.survivors)
    if other:
        culprit = other[0]
        return evidence.verdict("HF225", f"{_who(culprit)} {other[1]}", culprit, advice()["HF225"])
    cause = cause_of(culprit)
    named = [rank for rank in named_ranks(complaints) if rank != culprit.rank]
    accused = next((each for each in evidence.failures if named and each.rank == named[0]), None)
    if accused is not None and accused not in complaints:
        line = f"{_who(accused)} did not come: rank {culprit.rank} {cause.line}{_where(culprit)}"
        return evidence.verdict(cause.code, line, accused, cause.advice)
    missing = f"; missing: rank {', '.join(map(str, named[:8]))}" if named else ""
    line = f"{_who(culprit)} {cause.line}{_where(culprit)}{missing}"
    return evidence.verdict(cause.code, line, culprit, cause.advice)


def _absent(evidence: Evidence, victim: Failure, absent: Sequence[Where]) -> Verdict:
    """The verdict if a collective timed out and the stacks of that moment show which ranks were elsewhere: the first of
    them is the culprit, and not the ranks that waited."""
    culprit = stopped(absent[0].story)
    others = _some([each.story.rank for each in absent[1:]])
    more = f", as were {others}" if absent[1:] else ""
    waited = f"rank {victim.rank} waited for it in vain{_where(victim)}"
    line = f"{_who(culprit)} did not come: it was {absent[0].place}{more}, while {waited}"
    return evidence.verdict("HF209", line, culprit, advice()["HF209"])


def _left(evidence: Evidence, victim: Failure) -> Verdict:
    """The verdict if a rank ended with 0 while others still needed it: that rank is the culprit."""
    gone = _some(evidence.done)
    if not evidence.left:
        line = f"{_who(victim)} still needed its peers when {gone} had ended with exit code 0"
        return evidence.verdict("HF229", line, victim, advice()["HF229"])
    culprit = evidence.left[0]
    step = f" in step {culprit.step}" if culprit.step else ""
    more = f", as did {gone} in all" if len(evidence.done) > 1 else ""
    said = [line.strip() for line in culprit.stderr_tail.splitlines() if line.strip()]
    last = f"; it said last: {said[-1][:SAID_CHARACTERS_MAX]}" if said else ""
    needed = f"rank {victim.rank} still needed it{_where(victim)}{last}"
    line = f"{_who(culprit)} ended with exit code 0{step}{more}, while {needed}"
    return evidence.verdict("HF229", line, culprit, advice()["HF229"])


def _hung(evidence: Evidence, hang: Finding, order: Sequence[tuple[Blame, Failure]]) -> Verdict:
    """The verdict if a time-out (of a collective, or --hang-timeout) ended a hang: the awaited rank is known. If that
    rank had raised an exception but did not end, the exception is the cause."""
    raised = next((each for _, each in order if each.rank in hang.culprits and _raised_before(each)), None)
    if raised is not None:
        return _of_one(evidence, raised)
    culprit = evidence.hung or next((each for _, each in order if each.rank in hang.culprits), None)
    if culprit is None and order:
        culprit = order[0][1]
    code = hang.code or "HF246"
    line = " ".join(hang.text.split())
    threads = [(each, listen(each).thread) for _, each in order]
    died = next(((each, name, trace) for each, (name, trace) in threads if trace), None)
    if died is not None:
        said = died[2].strip().splitlines()[-1][:SAID_CHARACTERS_MAX]
        line += f"; before, rank {died[0].rank} lost its thread {died[1]!r}: {said}"
    return evidence.verdict(code, line, culprit, advice().get(code, ""))


def _raised_before(failure: Failure) -> bool:
    """Whether it was killed after it had recorded an exception of its own that is not about its peers."""
    return failure.exit_code < 0 and bool(failure.error_type) and not speaks_of_peers(failure)


def _lost(evidence: Evidence) -> Verdict:
    ranks = f": {_some(evidence.lost_ranks)}" if evidence.lost_ranks else ""
    return evidence.verdict("HF306", f"lost {', '.join(evidence.lost_nodes)}{ranks}", None, advice()["HF306"])


def _where(failure: Failure) -> str:
    """`, at train.py:18 …, step 7`, as far as known."""
    place = listen(failure).place
    return (f", at {place}" if place else "") + (f", step {failure.step}" if failure.step else "")


def _some(ranks: Sequence[int]) -> str:
    """`rank 5`, `ranks 4, 5, 6 …`."""
    shown = ", ".join(map(str, ranks[:RANKS_NAMED_MAX])) + (" …" if len(ranks) > RANKS_NAMED_MAX else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _who(failure: Failure) -> str:
    return f"rank {failure.rank} on {failure.host}"
