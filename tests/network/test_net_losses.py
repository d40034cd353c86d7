"""Nodes are lost in every way a node can be lost, come back, and two generations never live at once."""

from __future__ import annotations

import signal
import time
from itertools import pairwise

from tests.network.job_agents import FENCE_S, LEASE_S, LONG_LEASE, SHORT_LEASE, Generation, JobAgents, workers_on
from tests.support.limits import limit_s, until


def three(job_agents, nnodes: str = "2:3", conf: str = SHORT_LEASE) -> tuple[JobAgents, Generation]:
    job: JobAgents = job_agents(3)
    job.c10d(nnodes, conf=f"{conf},settle={limit_s(2):g}")
    job.start_all([1, 2, 3])
    return job, job.trains([1, 2, 3])


def finish(job: JobAgents, numbers: tuple[int, ...]) -> None:
    names = {f"node{number}" for number in numbers}
    job.finish_all([agent for agent in job.agents if agent.host.name in names and agent.program.running])


def test_killed_node_and_killed_agent(job_agents) -> None:
    """Every process of a node dies at once, then an agent alone, whose supervisor ends its workers: the kernel tells the
    others, who do not wait for a lease. Another agent on that node is taken in."""
    job, _ = three(job_agents, conf=LONG_LEASE)
    since_s = time.monotonic()
    job.hosts[3].kill()
    second = job.trains([1, 2], since_s)
    job.hosts[3].boot()
    agent = job.start(3)
    job.trains([1, 2, 3], second.born_s)
    since_s = time.monotonic()
    agent.signal(signal.SIGKILL)
    fourth = job.trains([1, 2], since_s)
    job.start(3)
    assert job.trains([1, 2, 3], fourth.born_s).world == 3
    finish(job, (1, 2, 3))
    job.check()


def test_crashed_node(job_agents) -> None:
    """Power loss: nobody is told."""
    job, _ = three(job_agents)
    since_s = time.monotonic()
    job.hosts.crash(3)
    job.trains([1, 2], since_s)
    finish(job, (1, 2))
    job.check()


def test_unplugged_node_stops_before_the_others_go_on_and_comes_back(job_agents) -> None:
    job, first = three(job_agents)
    since_s = time.monotonic()
    job.hosts.unplug(3)
    second = job.trains([1, 2], since_s)
    cut_off_s = first.last_s(["node3"])
    print(
        f"cut off node stopped {cut_off_s - since_s:.2f} s after the cable was pulled, "
        f"{second.born_s - cut_off_s:.2f} s before the others went on"
    )
    assert cut_off_s < second.born_s
    until(lambda: not workers_on(job, 3), job.story)
    job.hosts.plug(3)
    job.trains([1, 2, 3], second.born_s)
    # The node itself has seen why, and says so when it is back.
    job.agents[0].says("the link lost its carrier 1 time on eth0 of node node3")
    finish(job, (1, 2, 3))
    job.check()


def test_what_is_shorter_than_the_fence_costs_nothing(job_agents) -> None:
    """A cable that is in and out, never out for as long as the fence, and a network that loses a tenth of all packets:
    nobody is taken for lost. That the job ends well by the coordinator shows that every node still has its link."""
    job, first = three(job_agents, "3", f"lease={limit_s(10):g}")
    for _ in range(3):
        job.hosts.unplug(2)
        time.sleep(0.7)
        job.hosts.plug(2)
        time.sleep(0.3)
    for host in job.hosts:
        job.hosts.lose(host.number, 10)
    lossy_s = time.monotonic()
    until(lambda: bool(job.generations) and first.last_s() > lossy_s + 3.0, job.story)
    assert job.generations == [first], job.story()
    finish(job, (1, 2, 3))
    assert job.generations == [first], job.story()


