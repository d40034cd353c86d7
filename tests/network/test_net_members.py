"""Nodes come and go on purpose: arrivals are gathered, spares wait and are promoted, a leave is no failure."""

from __future__ import annotations

import signal
import time

from tests.network.fleet import LONG_LEASE, Fleet, until, workers_on
from tests.support.limits import limit_s


def test_third_joins_two(fleet) -> None:
    job: Fleet = fleet(3)
    job.c10d("1:3")
    agents = job.start_all([1, 2])
    job.trains([1, 2])
    since_s = time.monotonic()
    agents.append(job.start(3))
    second = job.trains([1, 2, 3], since_s)
    assert [second.place(f"node{number}") for number in (1, 2, 3)] == [[0], [1], [2]]
    assert second.restarts == 0
    job.finish_all(agents)
    job.check()


def test_two_arrivals_are_one_regroup(fleet) -> None:
    """Both come while the coordinator stands still: for it they come together, however slowly they were started."""
    job: Fleet = fleet(4)
    job.c10d("2:4", conf=f"lease={limit_s(20):g}")
    agents = job.start_all([1, 2])
    first = job.trains([1, 2])
    agents[0].signal(signal.SIGSTOP)
    agents += job.start_all([3, 4])
    for number in (3, 4):
        until(lambda number=number: connected(job, number), job.story)
    agents[0].signal(signal.SIGCONT)
    agents[0].program.resume()
    second = job.trains([1, 2, 3, 4])
    job.finish_all(agents)
    assert job.generations == [first, second]
    job.check()


def connected(job: Fleet, number: int) -> bool:
    """Whether an agent there has a connection to the endpoint."""
    return ":29400" in job.hosts[number].run(["ss", "--tcp", "--numeric", "state", "established"])


def test_spare_is_promoted(fleet) -> None:
    """One node too many waits; when a member is lost it takes its place, in one generation."""
    job: Fleet = fleet(4)
    job.c10d("3", conf=LONG_LEASE)
    agents = job.start_all([1, 2, 3])
    first = job.trains([1, 2, 3])
    agents.append(job.start(4))
    agents[3].says("this one stands by as a spare")
    assert job.generations == [first], "a spare is no reason to regroup"
    since_s = time.monotonic()
    job.hosts[2].kill()
    second = job.trains([1, 3, 4], since_s)
    assert [second.place(f"node{number}") for number in (1, 3, 4)] == [[0], [2], [1]], "who stays keeps its place"
    job.finish_all([agents[0], agents[2], agents[3]])
    assert job.generations == [first, second]
    job.check()


def test_leave_on_notice(fleet) -> None:
    """SIGTERM to one agent: it leaves with 143, the others go on, and the restart budget (0) is not touched."""
    job: Fleet = fleet(3)
    job.c10d("2:3", conf=LONG_LEASE)
    agents = job.start_all([1, 2, 3])
    job.trains([1, 2, 3])
    since_s = time.monotonic()
    agents[2].signal(signal.SIGTERM)
    second = job.trains([1, 2], since_s)
    assert agents[2].end() == 128 + signal.SIGTERM
    job.start(3)
    job.trains([1, 2, 3], second.born_s)
    job.finish_all([*agents[:2], job.agents[-1]])
    job.check()


def test_too_few_are_left(fleet) -> None:
    """Below the minimum nobody trains; when a node comes again, all do."""
    job: Fleet = fleet(2)
    job.c10d("2")
    agents = job.start_all([1, 2])
    job.trains([1, 2])
    since_s = time.monotonic()
    job.hosts[2].kill()
    agents[0].says("1 of 2 nodes")
    until(lambda: not workers_on(job, 1), job.story)
    job.hosts[2].boot()
    agents[1] = job.start(2)
    job.trains([1, 2], since_s)
    job.finish_all(agents)
    job.check()
