"""Passes the questions of commands on one node to the coordinator, whose extensions answer them.

Where the coordinator is unreachable, or does not answer in time, the node's own half of the extension answers for this
node alone. Knows no question by name, and reads neither what a question is about nor an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from holdfast.protocol.errors import ControlRefusedError
from holdfast.protocol.messages import Answer, Ask, FromAgent
from holdfast.runtime.node_extension import Question
from holdfast.runtime.running import Reply

ALONE_S_MIN, ALONE_S_MAX, ALONE_SHARE = 2.0, 15.0, 1 / 3
"""Share and limits (s) of the part of a command's time that is left for the node's own answer."""
UNANSWERED = "the coordinator does not answer"


class ControlRequests:
    """The questions of commands on one agent.

    `send` puts a message on the link to the coordinator, and returns False if there is none. `alone` returns this
    node's own answer; None: it has none.
    """

    def __init__(
        self, send: Callable[[FromAgent], bool], alone: Callable[[Question], Awaitable[bytes | None]], host: str
    ) -> None:
        self._send = send
        self._alone = alone
        self._host = host
        self._number = 0
        self._open: dict[int, asyncio.Future[Answer]] = {}

    async def ask(self, question: Question) -> Reply:
        """The answer to a question. If its `by` is empty, the command of the question's name asks."""
        by = f"{question.by or f'holdfast {question.name}'} on {self._host}"
        question = msgspec.structs.replace(question, by=by)
        answer = await self._ask_coordinator(question)
        if answer is not None:
            return _reply(answer.body, answer.refused)
        body = await self._alone(question)
        return msgspec.structs.replace(_reply(body or b"", "" if body else UNANSWERED), whole=False)

    def answered(self, answer: Answer) -> None:
        waiting = self._open.get(answer.number)  # None: its command has stopped to wait
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def link_lost(self) -> None:
        """End the wait of all open questions: the coordinator will not answer them."""
        for waiting in self._open.values():
            waiting.cancel()

    async def _ask_coordinator(self, question: Question) -> Answer | None:
        """The coordinator's answer; None: it is unreachable, does not answer in time, or has no answer."""
        self._number += 1
        number = self._number
        alone_s = min(ALONE_S_MAX, max(ALONE_S_MIN, ALONE_SHARE * question.within_s))
        waiting = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(Ask(number, question.name, question.by, question.about)):
                return None
            # Not `wait_for`: a lost link cancels the future, and that must not look like a cancellation of this task.
            await asyncio.wait({waiting}, timeout=max(0.0, question.within_s - alone_s))
            answer = waiting.result() if waiting.done() and not waiting.cancelled() else None
        finally:
            del self._open[number]
        return answer if answer is not None and (answer.body or answer.refused) else None


def _reply(body: bytes, refused: str) -> Reply:
    if refused:
        return Reply(code=ControlRefusedError.code, refused=refused)
    return Reply(body=msgspec.Raw(body))
