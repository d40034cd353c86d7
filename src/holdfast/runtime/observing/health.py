"""Whether an agent is well, from its facts: what a health check is answered. Pure but for the clock it is given."""

from __future__ import annotations

from holdfast.runtime.observing.vitals import BEAT_S, VitalsSample

STALL_S = 15.0
"""A loop that has not come round for so long stands still: a disk, a debugger, a machine without a free core."""
assert STALL_S > 5 * BEAT_S


def health(facts: VitalsSample, now_s: float) -> dict[str, object]:
    """`alive`: the agent's loop turns, and its job has not failed. `ready`: every worker of this node runs as well."""
    stalled_s = max(0.0, now_s - facts.taken_s)
    failed = bool(facts.ended) and facts.exit_code != 0
    status = "stalled" if stalled_s > STALL_S else "failed" if failed else facts.ended or "ok"
    alive = status not in ("stalled", "failed")
    return {
        "status": status,
        "alive": alive,
        "ready": alive and not facts.ended and 0 < facts.wanted <= facts.alive,
        "run_id": facts.run_id,
        "node": facts.node,
        "generation": facts.generation,
        "workers": facts.alive,
        "workers_wanted": facts.wanted,
        "stalled_s": round(stalled_s, 1),
        "step_age_s": min((round(each.age_s, 1) for each in facts.ranks), default=None),
    }
