"""Says where this node's agent works; alone where the coordinator does not answer."""

from __future__ import annotations

import os

import msgspec

from holdfast.runtime.node_extension import NodeExtension, Question
from tests.extensions.example.messages import Folders, Said, Say


class OnNode(NodeExtension):
    messages = Say

    def heard(self, message: Say) -> None:
        self.node.write("where_asked", number=message.number)
        self.send(Said(message.number, os.getcwd()))

    async def asked(self, question: Question) -> bytes:
        return msgspec.json.encode(Folders({self.node.host: os.getcwd()}))
