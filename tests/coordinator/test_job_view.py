"""The coordinator's view of the job, for people."""

from __future__ import annotations

import pytest

from holdfast.coordinator.coordinator_state import LinkClosed
from holdfast.protocol.messages import Stopped, WorkerDone
from holdfast.protocol.rank_progress import Stage
from tests.coordinator.coordinator_desk import gathering, steps, training, two_of_three


def test_the_view_of_a_job_that_trains() -> None:
    desk = two_of_three()
    for number in (10, 20, 30):
        desk.wait(1.0)
        steps(desk, number, own_s=0.02)
    desk.join(3)
    view = desk.machine.view(desk.now)
    assert (view.run_id, view.phase, view.generation, view.world_size) == ("t", "running", 1, 2)
    assert (view.restarts, view.restarts_max) == (0, 0)
    assert view.training_s == pytest.approx(2.0)
    assert view.job_s == desk.now
    assert [(node.host, node.group_rank, node.state) for node in view.nodes] == [
        ("n1", 0, "running"),
        ("n2", 1, "running"),
        ("n3", None, "spare"),
    ]
    (rank,) = view.nodes[1].ranks
    assert (rank.rank, rank.local_rank, rank.stage, rank.steps) == (1, 0, Stage.STEPPING, 30)
    assert (rank.step_s, rank.own_s, rank.age_s) == pytest.approx((0.1, 0.02, 0.0))
    assert view.nodes[2].ranks == ()


def test_the_view_counts_the_training_of_earlier_generations() -> None:
    desk = training(max_restarts=1)
    desk.fail(2)
    assert desk.machine.view(desk.now).nodes[0].state == "stopping"
    desk.both_say(Stopped(1))
    desk.prepare(1, 2)
    view = desk.machine.view(desk.now)
    assert (view.training_s, view.restarts, view.why) == (1.0, 1, "rank 1 failed on n2")
    for number in (10, 20):
        desk.wait(1.0)
        steps(desk, number)
    assert desk.machine.view(desk.now).training_s == 2.0


def test_the_view_while_nodes_meet() -> None:
    desk = gathering()
    desk.join(1)
    view = desk.machine.view(desk.now)
    assert (view.phase, view.world_size, [node.state for node in view.nodes]) == ("gathering", 0, ["arriving"])
    desk.join(2)
    assert {node.state for node in desk.machine.view(desk.now).nodes} == {"starting"}
    desk.prepare(1)
    assert [node.state for node in desk.machine.view(desk.now).nodes] == ["prepared", "starting"]


def test_the_view_outlives_lost_and_finished_nodes() -> None:
    desk = training()
    desk.say(2, WorkerDone(1, 0))
    assert [node.state for node in desk.machine.view(desk.now).nodes] == ["running", "done"]
    desk.give(LinkClosed(2, "reset"))
    assert [node.host for node in desk.machine.view(desk.now).nodes] == ["n1"]
    desk.say(1, WorkerDone(1, 0))
    assert desk.machine.view(desk.now).phase == "over"
