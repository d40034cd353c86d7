"""The node of the endpoint dies and comes back at the same address: the others wait for it, and the job goes on."""

from __future__ import annotations

import signal
import time

from tests.network.fleet import LEASE_S, SHORT_LEASE, Fleet, until, workers_on


def started(fleet, endpoint: str = "node1") -> tuple[Fleet, float]:
    job: Fleet = fleet(3)
    job.c10d("2:3", endpoint, SHORT_LEASE)
    job.start_all([1, 2, 3])
    first = job.trains([1, 2, 3])
    return job, first.born_s


def stopped(job: Fleet) -> None:
    """The nodes without a coordinator have stopped their workers."""
    for number in (2, 3):
        until(lambda number=number: not workers_on(job, number), job.story)


def test_agent_and_node_of_the_endpoint_killed_and_restarted(fleet) -> None:
    job, _ = started(fleet, "10.77.0.1:29477")
    for killed in ("agent", "node"):
        since_s = time.monotonic()
        if killed == "agent":
            job.agents[0].signal(signal.SIGKILL)
        else:
            job.hosts[1].kill()
        stopped(job)
        assert not [each for each in job.generations if each.born_s > since_s], "nobody may go on without a coordinator"
        if killed == "node":
            job.hosts[1].boot()
        back_s = time.monotonic()
        job.start(1)
        job.trains([1, 2, 3], back_s)
    job.finish_all([*job.agents[1:3], job.agents[-1]])
    job.check()


def test_node_of_the_endpoint_crashes_and_returns_at_once(fleet) -> None:
    """Nobody was told of its death, and its successor is there before anyone is fenced: the old ones must be gone first."""
    job, _ = started(fleet)
    job.hosts.crash(1)
    job.hosts[1].boot()
    job.hosts.plug(1)
    back_s = time.monotonic()
    job.start(1)
    job.trains([1, 2, 3], back_s)
    job.finish_all(job.agents[1:])
    job.check()


def test_cable_of_the_endpoint_pulled(fleet) -> None:
    """The node with the coordinator is alone and too few; the others stop; plugged back all three train."""
    job, _ = started(fleet)
    job.hosts.unplug(1)
    job.agents[0].says("1 of 2 to 3 nodes")
    for agent in job.agents[1:]:
        agent.says("waiting for the coordinator")
    since_s = time.monotonic()
    job.hosts.plug(1)
    job.trains([1, 2, 3], since_s)
    job.finish_all(job.agents)
    job.check()


def test_frozen_node_of_the_endpoint(fleet) -> None:
    """The coordinator stands still for longer than the lease and then goes on: the others have stopped, and rejoin."""
    job, born_s = started(fleet)
    job.hosts[1].freeze()
    stopped(job)
    time.sleep(LEASE_S / 2)  # beyond its lease, which is longer than the others' fence
    since_s = time.monotonic()
    job.hosts[1].thaw()
    after = job.trains([1, 2, 3], since_s)
    assert after.born_s > born_s
    job.finish_all(job.agents)
    job.check()
