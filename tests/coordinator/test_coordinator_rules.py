"""What the coordinator's tables do not show."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.coordinator.coordinator_events import LinkClosed, LinkOpened
from holdfast.coordinator.world import Phase
from holdfast.diagnosis.causes import judge
from holdfast.protocol import messages as msg
from holdfast.protocol.outcome import Failure, OutcomeKind
from holdfast.protocol.policy import Grow, NodeSpec
from holdfast.protocol.rank_progress import RankProgress, Stage
from tests.coordinator.coordinator_harness import (
    LIMITS,
    CoordinatorHarness,
    draining,
    gathering,
    over,
    preparing,
    running,
    steps,
    stopping,
    training,
    two_of_three,
)


def test_numbers_go_above_all_that_any_agent_has_seen() -> None:
    harness = CoordinatorHarness()
    harness.join(1)
    harness.join(2, last_generation=41)
    harness.wait(10.0)
    assert harness.machine.generation == 42
    assert harness.machine.knows_previous_leader


def test_a_stranger_speaks_in_vain() -> None:
    harness = running()
    harness.give(LinkOpened(9, "10.0.0.9", "10.0.0.1"))
    for message in (
        msg.Ping(3),
        msg.Leave("SIGTERM"),
        msg.Prepared(1, 40_000),
        msg.WorkerDone(1, 0),
        msg.Stopped(1),
        msg.StoreLost(1),
    ):
        harness.say(9, message)
    assert harness.machine.phase is Phase.RUNNING
    assert not [message for link, message in harness.told if link == 9]


def test_whoever_comes_after_the_end_is_told_of_it() -> None:
    harness = over()
    harness.join(8, last_generation=1)
    assert harness.last(8) == harness.last(1)
    harness.join(9)
    told = harness.last(9)
    assert isinstance(told, msg.Finish)
    assert told.outcome.kind is OutcomeKind.SUCCEEDED
    assert "before this node could join" in told.outcome.message


def test_two_joins_on_one_link_lose_it() -> None:
    harness = running()
    harness.say(1, msg.Join(NodeSpec(member="n1#2", host="n1", nproc=1)))
    assert harness.dropped == [1]
    assert harness.machine.phase is Phase.STOPPING


def test_a_used_identity_is_refused() -> None:
    harness = CoordinatorHarness()
    harness.join(1)
    harness.give(LinkClosed(1, "reset"))
    harness.join(1)
    assert isinstance(harness.last(1), msg.Refuse)


def test_who_waits_is_told_for_what() -> None:
    harness = CoordinatorHarness()
    harness.join(1)
    harness.wait(6.0)
    assert harness.last(1) == msg.Waiting("waiting: 1 of 2 nodes are here (n1); giving up in 55 s")


def test_a_restart_is_told_with_its_reason_and_what_is_left() -> None:
    harness = running(max_restarts=2)
    harness.fail(2)
    harness.both_say(msg.Stopped(1))
    notices = [(link, message.text) for link, message in harness.told if isinstance(message, msg.Notice)]
    assert notices == [(link, "HF200: exit code 1; restart 1 of 2") for link in (1, 2)]


def test_a_node_that_goes_costs_no_restart_and_none_is_told() -> None:
    harness = running(least=1, most=2, max_restarts=2)
    harness.say(2, msg.Leave("asked to", drain=False))
    harness.both_say(msg.Stopped(1))
    assert not [message for _, message in harness.told if isinstance(message, msg.Notice)]


def test_stale_words_change_nothing() -> None:
    harness = running(max_restarts=1)
    harness.fail(2)
    harness.both_say(msg.Stopped(1))
    harness.prepare(1, 2)
    assert harness.machine.generation == 2
    harness.say(1, msg.WorkerDone(1, 0))
    harness.say(1, msg.Stopped(1))
    harness.say(2, msg.StoreLost(1))
    harness.say(2, msg.WorkersFailed(1, (Failure(rank=0, local_rank=0, host="n1", pid=1, exit_code=1),)))
    assert harness.machine.phase is Phase.RUNNING
    assert not harness.machine.world.done


def test_a_stale_stopped_does_not_stand_for_a_newer_one() -> None:
    """It may have been on its way since before the node took part in the present generation."""
    harness = running(max_restarts=2)
    harness.fail(2)
    harness.both_say(msg.Stopped(1))
    harness.prepare(1, 2)
    harness.fail(2)
    harness.say(1, msg.Stopped(1))
    harness.say(2, msg.Stopped(2))
    assert harness.machine.phase is Phase.STOPPING
    harness.say(1, msg.Stopped(2))
    assert harness.machine.phase is Phase.GATHERING, "the second restart in a row is not immediate"


def test_a_quorum_that_comes_after_the_back_off_waits_for_the_future() -> None:
    """The coordinator once asked for a Tick at the end of a back-off that was long over, again and again."""
    harness = CoordinatorHarness(least=2, most=3)
    harness.join(1, last_generation=1)
    harness.wait(10.0)
    harness.join(2)
    assert harness.machine.phase is Phase.GATHERING
    due = harness.machine.next_deadline()
    assert due is not None
    assert due > harness.now
    harness.wait(LIMITS.settle_s)
    assert harness.machine.phase is Phase.PREPARING


def test_one_that_does_not_stop_in_time_is_dropped() -> None:
    harness = stopping(max_restarts=1)
    harness.say(1, msg.Stopped(1))
    harness.wait(LIMITS.stop_grace_s + LIMITS.stop_slack_s)
    assert harness.dropped == [2]
    assert harness.machine.phase is Phase.GATHERING


def test_it_never_forms_while_workers_may_live() -> None:
    harness = stopping(max_restarts=1)
    harness.say(1, msg.Stopped(1))
    assert harness.machine.phase is Phase.STOPPING
    harness.say(2, msg.Stopped(1))
    assert harness.machine.phase is Phase.PREPARING


@pytest.mark.parametrize(
    ("addresses", "local", "master"),
    [("127.0.0.", True, "127.0.0.1"), ("10.0.0.", False, "10.0.0.1")],
)
def test_a_world_on_one_machine_is_local(addresses: str, local: bool, master: str) -> None:
    harness = CoordinatorHarness()
    harness.join(1, 2, address=addresses)
    assign = harness.last(1)
    assert isinstance(assign, msg.Assign)
    assert assign.local_world is local
    harness.prepare(1, 2)
    assert harness.last(1) == msg.Start(1, master, 40_000, job_uid="n1#1")


def test_members_are_told_the_lease() -> None:
    harness = CoordinatorHarness()
    harness.join(1)
    times = LIMITS.lease_s, LIMITS.fence_s, LIMITS.ping_interval_s
    assert harness.told == [(1, msg.Joined(*times, suspend_s=LIMITS.suspend_of(2)))]


def test_the_more_agents_the_rarer_their_pings_and_reports() -> None:
    harness = CoordinatorHarness(1, 9, limits=structs.replace(LIMITS, pings_per_s_max=6, progress_per_s_max=2))
    harness.join(*range(1, 8))
    joined = [message for _, message in harness.told if isinstance(message, msg.Joined)]
    assert [message.ping_interval_s for message in joined] == [1.0] * 6 + [7 / 6]
    harness.wait(2.0)
    harness.prepare(*range(1, 8))
    assert harness.last(7) == msg.Start(1, "10.0.0.1", 40_000, 3.5, job_uid="n1#1")


# --- draining -----------------------------------------------------------------------------------------------------


def test_all_stop_at_a_safe_point_that_nobody_has_passed() -> None:
    harness = draining()
    harness.say(1, msg.Held(1, 4))
    assert not isinstance(harness.last(1), msg.DrainTo), "the other has not answered"
    harness.say(2, msg.Held(1, 6))
    assert [harness.last(link) for link in (1, 2)] == [msg.DrainTo(1, 7)] * 2
    harness.both_say(msg.Stopped(1))
    assert harness.machine.budget.used == 0


def test_what_a_drained_generation_ends_with_is_free() -> None:
    """One rank may be gone while another still talks to it."""
    harness = draining(least=1, max_restarts=0)
    harness.both_say(msg.Held(1, 4))
    harness.fail(1)
    harness.both_say(msg.Stopped(1))
    assert harness.machine.outcome is None
    assert harness.machine.phase is Phase.PREPARING


def test_a_failure_before_the_safe_point_is_agreed_is_one() -> None:
    harness = draining(least=1, max_restarts=0)
    harness.fail(1)
    harness.both_say(msg.Stopped(1))
    assert harness.machine.outcome.kind is OutcomeKind.FAILED


def test_a_drain_that_takes_too_long_is_ended() -> None:
    harness = draining()
    harness.both_say(msg.Held(1, 4))
    harness.wait(LIMITS.drain_s - 0.01)
    assert harness.machine.phase is Phase.DRAINING
    harness.wait(0.02)
    assert harness.last(1) == msg.Stop(
        1, msg.StopReason.MEMBER_LEFT, "n2 is leaving (SIGTERM); the workers did not stop within 60 s"
    )


def test_a_node_lost_in_a_drain_ends_it() -> None:
    harness = draining()
    harness.give(LinkClosed(2, "reset"))
    assert harness.last(1) == msg.Stop(1, msg.StopReason.MEMBER_LOST, "n2 was lost: reset")


def test_one_that_has_done_its_part_need_not_answer() -> None:
    harness = draining()
    harness.say(1, msg.WorkerDone(1, 0))
    harness.say(2, msg.Held(1, 4))
    harness.give(LinkClosed(1, "gone"))
    assert harness.last(2) == msg.DrainTo(1, 5)


def test_nobody_waits_for_the_answer_of_a_node_that_is_done() -> None:
    """Done before the drain, or while it is asked: it has nobody to hold."""
    early = running()
    early.say(1, msg.WorkerDone(1, 0))
    early.say(2, msg.Leave("SIGTERM", drain=True))
    early.say(2, msg.Held(1, 4))
    assert early.last(2) == msg.DrainTo(1, 5)
    late = draining()
    late.say(2, msg.Held(1, 4))
    late.say(1, msg.WorkerDone(1, 0))
    assert late.last(2) == msg.DrainTo(1, 5)


@pytest.mark.parametrize(
    ("grow", "phase"),
    [(Grow.DRAIN, Phase.DRAINING), (Grow.NOW, Phase.STOPPING), (Grow.NEVER, Phase.RUNNING)],
)
def test_growth(grow: Grow, phase: Phase) -> None:
    harness = two_of_three(grow=grow)
    harness.join(3)
    harness.wait(1.0)
    assert harness.machine.phase is phase
    said = [message.text for link, message in harness.told if link == 3 and isinstance(message, msg.Waiting)]
    assert ("waits as a spare" in said[0]) is (grow is Grow.NEVER)


def wanted(harness: CoordinatorHarness) -> int:
    return harness.machine.view(harness.now).nodes_wanted


def test_nodes_are_wanted_as_far_as_the_job_can_use_them() -> None:
    assert wanted(two_of_three(grow=Grow.DRAIN)) == 3
    assert wanted(two_of_three(grow=Grow.NEVER)) == 2
    harness = two_of_three(grow=Grow.DRAIN)
    harness.say(1, msg.WorkerDone(1, 0))
    assert wanted(harness) == 2, "no node joins a job that comes to its end"


def test_another_node_is_wanted_for_one_that_takes_no_part() -> None:
    harness = two_of_three(grow=Grow.DRAIN)
    flap(harness, 10, 3)
    harness.join(3)
    assert wanted(harness) == 4
    harness.wait(LIMITS.flap_first_s * 2 + 0.1)
    assert wanted(harness) == 3


# --- a previous leader's generation ---------------------------------------------------------------------------------------


def test_the_budget_survives_a_new_coordinator() -> None:
    harness = CoordinatorHarness(max_restarts=3)
    harness.join_running(1, 2, restart_count=2)
    assert (harness.machine.phase, harness.machine.generation, harness.machine.budget.used) == (Phase.RUNNING, 7, 2)


def test_a_generation_of_which_a_part_has_ended_is_abandoned() -> None:
    harness = CoordinatorHarness()
    harness.join_running(1)
    harness.join(2, last_generation=7)
    assert harness.last(1) == msg.Abandon(7)
    harness.wait(10.0)
    assert harness.machine.phase is Phase.GATHERING, "its workers may be alive"
    harness.say(1, msg.Stopped(7))
    assert harness.machine.generation == 8


def test_a_spare_of_an_earlier_coordinator_is_reason_enough_to_wait_for_the_fence() -> None:
    harness = CoordinatorHarness()
    harness.join(1)
    harness.join(2, again=True)
    assert harness.machine.phase is Phase.GATHERING, "others may run workers of a generation that it does not know"
    harness.wait(harness.machine.limits.fence_s + harness.machine.limits.kill_s)
    assert harness.machine.generation == 1


def test_of_two_generations_the_newer_one_counts() -> None:
    harness = CoordinatorHarness()
    harness.join_running(1, generation=6)
    harness.join_running(2, generation=7)
    assert harness.last(1) == msg.Abandon(6)


def test_who_comes_with_a_generation_that_was_replaced_is_told_to_kill_it() -> None:
    harness = two_of_three()
    harness.join_running(3, generation=1, of=3)
    assert msg.Abandon(1) in [message for link, message in harness.told if link == 3]


def test_workers_that_died_before_the_rest_came_end_the_generation() -> None:
    harness = CoordinatorHarness()
    harness.join_running(1)
    harness.say(1, msg.Stopped(7))
    harness.join_running(2)
    assert harness.last(2) == msg.Abandon(7)


def test_a_member_that_had_to_stop_its_workers_ends_the_generation() -> None:
    harness = running()
    harness.say(2, msg.Stopped(1))
    assert harness.last(1) == msg.Stop(1, msg.StopReason.FENCED, "n2 had to stop its workers")


# --- host back-off --------------------------------------------------------------------------------------------------------


def flap(harness: CoordinatorHarness, link: int, times: int) -> None:
    """An agent of host n3 comes and is lost at once, again and again."""
    for number in range(times):
        harness.give(LinkOpened(link + number, "10.0.0.3", "10.0.0.9"))
        harness.say(link + number, msg.Join(NodeSpec(member=f"n3#{link + number}", host="n3", nproc=1)))
        harness.wait(0.1)
        harness.give(LinkClosed(link + number, "reset"))


def test_a_host_that_comes_and_dies_in_a_loop_must_stay_a_while() -> None:
    harness = two_of_three(grow=Grow.NOW)
    flap(harness, 10, 3)
    harness.join(3)
    harness.wait(LIMITS.flap_first_s * 2 - 0.1)
    assert harness.machine.phase is Phase.RUNNING, "the others are not regrouped for it yet"
    harness.wait(0.2 + LIMITS.gather_s)
    assert harness.machine.phase is Phase.STOPPING


def test_a_host_blamed_too_often_is_shut_out_for_a_while() -> None:
    harness = running(least=1, most=2, max_restarts=9, exclude_after=2)
    for _ in range(2):
        harness.fail(2)
        harness.both_say(msg.Stopped(harness.machine.generation))
        harness.wait(1.0)
        harness.prepare(1, 2)
    assert harness.machine.world.order == ("n1#1",)
    assert msg.Waiting("n2 was blamed 2 times: excluded for 60 s") in [
        message for link, message in harness.told if link == 2
    ]
    harness.wait(LIMITS.exclude_first_s + LIMITS.gather_s)
    assert harness.machine.phase is Phase.DRAINING, "it may come back"


def test_a_coordinator_that_comes_after_a_lost_one_names_that_node() -> None:
    """Those that come from its generation know it; nobody else does."""
    harness = CoordinatorHarness()
    harness.give(LinkOpened(2, "10.0.0.2", "10.0.0.9"))
    harness.say(2, msg.Join(NodeSpec(member="n2#1", host="n2", nproc=1), 7, led_by="n1 (ranks 0-3)"))
    assert harness.machine.view(harness.now).why == "lost n1 (ranks 0-3), which had the coordinator"
    harness.wait(LIMITS.join_s + 60.0)
    outcome = harness.machine.outcome
    assert outcome.kind is OutcomeKind.NO_QUORUM
    assert outcome.message.endswith("; previous generation ended: lost n1 (ranks 0-3), which had the coordinator")


def test_where_a_lost_node_does_not_come_back_the_verdict_is_its_loss() -> None:
    harness = running(judge=judge)
    harness.give(LinkClosed(2, "reset"))
    harness.say(1, msg.Stopped(1))
    harness.wait(LIMITS.join_s + 1.0)
    outcome = harness.machine.outcome
    assert (outcome.kind, outcome.code) == (OutcomeKind.NO_QUORUM, "HF301")
    verdict = outcome.verdict
    assert verdict.code == "HF306"
    assert verdict.cause.startswith("lost n2 (reset): rank 1; then 1 of at least 2 nodes came within 60 s")
    assert verdict.culprit is None


# --- the end of a job that somebody asked for on one of its nodes -----------------------------------------------------


@pytest.mark.parametrize("state", [preparing, running, draining, stopping])
@pytest.mark.parametrize("drain", [True, False])
def test_every_member_is_told(state, drain: bool) -> None:
    harness: CoordinatorHarness = state()
    links = {member.link for member in harness.machine.members.values()}
    before = len(harness.told)
    harness.ask("stop" if drain else "kill", next(iter(links)))
    told = [(link, message) for link, message in harness.told[before:] if isinstance(message, msg.Quit)]
    assert {link for link, _ in told} == links
    assert {message for _, message in told} == {msg.Quit(drain, "somebody")}


def test_whoever_comes_later_is_sent_home() -> None:
    harness = running()
    harness.ask("stop")
    harness.join(9)
    assert [message for link, message in harness.told if link == 9] == [msg.Quit(drain=True, by="somebody")]
    assert len(harness.machine.members) == 2


def test_a_job_that_is_over_ends_as_it_did() -> None:
    harness = over()
    outcome = harness.machine.outcome
    harness.ask("kill")
    assert (harness.machine.phase, harness.machine.outcome) == (Phase.OVER, outcome)


# --- the coordinator's view of the job, for people --------------------------------------------------------------------


def test_the_view_of_a_job_that_trains() -> None:
    harness = two_of_three()
    for number in (10, 20, 30):
        harness.wait(1.0)
        steps(harness, number, own_s=0.02)
    harness.join(3)
    view = harness.machine.view(harness.now)
    assert (view.run_id, view.phase, view.generation, view.world_size) == ("t", "running", 1, 2)
    assert (view.restarts, view.restarts_max) == (0, 0)
    assert view.training_s == pytest.approx(2.0)
    assert view.job_s == harness.now
    assert [(node.host, node.group_rank, node.state) for node in view.nodes] == [
        ("n1", 0, "running"),
        ("n2", 1, "running"),
        ("n3", None, "spare"),
    ]
    (rank,) = view.nodes[1].ranks
    assert (rank.rank, rank.local_rank, rank.stage, rank.steps) == (1, 0, Stage.STEPPING, 30)
    assert (rank.step_s, rank.own_s, rank.age_s) == pytest.approx((0.1, 0.02, 0.0))
    assert view.nodes[2].ranks == ()


def test_the_view_has_the_steps_of_the_job_and_the_process() -> None:
    """After a restart the worker's own count begins at 0 again."""
    harness = two_of_three()
    progress = RankProgress(0, Stage.STEPPING, 5, job_step=106, pid=4711)
    harness.say(1, msg.Progress(1, (progress,)))
    harness.say(2, msg.Progress(1, (RankProgress(0, Stage.STEPPING, 5),)))
    ranks = [node.ranks[0] for node in harness.machine.view(harness.now).nodes]
    assert [(rank.steps, rank.counts_job, rank.pid) for rank in ranks] == [(105, True, 4711), (5, False, 0)]