def test_frozen_node_is_fenced_when_it_thaws(job_agents) -> None:
    """Every process stands still, the kernel still acknowledges: the others go on without it, and it comes back."""
    job, first = three(job_agents)
    since_s = time.monotonic()
    job.hosts[3].freeze()
    second = job.trains([1, 2], since_s)
    thawed_s = time.monotonic()
    job.hosts[3].thaw()
    third = job.trains([1, 2, 3], second.born_s)
    # What stands still cannot stop itself; what counts is how long it runs when it stands no more.
    print(f"a thawed worker lived for {first.last_s(['node3']) - thawed_s:.2f} s")
    assert first.last_s(["node3"]) < third.born_s
    assert first.last_s(["node1", "node2"]) < second.born_s
    assert second.last_s() < third.born_s
    finish(job, (1, 2, 3))


def test_a_firewall_resets_the_connections_of_a_node(job_agents) -> None:
    """The others know at once and do not wait; the node that is cut off goes on for no longer than the fence."""
    job, first = three(job_agents)
    since_s = time.monotonic()
    job.hosts.reject([3], [1, 2])
    second = job.trains([1, 2], since_s)
    third_alive_s = until(lambda: stopped(first, job), job.story) - since_s
    print(f"cut off node stopped {third_alive_s:.2f} s after the reset")
    job.hosts.heal()
    job.trains([1, 2, 3], second.born_s)
    finish(job, (1, 2, 3))
    job.check(overlap_s=FENCE_S + limit_s(1.0))


def stopped(generation: Generation, job: JobAgents) -> float:
    """When node3's workers were last seen, once none runs there; 0 before."""
    return generation.last_s(["node3"]) if not workers_on(job, 3) and job.generations else 0.0


def test_one_way_only(job_agents) -> None:
    """Packets pass in one direction, then only in the other: the node that gets no answer stops before the others go on."""
    job, before = three(job_agents)
    for senders, deaf in (([1], [3]), ([3], [1])):
        since_s = time.monotonic()
        job.hosts.one_way(senders, deaf)
        after = job.trains([1, 2], since_s)
        assert before.last_s(["node3"]) < after.born_s
        job.hosts.heal()
        before = job.trains([1, 2, 3], after.born_s)
    finish(job, (1, 2, 3))
    job.check()


def test_a_node_that_is_cut_off_while_its_workers_save_is_fenced_all_the_same(job_agents) -> None:
    """A stop is under way and one node takes its time; the cable goes; the others go on after its workers are dead."""
    job: JobAgents = job_agents(3)
    job.c10d("1:3", conf=SHORT_LEASE)
    job.start(1)
    job.start(2)
    job.start(3, "--shutdown-timeout", "30", env={"SLOW_TO_STOP": "1"})
    first = job.trains([1, 2, 3])
    since_s = time.monotonic()
    job.agents[1].signal(signal.SIGTERM)
    until((job.folder / "asked").exists, job.story)
    job.hosts.unplug(3)
    second = job.trains([1], since_s)
    assert (job.folder / "asked").stat().st_mtime - time.time() + time.monotonic() < first.last_s(["node3"]), (
        "slow to stop"
    )
    assert first.last_s(["node3"]) < second.born_s
    job.hosts.plug(3)
    job.trains([1, 3], second.born_s)
    finish(job, (1, 3))
    job.check()


def test_a_node_that_is_cut_off_can_be_told_to_end(job_agents) -> None:
    """One before its fence, and one that has stopped its workers."""
    job: JobAgents = job_agents(4)
    job.c10d("2:4", conf=SHORT_LEASE)
    agents = job.start_all([1, 2, 3, 4])
    job.trains([1, 2, 3, 4])
    since_s = time.monotonic()
    job.hosts.unplug(3)
    job.hosts.unplug(4)
    agents[2].signal(signal.SIGTERM)
    assert agents[2].end() == 128 + signal.SIGTERM
    agents[3].says("stopping this node's workers")
    agents[3].signal(signal.SIGTERM)
    assert agents[3].end() == 128 + signal.SIGTERM
    job.trains([1, 2], since_s)
    finish(job, (1, 2))
    job.check()


