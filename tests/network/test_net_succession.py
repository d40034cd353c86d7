"""The node with the coordinator is lost, and the others elect a successor, who goes on where it stopped."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.network.job_agents import (
    LEASE_S,
    LONG_LEASE,
    SHORT_LEASE,
    WORKER,
    Agent,
    Generation,
    JobAgents,
    until,
    workers_on,
)
from tests.support.limits import limit_s

TOGETHER = f"{LONG_LEASE},settle={limit_s(10):g}"
"""All nodes are in the first generation, however late the last one comes. Nothing waits for it: with all of them it is
formed at once, and a successor knows how many are left."""
FOUNDED_S = 5.0
"""A node that is enough for the job trains well before this time."""


def started(
    job_agents, count: int, nnodes: str, conf: str = SHORT_LEASE, endpoint: str = "node1"
) -> tuple[JobAgents, Generation]:
    """A job whose coordinator is on node 1."""
    job: JobAgents = job_agents(count)
    job.c10d(nnodes, endpoint, conf)
    numbers = list(range(1, count + 1))
    job.start_all(numbers)
    return job, job.trains(numbers)


def finish(job: JobAgents, *numbers: int) -> None:
    names = {f"node{number}" for number in numbers}
    job.finish_all([agent for agent in job.agents if agent.host.name in names and agent.program.running])


def coordinators(job: JobAgents) -> list[str]:
    """The hosts of agents that became the coordinator by election."""
    return [agent.host.name for agent in job.agents if "this node is the coordinator now" in agent.text]


def test_every_process_of_the_coordinators_node_is_killed(job_agents) -> None:
    """The kernel tells the others, who wait for no lease."""
    job, _ = started(job_agents, 3, "2:3", LONG_LEASE)
    since_s = time.monotonic()
    job.hosts[1].kill()
    after = job.trains([2, 3], since_s)
    print(f"the others trained {after.born_s - since_s:.2f} s after the kill")
    assert len(coordinators(job)) == 1
    finish(job, 2, 3)
    job.check()


TAKES_THE_FOLDER = """
import os

from holdfast.train.snapshots import lease

if os.environ["RANK"] == "0":
    waits = []
    held = lease.acquire(os.environ["SITE"] + "/runs", "none", job_uid=os.environ["HOLDFAST_JOB_UID"], wait=waits.append)
    with open(os.environ["SITE"] + "/waits", "a") as file:
        print(len(waits), file=file)
"""


def test_the_snapshot_folder_of_a_lost_rank_0_is_taken_at_once(job_agents) -> None:
    """Its node dies with the coordinator, so nobody gives the folder back. The job is the same one for the successor."""
    job: JobAgents = job_agents(3)
    job.script.write_text(TAKES_THE_FOLDER + WORKER)
    job.c10d("2:3", conf=TOGETHER)
    job.start_all([1, 2, 3])
    first = job.trains([1, 2, 3])
    assert first.place("node1") == [0]
    since_s = time.monotonic()
    job.hosts[1].kill()
    job.trains([2, 3], since_s)
    finish(job, 2, 3)
    assert (job.folder / "waits").read_text().split() == ["0", "0"]
    job.check()


def test_the_coordinators_node_becomes_silent(job_agents) -> None:
    """Its cable is pulled: it steps down, its workers are dead before the others go on, and it comes back."""
    job, first = started(job_agents, 3, "2:3")
    since_s = time.monotonic()
    job.hosts.unplug(1)
    after = job.trains([2, 3], since_s)
    print(f"the others trained {after.born_s - since_s:.2f} s after the cable was pulled")
    assert first.last_s(["node1"]) < after.born_s
    job.agents[0].says("this node is not the coordinator any more")
    job.hosts.plug(1)
    job.trains([1, 2, 3], after.born_s)
    finish(job, 1, 2, 3)
    job.check()


@contextmanager
def two_and_a_witness(job_agents) -> Iterator[JobAgents]:
    """A job of the nodes 1 and 2, and a witness on node 3 that hears their coordinator."""
    job: JobAgents = job_agents(3)
    screen = job.folder / "witness.txt"
    with screen.open("wb") as file:
        line = [sys.executable, "-m", "holdfast", "witness", "--bind", "10.77.0.3:29500"]
        witness = job.hosts[3].start([*line, "--lease", f"{LEASE_S:g}"], cwd=job.folder, stdout=file)
    until(lambda: "listens" in screen.read_text(), job.story)
    job.c10d("1:2", "node1:29400,node3:29500", SHORT_LEASE)
    job.start_all([1, 2])
    job.trains([1, 2])
    until(lambda: "witness of job" in screen.read_text(), screen.read_text)
    yield job
    finish(job, 1, 2)
    witness.signal(signal.SIGTERM)
    assert witness.wait(limit_s(5.0)) == 0
    job.check()


def test_two_nodes_and_a_witness(job_agents) -> None:
    """The node with the coordinator is killed; the other one goes on with the witness's vote. A new agent on the first
    node learns from the witness where the job is, and joins it."""
    with two_and_a_witness(job_agents) as job:
        since_s = time.monotonic()
        job.hosts[1].kill()
        after = job.trains([2], since_s)
        job.hosts[1].boot()
        job.start(1)
        job.trains([1, 2], after.born_s)


def test_a_lone_coordinator_and_a_witness(job_agents) -> None:
    """The other node is lost, and the coordinator goes on alone, with the witness's consent. When its process is killed
    as well, the witness alone remembers: the new one waits for nobody's votes, and continues with the next number."""
    with two_and_a_witness(job_agents) as job:
        since_s = time.monotonic()
        job.hosts[2].kill()
        alone = job.trains([1], since_s)
        newest = max(told["generation"] for told in journal(job.agents[0], "coordinator.started"))
        job.hosts[1].kill()
        job.hosts[1].boot()
        agent = job.start(1)
        again = job.trains([1], alone.last_s())
        (reported,) = journal(agent, "coordinator.charter_reported")
        assert reported["generation"] == newest
        assert min(told["generation"] for told in journal(agent, "coordinator.started")) == newest + 1
        assert "may still run it" not in agent.text, "it knows that nobody can be elected"
        job.hosts[2].boot()
        job.start(2)
        job.trains([1, 2], again.born_s)


