"""Parks nodes whose check has failed, and lets them take part again when it passes. Pure."""

from __future__ import annotations

from holdfast.extensions.health.messages import Recovered, Unfit
from holdfast.protocol.extension import (
    CoordinatorExtension,
    Figures,
    Happened,
    Job,
    MemberLost,
    Orders,
    Park,
    Unpark,
)
from holdfast.protocol.policy import Note


class AtCoordinator(CoordinatorExtension):
    messages = Unfit | Recovered

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._parked: dict[str, str] = {}
        """The host and the reason, in words, by member."""

    def heard(self, now: float, member: str, message: Unfit | Recovered) -> Orders:  # noqa: ARG002
        if isinstance(message, Recovered):
            self._parked.pop(member, None)
            return [Note("unparked", {"member": member}), Unpark(member)]
        host = next((each.host for each in self.job.members() if each.name == member), member)
        text = self._parked[member] = f"{host} is parked: {message.reason}"
        about = {"member": member, "generation": message.generation, "reason": message.reason}
        return [Note("parked", about), Park(member, text)]

    def happened(self, now: float, event: Happened) -> Orders:  # noqa: ARG002
        if isinstance(event, MemberLost):
            self._parked.pop(event.member, None)
        return ()

    def view(self, now: float) -> Figures:  # noqa: ARG002
        return Figures(notices=tuple(self._parked.values()))