def test_partition_in_halves(job_agents) -> None:
    """Two of four go on, those with the coordinator; the others stopped before; healed, all four train together."""
    job: JobAgents = job_agents(4)
    job.c10d("2:4", conf=SHORT_LEASE)
    agents = job.start_all([1, 2, 3, 4])
    first = job.trains([1, 2, 3, 4])
    since_s = time.monotonic()
    job.hosts.partition([1, 2], [3, 4])
    second = job.trains([1, 2], since_s)
    assert first.last_s(["node3", "node4"]) < second.born_s
    for agent in agents[2:]:
        agent.says("waiting for the coordinator")
    assert job.generations[-1] == second, "the side without the coordinator formed a world"
    job.hosts.heal()
    job.trains([1, 2, 3, 4], second.born_s)
    job.finish_all(agents)
    job.check()
    assert all(before.last_s() < after.born_s for before, after in pairwise(job.generations))


# --- the node of the endpoint dies and comes back at the same address: without succession the others wait for it ------


def started(job_agents, endpoint: str = "node1") -> tuple[JobAgents, float]:
    job: JobAgents = job_agents(3)
    job.c10d("2:3", endpoint, f"{SHORT_LEASE},succession=off")
    job.start_all([1, 2, 3])
    first = job.trains([1, 2, 3])
    return job, first.born_s


def others_stopped(job: JobAgents) -> None:
    """The nodes without a coordinator have stopped their workers."""
    for number in (2, 3):
        until(lambda number=number: not workers_on(job, number), job.story)


def test_agent_and_node_of_the_endpoint_killed_and_restarted(job_agents) -> None:
    job, _ = started(job_agents, "10.77.0.1:29477")
    for killed in ("agent", "node"):
        since_s = time.monotonic()
        if killed == "agent":
            job.agents[0].signal(signal.SIGKILL)
        else:
            job.hosts[1].kill()
        others_stopped(job)
        assert not [each for each in job.generations if each.born_s > since_s], "nobody may go on without a coordinator"
        if killed == "node":
            job.hosts[1].boot()
        back_s = time.monotonic()
        job.start(1)
        job.trains([1, 2, 3], back_s)
    job.finish_all([*job.agents[1:3], job.agents[-1]])
    job.check()


def test_node_of_the_endpoint_crashes_and_returns_at_once(job_agents) -> None:
    """Nobody was told of its death, and its successor is there before anyone is fenced: the old ones must be gone first."""
    job, _ = started(job_agents)
    job.hosts.crash(1)
    job.hosts[1].boot()
    job.hosts.plug(1)
    back_s = time.monotonic()
    job.start(1)
    job.trains([1, 2, 3], back_s)
    job.finish_all(job.agents[1:])
    job.check()


def test_cable_of_the_endpoint_pulled(job_agents) -> None:
    """The node with the coordinator is alone and too few; the others stop; plugged back all three train."""
    job, _ = started(job_agents)
    job.hosts.unplug(1)
    job.agents[0].says("1 of 2 to 3 nodes")
    for agent in job.agents[1:]:
        agent.says("waiting for the coordinator")
    since_s = time.monotonic()
    job.hosts.plug(1)
    job.trains([1, 2, 3], since_s)
    job.finish_all(job.agents)
    job.check()


def test_frozen_node_of_the_endpoint(job_agents) -> None:
    """The coordinator stands still for longer than the lease and then goes on: the others have stopped, and rejoin."""
    job, born_s = started(job_agents)
    job.hosts[1].freeze()
    others_stopped(job)
    time.sleep(LEASE_S / 2)  # beyond its lease, which is longer than the others' fence
    since_s = time.monotonic()
    job.hosts[1].thaw()
    after = job.trains([1, 2, 3], since_s)
    assert after.born_s > born_s
    job.finish_all(job.agents)
    job.check()
