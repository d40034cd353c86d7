"""The course of a run as plain data, for `holdfast report --json` and the dashboard."""

from __future__ import annotations

from typing import Any, TypedDict

from msgspec.structs import asdict

from holdfast.diagnosis.history import Activity, History, Timeline


class GenerationData(TypedDict):
    """One generation, as far as these journals show it."""

    generation: int
    restart_count: int
    world_size: int
    """Number of its workers; 0: unknown."""
    began_epoch_s: float
    why: str
    """The reason for the end of the previous generation."""
    phases_s: dict[str, float]
    """Duration of each part of its start."""
    total_s: float


class KernelsData(TypedDict):
    """The folder of one node in which compiled kernels are kept (`--cache-dir`)."""

    node: str
    folder: str
    had_entries: bool
    """Something was kept there before this run."""
    error: str
    """The reason why it is not used, or why its size is unknown; empty: there is none."""
    bytes: int | None
    """Its size at the end of the run; null: unknown."""
    removed_bytes: int
    seeded_bytes: int | None
    """What was copied into it at the start (`--cache-from`); null: nothing was to be."""
    shared_bytes: int | None
    """What was copied from it at the end (`--cache-from`); null: nothing was to be."""
    copy_errors: list[str]
    """The reasons why one of the two was not done."""


class CourseData(TypedDict):
    """The generations of a run, and why each began."""

    run_id: str
    nodes: list[str]
    end: str
    """The end in one word, with the exit code, or that there is no verdict; empty: it has not ended, as far as is
    known."""
    generations: list[GenerationData]
    preloaded: list[str]
    standbys: int
    standby_own_bytes: int
    kernels: list[KernelsData]


class SurvivalData(TypedDict):
    """A loss after which the other ranks went on."""

    generation: int
    ranks: int
    went_on_s: float
    steps_lost: int | None
    replaced_s: float | None


class StretchData(TypedDict):
    """A time in which the job did one thing."""

    doing: str
    from_epoch_s: float
    to_epoch_s: float
    generation: int


class HistoryData(TypedDict):
    """What the time of a run was used for."""

    total_s: float
    startup_s: float
    training_s: float
    lost_s: float
    """Time for steps that were repeated after a restart."""
    hung_s: float
    down_s: float
    """Time from the end of a generation to the first step of the next."""
    end_s: float
    effective: float | None
    """Effective training time, as a share of total_s; null: unknown."""
    lost_steps: int | None
    """Number of steps that restarts lost; null: unknown."""
    survivals: list[SurvivalData]
    stretches: list[StretchData]


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
        "kernels": [asdict(each) for each in course.kernels],
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
