"""The course of a run as plain data, for `holdfast report --json` and the dashboard."""

from __future__ import annotations

from typing import Any

from holdfast.diagnosis.history import Activity, History, Timeline


def as_json(course: Timeline) -> dict[str, Any]:
    generations = [
        {
            "generation": each.number,
            "restart_count": each.restart_count,
            "world_size": each.world_size,
            "began_epoch_s": each.began_epoch_s,
            "why": each.why,
            "phases_s": each.phases_s,
            "total_s": round(each.total_s, 4),
        }
        for each in course.generations
    ]
    return {
        "run_id": course.run_id,
        "nodes": course.nodes,
        "end": course.end,
        "generations": generations,
        "preloaded": course.preloaded,
        "standbys": course.standbys,
        "standby_own_bytes": course.standby_own_bytes,
    }


def history_as_json(past: History | None) -> dict[str, Any] | None:
    """The history as plain data; None: no generation was started on these nodes."""
    if past is None:
        return None
    return {
        "total_s": round(past.total_s, 3),
        **{f"{doing.name.lower()}_s": round(past.spent_s(doing), 3) for doing in Activity},
        "effective": round(past.effective, 4) if past.effective is not None else None,
        "lost_steps": past.lost_steps,
        "survivals": [
            {
                "generation": each.generation,
                "ranks": each.ranks,
                "went_on_s": round(each.went_on_s, 3),
                "steps_lost": each.steps_lost,
                "replaced_s": round(each.replaced_s, 3) if each.replaced_s is not None else None,
            }
            for each in past.survivals
        ],
        "stretches": [
            {
                "doing": each.doing.name.lower(),
                "from_epoch_s": each.from_s,
                "to_epoch_s": each.to_s,
                "generation": each.generation,
            }
            for each in past.stretches
        ],
    }
