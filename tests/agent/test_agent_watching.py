"""An agent tells of its workers' progress, looks when asked, says what it is told, and gives a hang no long grace."""

from __future__ import annotations

import signal

import pytest

from holdfast.agent.agent_state import Work
from holdfast.agent.commands import KillTree, LookAtWorkers, Say, SignalWorkers
from holdfast.agent.events import LinkLost, WorkerEnded, WorkersProgress, WorkersSeen
from holdfast.protocol.messages import Look, Looked, Notice, Progress, Stop, StopReason
from holdfast.protocol.policy import Limits
from holdfast.protocol.rank_progress import RankProgress, RankSample, Stage
from tests.agent.agent_desk import (
    LIMITS,
    NPROC,
    Desk,
    cleaned,
    cut_off_running,
    held,
    idle,
    killing,
    running,
    stopping,
)

RANKS = tuple(RankProgress(rank, Stage.STEPPING, 7, 0.5, 1.5) for rank in range(NPROC))


@pytest.mark.parametrize("state", [running, held])
def test_progress_is_passed_on_while_they_work(state) -> None:
    desk: Desk = state()
    desk.give(WorkersProgress(1, RANKS))
    assert desk.sent() == [Progress(1, RANKS)]


@pytest.mark.parametrize("state", [idle, stopping, killing, cut_off_running])
def test_nothing_is_told_of_workers_that_are_not_at_work_or_to_nobody(state) -> None:
    desk: Desk = state()
    desk.give(WorkersProgress(1, RANKS))
    assert desk.sent() == []


def test_nothing_is_told_of_an_older_generation() -> None:
    desk = running()
    desk.give(WorkersProgress(2, RANKS))
    assert desk.sent() == []


def test_the_board_knows_no_ends_but_the_agent_does() -> None:
    desk = running()
    desk.give(WorkerEnded(1, 1, None))
    desk.give(WorkersProgress(1, RANKS))
    (message,) = desk.sent()
    assert isinstance(message, Progress)
    assert [rank.stage for rank in message.ranks] == [Stage.STEPPING, Stage.DONE]


def test_a_look_is_taken_and_answered() -> None:
    desk = running()
    desk.hear(Look(1, 5, store=True))
    assert desk.done == [LookAtWorkers(1, 5, True)]
    samples = (RankSample(0, 4711, "S", 1.0),)
    desk.give(WorkersSeen(1, 5, samples, ("a cannot reach b",)))
    assert desk.sent() == [Looked(1, 5, samples, ("a cannot reach b",))]


@pytest.mark.parametrize("state", [idle, killing, cleaned])
def test_where_there_is_nobody_to_look_at_the_answer_comes_at_once(state) -> None:
    desk: Desk = state()
    desk.hear(Look(1, 5))
    assert desk.sent() == [Looked(1, 5)]


def test_another_generation_is_not_looked_at() -> None:
    desk = running()
    desk.hear(Look(2, 5))
    assert desk.sent() == [Looked(2, 5)]


def test_a_look_that_ends_after_the_link_did_is_told_to_nobody() -> None:
    desk = running()
    desk.hear(Look(1, 5))
    desk.give(LinkLost("reset"))
    desk.give(WorkersSeen(1, 5, ()))
    assert desk.sent() == []


def test_a_notice_is_said() -> None:
    desk = running()
    desk.hear(Notice("rank 3 hangs\nits stacks are there"))
    assert desk.done == [Say("rank 3 hangs\nits stacks are there")]


def test_after_a_hang_the_grace_is_short() -> None:
    desk = running()
    desk.hear(Stop(1, StopReason.HUNG, "rank 3 hangs"))
    assert SignalWorkers(signal.SIGTERM) in desk.done
    assert desk.machine.work is Work.STOPPING
    assert not any(isinstance(command, KillTree) for command in desk.wait(LIMITS.hang_grace_s - 0.1))
    assert any(isinstance(command, KillTree) for command in desk.wait(0.2))


def test_a_grace_that_is_shorter_still_counts() -> None:
    desk = running()
    desk.machine.limits = Limits(stop_grace_s=1.0)
    desk.hear(Stop(1, StopReason.HUNG, "rank 3 hangs"))
    assert any(isinstance(command, KillTree) for command in desk.wait(1.1))
