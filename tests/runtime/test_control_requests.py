"""Questions of commands on a node: who answers, and when the node does it alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from holdfast.protocol.messages import Answer, Ask, FromAgent
from holdfast.runtime.control_requests import ControlRequests
from holdfast.runtime.node_extension import Question

QUESTION = Question("status", "", b'{"a":1}', within_s=5.0)


class Link:
    """The way to a coordinator, and what was sent on it."""

    def __init__(self, *, up: bool = True, alone: bytes | None = b"[7]") -> None:
        self.sent: list[FromAgent] = []
        self.up = up
        self.alone = alone
        self.on_send: Callable[[Ask], None] = lambda _: None
        self.requests = ControlRequests(self.send, self.answer_alone, "n1")

    def send(self, message: FromAgent) -> bool:
        if self.up:
            assert isinstance(message, Ask)
            self.sent.append(message)
            self.on_send(message)
        return self.up

    async def answer_alone(self, _question: Question) -> bytes | None:
        return self.alone

    def answers(self, body: bytes = b"", refused: str = "") -> None:
        self.on_send = lambda ask: self.requests.answered(Answer(ask.number, body, refused))


async def test_what_a_question_is_about_is_passed_on_unread() -> None:
    link = Link()
    link.answers(b'{"b":2}')
    reply = await link.requests.ask(msgspec.structs.replace(QUESTION, about=b"not even JSON"))
    assert (reply.whole, bytes(reply.body)) == (True, b'{"b":2}')
    assert link.sent == [Ask(1, "status", "holdfast status on n1", b"not even JSON")]


async def test_a_refusal_is_the_jobs() -> None:
    link = Link()
    link.answers(refused="no rank 7")
    reply = await link.requests.ask(QUESTION)
    assert (reply.code, reply.refused, reply.whole) == ("HF128", "no rank 7", True)


async def test_without_a_link_or_an_answer_the_node_answers_alone() -> None:
    for link in (Link(up=False), Link()):
        link.answers()  # empty: this agent is no member
        reply = await link.requests.ask(QUESTION)
        assert (reply.whole, bytes(reply.body)) == (False, b"[7]")


async def test_a_silent_coordinator_is_waited_for_until_the_node_must_answer() -> None:
    link = Link()
    reply = await link.requests.ask(msgspec.structs.replace(QUESTION, within_s=0.0))
    assert (reply.whole, bytes(reply.body)) == (False, b"[7]")


async def test_a_lost_link_ends_the_wait() -> None:
    link = Link()
    asked = asyncio.ensure_future(link.requests.ask(msgspec.structs.replace(QUESTION, within_s=3600.0)))
    await asyncio.sleep(0)
    link.requests.link_lost()
    assert bytes((await asked).body) == b"[7]"


async def test_what_the_node_cannot_answer_alone_is_refused() -> None:
    reply = await Link(up=False, alone=None).requests.ask(QUESTION)
    assert (reply.code, reply.refused, reply.whole) == ("HF128", "the coordinator does not answer", False)
