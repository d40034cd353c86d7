"""A coordinator whose authority is a lease: deaf without it, and patient with what its previous leader left."""

from __future__ import annotations

from holdfast.authority.leased import Leased
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.coordinator_commands import Command, Tell
from holdfast.coordinator.coordinator_events import Heard, LinkOpened
from holdfast.protocol.messages import Assign, Join, Ping, Pong
from holdfast.protocol.outcome import Verdict
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec, Tick

JOB = JobSpec(run_id="j", min_nodes=1, max_nodes=1, backend="etcd")


def judge(*_: object) -> Verdict:
    raise AssertionError("nothing failed")


def made(lease: list[bool], newest_before: int = 0, workers_may_live_s: float = 0.0) -> Coordinator:
    authority = Leased(
        Limits(), 100.0, holds=lambda: lease[0], newest_before=newest_before, workers_may_live_s=workers_may_live_s
    )
    return Coordinator(JOB, Limits(), judge, 100.0, authority)


def joined(machine: Coordinator, now: float, last_generation: int = 0) -> list[Command]:
    machine.handle(now, LinkOpened(1, "10.0.0.1", "10.0.0.2", local=False))
    node = NodeSpec(member="a#1", host="a", nproc=1)
    return machine.handle(now, Heard(1, Join(node, last_generation, 0.0)))


def generations(commands: list[Command]) -> list[int]:
    return [c.message.generation for c in commands if isinstance(c, Tell) and isinstance(c.message, Assign)]


def test_without_the_lease_nothing_is_decided() -> None:
    lease = [False]
    machine = made(lease)
    assert joined(machine, 100.0) == []
    lease[0] = True
    assert generations(joined(machine, 101.0)) == [1]


def test_without_the_lease_no_ping_is_answered() -> None:
    lease = [True]
    machine = made(lease)
    joined(machine, 100.0)
    machine.next_deadline()  # as a driver asks after every event
    assert machine.pong(100.0, 1, Ping(1)) == Pong(1)
    lease[0] = False
    assert machine.pong(100.0, 1, Ping(2)) is None
    assert machine.handle(100.0, Heard(1, Ping(2))) == []


def test_the_first_of_a_job_waits_for_nobody() -> None:
    assert generations(joined(made([True]), 100.0)) == [1]


def test_a_successor_counts_on_and_waits_for_the_tail() -> None:
    machine = made([True], newest_before=7, workers_may_live_s=1.5)
    assert generations(joined(machine, 100.0, last_generation=7)) == []
    assert machine.next_deadline() == 101.5
    assert generations(machine.handle(101.4, Tick())) == []
    assert generations(machine.handle(101.5, Tick())) == [8]


def test_a_generation_that_etcd_forgot_is_observed_as_without_etcd() -> None:
    machine = made([True], newest_before=3)
    limits = Limits()
    assert generations(joined(machine, 100.0, last_generation=9)) == []
    assert generations(machine.handle(100.0 + limits.fence_s + limits.kill_s, Tick())) == [10]
