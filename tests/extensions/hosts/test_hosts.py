"""Hosts that users send away, keep out, and let in again."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.coordinator.coordinator_events import LinkClosed
from holdfast.protocol import messages as msg
from tests.coordinator.coordinator_harness import running, two_of_three


def test_one_host_is_excluded_until_it_is_readmitted() -> None:
    harness = two_of_three()  # a third node waits as a spare
    host = next(member.node.host for member in harness.machine.members.values() if member.link == 2)
    harness.ask("exclude", host=host, for_s=600.0)
    assert harness.answer() == {"nodes": 1}
    assert [link for link, message in harness.told if isinstance(message, msg.Quit)] == [2]
    (noted,) = harness.noted("excluded")
    assert (noted["host"], noted["for_s"], noted["by"]) == (host, 600.0, "somebody")
    assert harness.machine.host_backoff.until_s(host, harness.now) == harness.now + 600.0
    harness.ask("readmit", host=host)
    assert harness.answer() == {"nodes": 1}
    assert harness.machine.host_backoff.until_s(host, harness.now) == harness.now
    harness.ask("drain", host=host)
    assert [harness.noted(event)[0]["by"] for event in ("readmitted", "drain_asked")] == ["somebody"] * 2
    assert [link for link, message in harness.told if isinstance(message, msg.Quit)] == [2, 2]


def test_a_host_that_is_not_excluded_is_not_readmitted() -> None:
    harness = two_of_three()
    host = next(member.node.host for member in harness.machine.members.values() if member.link == 2)
    harness.ask("readmit", host="nowhere")
    assert harness.refusal() == "nowhere is not excluded, and no node of this job is on it"
    assert harness.noted("readmitted") == []
    harness.ask("exclude", host=host, for_s=600.0)
    assert harness.answer() == {"nodes": 1}
    harness.give(LinkClosed(2, "closed"))
    harness.ask("readmit", host=host)  # its node has left
    assert harness.answer() == {"nodes": 0}
    assert harness.machine.host_backoff.until_s(host, harness.now) == harness.now


@pytest.mark.parametrize("question", ["drain", "exclude"])
def test_a_host_of_the_job_may_leave_but_not_the_coordinators(question: str) -> None:
    harness = running()
    leader, other = harness.machine.members.values()
    leader.node = msgspec.structs.replace(leader.node, hosts_coordinator=True)
    harness.ask(question, host=leader.node.host, for_s=60.0)
    assert "coordinator: only `holdfast stop` ends it" in harness.refusal()
    harness.ask(question, host="nowhere", for_s=60.0)
    assert harness.refusal() == "no node of this job is on nowhere"
    assert not any(isinstance(message, msg.Quit) for _, message in harness.told)
    harness.ask(question, host=other.node.host, for_s=60.0)
    assert harness.answer() == {"nodes": 1}


@pytest.mark.parametrize("about", [{}, {"host": "n2", "for_s": -1}, {"host": 7}, {"host": "n2", "why": "age"}])
def test_what_it_is_not_asked_about_is_refused_and_costs_no_link(about: dict[str, object]) -> None:
    harness = running()
    harness.ask("exclude", **about)
    assert harness.refusal().startswith("exclude cannot be asked like this: ")
    assert (harness.dropped, harness.noted("excluded")) == ([], [])
