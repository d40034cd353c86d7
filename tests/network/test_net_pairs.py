"""`--preflight full` on pretend hosts: nodes measure each other, and the node or the link that is slow is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.network.job_agents import LONG_LEASE, JobAgents
from tests.support.limits import limit_s, until

FAKE_TORCH = """
__version__ = "2.13.0"
class distributed:
    is_available = staticmethod(lambda: True)
    is_gloo_available = staticmethod(lambda: True)
class version:
    cuda = None
"""
USUAL, SLOW = "20mbit", "1mbit"
"""Rates of nodes and links, so far below what the machine can do that they do not depend on its load."""
PATIENT = f"""
import functools
from holdfast.cli import resolve
from holdfast.extensions.health import node, pair_measure, pair_rounds, preflight
pair_measure.ROUND_S = pair_rounds.ROUND_S = {limit_s(1)}
pair_rounds.ANSWER_S_MAX = {limit_s(20)}
preflight.TORCH_S_MAX = {limit_s(20)}
node.OnNode.__init__.__defaults__ = ({limit_s(90)}, node.AGAIN_FIRST_S)
node.UNFIT_S_MAX = {limit_s(140)}
resolve.Limits = functools.partial(resolve.Limits, prepare_s={limit_s(150)})
"""
"""A slow machine has time for each round, for the answers, and for the health command that waits for the spare."""


def start(job: JobAgents, numbers: tuple[int, ...], *more: str) -> None:
    """Start nodes whose preflight finds a torch that is imported quickly."""
    job.change(PATIENT)
    package = job.folder / "fake" / "torch"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(FAKE_TORCH)
    job.c10d("4", conf=LONG_LEASE)
    for number in numbers:
        line = ("--preflight", "full", "--preload", "none", *more)
        job.start(number, *line, env={"PYTHONPATH": str(package.parent)})


def noted(job: JobAgents, event: str) -> list[dict[str, Any]]:
    lines = [
        json.loads(line)
        for path in Path(job.folder).glob("agent*/*/events.jsonl")
        for line in path.read_text().splitlines()
        if f'"{event}"' in line
    ]
    return [line for line in lines if line["event"] == event]


def hosts_of(members: list[str]) -> list[str]:
    return [name.partition("#")[0] for name in members]


def test_a_node_whose_network_is_slow_is_parked_and_the_spare_takes_its_place(job_agents) -> None:
    job: JobAgents = job_agents(5)
    job.hosts.slow(USUAL)
    job.hosts.slow_node(3, SLOW)
    # The spare is there before anything is measured.
    start(job, (1, 2, 3, 4), "--health-command", f"sh -c 'while [ ! -e {job.folder}/go ]; do sleep 0.1; done'")
    until(lambda: len(noted(job, "coordinator.joined")) == 4, job.story)
    start(job, (5,))
    until(lambda: len(noted(job, "coordinator.joined")) == 5, job.story)
    (job.folder / "go").touch()
    job.trains([1, 2, 4, 5])
    found = [hosts_of(each["members"]) for each in noted(job, "coordinator.slow_network")]
    assert ["node3"] in found, job.story()
    (parked,) = noted(job, "coordinator.parked")
    assert hosts_of([parked["member"]]) == ["node3"]
    assert "its network is slow with all others: " in parked["reason"]
    job.agents[0].says("node3 is parked: its network is slow with all others: ")
    job.finish_all(job.agents[:2])


def test_a_link_that_is_slow_is_named_and_the_job_trains_without_a_spare(job_agents) -> None:
    job: JobAgents = job_agents(4)
    job.hosts.slow(USUAL)
    job.hosts.slow_link(2, 3, SLOW)
    start(job, (1, 2, 3, 4))
    job.trains([1, 2, 3, 4])
    found = [sorted(hosts_of(each["members"])) for each in noted(job, "coordinator.slow_network")]
    assert ["node2", "node3"] in found, job.story()
    (pairs,) = noted(job, "coordinator.pairs")
    assert len(pairs["bytes_s"]) == 6
    # The coordinator's own node is reached, although its agent comes over loopback.
    assert any(rate > 0 for pair, rate in pairs["bytes_s"].items() if "node1#" in pair)
    text = job.agents[0].text
    assert "the network between node2 and node3 is slow: " in text or "the network between node3 and node2" in text
    job.finish_all(job.agents)
