"""Plain torchrun with `--rdzv-backend=holdfast`: real agents, real stores, gloo."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import descendants
from tests.processes.conftest import Agent, Site

pytestmark = [pytest.mark.xdist_group("torch jobs"), pytest.mark.timeout(240)]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LIMIT_S = 90.0
"""Every worker imports torch; the machine may be busy."""

# Leaves by os._exit: torch's threads may abort a program that is finished, and plain torchrun starts it without our remedy.
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
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    for agent in made.agents:
        if agent.process.poll() is None:
            kill_node(agent)
        agent.process.wait(10)


def start(site: Site, endpoint: str, *args: str | Path) -> Agent:
    options = ("--rdzv-backend=holdfast", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job")
    return site.start(*options, *args, program=TORCHRUN, env={"OMP_NUM_THREADS": "1"})


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


def test_a_crash_in_one_of_two_restarts_both_with_a_fresh_store(site: Site, endpoint: str) -> None:
    script = site.script(TRAIN + "if RANK == 1 and ROUND == 0: sys.exit(3)\ntotal()\nos._exit(0)")
    agents = [start(site, endpoint, "--nnodes=2", "--max-restarts=1", script) for _ in range(2)]
    assert_all_end(agents, 0)
    ups = site.trail("up")
    assert [(note["total"], note["fresh"], note["shared"]) for note in ups] == [(2, True, "True")] * 4
    assert len({note["port"] for note in ups}) == 2
    assert all("rank 1 failed on" in agent.text for agent in agents)
    site.all_gone()


def test_a_third_node_joins_and_a_node_is_killed(site: Site, endpoint: str) -> None:
    script = site.script(
        TRAIN + "while not (WORLD == 2 and os.path.exists('killed')):\n    total()\n    time.sleep(0.02)\nos._exit(0)"
    )
    nodes = ("--nnodes=1:3", "--max-restarts=1")  # a worker may fail before it is stopped
    agents = [start(site, endpoint, *nodes, script) for _ in range(2)]
    site.wait(2, "up", LIMIT_S, world=2)
    agents.append(start(site, endpoint, *nodes, script))
    site.wait(3, "up", LIMIT_S, world=3)
    (site.folder / "killed").touch()
    host = next(n for n, agent in enumerate(agents) if n == int(site.trail("up", world=3, node=0)[0]["agent"]))
    victim = agents.pop((host + 1) % 3)
    began_s = time.monotonic()
    kill_node(victim)
    survived = site.wait(4, "up", LIMIT_S, world=2)
    print(f"re-formed after {time.monotonic() - began_s:.1f} s")
    assert all(note["fresh"] and note["total"] == note["world"] for note in survived)
    assert_all_end(agents, 0)
    site.all_gone()


def test_a_node_without_restarts_left_ends_the_job_for_all(site: Site, endpoint: str) -> None:
    """Without torch in the workers: this one is about the agents."""
    script = site.script("meet()\nif RANK == 0: sys.exit(7)\nhold()")
    agents = [start(site, endpoint, "--nnodes=2", script) for _ in range(2)]
    assert_all_end(agents, 1)
    culprit = int(site.trail("up", rank=0)[0]["agent"])
    assert "exitcode  : 7" in agents[culprit].text
    assert "RendezvousClosedError: holdfast: the job is over" in agents[1 - culprit].text
    assert "(last: rank 0 failed on" in agents[1 - culprit].text
    site.all_gone()


def test_nobody_at_the_endpoint(site: Site, endpoint: str) -> None:
    agent = start(site, endpoint, "--nnodes=2", "--rdzv-conf=join_timeout=2,is_host=0", site.script("meet()"))
    assert agent.end(LIMIT_S) == 1
    assert "RendezvousConnectionError: holdfast: HF302: no coordinator at" in agent.text
    assert "connection refused (tried for 2 s)" in agent.text


def test_sigterm_to_one_is_told_to_the_other(site: Site, endpoint: str) -> None:
    """Without torch in the workers, and without waiting for anything to run out."""
    script = site.script("meet()\nif WORLD == 2: hold()")
    agents = [start(site, endpoint, "--nnodes=1:2", script) for _ in range(2)]
    site.wait(2, "up", LIMIT_S, world=2)
    host = int(site.trail("up", world=2, rank=0)[0]["agent"])
    leaver, other = agents[1 - host], agents[host]
    leaver.signal(15)
    site.wait(1, "up", LIMIT_S, world=1)
    assert leaver.end(LIMIT_S) != 0
    assert other.end(LIMIT_S) == 0
    assert "is leaving" in other.text
    site.all_gone()
