"""From the failures of a generation to one verdict: what failed first and why, as against what failed because of it.

words (what a failure says), blame (who), rules (the table of causes and what each code means), find (what), meeting
(what only several failures together show). Pure. The order of arrival at the coordinator is evidence, clocks of nodes
are not; what a failure says of itself outweighs both: a rank that complains about its peers' connections is a victim.
"""

from __future__ import annotations

from holdfast.protocol.outcome import Evidence, Failure, Verdict


def judge(evidence: Evidence) -> Verdict:
    """The verdict on one generation. Deterministic: the same evidence gives the same words on every node."""
    # Here and not above: a job that does not fail never needs the table of causes.
    from holdfast.diagnosis.causes.verdict import verdict_on

    return verdict_on(evidence)


def load() -> None:
    """Read the table of causes and compile its patterns. The first verdict takes some 70 ms, each later one about
    1 ms."""
    nothing_known = Failure(rank=0, local_rank=0, host="", pid=0, exit_code=1, message="Error: x", stderr_tail="x")
    judge(Evidence(generation=0, restarts=0, failures=(nothing_known,), lost_nodes=(), gave_up=""))
