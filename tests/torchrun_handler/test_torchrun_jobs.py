"""Plain torchrun with `--rdzv-backend=holdfast`: real agents, real stores, gloo."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import descendants
from tests.processes.conftest import Agent, JobFolder
from tests.support.limits import limit_s
from tests.warm import Warm
from tests.warm_jobs import WarmJobs

pytestmark = [pytest.mark.xdist_group("torch jobs"), pytest.mark.timeout(240)]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
FORKING = Path(__file__).parents[1] / "train" / "scripts" / "under_torchrun.py"
"""torchrun, but its workers are forked from it: neither imports torch once more."""
LIMIT_S = 90.0

TRAIN = """
import torch, torch.distributed as dist

store = dist.TCPStore(os.environ["MASTER_ADDR"], int(PORT), is_master=False, wait_for_workers=False)
fresh = store.add(f"seen{RANK}", 1) == 1
dist.init_process_group("gloo")

def total():
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones.item())

note("up", total=total(), fresh=fresh, shared=os.environ["TORCHELASTIC_USE_AGENT_STORE"])
"""


@pytest.fixture
def job_folder(tmp_path: Path) -> Iterator[JobFolder]:
    made = JobFolder(tmp_path)
    yield made
    for agent in made.agents:
        if agent.process.poll() is None:
            kill_node(agent)
        agent.process.wait(limit_s(10))


def start(job_folder: JobFolder, endpoint: str, *args: str | Path, program: Sequence[str] = TORCHRUN) -> Agent:
    options = ("--rdzv-backend=holdfast", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job")
    return job_folder.start(*options, *args, program=program, env={"OMP_NUM_THREADS": "1"})


def kill_node(agent: Agent) -> None:
    """The agent and its workers, all at once."""
    for pid in [agent.pid, *descendants(agent.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


def assert_all_end(agents: list[Agent], code: int) -> None:
    ends = [agent.end(LIMIT_S) for agent in agents]
    assert ends == [code] * len(agents), "\n\n".join(agent.text for agent in agents)


@pytest.fixture
def endpoint(free_port) -> str:
    return f"127.0.0.1:{free_port()}"


def test_a_crash_restarts_both_with_a_fresh_store_and_a_node_that_leaves_is_left_out(
    warm: Warm, job_folder: JobFolder, endpoint: str, tmp_path: Path
) -> None:
    """SIGTERM to one torchrun: the other goes on without it, and waits for nothing to run out."""
    script = job_folder.script(
        "if WORLD == 1: sys.exit(note('up'))\n"
        + TRAIN
        + "if sum(each['event'] == 'up' and each['rank'] == RANK for each in all_notes()) == 1:\n"
        "    sys.exit(3) if RANK else hold()\ntotal()\nnote('met')\nhold()"
    )
    with WarmJobs(warm, tmp_path) as jobs:
        torchrun = jobs.command(FORKING)
        agents = [
            start(job_folder, endpoint, "--nnodes=1:2", "--max-restarts=1", script, program=torchrun) for _ in range(2)
        ]
        job_folder.wait(2, "met", LIMIT_S)
        ups = job_folder.trail("up", world=2)
        assert [(note["total"], note["fresh"], note["shared"]) for note in ups] == [(2, True, "True")] * 4
        assert len({note["port"] for note in ups}) == 2
        assert all("rank 1 failed on" in agent.text for agent in agents)
        host = int(job_folder.trail("met", rank=0)[0]["agent"])
        leaver, other = agents[1 - host], agents[host]
        leaver.signal(15)
        job_folder.wait(1, "up", LIMIT_S, world=1)
        assert leaver.end(LIMIT_S) != 0
        assert other.end(LIMIT_S) == 0
        assert "is leaving" in other.text
        job_folder.all_gone()


def test_a_third_node_joins_a_node_is_killed_and_one_without_restarts_ends_the_job(
    job_folder: JobFolder, endpoint: str
) -> None:
    """Without torch in the workers: this one is about the agents."""
    script = job_folder.script(
        "meet()\nwhile WORLD == 3 or not os.path.exists('killed'): time.sleep(0.02)\nif RANK == 0: sys.exit(7)\nhold()"
    )
    agents = [start(job_folder, endpoint, "--nnodes=1:3", script) for _ in range(2)]
    job_folder.wait(2, "up", LIMIT_S, world=2)
    agents.append(start(job_folder, endpoint, "--nnodes=1:3", script))
    job_folder.wait(3, "up", LIMIT_S, world=3)
    (job_folder.folder / "killed").touch()
    host = int(job_folder.trail("up", world=3, rank=0)[0]["agent"])
    victim = (host + 1) % 3
    kill_node(agents[victim])
    job_folder.wait(4, "up", LIMIT_S, world=2)
    assert len({note["port"] for note in job_folder.trail("up")}) == 3
    culprit = int(job_folder.trail("up", world=2, rank=0)[-1]["agent"])
    survivor = 3 - victim - culprit
    assert_all_end([agents[culprit], agents[survivor]], 1)
    assert "exitcode  : 7" in agents[culprit].text
    assert "RendezvousClosedError: holdfast: the job is over" in agents[survivor].text
    assert "(last: rank 0 failed on" in agents[survivor].text
    job_folder.all_gone()
