"""`stop` and `kill` at the coordinator: all agents end, as if each had received a signal. Pure."""

from __future__ import annotations

import msgspec

from holdfast.extensions.end.messages import About
from holdfast.protocol.extension import AnswerRequest, CoordinatorExtension, EndJob, Orders, Sent, UserRequest


class AtCoordinator(CoordinatorExtension):
    questions = {"stop": About, "kill": About}

    def asked(self, now: float, request: UserRequest) -> Orders:  # noqa: ARG002
        # The answer first: agents that end close their links.
        body = msgspec.json.encode(Sent(len(self.job.members())))
        return [AnswerRequest(request.number, body), EndJob(drain=request.question == "stop", by=request.by)]
