"""The verdict on one generation, from all that its coordinator knows.

Pure and deterministic: the same evidence gives the same words on every node.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.hang import Finding
from holdfast.core.outcome import Evidence, Failure, Verdict
from holdfast.insight.causes.blame import Blame, first_own, ranked
from holdfast.insight.causes.find import cause_of
from holdfast.insight.causes.meeting import named_ranks, odd_one, spread
from holdfast.insight.causes.texts import ADVICE

COMPLAINTS = (Blame.LOOSE, Blame.WAITED, Blame.WAITED_LATE, Blame.CUT)


def verdict_on(evidence: Evidence) -> Verdict:
    """First match wins.

    | there is                                                 | then                                                 |
    |----------------------------------------------------------|------------------------------------------------------|
    | a failure with a reason of its own, before the stop      | the first of these is to blame                       |
    | a hang that was seen                                     | whoever the others waited for                        |
    | a lost node                                              | that explains what its peers say                     |
    | one that was stopped while it ended for an own reason    | the first of these: only its victims were faster     |
    | complaints about peers                                   | who waited before who was cut off; ranks named by    |
    |                                                          | others, lagging, or gone with 0 are told             |
    | nothing                                                  | the generation was ended although no worker failed   |
    """
    own = first_own(evidence.failures)
    if own is not None:
        return _of_one(evidence, own)
    if evidence.lost_nodes and evidence.hang is None:
        return _lost(evidence)
    order = ranked(evidence.failures)
    blame, first = order[0] if order else (Blame.STOPPED, None)
    if evidence.hang is not None:
        return _hung(evidence, evidence.hang, order)
    if first is None or blame is Blame.STOPPED:
        return _verdict(evidence, "HF200", "the generation was ended although no worker failed", "", None)
    if blame in COMPLAINTS:
        return _unexplained(evidence, [failure for blame, failure in order if blame in COMPLAINTS])
    return _of_one(evidence, first)


def _of_one(evidence: Evidence, culprit: Failure) -> Verdict:
    """Somebody has a reason of its own."""
    cause = cause_of(culprit)
    line = f"{_who(culprit)} {cause.line}{spread(evidence, culprit, cause)}"
    return _verdict(evidence, cause.code, line, cause.advice, culprit)


def _unexplained(evidence: Evidence, complaints: Sequence[Failure]) -> Verdict:
    """Everybody complains about somebody else."""
    culprit = complaints[0]
    if evidence.done:
        gone = ", ".join(map(str, evidence.done[:8])) + (" …" if len(evidence.done) > 8 else "")
        line = f"{_who(culprit)} still needed its peers when rank {gone} had ended with exit code 0"
        return _verdict(evidence, "HF229", line, ADVICE["HF229"], culprit)
    odd = odd_one(complaints)
    if odd is not None:
        culprit, another = odd
        if another:
            line = f"{_who(culprit)} called another collective than its peers, who waited for it in vain"
            return _verdict(evidence, "HF225", line, ADVICE["HF225"], culprit)
        cause = cause_of(culprit)
        line = f"{_who(culprit)} is behind: the others were waiting in a later collective; it {cause.line}"
        return _verdict(evidence, cause.code, line, cause.advice, culprit)
    cause = cause_of(culprit)
    named = [rank for rank in named_ranks(complaints) if rank != culprit.rank]
    missing = f"; missing: rank {', '.join(map(str, named[:8]))}" if named else ""
    return _verdict(evidence, cause.code, f"{_who(culprit)} {cause.line}{missing}", cause.advice, culprit)


def _hung(evidence: Evidence, hang: Finding, order: Sequence[tuple[Blame, Failure]]) -> Verdict:
    """The time-out of a collective, or our own, ended what stood still: who was waited for is known."""
    culprit = evidence.hung or next((each for _, each in order if each.rank in hang.culprits), None)
    if culprit is None and order:
        culprit = order[0][1]
    return _verdict(evidence, hang.code or "HF241", " ".join(hang.text.split()), ADVICE.get(hang.code, ""), culprit)


def _lost(evidence: Evidence) -> Verdict:
    return _verdict(evidence, "HF306", f"lost {', '.join(evidence.lost_nodes)}", ADVICE["HF306"], None)


def _verdict(evidence: Evidence, code: str, cause: str, advice: str, culprit: Failure | None) -> Verdict:
    return Verdict(
        code=code,
        cause=cause,
        advice=advice,
        culprit=culprit,
        collateral=tuple(failure for failure in evidence.failures if failure is not culprit),
        lost_nodes=evidence.lost_nodes,
        generation=evidence.generation,
        restarts=evidence.restarts,
        gave_up=evidence.gave_up,
    )


def _who(failure: Failure) -> str:
    return f"rank {failure.rank} on {failure.host}"
