"""A save on demand: all ranks save at one safe point and go on, or nobody does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.coordinator.coordinator_state import Phase, SaveAgreed, SaveAsked
from holdfast.protocol import messages as msg
from tests.coordinator.coordinator_desk import LIMITS, Desk, draining, preparing, running, stopping


def saving() -> Desk:
    desk = running()
    desk.told.clear()
    desk.give(SaveAsked("somebody"))
    assert [message for _, message in desk.told] == [msg.Drain(1, "somebody")] * 2
    return desk


def test_all_save_after_the_newest_safe_point_and_go_on() -> None:
    desk = saving()
    desk.say(1, msg.Held(1, 5, saves=True))
    assert desk.saves == []
    desk.say(2, msg.Held(1, 3, saves=True))
    assert [message for _, message in desk.told if isinstance(message, msg.DrainTo)] == [msg.DrainTo(1, 6, True)] * 2
    assert (desk.saves, desk.machine.phase, desk.noted("save_asked")[0]["by"]) == (
        [SaveAgreed(6)],
        Phase.RUNNING,
        "somebody",
    )


@pytest.mark.parametrize("held", [msg.Held(1, 5), msg.Held(1, 0, saves=True)])
def test_where_a_rank_does_not_save_nobody_does(held: msg.Held) -> None:
    desk = saving()
    desk.say(1, msg.Held(1, 0, saves=True))
    desk.say(2, held)
    assert desk.told[-1][1] == msg.DrainTo(1, 0)
    assert "ht.Snapshots" in desk.saves[0].refused
    assert desk.machine.phase is Phase.RUNNING


def test_a_node_that_is_silent_or_leaves_ends_no_job_that_is_to_save() -> None:
    desk = saving()
    desk.wait(LIMITS.drain_s + 1)
    assert (desk.machine.phase, bool(desk.saves[0].refused)) == (Phase.RUNNING, True)
    desk = saving()
    desk.say(2, msg.Leave("SIGTERM", drain=True))
    assert "n2 is leaving" in desk.saves[0].refused
    assert (desk.machine.phase, desk.told[-1][1]) == (Phase.DRAINING, msg.Drain(1, "n2 is leaving (SIGTERM)"))


@pytest.mark.parametrize("state", [preparing, stopping, draining])
def test_what_does_not_run_is_not_saved(state: Callable[[], Desk]) -> None:
    desk = state()
    desk.give(SaveAsked("somebody"))
    assert "the job is" in desk.saves[0].refused
