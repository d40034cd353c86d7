"""An agent that is told, from some node, that the job is to end: as if it had got a signal."""

from __future__ import annotations

import signal

import pytest

from holdfast.core.agent.commands import Exit, HoldWorkers, KillTree, SignalWorkers
from holdfast.core.agent.events import TreeGone, WorkerEnded, WorkersHeld
from holdfast.core.outcome import OutcomeKind
from holdfast.core.protocol import Leave, Quit
from tests.core.agent.agent_desk import LIMITS, Desk, draining, idle, joining, preparing, running, stopping

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
    for local_rank in range(2):
        desk.give(WorkerEnded(1, local_rank, None))
    desk.give(TreeGone(1))
    assert desk.machine.outcome is not None
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
    assert desk.machine.outcome is not None
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
