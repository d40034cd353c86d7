"""`save` at the coordinator: all ranks save at one safe point, or it reports why they do not. Pure.

The coordinator holds the workers and finds the safe point, as it does before a node leaves. Requests that come
meanwhile wait for the same save.
"""

from __future__ import annotations

from math import inf

import msgspec

from holdfast.extensions.save.messages import About
from holdfast.protocol.extension import (
    AnswerRequest,
    CoordinatorExtension,
    Ended,
    Happened,
    Order,
    Orders,
    RefuseRequest,
    SafePointAgreed,
    SafePointRefused,
    SaveAtSafePoint,
    Sent,
    UserRequest,
)
from holdfast.protocol.policy import Note

AGREED_S_MAX = 5.0
"""Limit for the workers to agree on a safe point (s)."""


class AtCoordinator(CoordinatorExtension):
    questions = {"save": About}
    _waiting: tuple[UserRequest, ...] = ()
    """Requests that wait for the save in progress."""
    _due_s = inf
    """The time at which that save counts as failed."""

    def asked(self, now: float, request: UserRequest) -> Orders:
        first = not self._waiting
        self._waiting = (*self._waiting, request)
        if not first:
            return ()
        self._due_s = now + AGREED_S_MAX
        return (Note("save_asked", {"by": request.by}), SaveAtSafePoint(request.by))

    def happened(self, now: float, event: Happened) -> Orders:  # noqa: ARG002
        match event:
            case SafePointAgreed():
                body = msgspec.json.encode(Sent(len(self.job.members())))
                return [AnswerRequest(each.number, body) for each in self._taken()]
            case SafePointRefused(text):
                return self._refuse(text)
            case Ended():
                return self._refuse("the generation ended before a safe point was agreed")
            case _:
                return ()

    def due_s(self) -> float:
        return self._due_s

    def due(self, now: float) -> Orders:  # noqa: ARG002
        return self._refuse(f"no safe point was agreed within {AGREED_S_MAX:g} s")

    def _refuse(self, text: str) -> list[Order]:
        return [RefuseRequest(each.number, text) for each in self._taken()]

    def _taken(self) -> tuple[UserRequest, ...]:
        """The requests that wait; none waits any more."""
        waiting, self._waiting, self._due_s = self._waiting, (), inf
        return waiting
