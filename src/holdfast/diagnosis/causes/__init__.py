"""Makes one verdict of the failures of a generation: the primary failure with its cause, and the consequences.

exception_text reads the text of a failure, blame finds the culprit, find its cause in the table rules.toml, verdict
compares several failures. Pure. The order of arrival at the coordinator is evidence, the clocks of nodes are not. The
text of a failure counts more: a rank that reports broken connections to peers is a victim.
"""

from __future__ import annotations

from holdfast.protocol.outcome import Evidence, Failure, Verdict


def judge(evidence: Evidence) -> Verdict:
    """The verdict on one generation. Deterministic: the same evidence gives the same text on every node."""
    # Imported here because a job that does not fail never needs the table of causes.
    from holdfast.diagnosis.causes.verdict import verdict_on

    return verdict_on(evidence)


def load() -> None:
    """Read the table of causes and compile its patterns. The first verdict takes some 70 ms, each later one about
    1 ms."""
    nothing_known = Failure(rank=0, local_rank=0, host="", pid=0, exit_code=1, message="Error: x", stderr_tail="x")
    judge(Evidence(generation=0, restarts=0, failures=(nothing_known,), lost_nodes=(), gave_up=""))
