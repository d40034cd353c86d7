"""Samples this node's workers for `stacks`; alone where the coordinator does not answer."""

from __future__ import annotations

from functools import partial

from holdfast.extensions.stacks.messages import Samples, TakeSamples, body_of, view_of
from holdfast.protocol.codec import send_samples
from holdfast.runtime.node_extension import NodeExtension, Question, rank_in, takes_part


class OnNode(NodeExtension):
    messages = TakeSamples

    def heard(self, message: TakeSamples) -> None:
        self.node.start("stacks", self._sample(message.number))

    async def _sample(self, number: int) -> None:
        send_samples(self.send, partial(Samples, number), await self.node.samples())

    async def asked(self, _question: Question) -> bytes:
        place = self.node.place
        seen = []
        if place is not None:
            samples = [each for each in await self.node.samples() if takes_part(place, each.local_rank)]
            seen = [(self.node.host, rank_in(place, each.local_rank), each) for each in samples]
        generation, size = (place.generation, place.world_size) if place is not None else (0, 0)
        return body_of(view_of(self.node.run_id, generation, size, seen))
