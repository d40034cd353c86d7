"""Profiles of some ranks: which nodes are asked, and what becomes of their answers."""

from __future__ import annotations

import pytest

from holdfast.coordinator.coordinator_events import LinkClosed
from holdfast.extensions.profile.messages import COLLECTED_S_MAX, Profiles, RankProfile, TakeProfiles
from tests.coordinator.coordinator_harness import CoordinatorHarness, running


def asked() -> tuple[CoordinatorHarness, TakeProfiles]:
    """A user on node 1 asks for rank 1, which is on node 2."""
    harness = running(max_restarts=1)
    harness.ask("profile", ranks=[1], steps=5, name="20261125-120000")
    assert [link for link, _ in harness.extended] == [2]
    return harness, harness.ordered(2, TakeProfiles)


def test_only_the_wanted_ranks_are_profiled_and_shown() -> None:
    harness, order = asked()
    assert (order.local_ranks, order.steps, order.name, order.generation) == ((0,), 5, "20261125-120000-1", 1)
    (noted,) = harness.noted("profile_asked")
    assert (noted["by"], noted["ranks"], noted["name"]) == ("somebody", [1], order.name)
    assert harness.answers == []
    harness.extend(2, "profile", Profiles(order.number, (RankProfile(0, ("/x",), why="no"), RankProfile(9))))
    view = harness.answer()
    assert view["name"] == order.name
    assert [(rank["rank"], rank["host"], rank["files"], rank["why"]) for rank in view["ranks"]] == [
        (1, "n2", ["/x"], "no")
    ]


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ({"ranks": [0, 7], "steps": 5}, "rank 7: not running now; there are 2 ranks"),
        ({"steps": 5}, "no ranks are named"),
        ({"ranks": [0], "steps": 1001}, "cannot be asked like this"),
        ({"ranks": [0], "for_s": 301.0}, "cannot be asked like this"),
        ({"ranks": list(range(65))}, "cannot be asked like this"),
        ({"ranks": [0], "name": "../../etc"}, "cannot be asked like this"),
    ],
)
def test_profiles_that_cannot_be_taken_are_refused(about: dict[str, object], text: str) -> None:
    harness = running()
    harness.ask("profile", **about)
    assert text in harness.refusal()
    assert (harness.extended, harness.dropped) == ([], [])


def test_a_node_that_is_lost_gives_no_profile() -> None:
    harness, _ = asked()
    harness.give(LinkClosed(2, "reset"))
    view = harness.answer()
    assert (view["ranks"], view["silent"]) == ([], [])


def test_a_node_that_is_silent_is_named() -> None:
    harness, _ = asked()
    harness.wait(COLLECTED_S_MAX + 1)
    assert harness.answer()["silent"] == ["n2"]
