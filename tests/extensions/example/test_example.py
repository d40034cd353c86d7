"""A new question to a running job without a change in src: here in the machine, in processes/test_extension_jobs.py in a
real job."""

from __future__ import annotations

from holdfast.coordinator.coordinator_state import LinkClosed
from holdfast.extension_list import EXTENSIONS
from tests.coordinator.coordinator_harness import running
from tests.extensions.example import EXAMPLE
from tests.extensions.example.messages import Said, Say


def test_the_example_collects_an_answer_of_every_node() -> None:
    harness = running(extensions=(*EXTENSIONS, EXAMPLE))
    harness.ask("where", 2)
    numbers = {harness.ordered(link, Say).number for link in (1, 2)}
    (number,) = numbers
    harness.extend(1, "example", Said(number, "/a"))
    assert harness.answers == []
    harness.extend(2, "example", Said(number, "/b"))
    assert harness.answer(2) == {"folders": {"n1": "/a", "n2": "/b"}}


def test_the_example_waits_for_no_node_that_is_lost() -> None:
    harness = running(max_restarts=1, extensions=(*EXTENSIONS, EXAMPLE))
    harness.ask("where")
    harness.extend(1, "example", Said(harness.ordered(1, Say).number, "/a"))
    harness.give(LinkClosed(2, "reset"))
    assert harness.answer() == {"folders": {"n1": "/a"}}
