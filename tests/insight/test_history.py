"""Where a run's time went: journals in, stretches without gaps out."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.insight.history import Activity, History, history

T = 1000.0
"""The first event's time."""


class Journal:
    """One node's events, at seconds after T."""

    def __init__(self, node: str = "a") -> None:
        self.events: list[dict[str, Any]] = []
        self.at(0, "begins", member=f"{node}#1", run_id="r", endpoint="")

    def at(self, second: float, event: str, **fields: Any) -> Journal:
        self.events.append({"time": T + second, "monotonic": second, "event": event, **fields})
        return self

    def starts(self, second: float, generation: int, ready: float | None = None, nproc: int = 2) -> Journal:
        """Told a second after it was."""
        self.at(second, "generation", generation=generation, world_size=nproc, nproc=nproc, rank_base=0)
        if ready is None:
            return self
        phases = {"spawn_s": 0.1, "first_step_s": 0.1, "until_monotonic": ready}
        return self.at(ready + 1, "phases", generation=generation, restart_count=0, **phases)

    def ends(self, second: float, generation: int, *codes: int, stopped: bool = False) -> Journal:
        for rank, code in enumerate(codes):
            place = {"generation": generation, "local_rank": rank, "rank": rank, "pid": 1}
            self.at(second + rank, "worker_ended", **place, exit_code=code, stopped=stopped)
        return self

    def progress(self, second: float, generation: int, steps: int, began_at: int = -1, at: int = -1) -> Journal:
        return self.at(
            second, "progress", generation=generation, steps=[steps, steps], began_at=[began_at] * 2, at=[at] * 2
        )

    def over(self, second: float) -> Journal:
        return self.at(second, "ended", kind="succeeded", exit_code=0)


def told(*journals: Journal) -> History:
    found = history([journal.events for journal in journals])
    assert found is not None
    for before, after in zip(found.stretches, found.stretches[1:], strict=False):
        assert before.to_s == after.from_s
    return found


def spent(past: History) -> dict[str, float]:
    return {doing.name: seconds for doing in Activity if (seconds := round(past.spent_s(doing), 6))}


def test_a_run_that_goes_well() -> None:
    past = told(Journal().starts(2, 1, ready=5).ends(20, 1, 0, 0).over(23))
    assert spent(past) == {"STARTUP": 5, "TRAINING": 16, "END": 2}
    assert past.total_s == 23
    assert past.effective == pytest.approx(16 / 23)
    assert past.lost_steps is None


def test_work_that_a_restart_lost() -> None:
    journal = Journal().starts(2, 1, ready=5).ends(15, 1, 1, -15)
    journal.progress(15, 1, 100, began_at=0, at=100).starts(16, 2, ready=20)
    past = told(journal.progress(30, 2, 50, began_at=80, at=130).ends(30, 2, 0).over(30))
    assert spent(past) == {"STARTUP": 5, "TRAINING": 8 + 10, "LOST": 2, "DOWN": 5}
    assert past.lost_steps == 20


def test_nothing_is_lost_where_the_next_goes_on() -> None:
    journal = Journal().starts(2, 1, ready=5).ends(15, 1, 0, 0, stopped=True)
    journal.progress(15, 1, 100, began_at=0, at=100).starts(16, 2, ready=20)
    past = told(journal.progress(30, 2, 50, began_at=100, at=150).ends(30, 2, 0).over(30))
    assert (past.lost_steps, spent(past).get("LOST")) == (0, None)


def test_a_generation_that_never_came_to_a_step_is_part_of_the_wait() -> None:
    first = Journal().starts(2, 1).ends(4, 1, 1).starts(5, 2, ready=8).ends(20, 2, 1).starts(21, 3).ends(22, 3, 1)
    past = told(first.starts(23, 4, ready=30).ends(40, 4, 0).over(40))
    assert spent(past) == {"STARTUP": 8, "TRAINING": 12 + 10, "DOWN": 10}


def test_without_an_optimizer_it_trains_once_all_its_workers_run() -> None:
    journal = Journal().starts(2, 1)
    journal.at(4, "phases", generation=1, restart_count=0, form_s=1.0, spawn_s=0.5, until_monotonic=3.0)
    assert spent(told(journal.ends(13, 1, 0).over(13))) == {"STARTUP": 3, "TRAINING": 10}


def test_the_slowest_node_begins_and_the_first_failure_ends() -> None:
    one = Journal("a").starts(1, 1, ready=5).ends(12, 1, -15).over(13)
    other = Journal("b").starts(1, 1, ready=7).ends(11, 1, 1).over(13)
    assert spent(told(one, other)) == {"STARTUP": 7, "TRAINING": 4, "END": 2}


def test_a_node_that_is_done_first_does_not_end_the_generation() -> None:
    one = Journal("a").starts(1, 1, ready=5, nproc=1).ends(10, 1, 0).over(21)
    other = Journal("b").starts(1, 1, ready=5, nproc=1).ends(20, 1, 0).over(21)
    assert spent(told(one, other)) == {"STARTUP": 5, "TRAINING": 15, "END": 1}


def test_a_node_that_was_lost_has_no_say_in_when_it_ended() -> None:
    here = Journal("a").starts(1, 1, ready=5).ends(12, 1, -15, stopped=True).starts(13, 2, ready=15).ends(20, 2, 0)
    lost = Journal("b").starts(1, 1, ready=5).progress(9, 1, 10)
    assert spent(told(here.over(20), lost)) == {"STARTUP": 5, "TRAINING": 7 + 5, "DOWN": 3}


def test_a_run_that_goes_on() -> None:
    past = told(Journal().starts(2, 1, ready=5).progress(30, 1, 100))
    assert spent(past) == {"STARTUP": 5, "TRAINING": 25}
    assert not past.nodes[0].ended


def test_a_run_that_never_starts_anything() -> None:
    assert history([Journal().over(3).events]) is None
    past = told(Journal().starts(2, 1).ends(4, 1, 1).over(5))
    assert spent(past) == {"STARTUP": 5}
    assert past.effective == 0.0


def test_a_hang_is_no_training() -> None:
    """31 of 33 s: it stood still when it was found, and until it was ended."""
    run = Journal().starts(0, 1, ready=1).progress(2, 1, 10)
    run.at(12, "coordinator.hang", generation=1, kind="hung", code="HF240", still_s=10.0)
    run.ends(33, 1, 1).over(33)
    assert spent(told(run)) == {"STARTUP": 1.0, "TRAINING": 1.0, "HUNG": 31.0}


def test_a_hang_that_went_over_and_a_pause_are_training() -> None:
    run = Journal().starts(0, 1, ready=1)
    run.at(12, "coordinator.hang", generation=1, kind="hung", code="HF240", still_s=10.0)
    run.at(14, "coordinator.hang_over", generation=1, still_s=12.0)
    run.at(20, "coordinator.hang", generation=1, kind="paused", code="", still_s=5.0)
    run.ends(33, 1, 0).over(33)
    assert spent(told(run)) == {"STARTUP": 1.0, "TRAINING": 32.0}