def journal(agent: Agent, event: str) -> list[dict[str, Any]]:
    """What this agent wrote of this kind."""
    (path,) = agent.screen.with_suffix("").glob("*/events.jsonl")
    notes = [json.loads(line) for line in path.read_text().splitlines() if event in line]
    return [note for note in notes if note["event"] == event]


PORTS = """
import json, os, sys, time

job_folder = os.environ["SITE"]
ports = {}
for path in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in open(path).read().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A":
            address, port = local.split(":")
            ports[int(port, 16)] = address
with open(job_folder + "/ports.part", "w") as file:
    json.dump({"master": int(os.environ["MASTER_PORT"]), "ports": ports}, file)
if os.environ["RANK"] == "0":
    os.rename(job_folder + "/ports.part", job_folder + "/ports")
"""
"""The first worker writes which ports of its host are listened at."""


@pytest.mark.parametrize(
    ("options", "ports"),
    [
        pytest.param(("--standalone",), (), id="standalone"),
        pytest.param(("--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1"), (29400,), id="one-node"),
        pytest.param(
            ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1", "--agent-port", "7777"),
            (7777, 29400),
            id="agent-port",
        ),
    ],
)
def test_an_agent_listens_only_where_others_need_it(
    job_agents, options: tuple[str, ...], ports: tuple[int, ...]
) -> None:
    """All of its host's ports, beside that of the store for the workers."""
    job: JobAgents = job_agents(1)
    job.script.write_text(PORTS)
    job.args = options
    assert job.start(1).end() == 0
    found = json.loads((job.folder / "ports").read_text())
    assert sorted(int(port) for port in found["ports"] if int(port) != found["master"]) == list(ports)


def test_the_coordinators_node_and_one_more_of_five(job_agents) -> None:
    """Nobody has seen the end of the other one: its workers may live until their fence."""
    job, _ = started(job_agents, 5, "2:5")
    since_s = time.monotonic()
    job.hosts[1].kill()
    job.hosts[2].kill()
    job.trains([3, 4, 5], since_s)
    finish(job, 3, 4, 5)
    job.check()


def test_its_agent_is_restarted_at_once_at_the_endpoint(job_agents) -> None:
    """Node 1 founds the job again while the others elect, or finds their successor: all three train in one job."""
    job, _ = started(job_agents, 3, "1:3", LONG_LEASE)
    since_s = time.monotonic()
    job.agents[0].signal(signal.SIGKILL)
    job.start(1)
    job.trains([1, 2, 3], since_s)
    finish(job, 1, 2, 3)
    job.check()


def test_the_coordinators_node_returns_and_the_successor_cannot_reach_it(job_agents) -> None:
    """It would train alone. The others tell it that the job lives, and it joins when the network is whole again."""
    job, _ = started(job_agents, 4, "1:4")
    since_s = time.monotonic()
    job.agents[0].signal(signal.SIGKILL)
    job.trains([2, 3, 4], since_s)
    successor = int(coordinators(job)[0].removeprefix("node"))
    job.hosts.partition([1], [successor])
    since_s = time.monotonic()
    job.start(1)
    job.agents[-1].says("another node reaches this job's coordinator, and this one does not")
    time.sleep(FOUNDED_S)
    assert [each for each in job.generations if each.born_s > since_s] == []
    job.hosts.heal()
    job.trains([1, 2, 3, 4], since_s)
    finish(job, 1, 2, 3, 4)
    job.check()


