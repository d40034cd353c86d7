"""Answers `status` for one node, where the coordinator does not."""

from __future__ import annotations

from holdfast.extensions.status.messages import body_of
from holdfast.runtime.node_extension import NodeExtension, Question


class OnNode(NodeExtension):
    async def asked(self, _question: Question) -> bytes:
        return body_of(self.node.view())
