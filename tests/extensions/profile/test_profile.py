"""Profiles of some ranks: which nodes are asked, and what becomes of their answers."""

from __future__ import annotations

import pytest

from holdfast.coordinator.coordinator_state import LinkClosed
from holdfast.extensions.profile.messages import COLLECTED_S_MAX, Profiles, RankProfile, TakeProfiles
from tests.coordinator.coordinator_desk import Desk, running


def asked() -> tuple[Desk, TakeProfiles]:
    """A user on node 1 asks for rank 1, which is on node 2."""
    desk = running(max_restarts=1)
    desk.ask("profile", ranks=[1], steps=5, name="20261125-120000")
    assert [link for link, _ in desk.extended] == [2]
    return desk, desk.ordered(2, TakeProfiles)


def test_only_the_wanted_ranks_are_profiled_and_shown() -> None:
    desk, order = asked()
    assert (order.local_ranks, order.steps, order.name, order.generation) == ((0,), 5, "20261125-120000-1", 1)
    (noted,) = desk.noted("profile_asked")
    assert (noted["by"], noted["ranks"], noted["name"]) == ("somebody", [1], order.name)
    assert desk.answers == []
    desk.extend(2, "profile", Profiles(order.number, (RankProfile(0, ("/x",), why="no"), RankProfile(9))))
    view = desk.answer()
    assert view["name"] == order.name
    assert [(rank["rank"], rank["host"], rank["files"], rank["why"]) for rank in view["ranks"]] == [
        (1, "n2", ["/x"], "no")
    ]


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ({"ranks": [0, 7], "steps": 5}, "no rank 7 runs now; there are 2 ranks"),
        ({"steps": 5}, "no ranks are named"),
        ({"ranks": [0], "steps": 1001}, "cannot be asked like this"),
        ({"ranks": [0], "for_s": 301.0}, "cannot be asked like this"),
        ({"ranks": list(range(65))}, "cannot be asked like this"),
        ({"ranks": [0], "name": "../../etc"}, "cannot be asked like this"),
    ],
)
def test_profiles_that_cannot_be_taken_are_refused(about: dict[str, object], text: str) -> None:
    desk = running()
    desk.ask("profile", **about)
    assert text in desk.refusal()
    assert (desk.extended, desk.dropped) == ([], [])


def test_a_node_that_is_lost_gives_no_profile() -> None:
    desk, _ = asked()
    desk.give(LinkClosed(2, "reset"))
    view = desk.answer()
    assert (view["ranks"], view["silent"]) == ([], [])


def test_a_node_that_is_silent_is_named() -> None:
    desk, _ = asked()
    desk.wait(COLLECTED_S_MAX + 1)
    assert desk.answer()["silent"] == ["n2"]
