"""A save on demand: all ranks save at one safe point and go on, or nobody does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.coordinator.world import Phase
from holdfast.extensions.save.coordinator import AGREED_S_MAX
from holdfast.protocol import messages as msg
from tests.coordinator.coordinator_harness import LIMITS, CoordinatorHarness, draining, preparing, running, stopping


def saving() -> CoordinatorHarness:
    harness = running()
    harness.told.clear()
    harness.ask("save")
    assert [message for _, message in harness.told] == [msg.Drain(1, "somebody")] * 2
    return harness


def test_all_save_after_the_newest_safe_point_and_go_on() -> None:
    harness = saving()
    harness.say(1, msg.Held(1, 5, saves=True))
    assert harness.answers == []
    harness.say(2, msg.Held(1, 3, saves=True))
    assert [message for _, message in harness.told if isinstance(message, msg.DrainTo)] == [msg.DrainTo(1, 6, True)] * 2
    assert (harness.answer(), harness.machine.phase) == ({"nodes": 2}, Phase.RUNNING)
    assert harness.noted("save_asked")[0]["by"] == "somebody"
    assert harness.told[-1][1] == msg.Notice("all ranks save at their next safe point (somebody)")


@pytest.mark.parametrize("held", [msg.Held(1, 5), msg.Held(1, 0, saves=True)])
def test_where_a_rank_does_not_save_nobody_does(held: msg.Held) -> None:
    harness = saving()
    harness.say(1, msg.Held(1, 0, saves=True))
    harness.say(2, held)
    assert harness.told[-1][1] == msg.DrainTo(1, 0)
    assert "ht.Snapshots" in harness.refusal()
    assert harness.machine.phase is Phase.RUNNING


def test_a_node_that_is_silent_or_leaves_ends_no_job_that_is_to_save() -> None:
    harness = saving()
    harness.wait(AGREED_S_MAX + 1)
    assert harness.refusal() == "no safe point was agreed within 5 s"
    harness.wait(LIMITS.drain_s)
    assert harness.machine.phase is Phase.RUNNING
    harness = saving()
    harness.say(2, msg.Leave("SIGTERM", drain=True))
    assert "n2 is leaving" in harness.refusal()
    assert (harness.machine.phase, harness.told[-1][1]) == (
        Phase.DRAINING,
        msg.Drain(1, "n2 is leaving (SIGTERM)", drain=1),
    )
    harness.both_say(msg.Held(1, 4))
    assert isinstance(harness.told[-1][1], msg.Drain), "these answers are to the drain that was let go"


@pytest.mark.parametrize("state", [preparing, stopping, draining])
def test_what_does_not_run_is_not_saved(state: Callable[[], CoordinatorHarness]) -> None:
    harness = state()
    harness.ask("save")
    assert "the job is" in harness.refusal()


def test_who_asks_meanwhile_gets_the_same_answer() -> None:
    harness = saving()
    harness.ask("save", 2)
    assert len(harness.noted("save_asked")) == 1
    harness.both_say(msg.Held(1, 5, saves=True))
    assert (harness.answer(1), harness.answer(2)) == ({"nodes": 2}, {"nodes": 2})


def test_a_generation_that_ends_first_is_not_saved() -> None:
    harness = saving()
    harness.fail(2)
    assert harness.refusal() == "the generation ended before a safe point was agreed"
    assert harness.machine.phase is Phase.STOPPING
