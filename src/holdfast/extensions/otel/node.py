"""`--otel URL`: sends a span of the run and of each generation to an OTLP/HTTP receiver. Only the node of the
coordinator sends."""

from __future__ import annotations

from holdfast.detached import run_detached
from holdfast.extensions.otel.exporter import Exporter
from holdfast.extensions.otel.spans import Span, Spans
from holdfast.runtime.node_extension import (
    Node,
    NodeExtension,
    NodeHappened,
    Send,
    WorkersRegrouped,
    WorkersStarted,
)


class OnNode(NodeExtension):
    def __init__(self, node: Node, send: Send) -> None:
        super().__init__(node, send)
        self._job_uid = ""
        self._exporter = Exporter(
            str(node.options.otel), node.host, lambda span, why: node.write("span_lost", span=span, why=why)
        )
        node.listen(Spans({"holdfast.run_id": node.run_id}, self._send_span).heard)

    def happened(self, event: NodeHappened) -> None:
        if isinstance(event, WorkersStarted | WorkersRegrouped):
            self._job_uid = self._job_uid or event.start.job_uid

    def _send_span(self, span: Span) -> None:
        # A job that ends before its first generation has no identity, and one that has none yet is this agent's alone.
        self._exporter.send(span, self._job_uid or f"{self.node.run_id}/{self.node.host}")

    async def reported(self) -> None:
        await run_detached(self._exporter.close)
