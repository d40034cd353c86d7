"""The end of a job that somebody asked for on one of its nodes."""

from __future__ import annotations

import pytest

from holdfast.coordinator.coordinator_state import Phase, QuitAsked
from holdfast.protocol.messages import Quit
from tests.coordinator.coordinator_desk import Desk, draining, over, preparing, running, stopping


@pytest.mark.parametrize("state", [preparing, running, draining, stopping])
@pytest.mark.parametrize("drain", [True, False])
def test_every_member_is_told(state, drain: bool) -> None:
    desk: Desk = state()
    links = {member.link for member in desk.machine.members.values()}
    before = len(desk.told)
    desk.give(QuitAsked(drain, "holdfast stop"))
    told = [(link, message) for link, message in desk.told[before:] if isinstance(message, Quit)]
    assert {link for link, _ in told} == links
    assert {message for _, message in told} == {Quit(drain, "holdfast stop")}


def test_whoever_comes_later_is_sent_home() -> None:
    desk = running()
    desk.give(QuitAsked(drain=True, by="holdfast stop"))
    desk.join(9)
    assert [message for link, message in desk.told if link == 9] == [Quit(drain=True, by="holdfast stop")]
    assert len(desk.machine.members) == 2


def test_a_job_that_is_over_ends_as_it_did() -> None:
    desk = over()
    outcome = desk.machine.outcome
    desk.give(QuitAsked(drain=False, by="holdfast kill"))
    assert (desk.machine.phase, desk.machine.outcome) == (Phase.OVER, outcome)
