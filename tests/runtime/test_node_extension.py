"""An agent's extensions: when they are made, what reaches them, and what their faults do not do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.protocol.errors import ProtocolError
from holdfast.protocol.messages import EXTENDED_BYTES_MAX, Extended
from holdfast.runtime.node_extension import NodeExtension, NodeExtensions, Question, Send


class Word(msgspec.Struct, frozen=True, array_like=True):
    text: str


class Echo(NodeExtension):
    messages = Word
    broken = False

    def __init__(self, node: Any, send: Send) -> None:
        super().__init__(node, send)
        self.events: list[object] = []

    def heard(self, message: Word) -> None:
        self._fail()
        self.send(message)

    async def asked(self, question: Question) -> bytes | None:
        self._fail()
        return question.about

    def started(self, generation: int, interval_s: float) -> None:
        self._fail()
        self.events.append((generation, interval_s))

    def gone(self) -> None:
        self._fail()
        self.events.append("gone")

    def _fail(self) -> None:
        if self.broken:
            raise RuntimeError("the test broke it")


class Listed:
    name = "echo"
    questions = ("echo",)

    def __init__(self, *, follows: bool = False) -> None:
        self.follows = follows
        self.made: Echo | None = None

    def node(self, node: Any, send: Send) -> NodeExtension:
        self.made = Echo(node, send)
        return self.made


class Agent:
    def __init__(self, *, follows: bool = False) -> None:
        self.listed = Listed(follows=follows)
        self.sent: list[Any] = []
        self.faults: list[tuple[str, str]] = []
        node: Any = None
        self.extensions = NodeExtensions(
            [self.listed], node, self.sent.append, lambda what, error: self.faults.append((what, str(error)))
        )


def packed(message: Word) -> bytes:
    return msgspec.msgpack.encode(message)


def test_a_message_reaches_the_half_that_it_names_and_makes_it() -> None:
    agent = Agent()
    assert agent.listed.made is None
    agent.extensions.heard(Extended("echo", packed(Word("\x1b[2Jhello"))))
    assert agent.sent == [Extended("echo", packed(Word("hello")))]
    agent.extensions.heard(Extended("another", b""))
    assert len(agent.sent) == 1


def test_what_is_no_message_of_its_half_is_the_coordinators_error() -> None:
    with pytest.raises(ProtocolError):
        Agent().extensions.heard(Extended("echo", b"\x91\x07"))


def test_only_an_extension_that_follows_is_made_at_the_start() -> None:
    late, early = Agent(), Agent(follows=True)
    for agent in (late, early):
        agent.extensions.started(3, 1.0)
        agent.extensions.gone()
    assert late.listed.made is None
    assert early.listed.made is not None
    assert early.listed.made.events == [(3, 1.0), "gone"]


async def test_it_answers_alone_what_it_can() -> None:
    agent = Agent()
    assert await agent.extensions.asked(Question("echo", "me", b"[1]", 5.0)) == b"[1]"
    assert await agent.extensions.asked(Question("weather", "me", b"[1]", 5.0)) is None


async def test_a_fault_of_it_goes_to_the_journal() -> None:
    agent = Agent(follows=True)
    assert agent.listed.made is not None
    agent.listed.made.broken = True
    agent.extensions.heard(Extended("echo", packed(Word("hello"))))
    agent.extensions.started(3, 1.0)
    agent.extensions.gone()
    assert await agent.extensions.asked(Question("echo", "me", b"[1]", 5.0)) is None
    assert agent.faults == [("echo", "the test broke it")] * 4


def test_a_message_that_is_too_large_is_not_sent() -> None:
    agent = Agent(follows=True)
    assert agent.listed.made is not None
    with pytest.raises(ProtocolError, match="does not fit into a frame"):
        agent.listed.made.send(Word("x" * (EXTENDED_BYTES_MAX + 1)))
    agent.listed.made.send(Word("a file named \udcff"))
    assert agent.sent == [Extended("echo", packed(Word("a file named ?")))]
