"""Nobody comes: how long is waited, and what is said then."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.limits import limit_s, until


def test_a_missing_peer(site, endpoint: str) -> None:
    args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", "join_timeout=1")
    code, agent = site.run(*args, site.script("note('up')"))
    assert code == 1, agent.text
    assert "HF301" in agent.text
    assert "1 of at least 2 nodes" in agent.text
    assert "here: " in agent.text
    assert len(agent.text.splitlines()) <= 3
    assert site.trail() == []


def test_a_missing_host(site, endpoint: str) -> None:
    conf = ("--rdzv-conf", "join_timeout=1,is_host=0")
    args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *conf)
    code, agent = site.run(*args, site.script("note('up')"))
    assert code == 1, agent.text
    assert "HF302" in agent.text
    assert endpoint in agent.text
    assert "refused" in agent.text


def test_a_host_that_does_not_resolve(site) -> None:
    args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "no-such-host.invalid:29400")
    code, agent = site.run(*args, "--rdzv-conf", "join_timeout=1", site.script("note('up')"))
    assert code == 2, agent.text
    assert "HF110" in agent.text
    assert "no-such-host.invalid" in agent.text
    assert "does not resolve" in agent.text


def test_two_agents_with_one_node_rank(site, free_port: Callable[[], int]) -> None:
    args = ("--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    script = site.script("meet()")
    host = site.start(*args, "--node-rank", "0", script)
    first = site.start(*args, "--node-rank", "1", script)
    site.joined(2)
    second = site.start(*args, "--node-rank", "1", script)
    assert second.end() == 2, second.text
    assert "--node-rank 1 is taken" in second.text
    third = site.start(*args, "--node-rank", "2", script)
    assert [agent.end() for agent in (host, first, third)] == [0, 0, 0], host.text


def test_two_agents_that_both_are_node_0(site, free_port: Callable[[], int]) -> None:
    args = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    script = site.script("meet()")
    site.start(*args, script)
    site.joined(1)
    second = site.start(*args, script)
    assert second.end() == 2, second.text
    assert "Traceback" not in second.text


def test_the_endpoint_comes_up_later(site, endpoint: str) -> None:
    args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    script = site.script("meet()")
    guest = site.start(*args, "--rdzv-conf", "is_host=0", script)
    until(lambda: guest.begun and guest.events("claim"), lambda: guest.text)
    host = site.start(*args, script)
    assert (host.end(), guest.end()) == (0, 0), host.text + guest.text


# --- one of three agents is killed while the job forms; the others form and finish ------------------------------------


LEASE_S = limit_s(0.75)
"""Of a killed agent on another machine; a closed connection says as much at once."""


def events(site: Any, name: str) -> int:
    """So many of this name in the journals of all agents."""
    return sum(len(agent.events(name)) for agent in site.agents if agent.begun)


MOMENTS: dict[str, Callable[[Any], object]] = {
    "forked": lambda site: True,
    "first run folder": lambda site: any(agent.begun for agent in site.agents),
    "first claim": lambda site: events(site, "claim"),
    "one joined": lambda site: events(site, "coordinator.joined") >= 1,
    "all joined": lambda site: events(site, "coordinator.joined") >= 3,
    "being prepared": lambda site: events(site, "coordinator.assigned"),
    "formed": lambda site: events(site, "coordinator.started"),
    "first worker runs": lambda site: site.trail("up"),
    "all have met": lambda site: site.trail("child"),
}


def started(site: Any, endpoint: str, body: str) -> list[Any]:
    conf = ("--rdzv-conf", f"settle=0.3,lease={LEASE_S:g}", "--max-restarts", "1", "--shutdown-timeout", "3")
    args = ("--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *conf, site.script(body))
    return [site.start(*args) for _ in range(3)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment(site: Any, endpoint: str, moment: str) -> None:
    """The killed one may host the coordinator: then another takes the endpoint. Nobody waits for a time-out."""
    agents = started(site, endpoint, "meet()\nchild()\ntime.sleep(0.2)\nnote('end')")
    until(lambda: MOMENTS[moment](site), moment)
    agents.pop(list(MOMENTS).index(moment) % 3).signal(signal.SIGKILL)
    codes = [agent.end() for agent in agents]
    story = "".join(f"\n--- {agent.text}" for agent in agents)
    assert codes == [0, 0], story
    ends = site.trail("end")
    finished = {each["rank"] for each in ends if each["port"] == ends[-1]["port"]}
    assert finished == set(range(ends[-1]["world"])), story
    site.all_gone()


@pytest.mark.parametrize("moment", ["first claim", "one joined", "formed", "first worker runs"])
def test_a_clean_end_at_any_moment(site: Any, endpoint: str, moment: str) -> None:
    """The same with SIGTERM: whoever leaves says so, and ends with 143."""
    agents = started(site, endpoint, "meet()\ntime.sleep(0.2)")
    until(lambda: MOMENTS[moment](site), moment)
    leaver = agents.pop(list(MOMENTS).index(moment) % 3)
    leaver.signal(signal.SIGTERM)
    assert leaver.end() in (0, 143), leaver.text
    assert [agent.end() for agent in agents] == [0, 0], "".join(agent.text for agent in agents)
    site.all_gone()
