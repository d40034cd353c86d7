"""Keeps the newest load of every node, and shows it. Pure."""

from __future__ import annotations

from holdfast.extensions.load.messages import SHOWN_MAX, NodeLoad
from holdfast.protocol.extension import CoordinatorExtension, Figures, Happened, Job, MemberLost, Orders

SHOWN_S_MAX = 300.0
"""Age from which a load is not shown (s): a driver or a disk does not answer."""


class AtCoordinator(CoordinatorExtension):
    messages = NodeLoad

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._loads: dict[str, tuple[NodeLoad, float]] = {}
        """The newest load of each member, by its name, and the time at which it came."""

    def heard(self, now: float, member: str, message: NodeLoad) -> Orders:
        self._loads[member] = message, now
        return ()

    def happened(self, now: float, event: Happened) -> Orders:  # noqa: ARG002
        if isinstance(event, MemberLost):
            self._loads.pop(event.member, None)
        return ()

    def view(self, now: float) -> Figures:
        in_world = [node.member for node in self.job.nodes()]
        members = dict.fromkeys([*in_world, *(each.name for each in self.job.members())])
        shown = {}
        for name in list(members)[:SHOWN_MAX]:
            load, came_s = self._loads.get(name, (None, now))
            if load is not None and now - came_s < SHOWN_S_MAX:
                shown[name] = load
        return Figures(nodes=shown)
