"""Ends this node's part of the job, where the coordinator does not answer."""

from __future__ import annotations

import msgspec

from holdfast.protocol.extension import Sent
from holdfast.runtime.node_extension import NodeExtension, Question


class OnNode(NodeExtension):
    async def asked(self, question: Question) -> bytes:
        self.node.quit(drain=question.name == "stop", by=question.by)
        return msgspec.json.encode(Sent(1))
