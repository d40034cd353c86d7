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
        return evidence.verdict("HF200", "the generation was ended although no worker failed", None)
    if blame in COMPLAINTS:
        return _unexplained(evidence, [failure for blame, failure in order if blame in COMPLAINTS])
    return _of_one(evidence, first)


def _of_one(evidence: Evidence, culprit: Failure) -> Verdict:
    """Somebody has a reason of its own."""
    cause = cause_of(culprit)
    line = f"{_who(culprit)} {cause.line}{spread(evidence, culprit, cause)}"
    return evidence.verdict(cause.code, line, culprit, cause.advice)


def _unexplained(evidence: Evidence, complaints: Sequence[Failure]) -> Verdict:
    """Everybody complains about somebody else."""
    culprit = complaints[0]
    if evidence.done:
        gone = ", ".join(map(str, evidence.done[:8])) + (" …" if len(evidence.done) > 8 else "")
        line = f"{_who(culprit)} still needed its peers when rank {gone} had ended with exit code 0"
        return evidence.verdict("HF229", line, culprit, ADVICE["HF229"])
    odd = odd_one(complaints)
    if odd is not None:
        culprit, another = odd
        if another:
            line = f"{_who(culprit)} called another collective than its peers, who waited for it in vain"
            return evidence.verdict("HF225", line, culprit, ADVICE["HF225"])
        cause = cause_of(culprit)
        line = f"{_who(culprit)} is behind: the others were waiting in a later collective; it {cause.line}"
        return evidence.verdict(cause.code, line, culprit, cause.advice)
    cause = cause_of(culprit)
    named = [rank for rank in named_ranks(complaints) if rank != culprit.rank]
    missing = f"; missing: rank {', '.join(map(str, named[:8]))}" if named else ""
    return evidence.verdict(cause.code, f"{_who(culprit)} {cause.line}{missing}", culprit, cause.advice)


def _hung(evidence: Evidence, hang: Finding, order: Sequence[tuple[Blame, Failure]]) -> Verdict:
    """The time-out of a collective, or our own, ended what stood still: who was waited for is known."""
    culprit = evidence.hung or next((each for _, each in order if each.rank in hang.culprits), None)
    if culprit is None and order:
        culprit = order[0][1]
    return evidence.verdict(hang.code or "HF241", " ".join(hang.text.split()), culprit, ADVICE.get(hang.code, ""))


def _lost(evidence: Evidence) -> Verdict:
    return evidence.verdict("HF306", f"lost {', '.join(evidence.lost_nodes)}", None, ADVICE["HF306"])


def _who(failure: Failure) -> str:
    return f"rank {failure.rank} on {failure.host}"
