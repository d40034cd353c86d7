"""What an agent answers to a command on its host: what the coordinator says, or else what this node knows itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from holdfast.core.progress import JobView
from holdfast.core.protocol import Answer, Ask, FromAgent, Question, Quit
from holdfast.runtime.control_client import Reply

ANSWER_S_MAX = {Question.STATUS: 3.0, Question.STACKS: 8.0, Question.STOP: 3.0, Question.KILL: 3.0}
"""So long the coordinator is waited for; stacks are collected on all nodes first."""


class LocalNode(Protocol):
    """This node's agent, when nobody else can be asked."""

    def view(self) -> JobView: ...

    async def stacks(self) -> bytes:
        """JSON, as the coordinator answers it."""

    def quit(self, order: Quit) -> None: ...


class Inquiry:
    """One per agent. `send` puts a message on the link to the coordinator, and is False where there is none."""

    def __init__(self, send: Callable[[FromAgent], bool], own: LocalNode, host: str) -> None:
        self._send = send
        self._own = own
        self._host = host
        self._number = 0
        self._open: dict[int, asyncio.Future[bytes]] = {}

    async def ask(self, question: Question) -> Reply:
        by = f"holdfast {question.value} on {self._host}"
        body = await self._ask_coordinator(question, by)
        if body is not None:
            return Reply(body=msgspec.Raw(body))
        return Reply(whole=False, body=msgspec.Raw(await self._ask_ourselves(question, by)))

    def answered(self, answer: Answer) -> None:
        waiting = self._open.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.body)

    def link_lost(self) -> None:
        """Nobody will answer what is open."""
        for waiting in self._open.values():
            waiting.cancel()

    async def _ask_coordinator(self, question: Question, by: str) -> bytes | None:
        """None: it cannot be reached, does not answer in time, or has nothing to say."""
        self._number += 1
        number = self._number
        waiting = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(Ask(number, question, by)):
                return None
            await asyncio.wait({waiting}, timeout=ANSWER_S_MAX[question])
            return (waiting.result() or None) if waiting.done() and not waiting.cancelled() else None
        finally:
            del self._open[number]

    async def _ask_ourselves(self, question: Question, by: str) -> bytes:
        match question:
            case Question.STATUS:
                return msgspec.json.encode(self._own.view())
            case Question.STACKS:
                return await self._own.stacks()
            case Question.STOP | Question.KILL:
                self._own.quit(Quit(drain=question is Question.STOP, by=by))
                return b'{"nodes":1}'