def test_the_view_says_which_ranks_wait_as_spares_and_why() -> None:
    harness = two_of_three()
    assert (harness.machine.view(harness.now).spares, harness.machine.view(harness.now).spares_why) == ((), "")
    harness.say(2, msg.Progress(1, (RankProgress(0, Stage.SPARE),)))
    view = harness.machine.view(harness.now)
    assert view.spares == (1,)
    assert view.spares_why == (
        "rank 1 waits as a spare: ht.survive(ranks=…) uses fewer than the 2 ranks that are there"
    )


def test_the_view_counts_the_training_of_earlier_generations() -> None:
    harness = training(max_restarts=1)
    harness.fail(2)
    assert harness.machine.view(harness.now).nodes[0].state == "stopping"
    harness.both_say(msg.Stopped(1))
    harness.prepare(1, 2)
    view = harness.machine.view(harness.now)
    assert (view.training_s, view.restarts, view.why) == (1.0, 1, "rank 1 failed on n2")
    for number in (10, 20):
        harness.wait(1.0)
        steps(harness, number)
    assert harness.machine.view(harness.now).training_s == 2.0


def test_the_view_while_nodes_meet() -> None:
    harness = gathering()
    harness.join(1)
    view = harness.machine.view(harness.now)
    assert (view.phase, view.world_size, [node.state for node in view.nodes]) == ("gathering", 0, ["arriving"])
    harness.join(2)
    assert {node.state for node in harness.machine.view(harness.now).nodes} == {"starting"}
    harness.prepare(1)
    assert [node.state for node in harness.machine.view(harness.now).nodes] == ["prepared", "starting"]


def test_the_view_outlives_lost_and_finished_nodes() -> None:
    harness = training()
    harness.say(2, msg.WorkerDone(1, 0))
    assert [node.state for node in harness.machine.view(harness.now).nodes] == ["running", "done"]
    harness.give(LinkClosed(2, "reset"))
    assert [node.host for node in harness.machine.view(harness.now).nodes] == ["n1"]
    harness.say(1, msg.WorkerDone(1, 0))
    assert harness.machine.view(harness.now).phase == "over"
