"""What an agent is asked for: to end, to look at its workers, to say something; and how it looks for the coordinator."""

from __future__ import annotations

import signal

import pytest
from msgspec import structs

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.agent.local_generation import Work
from holdfast.protocol import messages as msg
from holdfast.protocol.outcome import OutcomeKind
from holdfast.protocol.policy import Limits, Tick
from holdfast.protocol.rank_progress import RankProgress, Stage
from tests.agent.agent_harness import (
    LIMITS,
    NPROC,
    AgentHarness,
    assign,
    cut_off_running,
    dialing,
    draining,
    held,
    holding,
    idle,
    joining,
    killing,
    preparing,
    running,
    stopping,
)

STOP = msg.Quit(drain=True, by="holdfast stop")
KILL = msg.Quit(drain=False, by="holdfast kill")


def test_stop_holds_the_workers_at_their_safe_point() -> None:
    harness = running()
    harness.hear(STOP)
    assert harness.has(do.HoldWorkers)
    harness.give(ev.WorkersHeld(1, 6))
    assert harness.sent() == [msg.Leave("holdfast stop", drain=True)]


def test_stop_ends_workers_that_know_no_safe_point_as_sigterm_does() -> None:
    harness = running()
    harness.hear(STOP)
    harness.give(ev.WorkersHeld(1, 0))
    assert do.SignalWorkers(signal.SIGTERM) in harness.done
    harness.all_end()
    harness.give(ev.TreeGone(1))
    assert (harness.machine.outcome.kind, harness.machine.outcome.exit_code) == (OutcomeKind.SIGNALLED, 143)
    assert "holdfast stop" in harness.machine.outcome.message


def test_stop_said_twice_is_no_kill() -> None:
    harness = running()
    harness.hear(STOP)
    harness.hear(STOP)
    assert not harness.has(do.KillTree)


@pytest.mark.parametrize("state", [running, draining, stopping])
def test_kill_asks_nobody(state) -> None:
    harness: AgentHarness = state()
    harness.hear(KILL)
    assert harness.has(do.KillTree)
    harness.give(ev.TreeGone(1))
    assert harness.has(do.Exit)
    assert harness.machine.outcome.exit_code == 137


def test_kill_after_stop() -> None:
    harness = running()
    harness.hear(STOP)
    harness.hear(KILL)
    assert harness.has(do.KillTree)


@pytest.mark.parametrize("state", [joining, idle, preparing])
@pytest.mark.parametrize("quit_", [STOP, KILL])
def test_without_workers_there_is_nothing_to_wait_for(state, quit_: msg.Quit) -> None:
    harness: AgentHarness = state()
    harness.hear(quit_)
    harness.wait(LIMITS.fence_s / 4)
    assert harness.machine.outcome is not None


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
    harness: AgentHarness = state()
    harness.give(ev.Signalled(signum, signum.name))
    (said,) = (command.text for command in harness.done if isinstance(command, do.Say))
    assert said.startswith(f"{signum.name}: ")
    assert f"up to {limit_s:.0f} s; again kills them at once" in said
    harness.give(ev.Signalled(signum, signum.name))
    assert not harness.has(do.Say)


@pytest.mark.parametrize("state", [joining, idle, preparing])
def test_without_workers_a_signal_needs_no_patience_and_no_words(state) -> None:
    harness: AgentHarness = state()
    harness.give(ev.Signalled(signal.SIGINT, "SIGINT"))
    assert not harness.has(do.Say)


def test_whoever_stops_a_job_from_elsewhere_is_named_and_again_is_a_kill() -> None:
    harness = running()
    harness.hear(STOP)
    (said,) = (command.text for command in harness.done if isinstance(command, do.Say))
    assert said.startswith("holdfast stop: ")
    assert said.endswith("`holdfast kill` kills them at once")


def test_a_signal_that_nobody_at_a_console_sent_is_not_answered() -> None:
    harness = running()
    harness.give(ev.Signalled(signal.SIGINT, "its torchrun has ended", kills=""))
    assert not harness.has(do.Say)


# --- progress is passed on, looks are answered, notices are said, a hang gets no long grace ------------------------------


RANKS = tuple(RankProgress(rank, Stage.STEPPING, 7, 0.5, 1.5) for rank in range(NPROC))


@pytest.mark.parametrize("state", [running, held])
def test_progress_is_passed_on_while_they_work(state) -> None:
    harness: AgentHarness = state()
    harness.give(ev.WorkersProgress(1, RANKS))
    assert harness.sent() == [msg.Progress(1, RANKS, ping=1)]
    harness.wait(LIMITS.ping_interval_s - 0.01)
    assert harness.sent() == [], "it takes the place of a ping"


def test_progress_waits_a_little_for_the_next_ping() -> None:
    harness = running()
    harness.wait(LIMITS.ping_interval_s - 0.1)
    harness.give(ev.WorkersProgress(1, RANKS))
    assert harness.sent() == []
    harness.wait(0.11)
    older = tuple(structs.replace(rank, age_s=pytest.approx(0.6, abs=0.02)) for rank in RANKS)
    assert harness.sent() == [msg.Progress(1, older, ping=1)]


def test_the_ping_does_not_wait_for_workers_that_ended_meanwhile() -> None:
    harness = running()
    harness.wait(LIMITS.ping_interval_s - 0.1)
    harness.give(ev.WorkersProgress(1, RANKS))
    harness.hear(msg.Stop(1, msg.StopReason.MEMBER_LOST))
    harness.wait(0.11)
    assert harness.sent() == [msg.Ping(1)]


@pytest.mark.parametrize("state", [idle, stopping, killing, cut_off_running])
def test_nothing_is_told_of_workers_that_are_not_at_work_or_to_nobody(state) -> None:
    harness: AgentHarness = state()
    harness.give(ev.WorkersProgress(1, RANKS))
    assert harness.sent() == []


