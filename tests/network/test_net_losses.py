"""Nodes are lost in every way a node can be lost, come back, and two generations never live at once."""

from __future__ import annotations

import signal
import time
from itertools import pairwise

import pytest

from tests.network.fleet import Fleet, Generation, measured, until

SILENCE_S = 10.0
"""Promised: a node is cut off → the others train."""
DEATH_S = 1.5
"""Promised: a node is killed → the others train."""


def three(fleet, nnodes: str = "2:3", conf: str = "") -> tuple[Fleet, Generation]:
    job: Fleet = fleet(3)
    job.c10d(nnodes, conf=conf)
    job.start_all([1, 2, 3])
    return job, job.trains([1, 2, 3])


def finish(job: Fleet, numbers: tuple[int, ...]) -> None:
    names = {f"node{number}" for number in numbers}
    job.finish_all([agent for agent in job.agents if agent.host.name in names and agent.program.running])


def test_killed_node(fleet) -> None:
    """Every process of a node dies at once: its kernel tells the others."""
    job, _ = three(fleet)
    since_s = time.monotonic()
    job.hosts[3].kill()
    after = job.trains([1, 2], since_s)
    measured("a whole node killed -> survivors train", after.trains_s - since_s, DEATH_S)
    job.hosts[3].boot()
    job.start(3)
    job.trains([1, 2, 3], after.born_s)
    finish(job, (1, 2, 3))
    job.check()


def test_crashed_node(fleet) -> None:
    """Power loss: nobody is told."""
    job, _ = three(fleet)
    since_s = time.monotonic()
    job.hosts.crash(3)
    after = job.trains([1, 2], since_s)
    measured("a whole node crashed -> survivors train", after.trains_s - since_s, SILENCE_S)
    finish(job, (1, 2))
    job.check()


def test_unplugged_node_stops_before_the_others_go_on_and_comes_back(fleet) -> None:
    job, first = three(fleet)
    since_s = time.monotonic()
    job.hosts.unplug(3)
    second = job.trains([1, 2], since_s)
    measured("cable pulled -> survivors train", second.trains_s - since_s, SILENCE_S)
    cut_off_s = first.last_s(["node3"])
    print(
        f"cut off node stopped {cut_off_s - since_s:.2f} s after the cable was pulled, "
        f"{second.born_s - cut_off_s:.2f} s before the others went on"
    )
    assert cut_off_s < second.born_s
    until(lambda: not any(b"train.py" in command for command in commands(job, 3)), job.story)
    since_s = time.monotonic()
    job.hosts.plug(3)
    third = job.trains([1, 2, 3], second.born_s)
    measured("cable back -> all three train", third.trains_s - since_s, 5.0)
    finish(job, (1, 2, 3))
    job.check()


def commands(job: Fleet, number: int) -> list[bytes]:
    """What runs as a worker there: the agent has the script on its line as well, but more before it."""
    found = []
    for pid in job.hosts[number].pids():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read()
        except OSError:
            continue
        if b"holdfast.run" not in line:
            found.append(line)
    return found


def test_short_silence_is_borne(fleet) -> None:
    """A cable out for less than the fence costs nothing."""
    job, first = three(fleet, conf="lease=3")
    job.hosts.unplug(3)
    time.sleep(1.0)
    job.hosts.plug(3)
    time.sleep(4.0)  # a lease, after which anything that was lost would have shown
    assert job.generations == [first]
    finish(job, (1, 2, 3))


def test_frozen_node_is_fenced_when_it_thaws(fleet) -> None:
    """Every process stands still, the kernel still acknowledges: the others go on without it, and it comes back."""
    job, first = three(fleet)
    since_s = time.monotonic()
    job.hosts[3].freeze()
    second = job.trains([1, 2], since_s)
    measured("node frozen -> survivors train", second.trains_s - since_s, SILENCE_S)
    thawed_s = time.monotonic()
    job.hosts[3].thaw()
    third = job.trains([1, 2, 3], second.born_s)
    measured("node thawed -> all three train", third.trains_s - thawed_s, 5.0)
    # What stands still cannot stop itself; what counts is how long it runs when it stands no more.
    print(f"a thawed worker lived for {first.last_s(['node3']) - thawed_s:.2f} s")
    assert first.last_s(["node3"]) <= thawed_s + 1.0
    assert first.last_s(["node1", "node2"]) < second.born_s
    assert second.last_s() < third.born_s
    finish(job, (1, 2, 3))


def test_a_firewall_resets_the_connections_of_a_node(fleet) -> None:
    """The others know at once and do not wait; the node that is cut off goes on for no longer than the fence (4 s)."""
    job, first = three(fleet)
    since_s = time.monotonic()
    job.hosts.reject([3], [1, 2])
    second = job.trains([1, 2], since_s)
    measured("connections reset -> survivors train", second.trains_s - since_s, DEATH_S)
    third_alive_s = until(lambda: stopped(first, job), job.story) - since_s
    print(f"cut off node stopped {third_alive_s:.2f} s after the reset")
    assert third_alive_s <= 4.0 + 1.0
    job.hosts.heal()
    job.trains([1, 2, 3], second.born_s)
    finish(job, (1, 2, 3))
    job.check(overlap_s=4.0 + 1.0)


