"""Asks every node, and answers when all have. Pure: it also runs in the simulator."""

from __future__ import annotations

import msgspec

from holdfast.protocol.extension import (
    AnswerRequest,
    CoordinatorExtension,
    Happened,
    Job,
    MemberLost,
    Orders,
    ToNode,
    UserRequest,
)
from tests.extensions.example.messages import About, Folders, Said, Say


class AtCoordinator(CoordinatorExtension):
    questions = {"where": About}
    messages = Said

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._awaited: dict[int, dict[str, str]] = {}
        """By request: the host of each member that has not answered."""
        self._found: dict[int, dict[str, str]] = {}

    def asked(self, now: float, request: UserRequest) -> Orders:
        self._awaited[request.number] = {member.name: member.host for member in self.job.members()}
        self._found[request.number] = {}
        return [ToNode(name, Say(request.number)) for name in self._awaited[request.number]]

    def heard(self, now: float, member: str, message: Said) -> Orders:
        host = self._awaited.get(message.number, {}).pop(member, None)
        if host is not None:
            self._found[message.number][host] = message.folder
        return self._complete()

    def happened(self, now: float, event: Happened) -> Orders:
        if isinstance(event, MemberLost):
            for awaited in self._awaited.values():
                awaited.pop(event.member, None)
        return self._complete()

    def _complete(self) -> list[AnswerRequest]:
        over = [number for number, awaited in self._awaited.items() if not awaited]
        for number in over:
            del self._awaited[number]
        return [AnswerRequest(number, msgspec.json.encode(Folders(self._found.pop(number)))) for number in over]