def test_nothing_is_told_of_an_older_generation() -> None:
    harness = running()
    harness.give(ev.WorkersProgress(2, RANKS))
    assert harness.sent() == []


def test_the_board_knows_no_ends_but_the_agent_does() -> None:
    harness = running()
    harness.give(ev.WorkerEnded(1, 1, None))
    harness.give(ev.WorkersProgress(1, RANKS))
    (message,) = harness.sent()
    assert isinstance(message, msg.Progress)
    assert [rank.stage for rank in message.ranks] == [Stage.STEPPING, Stage.DONE]


def test_a_notice_is_said() -> None:
    harness = running()
    harness.hear(msg.Notice("rank 3 hangs\nits stacks are there"))
    assert harness.done == [do.Say("rank 3 hangs\nits stacks are there")]


def test_after_a_hang_the_grace_is_short() -> None:
    harness = running()
    harness.hear(msg.Stop(1, msg.StopReason.HUNG, "rank 3 hangs"))
    assert do.SignalWorkers(signal.SIGTERM) in harness.done
    assert harness.machine.work is Work.STOPPING
    assert not any(isinstance(command, do.KillTree) for command in harness.wait(LIMITS.hang_grace_s - 0.1))
    assert any(isinstance(command, do.KillTree) for command in harness.wait(0.2))


def test_a_grace_that_is_shorter_still_counts() -> None:
    harness = running()
    harness.machine.limits = Limits(stop_grace_s=1.0)
    harness.hear(msg.Stop(1, msg.StopReason.HUNG, "rank 3 hangs"))
    assert any(isinstance(command, do.KillTree) for command in harness.wait(1.1))


def test_the_grace_of_holdfast_stop_runs_once_though_the_coordinator_orders_a_stop_as_well() -> None:
    harness = running()
    harness.hear(STOP)
    harness.give(ev.WorkersHeld(1, 0))
    harness.wait(LIMITS.stop_grace_s - 0.1)
    harness.hear(msg.Stop(1, msg.StopReason.MEMBER_LEFT, "a is leaving (holdfast stop)"))
    assert [each for each in harness.wait(0.2) if isinstance(each, do.KillTree)] == [do.KillTree(1)]
    # All processes of the tree get SIGKILL now: nothing is due again, whatever is left of them.
    later = harness.wait(3 * LIMITS.stop_grace_s)
    assert not any(isinstance(each, do.KillTree | do.SignalWorkers) for each in later)
    harness.give(ev.TreeGone(1))
    assert harness.has(do.Exit)


# --- how an agent looks for the coordinator: pauses, when it gives up, and which node it has lost ---------------------


def test_pauses_between_attempts_grow_to_the_limit() -> None:
    harness = dialing()
    times = []
    while harness.now < 8.0:
        harness.give(ev.DialFailed("HF302", 1, "connection refused", final=False))
        due = harness.machine.next_deadline()
        assert due is not None
        times.append(round(due - harness.now, 3))
        harness.now = due
        harness.give(Tick())
        if not harness.has(do.Dial):  # it was time to say something
            harness.now += times[-1]
            harness.give(Tick())
    assert times[:4] == [0.1, 0.2, 0.4, 0.5]
    assert max(times) == LIMITS.connect_retry_max_s


def test_it_gives_up_at_the_join_deadline_and_says_why() -> None:
    harness = dialing()
    while harness.machine.outcome is None:
        harness.give(ev.DialFailed("HF110", 2, "no such host", final=False))
        due = harness.machine.next_deadline()
        if due is not None:
            harness.now = due
            harness.give(Tick())
    assert harness.now == 60.0
    outcome = harness.machine.outcome
    assert (outcome.kind, outcome.code, outcome.exit_code) == (OutcomeKind.NO_QUORUM, "HF110", 2)
    assert outcome.message == "no such host (tried for 60 s)"


def test_the_node_that_had_the_coordinator_is_named_with_its_ranks() -> None:
    harness = idle()
    harness.hear(structs.replace(assign(1), led_by="b (ranks 2-3)"))
    said = [command.text for command in harness.give(ev.LinkLost("connection reset")) if isinstance(command, do.Say)]
    assert said == ["lost the coordinator on b (ranks 2-3): connection reset; trying to reach it again"]
    harness.give(Tick())
    harness.give(ev.Dialed())
    (join,) = harness.sent()
    assert isinstance(join, msg.Join)
    assert join.led_by == "b (ranks 2-3)"
    harness.give(ev.LinkLost("connection reset"))
    while harness.machine.outcome is None:
        harness.give(ev.DialFailed("HF302", 1, "connection refused", final=False))
        due = harness.machine.next_deadline()
        if due is not None:
            harness.now = due
            harness.give(ev.TreeGone(1) if harness.has(do.KillTree) else Tick())
    outcome = harness.machine.outcome
    assert outcome.message == "lost b (ranks 2-3), which had the coordinator: it did not come back within 60 s"
    assert outcome.verdict.lost_nodes == ("b (ranks 2-3)",)


def test_a_final_refusal_is_not_repeated() -> None:
    harness = dialing()
    harness.give(ev.DialFailed("HF111", 2, "another job", final=True))
    assert harness.has(do.Exit)


def test_workers_that_save_at_a_safe_point_go_on() -> None:
    harness = running()
    harness.hear(msg.Drain(1, "somebody"))
    harness.give(ev.WorkersHeld(1, 8, saves=True))
    assert harness.sent() == [msg.Held(1, 8, saves=True)]
    assert harness.hear(msg.DrainTo(1, 9, save=True)) == [do.ReleaseWorkers(1, 9, save=True)]
    assert harness.machine.work is Work.RUNNING
