"""Answers `status` from the coordinator's state. Pure."""

from __future__ import annotations

from holdfast.extensions.status.messages import About, body_of
from holdfast.protocol.extension import AnswerRequest, CoordinatorExtension, Orders, UserRequest


class AtCoordinator(CoordinatorExtension):
    questions = {"status": About}

    def asked(self, now: float, request: UserRequest) -> Orders:
        return [AnswerRequest(request.number, body_of(self.job.view(now)))]
