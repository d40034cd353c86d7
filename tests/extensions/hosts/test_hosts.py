"""Hosts that users send away, keep out, and let in again."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.protocol import messages as msg
from tests.coordinator.coordinator_desk import running, two_of_three


def test_one_host_is_excluded_until_it_is_readmitted() -> None:
    desk = two_of_three()  # a third node waits as a spare
    host = next(member.node.host for member in desk.machine.members.values() if member.link == 2)
    desk.ask("exclude", host=host, for_s=600.0)
    assert desk.answer() == {"nodes": 1}
    assert [link for link, message in desk.told if isinstance(message, msg.Quit)] == [2]
    (noted,) = desk.noted("excluded")
    assert (noted["host"], noted["for_s"], noted["by"]) == (host, 600.0, "somebody")
    assert desk.machine.host_backoff.until_s(host, desk.now) == desk.now + 600.0
    desk.ask("readmit", host=host)
    assert desk.answer() == {"nodes": 1}
    assert desk.machine.host_backoff.until_s(host, desk.now) == desk.now
    desk.ask("drain", host=host)
    assert [desk.noted(event)[0]["by"] for event in ("readmitted", "drain_asked")] == ["somebody"] * 2
    assert [link for link, message in desk.told if isinstance(message, msg.Quit)] == [2, 2]


@pytest.mark.parametrize("question", ["drain", "exclude"])
def test_a_host_of_the_job_may_leave_but_not_the_coordinators(question: str) -> None:
    desk = running()
    leader, other = desk.machine.members.values()
    leader.node = msgspec.structs.replace(leader.node, hosts_coordinator=True)
    desk.ask(question, host=leader.node.host, for_s=60.0)
    assert "coordinator: only `holdfast stop` ends it" in desk.refusal()
    desk.ask(question, host="nowhere", for_s=60.0)
    assert desk.refusal() == "no node of this job is on nowhere"
    assert not any(isinstance(message, msg.Quit) for _, message in desk.told)
    desk.ask(question, host=other.node.host, for_s=60.0)
    assert desk.answer() == {"nodes": 1}


@pytest.mark.parametrize("about", [{}, {"host": "n2", "for_s": -1}, {"host": 7}, {"host": "n2", "why": "age"}])
def test_what_it_is_not_asked_about_is_refused_and_costs_no_link(about: dict[str, object]) -> None:
    desk = running()
    desk.ask("exclude", **about)
    assert desk.refusal().startswith("exclude cannot be asked like this: ")
    assert (desk.dropped, desk.noted("excluded")) == ([], [])