def stopped(generation: Generation, job: Fleet) -> float:
    """When node3's workers were last seen, once they have not been for a second; 0 before."""
    last_s = generation.last_s(["node3"]) if job.generations else 0.0
    return last_s if time.monotonic() - last_s > 1.0 else 0.0


def test_agent_killed(fleet) -> None:
    """Its keeper ends its workers; another agent on the same node takes its place."""
    job, _ = three(fleet)
    since_s = time.monotonic()
    job.agents[2].signal(signal.SIGKILL)
    second = job.trains([1, 2], since_s)
    measured("an agent killed -> survivors train", second.trains_s - since_s, DEATH_S)
    job.start(3)
    third = job.trains([1, 2, 3], second.born_s)
    assert third.world == 3
    finish(job, (1, 2, 3))
    job.check()


@pytest.mark.parametrize("deaf", ["the agent", "the coordinator"])
def test_one_way_only(fleet, deaf: str) -> None:
    """Packets pass in one direction: the node that gets no answer stops before the others go on."""
    job, first = three(fleet, conf="lease=3")
    since_s = time.monotonic()
    job.hosts.one_way([1], [3]) if deaf == "the agent" else job.hosts.one_way([3], [1])
    second = job.trains([1, 2], since_s)
    measured(f"{deaf} hears nothing, lease 3 s -> survivors train", second.trains_s - since_s, 5.0)
    assert first.last_s(["node3"]) < second.born_s
    job.hosts.heal()
    job.trains([1, 2, 3], second.born_s)
    finish(job, (1, 2, 3))
    job.check()


def test_loose_cable(fleet) -> None:
    """In and out every second, never out for as long as the fence: nothing comes of it."""
    job, first = three(fleet)
    for _ in range(4):
        job.hosts.unplug(2)
        time.sleep(0.7)
        job.hosts.plug(2)
        time.sleep(0.7)
    time.sleep(3.0)
    assert job.generations == [first], job.story()
    finish(job, (1, 2, 3))


def test_a_node_that_is_cut_off_while_its_workers_save_is_fenced_all_the_same(fleet) -> None:
    """A stop is under way and one node takes its time; the cable goes; the others go on after its workers are dead."""
    job: Fleet = fleet(3)
    job.c10d("1:3", conf="lease=3")
    job.start(1)
    job.start(2)
    job.start(3, "--shutdown-timeout", "30", env={"SLOW_TO_STOP": "1"})
    first = job.trains([1, 2, 3])
    since_s = time.monotonic()
    job.agents[1].signal(signal.SIGTERM)
    time.sleep(0.3)
    job.hosts.unplug(3)
    second = job.trains([1], since_s)
    assert first.last_s(["node3"]) > since_s + 0.5, "it was to be slow"
    assert first.last_s(["node3"]) < second.born_s
    job.hosts.plug(3)
    job.trains([1, 3], second.born_s)
    finish(job, (1, 3))
    job.check()


@pytest.mark.parametrize("fenced", [False, True])
def test_a_node_that_is_cut_off_can_be_told_to_end(fleet, fenced: bool) -> None:
    job, _ = three(fleet)
    job.hosts.unplug(3)
    if fenced:
        job.agents[2].says("stopping this node's workers")
    since_s = time.monotonic()
    job.agents[2].signal(signal.SIGTERM)
    assert job.agents[2].end() == 128 + signal.SIGTERM
    measured(f"SIGTERM to an agent that is cut off, fenced {fenced} -> its end", time.monotonic() - since_s, 2.0)
    job.trains([1, 2], since_s)
    finish(job, (1, 2))
    job.check()


def test_lossy_network(fleet) -> None:
    """A tenth of all packets is lost: nobody is taken for lost."""
    job, first = three(fleet)
    for host in job.hosts:
        job.hosts.lose(host.number, 10)
    time.sleep(8.0)
    assert job.generations == [first], job.story()
    finish(job, (1, 2, 3))


def test_partition_in_halves(fleet) -> None:
    """Two of four go on, those with the coordinator; the others stopped before; healed, all four train together."""
    job: Fleet = fleet(4)
    job.c10d("2:4")
    agents = job.start_all([1, 2, 3, 4])
    first = job.trains([1, 2, 3, 4])
    since_s = time.monotonic()
    job.hosts.partition([1, 2], [3, 4])
    second = job.trains([1, 2], since_s)
    measured("partition 2|2 -> one side trains", second.trains_s - since_s, SILENCE_S)
    assert first.last_s(["node3", "node4"]) < second.born_s
    time.sleep(3.0)
    assert job.generations == [first, second], "the side without the coordinator formed a world"
    since_s = time.monotonic()
    job.hosts.heal()
    third = job.trains([1, 2, 3, 4], second.born_s)
    measured("healed -> all four train", third.trains_s - since_s, 5.0)
    job.finish_all(agents)
    job.check()
    assert all(before.last_s() < after.born_s for before, after in pairwise(job.generations))
