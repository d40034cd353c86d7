"""The end of a job that a user asks for: the answer comes before the order."""

from __future__ import annotations

import pytest

from holdfast.coordinator.coordinator_state import Heard, Tell
from holdfast.protocol import messages as msg
from tests.coordinator.coordinator_harness import running


@pytest.mark.parametrize(("question", "drain"), [("stop", True), ("kill", False)])
def test_the_answer_is_sent_before_agents_end(question: str, drain: bool) -> None:
    harness = running()
    out = harness.machine.handle(harness.now, Heard(1, msg.Ask(4, question, "somebody")))
    to_first = [command.message for command in out if isinstance(command, Tell) and command.link == 1]
    assert to_first == [msg.Answer(4, b'{"nodes":2}'), msg.Quit(drain, "somebody")]
