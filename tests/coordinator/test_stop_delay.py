"""How long the stop after a failure waits, and what for."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.coordinator.complaints import AGREED_S, REASON_S
from holdfast.coordinator.coordinator_events import LinkClosed
from holdfast.coordinator.stop_delay import EVIDENCE_S, PLACES_S
from holdfast.coordinator.world import Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.exit_codes import EXIT_REQUEUE, REQUESTS
from holdfast.protocol.outcome import Evidence, Failure
from tests.coordinator.coordinator_harness import CoordinatorHarness, training
from tests.support.simulator.nodes import simple_judge

# --- a wait in vain ---------------------------------------------------------------------------------------------------


def fails(harness: CoordinatorHarness, link: int, says: str) -> None:
    harness.say(link, msg.WorkersFailed(harness.machine.generation, (bare(link, 1, says),)))


def bare(link: int, exit_code: int, says: str = "") -> Failure:
    return Failure(rank=link - 1, local_rank=0, host=f"n{link}", pid=1, exit_code=exit_code, message=says)


def times_out(harness: CoordinatorHarness, link: int) -> None:
    fails(harness, link, "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete")


def judged_training() -> tuple[CoordinatorHarness, list[Evidence]]:
    """A job that trains and may not restart, and what its judge is given."""
    judged: list[Evidence] = []
    return training(judge=lambda evidence: judged.append(evidence) or simple_judge(evidence)), judged


def stops(harness: CoordinatorHarness) -> list[msg.Stop]:
    return [message for to, message in harness.told if to == 2 and isinstance(message, msg.Stop)]


@pytest.mark.parametrize(
    "says",
    [
        "RuntimeError: NCCL operation timed out",
        "torch.distributed.DistBackendError: NCCL operation timed out",
        "[rank0]:[E1125 10:00:00] [default_pg] Operation timed out after 600012 ms",
        "[rank0]:[E1125 10:00:00] Aborting process on rank 0 due to timeout - collective operation timed out",
        "[rank0]:[E1125 10:00:00] Aborting process due to timeout on rank 0 - timeout watchdog detected operation timeout",
    ],
)
def test_what_the_newer_nccl_backend_says_of_a_wait_in_vain_is_known(says: str) -> None:
    harness, _ = judged_training()
    fails(harness, 1, says)
    assert len(harness.looks_at(2)) == 1
    assert stops(harness) == []


def test_the_survivors_of_a_wait_in_vain_are_looked_at_before_they_are_stopped() -> None:
    harness, judged = judged_training()
    times_out(harness, 1)
    assert len(harness.looks_at(2)) == 1
    assert stops(harness) == []
    harness.looked(1)
    harness.looked(2, "sleep")
    assert stops(harness) == []
    harness.wait(PLACES_S + 0.1)
    assert [stop.reason for stop in stops(harness)] == [msg.StopReason.WORKER_FAILED]
    harness.both_say(msg.Stopped(1))
    (story,) = judged[0].survivors
    assert (story.rank, story.samples[0].frames[0].function) == (1, "sleep")


def test_a_survivor_that_waits_in_vain_too_may_say_so() -> None:
    harness, judged = judged_training()
    times_out(harness, 1)
    harness.looked(1)
    harness.looked(2, "all_reduce")
    times_out(harness, 2)
    assert len(stops(harness)) == 1
    harness.both_say(msg.Stopped(1))
    assert [failure.rank for failure in judged[0].failures] == [0, 1]
    assert judged[0].survivors == ()


def test_the_last_answer_about_places_ends_the_wait() -> None:
    harness = training()
    times_out(harness, 1)
    times_out(harness, 2)
    harness.looked(1)
    assert stops(harness) == []
    harness.machine.next_deadline()  # as a shell does: without a known deadline there is no fast path
    harness.looked(2, "all_reduce")
    assert len(stops(harness)) == 1


def test_a_node_that_is_lost_is_not_waited_for_either() -> None:
    harness = training(least=1, most=2)
    times_out(harness, 1)
    harness.give(LinkClosed(2, "reset"))
    assert harness.machine.phase is Phase.STOPPING


def test_those_that_do_not_answer_are_stopped_all_the_same() -> None:
    harness = training()
    times_out(harness, 1)
    harness.wait(PLACES_S + 0.1)
    assert len(stops(harness)) == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_failure_with_a_reason_of_its_own_stops_them_at_once(first: bool) -> None:
    harness = training()
    if not first:
        times_out(harness, 1)
    harness.fail(2)
    assert len(stops(harness)) == 1


# --- a bare failure ---------------------------------------------------------------------------------------------------


def reports(harness: CoordinatorHarness, failure: Failure, *, evidence_follows: bool = False) -> None:
    harness.say(failure.rank + 1, msg.WorkersFailed(harness.machine.generation, (failure,), evidence_follows))


@pytest.mark.parametrize("exit_code", [-9, -11, *REQUESTS])
def test_an_exit_status_that_needs_no_words_stops_the_others_at_once(exit_code: int) -> None:
    harness, judged = judged_training()
    failure = bare(1, exit_code)
    reports(harness, failure, evidence_follows=True)
    assert [stop.text for stop in stops(harness)] == ["rank 0 failed on n1"]
    read = structs.replace(failure, stderr_tail="the last words")
    reports(harness, read)
    assert len(harness.noted("workers_failed")) == 1
    harness.both_say(msg.Stopped(1))
    if exit_code != EXIT_REQUEUE:
        assert judged[0].failures == (read,), "the verdict is made of all that is known"


@pytest.mark.parametrize("exit_code", [1, 7, -6])
def test_what_an_exception_says_decides_when_the_others_are_stopped(exit_code: int) -> None:
    harness = training()
    failure = bare(1, exit_code)
    reports(harness, failure, evidence_follows=True)
    assert stops(harness) == []
    reports(harness, structs.replace(failure, message="ValueError: nan"))
    assert len(stops(harness)) == 1


def test_evidence_that_does_not_come_is_not_waited_for_long() -> None:
    harness = training()
    reports(harness, bare(1, 1), evidence_follows=True)
    harness.wait(EVIDENCE_S + 0.1)
    assert len(stops(harness)) == 1


def test_evidence_of_a_wait_in_vain_keeps_the_others_for_their_stacks() -> None:
    harness = training()
    reports(harness, bare(1, 1), evidence_follows=True)
    times_out(harness, 1)
    assert len(harness.looks_at(2)) == 1
    assert stops(harness) == []
    harness.wait(PLACES_S + 0.1)
    assert len(stops(harness)) == 1


def test_the_first_that_failed_stays_the_first_when_its_evidence_is_the_last() -> None:
    harness, judged = judged_training()
    first, second = bare(1, -9), bare(2, 1)
    reports(harness, first, evidence_follows=True)
    reports(harness, second, evidence_follows=True)
    first, second = (structs.replace(each, message=f"rank {each.rank}") for each in (first, second))
    reports(harness, second)
    reports(harness, first)
    harness.both_say(msg.Stopped(1))
    assert judged[0].failures == (first, second)


# --- a lost connection ------------------------------------------------------------------------------------------------

CLOSED = (
    "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:39846",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:3690, remote process exited or there was a network error",
    "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.",
)


@pytest.mark.parametrize("says", CLOSED)
def test_whoever_closed_a_connection_may_say_why_before_it_is_stopped(says: str) -> None:
    harness = training()
    fails(harness, 1, says)
    assert stops(harness) == []
    harness.fail(2)
    assert len(stops(harness)) == 1


def test_whoever_closed_a_connection_may_end_with_0() -> None:
    harness, judged = judged_training()
    fails(harness, 1, CLOSED[0])
    harness.say(2, msg.WorkerDone(1, 0))
    assert harness.machine.phase is Phase.STOPPING
    harness.say(1, msg.Stopped(1))
    harness.say(2, msg.Stopped(1))
    assert judged[0].done == (1,)


def test_after_a_lost_connection_nobody_is_waited_for_for_long() -> None:
    harness = training()
    fails(harness, 1, CLOSED[0])
    harness.wait(REASON_S + 0.1)
    assert len(stops(harness)) == 1


def test_where_all_have_lost_their_peers_nobody_is_waited_for() -> None:
    harness = training()
    fails(harness, 1, CLOSED[0])
    fails(harness, 2, CLOSED[0])
    assert len(stops(harness)) == 1


def test_a_wait_in_vain_after_a_lost_connection_is_looked_at() -> None:
    harness = training()
    fails(harness, 1, CLOSED[0])
    times_out(harness, 1)
    assert len(harness.looks_at(2)) == 1


# --- ranks that agreed to end ------------------------------------------------------------------------------------------


RAISED = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    raise RuntimeError("stop")\n'


def raises(harness: CoordinatorHarness, node: int, says: str) -> None:
    reports(harness, bare(node, 1), evidence_follows=True)
    reports(harness, structs.replace(bare(node, 1), message=says, traceback=RAISED + says, in_group=True))


@pytest.mark.parametrize(
    "says", ["RuntimeError: another rank failed", "RuntimeError: error on rank 1: op.preamble.length"]
)
def test_the_rank_that_the_others_report_may_say_why_before_it_is_stopped(says: str) -> None:
    harness = training()
    raises(harness, 1, says)
    harness.wait(REASON_S / 2)
    assert stops(harness) == []
    harness.fail(2)
    assert len(stops(harness)) == 1


def test_a_rank_that_reports_another_one_is_not_kept_for_ever() -> None:
    harness = training()
    raises(harness, 1, "RuntimeError: not all ranks succeeded")
    harness.wait(REASON_S + 0.1)
    assert len(stops(harness)) == 1


def test_ranks_that_all_raise_on_purpose_are_all_heard() -> None:
    harness, judged = judged_training()
    raises(harness, 1, "RuntimeError: stop")
    assert stops(harness) == []
    raises(harness, 2, "RuntimeError: stop")
    assert len(stops(harness)) == 1
    harness.both_say(msg.Stopped(1))
    assert len(judged[0].failures) == 2


def test_one_rank_that_raises_on_purpose_stops_the_others_shortly_later() -> None:
    harness = training()
    raises(harness, 1, "RuntimeError: stop")
    harness.wait(AGREED_S + 0.1)
    assert len(stops(harness)) == 1
