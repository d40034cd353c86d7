"""One of three agents is killed at some moment of the formation; the others form and finish, whatever the moment."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.limits import limit_s, until

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
