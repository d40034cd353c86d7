"""Nodes come and go on purpose: arrivals are gathered, spares wait and are promoted, a leave is no failure."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from tests.network.job_agents import JobAgents, workers_on
from tests.support.limits import limit_s, until


def test_two_arrivals_are_one_regroup(job_agents) -> None:
    """Both come while the coordinator stands still: for it they come together, however slowly they were started."""
    job: JobAgents = job_agents(4)
    # Of two that are connected one may be slower to join.
    job.change(
        "import functools\nfrom holdfast.cli import resolve\n"
        f"resolve.Limits = functools.partial(resolve.Limits, gather_s={limit_s(1)})"
    )
    job.c10d("2:4", conf=f"lease={limit_s(20):g}")
    agents = job.start_all([1, 2])
    first = job.trains([1, 2])
    agents[0].signal(signal.SIGSTOP)
    agents += job.start_all([3, 4])
    until(lambda: connected(job, 3) and connected(job, 4), job.story)
    agents[0].signal(signal.SIGCONT)
    agents[0].program.resume()
    second = job.trains([1, 2, 3, 4])
    job.finish_all(agents)
    assert job.generations == [first, second]
    job.check()


def connected(job: JobAgents, number: int) -> bool:
    """Whether an agent there has a connection to the endpoint."""
    return ":29400" in job.hosts[number].run(["ss", "--tcp", "--numeric", "state", "established"])


def test_too_few_are_left(job_agents) -> None:
    """Below the minimum nobody trains; when a node comes again, all do."""
    job: JobAgents = job_agents(2)
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


def test_an_excluded_host_takes_no_part_until_it_is_readmitted(job_agents) -> None:
    """Its nodes leave the running job, which goes on without them; its next agent has to wait."""
    job: JobAgents = job_agents(3)
    job.c10d("2:3")
    agents = job.start_all([1, 2, 3])
    job.trains([1, 2, 3])
    (run,) = (job.folder / "agent0-node1").iterdir()
    command = [sys.executable, "-m", "holdfast"]
    since_s = time.monotonic()
    assert "sent to 1 node" in job.hosts[1].run([*command, "exclude", "node3", run, "--for", "1d"])
    assert agents[2].end() == 128 + signal.SIGTERM
    job.trains([1, 2], since_s)
    agents[2] = job.start(3)
    agents[2].says("node3 is excluded: it has to wait")
    since_s = time.monotonic()
    job.hosts[1].run([*command, "readmit", "node3", run])
    job.trains([1, 2, 3], since_s)
    job.finish_all(agents)
    job.check()


# --- nodes on a network find each other: names, addresses, families, wishes, and what is said when they do not --------


@pytest.mark.parametrize("endpoint", ["node1", "[fd00:77::1]:29477"])
def test_three_nodes_of_different_sizes_meet(job_agents, endpoint: str) -> None:
    if endpoint.startswith("[") and not os.path.exists("/proc/sys/net/ipv6"):
        pytest.skip("this kernel has no IPv6")
    job = job_agents(3)
    job.c10d("3", endpoint)
    agents = [
        job.start(number, "--nproc-per-node", str(size), env={"CONNECT": "1"})
        for number, size in ((3, 1), (2, 2), (1, 1))
    ]
    generation = job.trains([1, 2, 3])
    job.finish_all(agents)
    assert generation.world == 4
    assert [len(generation.place(f"node{number}")) for number in (1, 2, 3)] == [1, 2, 1]
    assert generation.place("node1") == [0], "rank 0 is where the coordinator is"
    assert generation.master == ("fd00:77::1" if endpoint.startswith("[") else "10.77.0.1")
    job.check()


def test_own_name_is_a_loopback_address(job_agents) -> None:
    """As Debian's installer writes it: on node1 its own name is 127.0.1.1, everywhere else it is what it is."""
    job = job_agents(3)
    book = job.hosts.phone_book()
    job.hosts[1].hosts_file.write_text(book.replace("10.77.0.1 node1", "127.0.1.1 node1"))
    job.c10d("3")
    agents = [job.start(number, env={"CONNECT": "1"}) for number in (1, 2, 3)]
    assert job.trains([1, 2, 3]).master == "10.77.0.1"
    job.finish_all(agents)


def test_local_addr_is_what_the_others_are_told(job_agents) -> None:
    job = job_agents(2)
    job.hosts[1].run(["ip", "addr", "add", "10.77.9.1/16", "dev", "eth0"])
    job.c10d("2")
    agents = [job.start(1, "--local-addr", "10.77.9.1", env={"CONNECT": "1"}), job.start(2, env={"CONNECT": "1"})]
    assert job.trains([1, 2]).master == "10.77.9.1"
    job.finish_all(agents)


def test_name_resolves_late(job_agents) -> None:
    job = job_agents(2)
    job.c10d("2", "meeting.example:29477")
    agents = job.start_all([1, 2])
    for agent in agents:
        agent.says("does not resolve")
    for host in job.hosts:
        host.hosts_file.write_text(job.hosts.phone_book() + "10.77.0.1 meeting.example\n")
    assert job.trains([1, 2]).master == "10.77.0.1"
    job.finish_all(agents)


def test_silent_port_is_named(job_agents) -> None:
    """A firewall between the nodes: what was tried is said while waiting and at the end."""
    job = job_agents(2)
    job.hosts.blackhole(1, 29400)
    job.c10d("2", conf=f"join_timeout={round(limit_s(5))}")
    first, second = job.start_all([1, 2])
    second.says("waiting for the coordinator: no coordinator at node1:29400: 10.77.0.1: no answer within 3 s")
    assert second.end() != 0
    assert "10.77.0.1: no answer within 3 s" in second.text.splitlines()[-1] + second.text.splitlines()[-2], second.text
    assert first.end() != 0
    assert "1 of 2 nodes" in first.text or "1 of at least 2 nodes" in first.text, first.text