def test_a_fourth_node_without_a_vote_finds_the_successor_and_so_does_a_newcomer(job_agents) -> None:
    """The endpoint is gone for ever: who has no vote knows the voters, and a newcomer asks at the list's next entry."""
    job: JobAgents = job_agents(5)
    job.c10d("2:5", "node1:29400,node2:29400", LONG_LEASE)
    job.start_all([1, 2, 3, 4])
    job.trains([1, 2, 3, 4])
    since_s = time.monotonic()
    job.hosts[1].kill()
    after = job.trains([2, 3, 4], since_s)
    job.start(5)
    job.trains([2, 3, 4, 5], after.born_s)
    finish(job, 2, 3, 4, 5)
    job.check()


def test_the_coordinator_is_killed_while_it_admits_a_node(job_agents) -> None:
    job: JobAgents = job_agents(4)
    job.c10d("2:4", conf=LONG_LEASE)
    job.start_all([1, 2, 3])
    job.trains([1, 2, 3])
    job.start(4)
    job.agents[1].says("node node4 joined")
    since_s = time.monotonic()
    job.hosts[1].kill()
    until(lambda: any(coordinators(job)), job.story)
    until(
        lambda: any(each.complete and each.born_s > since_s and "node1" not in each.hosts for each in job.generations),
        job.story,
    )
    finish(job, 2, 3)
    job.check()


def test_the_coordinator_is_killed_while_the_workers_stop(job_agents) -> None:
    """They take their time. The successor ends them with the old generation before it forms another one."""
    job: JobAgents = job_agents(4)
    job.c10d("1:4", conf=SHORT_LEASE)
    job.start(1)
    job.start(2, "--shutdown-timeout", "3", env={"SLOW_TO_STOP": "1"})
    job.start_all([3, 4])
    job.trains([1, 2, 3, 4])
    job.agents[3].signal(signal.SIGTERM)
    until((job.folder / "asked").exists, job.story)
    since_s = time.monotonic()
    job.hosts[1].kill()
    job.trains([2, 3], since_s)
    finish(job, 2, 3)
    job.check()


ASKED = WORKER.replace(
    "    note()\n",
    """    if should_stop():
        open(SITE + "/asked", "w").close()
        while not os.path.exists(SITE + "/saved"):
            note()
            time.sleep(0.05)
        sys.exit(0)
    note()
    beat()
    if about["rank"] == 1 and os.path.exists(SITE + "/fail"):
        os.unlink(SITE + "/fail")
        raise ValueError("broken on purpose")
""",
).replace("\n\ndef note", "\nfrom holdfast.worker import beat, should_stop\n\ndef note")
"""It makes steps, fails when it is asked to, and saves until the test says that it is done when it has to stop."""


def commanded(job_agents, count: int, *more: str) -> JobAgents:
    """A job of ASKED whose nodes do not see each other's agents, as on real machines."""
    job: JobAgents = job_agents(count)
    job.script.write_text(ASKED)
    job.c10d(f"1:{count}", conf=TOGETHER)
    job.args += more
    numbers = list(range(1, count + 1))
    for number in numbers:
        job.start(number, env={"HOLDFAST_RUNTIME_DIR": runtime(job, number)})
    job.trains(numbers)
    return job


def runtime(job: JobAgents, number: int) -> str:
    return str(job.folder / f"running{number}")


def command(job: JobAgents, number: int, *words: str | Path) -> str:
    """What a command prints on this host."""
    line = ("env", f"HOLDFAST_RUNTIME_DIR={runtime(job, number)}", sys.executable, "-m", "holdfast", *words)
    return job.hosts[number].run(line)


