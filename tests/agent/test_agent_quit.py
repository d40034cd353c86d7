"""An agent that is told, from some node, that the job is to end: as if it had got a signal."""

from __future__ import annotations

import signal

import pytest

from holdfast.agent.commands import Exit, HoldWorkers, KillTree, Say, SignalWorkers
from holdfast.agent.events import Signalled, TreeGone, WorkersHeld
from holdfast.protocol.messages import Leave, Quit
from holdfast.protocol.outcome import OutcomeKind
from tests.agent.agent_desk import LIMITS, Desk, draining, holding, idle, joining, preparing, running, stopping

STOP = Quit(drain=True, by="holdfast stop")
KILL = Quit(drain=False, by="holdfast kill")


def test_stop_holds_the_workers_at_their_safe_point() -> None:
    desk = running()
    desk.hear(STOP)
    assert desk.has(HoldWorkers)
    desk.give(WorkersHeld(1, 6))
    assert desk.sent() == [Leave("holdfast stop", drain=True)]


def test_stop_ends_workers_that_know_no_safe_point_as_sigterm_does() -> None:
    desk = running()
    desk.hear(STOP)
    desk.give(WorkersHeld(1, 0))
    assert SignalWorkers(signal.SIGTERM) in desk.done
    desk.all_end()
    desk.give(TreeGone(1))
    assert (desk.machine.outcome.kind, desk.machine.outcome.exit_code) == (OutcomeKind.SIGNALLED, 143)
    assert "holdfast stop" in desk.machine.outcome.message


def test_stop_said_twice_is_no_kill() -> None:
    desk = running()
    desk.hear(STOP)
    desk.hear(STOP)
    assert not desk.has(KillTree)


@pytest.mark.parametrize("state", [running, draining, stopping])
def test_kill_asks_nobody(state) -> None:
    desk: Desk = state()
    desk.hear(KILL)
    assert desk.has(KillTree)
    desk.give(TreeGone(1))
    assert desk.has(Exit)
    assert desk.machine.outcome.exit_code == 137


def test_kill_after_stop() -> None:
    desk = running()
    desk.hear(STOP)
    desk.hear(KILL)
    assert desk.has(KillTree)


@pytest.mark.parametrize("state", [joining, idle, preparing])
@pytest.mark.parametrize("quit_", [STOP, KILL])
def test_without_workers_there_is_nothing_to_wait_for(state, quit_: Quit) -> None:
    desk: Desk = state()
    desk.hear(quit_)
    desk.wait(LIMITS.fence_s / 4)
    assert desk.machine.outcome is not None


@pytest.mark.parametrize(
    ("state", "signum", "limit_s"),
    [
        (running, signal.SIGINT, LIMITS.stop_grace_s),
        (running, signal.SIGTERM, LIMITS.drain_s + LIMITS.stop_grace_s),
        (holding, signal.SIGTERM, LIMITS.drain_s + LIMITS.stop_grace_s),
        (draining, signal.SIGINT, LIMITS.stop_grace_s),
        (stopping, signal.SIGINT, LIMITS.stop_grace_s),
    ],
)
def test_the_first_signal_is_answered_at_once_with_what_comes_and_for_how_long(state, signum, limit_s) -> None:
    desk: Desk = state()
    desk.give(Signalled(signum, signum.name))
    (said,) = (command.text for command in desk.done if isinstance(command, Say))
    assert said.startswith(f"{signum.name}: ")
    assert f"up to {limit_s:.0f} s; again kills them at once" in said
    desk.give(Signalled(signum, signum.name))
    assert not desk.has(Say)


@pytest.mark.parametrize("state", [joining, idle, preparing])
def test_without_workers_a_signal_needs_no_patience_and_no_words(state) -> None:
    desk: Desk = state()
    desk.give(Signalled(signal.SIGINT, "SIGINT"))
    assert not desk.has(Say)


def test_whoever_stops_a_job_from_elsewhere_is_named_and_again_is_a_kill() -> None:
    desk = running()
    desk.hear(STOP)
    (said,) = (command.text for command in desk.done if isinstance(command, Say))
    assert said.startswith("holdfast stop: ")
    assert said.endswith("`holdfast kill` kills them at once")


def test_a_signal_that_nobody_at_a_console_sent_is_not_answered() -> None:
    desk = running()
    desk.give(Signalled(signal.SIGINT, "its torchrun has ended", kills=""))
    assert not desk.has(Say)
