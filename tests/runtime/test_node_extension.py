"""An agent's extensions: when they are made, what reaches them, and what their faults do not do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.protocol.errors import PortInUseError, ProtocolError
from holdfast.protocol.messages import EXTENDED_BYTES_MAX, Extended
from holdfast.protocol.options import RunOptions
from holdfast.protocol.outcome import Outcome
from holdfast.runtime.node_extension import (
    NodeExtension,
    NodeExtensions,
    NodeHappened,
    Question,
    Send,
    SupervisorReplaced,
    WorkersGone,
)


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

    def happened(self, event: NodeHappened) -> None:
        self._fail()
        self.events.append(event)

    def supervisor(self, event: Any) -> None:
        self._fail()
        self.events.append(event)

    def environment(self, generation: int, local_rank: int) -> dict[str, str]:
        self._fail()
        return {"ECHO": f"{generation}.{local_rank}"}

    async def close(self, outcome: Outcome | None) -> None:
        self._fail()
        self.events.append("closed")

    async def reported(self) -> None:
        self._fail()
        self.events.append("reported")

    def _fail(self) -> None:
        if self.broken:
            raise RuntimeError("the test broke it")


class Listed:
    name = "echo"
    questions = ("echo",)

    def __init__(self, *, begins: bool, refuses: bool) -> None:
        self._begins, self._refuses = begins, refuses
        self.made: Echo | None = None

    def begins(self, _options: RunOptions) -> bool:
        return self._begins

    def node(self, node: Any, send: Send) -> NodeExtension:
        if self._refuses:
            raise PortInUseError("the test took the port")
        self.made = Echo(node, send)
        return self.made


class PretendNode:
    async def close(self) -> None:
        pass


class Agent:
    def __init__(self, *, begins: bool = False, refuses: bool = False) -> None:
        self.listed = Listed(begins=begins, refuses=refuses)
        self.sent: list[Any] = []
        self.faults: list[tuple[str, str]] = []
        node: Any = PretendNode()
        self.extensions = NodeExtensions(
            [self.listed], node, self.sent.append, lambda what, error: self.faults.append((what, str(error)))
        )

    async def begin(self) -> Agent:
        options: Any = None
        await self.extensions.begin(options)
        return self


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


async def pass_all(extensions: NodeExtensions) -> dict[str, str]:
    """Let everything happen that an extension gets. Returns the variables of a worker."""
    extensions.happened(WorkersGone())
    extensions.supervisor(SupervisorReplaced())
    variables = extensions.environment(3, 1)
    await extensions.close(None)
    await extensions.reported()
    return variables


async def test_only_an_extension_that_begins_with_the_agent_is_made_before_it_is_asked() -> None:
    late, early = await Agent().begin(), await Agent(begins=True).begin()
    assert [await pass_all(agent.extensions) for agent in (late, early)] == [{}, {"ECHO": "3.1"}]
    assert late.listed.made is None
    assert early.listed.made is not None
    assert early.listed.made.events == [WorkersGone(), SupervisorReplaced(), "closed", "reported"]


async def test_an_extension_that_cannot_do_what_the_options_ask_for_refuses_the_start() -> None:
    with pytest.raises(PortInUseError):
        await Agent(begins=True, refuses=True).begin()


def test_an_extension_that_refuses_later_ends_no_job() -> None:
    agent = Agent(refuses=True)
    agent.extensions.heard(Extended("echo", packed(Word("hello"))))
    assert agent.faults == [("echo", "the test took the port")]


async def test_it_answers_alone_what_it_can() -> None:
    agent = Agent()
    assert await agent.extensions.asked(Question("echo", "me", b"[1]", 5.0)) == b"[1]"
    assert await agent.extensions.asked(Question("weather", "me", b"[1]", 5.0)) is None


async def test_a_fault_of_it_goes_to_the_journal() -> None:
    agent = await Agent(begins=True).begin()
    assert agent.listed.made is not None
    agent.listed.made.broken = True
    agent.extensions.heard(Extended("echo", packed(Word("hello"))))
    assert await agent.extensions.asked(Question("echo", "me", b"[1]", 5.0)) is None
    assert await pass_all(agent.extensions) == {}
    assert agent.faults == [("echo", "the test broke it")] * 7


async def test_a_message_that_is_too_large_is_not_sent() -> None:
    agent = await Agent(begins=True).begin()
    assert agent.listed.made is not None
    with pytest.raises(ProtocolError, match="does not fit into a frame"):
        agent.listed.made.send(Word("x" * (EXTENDED_BYTES_MAX + 1)))
    agent.listed.made.send(Word("a file named \udcff"))
    assert agent.sent == [Extended("echo", packed(Word("a file named ?")))]
