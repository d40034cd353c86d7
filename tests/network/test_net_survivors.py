"""Nodes become silent while all ranks train in `ht.survive`: their workers are suspended, and the others go on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest

from holdfast.linux import process_stat
from tests.network.job_agents import Agent, JobAgents, until
from tests.support.limits import limit_s
from tests.warm import ON_CPU, Warm
from tests.warm_jobs import WarmJobs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.xdist_group("torch jobs"),
]

SCRIPT = """
import json, os, socket, time
import torch
from torch import nn
import holdfast.train as ht

SITE = os.environ["SITE"]
trail = os.open(SITE + "/steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
torch.set_num_threads(1)
with ht.process_group() as pg, ht.Snapshots(SITE + "/runs", every="1h", memory_every=20) as snaps:
    model = ht.ddp(nn.Linear(8, 2), pg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = snaps.track(model=model, optimizer=optimizer)
    snaps.resume()

    @ht.survive(snaps)
    def train():
        done = torch.zeros(1)
        while not done.item():
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            about = {"host": socket.gethostname(), "pid": os.getpid(), "world": pg.world, "step": state.step + 1}
            os.write(trail, json.dumps({**about, "now": time.monotonic()}).encode() + b"\\n")
            snaps.step()
            done[0] = os.path.exists(SITE + "/finish")
            torch.distributed.all_reduce(done, torch.distributed.ReduceOp.MAX)
            time.sleep(0.02)

    train()
"""


SHARDED = """
import json, os, socket, time
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
import holdfast.train as ht

SITE, SHARDS, COPIES = os.environ["SITE"], int(os.environ["SHARDS"]), int(os.environ["COPIES"])
trail = os.open(SITE + "/steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
torch.set_num_threads(1)
with ht.process_group() as pg, ht.Snapshots(SITE + "/runs", every="1h", memory_every=5, copies=COPIES) as snaps:

    @ht.survive(snaps)
    def train():
        mesh = pg.mesh(replicate=-1, shard=SHARDS) if SHARDS else pg.mesh(shard=-1)
        torch.manual_seed(0)  # replicas begin alike
        model = fully_shard(nn.Linear(8, 8), mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters())
        state = snaps.track(model=model, optimizer=optimizer)
        resumed = snaps.resume()
        about = {"host": socket.gethostname(), "pid": os.getpid(), "world": pg.world}
        about |= {"source": resumed.source if resumed else "", "began": state.step}
        done, hold = torch.zeros(1), SITE + "/hold-" + socket.gethostname()
        while not done.item():
            while os.path.exists(hold):
                open(SITE + "/held", "w").close()
                time.sleep(0.01)
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            snaps.step()
            line = {**about, "step": state.step, "now": time.monotonic()}
            os.write(trail, json.dumps(line).encode() + b"\\n")
            done[0] = os.path.exists(SITE + "/finish")
            torch.distributed.all_reduce(done, torch.distributed.ReduceOp.MAX)
            time.sleep(0.02)

    train()
"""
"""FSDP2, or HSDP if SHARDS is not 0. The disk gets nothing before the end."""


@pytest.fixture(scope="module")
def warm_jobs(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmJobs]:
    with WarmJobs(warm, tmp_path_factory.mktemp("jobs")) as made:
        yield made


@pytest.fixture
def hosts_of_a_job(job_agents: Any, warm_jobs: WarmJobs, monkeypatch: pytest.MonkeyPatch) -> JobAgents:
    """Three hosts, whose agents share an import of torch."""
    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)
    made: JobAgents = job_agents(3)
    made.launcher = (*warm_jobs.command("holdfast", "run"),)
    return made


SETTLE = f"settle={limit_s(10):g}"
"""All nodes are in the first generation, however late the last one comes: then it is formed at once."""


class Done(NamedTuple):
    """One rank has done a step."""

    host: str
    pid: int
    """As the host numbers it."""
    world: int
    step: int
    now: float
    source: str = ""
    """Of the state with which its call of the training function began."""
    began: int = 0
    """The step of that state."""


class Job:
    """Three hosts, one rank each; the coordinator is on the first."""

    def __init__(self, job_agents: JobAgents, conf: str = "") -> None:
        self.job_agents = job_agents
        self.job_agents.script.write_text(SCRIPT)
        self.job_agents.c10d("1:3", conf=f"{conf},{SETTLE}" if conf else SETTLE)
        self.agents = self.job_agents.start_all([1, 2, 3])
        self.until(lambda: {each.host for each in self.of(3) if each.step > 20} == {"node1", "node2", "node3"})
        self.pids = {each.host: each.pid for each in self.of(3)}

    def steps(self) -> list[Done]:
        path = self.job_agents.folder / "steps.jsonl"
        text = path.read_text() if path.exists() else ""
        return [Done(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]

    def of(self, world: int, since_s: float = 0.0) -> list[Done]:
        return [each for each in self.steps() if each.world == world and each.now > since_s]

    def until(self, condition: Any) -> None:
        until(condition, lambda: f"{self.steps()[-9:]}\n{self.job_agents.story()}", 90)

    def two_go_on(self, lost: str) -> list[Done]:
        """The others train in the same processes; the lost one has done nothing since they began."""
        others = {host: pid for host, pid in self.pids.items() if host != lost}
        self.until(lambda: {each.host for each in self.of(2)} == set(others))
        alone = self.of(2)
        assert {(each.host, each.pid) for each in alone} == set(others.items())
        began_s = min(each.now for each in alone)
        assert not [each for each in self.steps() if each.host == lost and each.now > began_s]
        return alone

    def all_again(self, alone: list[Done]) -> None:
        """And end well. No rank has done a step twice, and none has left one out."""
        self.until(lambda: len({each.host for each in self.of(3, alone[-1].now)}) == 3)
        self.job_agents.finish_all(self.agents)
        for process in {(each.host, each.pid) for each in self.steps()}:
            numbers = [each.step for each in self.steps() if (each.host, each.pid) == process]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))

    def suspends(self, number: int) -> None:
        """Wait until its worker is suspended. An agent may be stopped there, too."""
        own = self.agents[number - 1].pid
        pids = self.job_agents.hosts[number].pids
        self.until(lambda: any(state(pid) == "T" for pid in pids() if pid != own))

    def said(self, text: str) -> bool:
        return any(text in agent.text for agent in self.agents)


def state(pid: int) -> str:
    stat = process_stat(pid)
    return stat.state if stat is not None else ""


def test_a_short_silence_suspends_the_workers_and_a_longer_one_costs_the_node(hosts_of_a_job: JobAgents) -> None:
    """After the short one they continue with the same processes in the same generation. The lease is longer than usual,
    because the kernel may send again only a second after the cable is in: that is as long as the usual time between
    suspension and loss."""
    job = Job(hosts_of_a_job, conf="lease=18")
    job.job_agents.hosts.unplug(3)
    job.suspends(3)
    job.job_agents.hosts.plug(3)
    job.until(lambda: "the coordinator answers again: the workers continue" in job.agents[2].text)
    newest = job.steps()[-1].step
    job.until(lambda: job.steps()[-1].step > newest + 20)
    assert not job.of(2)
    assert {(each.host, each.pid) for each in job.steps()} == set(job.pids.items())

    job.job_agents.hosts.unplug(3)
    alone = job.two_go_on("node3")
    assert job.said("node3 was lost: silent for more than")
    assert "this node's workers are suspended" in job.agents[2].text
    job.job_agents.hosts.plug(3)
    job.all_again(alone)


def test_the_workers_of_a_stopped_agent_are_suspended_by_its_supervisor(hosts_of_a_job: JobAgents) -> None:
    job = Job(hosts_of_a_job)
    stopped = job.agents[2].pid
    os.kill(stopped, signal.SIGSTOP)
    job.suspends(3)
    alone = job.two_go_on("node3")
    os.kill(stopped, signal.SIGCONT)
    job.all_again(alone)


def test_the_others_keep_their_processes_when_the_coordinators_node_becomes_silent(hosts_of_a_job: JobAgents) -> None:
    """A successor lets the suspended workers continue before they are killed."""
    job = Job(hosts_of_a_job)
    job.job_agents.hosts.unplug(1)
    alone = job.two_go_on("node1")
    assert job.said("this node is the coordinator now")
    assert job.said("node1 was lost: it stopped answering together with the coordinator")
    job.job_agents.hosts.plug(1)
    job.all_again(alone)


class ShardedJob(Job):
    """Some of three hosts, with some ranks on each."""

    def __init__(self, job_agents: JobAgents, numbers: Sequence[int], ranks: int, **env: str) -> None:
        self.job_agents = job_agents
        self.job_agents.script.write_text(SHARDED)
        # A newcomer has room once a node is lost.
        self.job_agents.c10d(f"1:{len(numbers)}", conf=SETTLE)
        self.ranks, self.env = ranks, env
        self.agents = [self.start(number) for number in numbers]
        self.world = len(numbers) * ranks
        self.until(lambda: len({(each.host, each.pid) for each in self.of(self.world) if each.step > 20}) == self.world)

    def start(self, number: int) -> Agent:
        return self.job_agents.start(number, "--nproc-per-node", str(self.ranks), env=self.env)

    def loses(self, number: int) -> list[Done]:
        """The steps of the others after this host has lost its power; each is in the process that it was in. They wait
        for its gradients then: in the middle of an optimizer's step, a rank would have no state of the step before."""
        site = self.job_agents.folder
        (site / f"hold-node{number}").touch()
        self.until(lambda: (site / "held").exists() and self.are_level())
        self.job_agents.hosts[number].kill()
        left = self.world - self.ranks
        before = {(each.host, each.pid) for each in self.of(self.world) if each.host != f"node{number}"}
        self.until(lambda: {(each.host, each.pid) for each in self.of(left)} == before)
        return self.of(left)

    def are_level(self) -> bool:
        """Whether all ranks have done the newest step."""
        newest = max(each.step for each in self.of(self.world))
        return sum(each.step == newest for each in self.of(self.world)) == self.world

    def has_lost_no_step(self, since: list[Done], world: int) -> None:
        """A step in which the ranks leave their function is complete, and has no line."""
        newest = max(each.step for each in self.of(world))
        assert {each.began for each in since} <= {newest, newest + 1}
        assert len({each.began for each in since}) == 1


@pytest.mark.parametrize(("copies", "source"), [("1", "memory"), ("0", "disk")], ids=["copies", "no copies"])
def test_hsdp_loses_no_step_with_a_node_and_none_when_another_comes(
    hosts_of_a_job: JobAgents, copies: str, source: str
) -> None:
    """Each node has a whole replica. The newcomer has nothing in memory: without copies the others save for it."""
    job = ShardedJob(hosts_of_a_job, [1, 2], 2, SHARDS="2", COPIES=copies)
    alone = job.loses(2)
    assert {each.source for each in alone} == {"memory"}
    job.has_lost_no_step(alone, 4)
    newcomer = job.start(3)
    job.until(lambda: len({(each.host, each.pid) for each in job.of(4, alone[0].now)}) == 4)
    again = job.of(4, alone[0].now)
    assert {each.host for each in again} == {"node1", "node3"}
    assert {each.source for each in again} == {source}
    job.has_lost_no_step(again, 2)
    job.job_agents.finish_all([job.agents[0], newcomer])


def test_steps_that_nobody_has_any_more_are_told(hosts_of_a_job: JobAgents) -> None:
    """The lost node's shards were in its memory alone, and nothing was saved to the disk."""
    job = ShardedJob(hosts_of_a_job, [1, 2], 1, SHARDS="0", COPIES="0")
    alone = job.loses(2)
    assert {(each.source, each.began) for each in alone} == {("", 0)}
    job.job_agents.finish_all(job.agents[:1])
    assert "steps are lost: no state of them was complete in memory, and none was on the disk" in job.agents[0].text


def test_the_shard_of_a_lost_node_comes_from_another_one_s_memory(hosts_of_a_job: JobAgents) -> None:
    job = ShardedJob(hosts_of_a_job, [1, 2, 3], 1, SHARDS="0", COPIES="1")
    alone = job.loses(3)
    assert {each.source for each in alone} == {"memory"}
    assert 0 < alone[0].began <= max(each.step for each in job.of(3))
    assert not [*(job.job_agents.folder / "runs").glob("step_*")], "nothing is on the disk"
    job.job_agents.finish_all(job.agents[:2])
