"""Stacks of all ranks, collected for a user."""

from __future__ import annotations

import msgspec

from holdfast.coordinator.coordinator_state import LinkClosed
from holdfast.extensions.stacks.coordinator import SAMPLED_S_MAX
from holdfast.extensions.stacks.messages import ANSWER_BYTES_MAX, Samples, TakeSamples, body_of, view_of
from holdfast.protocol.rank_progress import Frame, RankSample, StacksView
from tests.coordinator.coordinator_harness import CoordinatorHarness, gathering, running


def asked() -> tuple[CoordinatorHarness, int]:
    """Both nodes are asked for the same number."""
    harness = running(max_restarts=1)
    harness.ask("stacks", 2)
    numbers = {harness.ordered(link, TakeSamples).number for link in (1, 2)}
    assert harness.noted("stacks_asked") == [{"by": "somebody"}]
    return harness, numbers.pop()


def sampled(harness: CoordinatorHarness, link: int, number: int, *frames: Frame) -> None:
    harness.extend(link, "stacks", Samples(number, (RankSample(0, 100 + link, "S", 0.5, frames),)))


def test_the_stacks_of_all_nodes_are_one_answer() -> None:
    harness, number = asked()
    sampled(harness, 1, number, Frame("a.py", 1, "f"))
    assert harness.answers == []
    sampled(harness, 2, number, Frame("b.py", 2, "g"))
    view = harness.answer(2)
    assert [(rank["rank"], rank["host"], rank["stack"]) for rank in view["ranks"]] == [(0, "n1", 0), (1, "n2", 1)]
    assert view["silent"] == []
    sampled(harness, 2, number, Frame("b.py", 2, "g"))
    assert harness.answers == [], "what comes too late is no answer"


def test_a_node_that_is_silent_is_not_waited_for() -> None:
    harness, number = asked()
    sampled(harness, 1, number)
    harness.wait(SAMPLED_S_MAX + 1)
    view = harness.answer(2)
    assert ([rank["rank"] for rank in view["ranks"]], view["silent"]) == ([0], ["n2"])


def test_a_node_that_is_lost_is_not_waited_for() -> None:
    harness = running(max_restarts=1)
    harness.ask("stacks", 1)
    sampled(harness, 1, harness.ordered(1, TakeSamples).number)
    harness.give(LinkClosed(2, "reset"))
    view = harness.answer(1)
    assert ([rank["rank"] for rank in view["ranks"]], view["silent"]) == ([0], [])


def test_without_workers_there_are_no_stacks() -> None:
    harness = gathering()
    harness.join(1)
    harness.ask("stacks")
    assert harness.answer()["ranks"] == []


def test_the_answer_fits_into_a_frame() -> None:
    frames = tuple(Frame("/a/rather/long/path/to/a/file.py", number, "function") for number in range(63))
    for count in (2000, 20_000):
        seen = [
            ("a", rank, RankSample(0, rank, "S", 0.0, (Frame("own.py", rank, "f"), *frames))) for rank in range(count)
        ]
        body = body_of(view_of("x", 1, count, seen))
        assert len(body) <= ANSWER_BYTES_MAX
        told = msgspec.json.decode(body, type=StacksView)
        assert told.stacks[told.ranks[-1].stack][0] == Frame("own.py", told.ranks[-1].rank, "f")
    assert len(told.ranks) >= 5000
