"""A save on demand: all ranks save at one safe point and go on, or nobody does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.coordinator.coordinator_state import Phase
from holdfast.extensions.save.coordinator import AGREED_S_MAX
from holdfast.protocol import messages as msg
from tests.coordinator.coordinator_desk import LIMITS, Desk, draining, preparing, running, stopping


def saving() -> Desk:
    desk = running()
    desk.told.clear()
    desk.ask("save")
    assert [message for _, message in desk.told] == [msg.Drain(1, "somebody")] * 2
    return desk


def test_all_save_after_the_newest_safe_point_and_go_on() -> None:
    desk = saving()
    desk.say(1, msg.Held(1, 5, saves=True))
    assert desk.answers == []
    desk.say(2, msg.Held(1, 3, saves=True))
    assert [message for _, message in desk.told if isinstance(message, msg.DrainTo)] == [msg.DrainTo(1, 6, True)] * 2
    assert (desk.answer(), desk.machine.phase) == ({"nodes": 2}, Phase.RUNNING)
    assert desk.noted("save_asked")[0]["by"] == "somebody"
    assert desk.told[-1][1] == msg.Notice("all ranks save at their next safe point (somebody)")


@pytest.mark.parametrize("held", [msg.Held(1, 5), msg.Held(1, 0, saves=True)])
def test_where_a_rank_does_not_save_nobody_does(held: msg.Held) -> None:
    desk = saving()
    desk.say(1, msg.Held(1, 0, saves=True))
    desk.say(2, held)
    assert desk.told[-1][1] == msg.DrainTo(1, 0)
    assert "ht.Snapshots" in desk.refusal()
    assert desk.machine.phase is Phase.RUNNING


def test_a_node_that_is_silent_or_leaves_ends_no_job_that_is_to_save() -> None:
    desk = saving()
    desk.wait(AGREED_S_MAX + 1)
    assert desk.refusal() == "no safe point was agreed within 5 s"
    desk.wait(LIMITS.drain_s)
    assert desk.machine.phase is Phase.RUNNING
    desk = saving()
    desk.say(2, msg.Leave("SIGTERM", drain=True))
    assert "n2 is leaving" in desk.refusal()
    assert (desk.machine.phase, desk.told[-1][1]) == (Phase.DRAINING, msg.Drain(1, "n2 is leaving (SIGTERM)"))


@pytest.mark.parametrize("state", [preparing, stopping, draining])
def test_what_does_not_run_is_not_saved(state: Callable[[], Desk]) -> None:
    desk = state()
    desk.ask("save")
    assert "the job is" in desk.refusal()


def test_who_asks_meanwhile_gets_the_same_answer() -> None:
    desk = saving()
    desk.ask("save", 2)
    assert len(desk.noted("save_asked")) == 1
    desk.both_say(msg.Held(1, 5, saves=True))
    assert (desk.answer(1), desk.answer(2)) == ({"nodes": 2}, {"nodes": 2})


def test_a_generation_that_ends_first_is_not_saved() -> None:
    desk = saving()
    desk.fail(2)
    assert desk.refusal() == "the generation ended before a safe point was agreed"
    assert desk.machine.phase is Phase.STOPPING