def test_commands_pages_budget_and_verdict_follow_the_coordinator(job_agents) -> None:
    began_s = time.monotonic()
    job = commanded(job_agents, 3, "--max-restarts", "1", "--dashboard", "0.0.0.0:8801", "--metrics", "0.0.0.0:8802")
    trains_s = time.monotonic()  # the agents' own start, which may be slow, is not part of the job's time
    (job.folder / "fail").touch()
    job.agents[0].says("restart 1 of 1")
    job.trains([1, 2, 3], job.generations[0].last_s())
    job_s = time.monotonic() - trains_s
    since_s = time.monotonic()
    job.hosts[1].kill()
    job.trains([2, 3], since_s)
    (name,) = coordinators(job)
    leader = int(name.removeprefix("node"))
    for number in (2, 3):
        view = json.loads(command(job, number, "status", "--json"))
        assert view["whole"]
        assert {node["host"] for node in view["nodes"]} == {"node2", "node3"}
        assert view["restarts"] == 1
        assert 0.5 * job_s < view["job_s"] < time.monotonic() - began_s
        assert "2 ranks" in command(job, number, "stacks")
    assert "holdfast_job_restarts_left 0.0" in page(job, f"http://{name}:8802/metrics")
    assert "holdfast_job_" not in page(job, f"http://node{5 - leader}:8802/metrics")
    (link,) = [line.split()[-1] for line in job.agents[leader - 1].text.splitlines() if "dashboard http" in line]
    assert "<html" in page(job, link)
    (job.folder / "fail").touch()
    for agent in job.agents[1:]:
        assert agent.end() == 1
        assert "after 1 restart: rank 1" in agent.text
    folders = [next((job.folder / agent.screen.stem).iterdir()) for agent in job.agents]
    verdicts = [json.loads((folder / "verdict.json").read_text()) for folder in folders[1:]]
    assert verdicts[0] == verdicts[1]
    assert "the coordinator on it ended" in command(job, 3, "report", *folders)
    job.check()


def page(job: JobAgents, address: str) -> str:
    script = (
        f"from urllib.request import *; print(build_opener(HTTPCookieProcessor()).open({address!r}).read().decode())"
    )
    return job.hosts[3].run([sys.executable, "-c", script])


def test_the_coordinator_is_killed_while_the_next_voter_leaves(job_agents) -> None:
    """That node gives its vote, and does not stand. Nobody waits for a fence: it is proved that it has ended."""
    job = commanded(job_agents, 4)
    job.agents[1].signal(signal.SIGTERM)
    until((job.folder / "asked").exists, job.story)
    since_s = time.monotonic()
    job.hosts[1].kill()
    until(lambda: coordinators(job), job.story)
    (job.folder / "saved").touch()
    job.trains([3, 4], since_s)
    assert coordinators(job) == ["node3"]
    assert job.agents[1].end() == 75
    finish(job, 3, 4)
    job.check()


def test_the_coordinator_is_killed_while_the_job_is_stopped(job_agents) -> None:
    """All save and end, and nobody starts the job again."""
    job = commanded(job_agents, 3)
    for agent in job.agents[1:]:
        agent.signal(signal.SIGTERM)
    until((job.folder / "asked").exists, job.story)
    job.hosts[1].kill()
    until(lambda: all(journal(agent, "agent.link_lost") for agent in job.agents[1:]), job.story)
    (job.folder / "saved").touch()
    assert [agent.end() for agent in job.agents[1:]] == [75, 75]
    assert len(job.generations) == 1
    job.check()


@pytest.mark.parametrize("event", ["coordinator.assigned", "coordinator.started"])
def test_the_coordinator_is_killed_while_the_first_generation_begins(job_agents, event: str) -> None:
    job: JobAgents = job_agents(3)
    job.c10d("2:3", conf=TOGETHER)
    job.start_all([1, 2, 3])

    def begun() -> bool:
        journals = (job.folder / job.agents[0].screen.stem).glob("*/events.jsonl")
        return any(event in journal.read_text() for journal in journals)

    until(begun, job.story)
    since_s = time.monotonic()
    job.hosts[1].kill()
    job.trains([2, 3], since_s)
    finish(job, 2, 3)
    job.check()


def test_the_coordinator_is_killed_while_the_job_ends(job_agents) -> None:
    """Its own worker has ended well. Whatever the others know of that, they end well, too."""
    job = commanded(job_agents, 3)
    job.finish()
    until(lambda: not workers_on(job, 1), job.story)
    job.hosts[1].kill()
    assert [agent.end() for agent in job.agents[1:]] == [0, 0]
    job.check()


GLOO = WORKER.replace(
    'while not os.path.exists(SITE + "/finish"):\n    note()',
    """import torch
import torch.distributed as dist

dist.init_process_group("gloo")
done = torch.zeros(1)
while not done.item():
    done[0] = os.path.exists(SITE + "/finish")
    dist.all_reduce(done, dist.ReduceOp.MAX)
    note()""",
)


def test_collectives_go_on_after_the_coordinators_node_was_killed(job_agents) -> None:
    """torch on gloo: the others' all-reduce breaks, and works again in the next generation."""
    job: JobAgents = job_agents(3)
    script = job.folder / "reduce.py"
    script.write_text(GLOO)
    job.c10d("2:3", conf=LONG_LEASE)
    for number in (1, 2, 3):
        # `check` compares the times at which processes were made: a standby is made before its generation.
        job.start(number, "--standby", "off", script=script)
    job.trains([1, 2, 3])
    since_s = time.monotonic()
    job.hosts[1].kill()
    after = job.trains([2, 3], since_s)
    print(f"the others trained {after.born_s - since_s:.2f} s after the kill")
    finish(job, 2, 3)
    job.check()
