"""Sends spans to an OTLP/HTTP receiver, in a thread of its own: a receiver that is slow, absent or broken costs spans,
and neither time nor the end of the job.

Imports OpenTelemetry, the extra `otel`, in that thread.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from holdfast.extensions.otel.spans import Span

QUEUE_MAX = 256
SEND_S_MAX = 10.0
"""Limit for one span, with all tries of the exporter (s)."""
CLOSE_S_MAX = 5.0
"""Limit for the spans that wait at the end of the job (s)."""
TRACES = "/v1/traces"
Exported = tuple[Span, str]
"""A span, and the identity of the job."""


class Exporter:
    """Sends spans one by one."""

    def __init__(self, url: str, host: str, failed: Callable[[str, str], None]) -> None:
        """`failed` gets the name of a span that was not sent, and the reason. Any thread may call it."""
        self._url = url if urlsplit(url).path.strip("/") else url.rstrip("/") + TRACES
        self._host = host
        self._failed = failed
        self._queue: queue.Queue[Exported | None] = queue.Queue(QUEUE_MAX)
        self._thread = threading.Thread(target=self._run, name="holdfast-otel", daemon=True)
        self._thread.start()

    def send(self, span: Span, job_uid: str) -> None:
        """Queue a span without waiting. If the queue is full, it is lost and reported."""
        try:
            self._queue.put_nowait((span, job_uid))
        except queue.Full:
            self._failed(span.name, f"{QUEUE_MAX} spans wait already")

    def close(self) -> None:
        """Wait until all are sent, for at most CLOSE_S_MAX."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_S_MAX)
        if self._thread.is_alive():
            self._failed("the last ones", f"the receiver did not take them within {CLOSE_S_MAX:g} s")

    def _run(self) -> None:
        try:
            self._export()
        except Exception as error:  # noqa: BLE001 - of a package that is broken: no traceback on the console, and no end
            self._failed("all", f"{type(error).__name__}: {error}")

    def _export(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult

        told = _Told()
        log = logging.getLogger("opentelemetry")
        log.propagate = False  # its messages would be on the console
        log.addHandler(told)
        exporter = OTLPSpanExporter(endpoint=self._url, timeout=SEND_S_MAX)
        while (next_one := self._queue.get()) is not None:
            told.text = ""
            span, job_uid = next_one
            try:
                taken = exporter.export([readable(span, job_uid, self._host)]) is SpanExportResult.SUCCESS
            except Exception as error:  # noqa: BLE001 - whatever its packages raise ends no job
                taken, told.text = False, f"{type(error).__name__}: {error}"
            if not taken:
                self._failed(span.name, told.text or "the receiver did not take it")


class _Told(logging.Handler):
    """Keeps the newest message of OpenTelemetry."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage().partition("\n")[0][:300]


def readable(span: Span, job_uid: str, host: str) -> object:
    """The span as OpenTelemetry's. Its trace and that of the run follow from the identity of the job, so that a
    coordinator that takes over on another node adds to the same trace."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    resource = Resource.create({"host.name": host})  # with those in OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "holdfast"}))
    sampled = TraceFlags(TraceFlags.SAMPLED)

    def context(name: str) -> SpanContext:
        return SpanContext(_number(job_uid, 16), _number(f"{job_uid}/{name}", 8), is_remote=False, trace_flags=sampled)

    return ReadableSpan(
        name=span.name,
        context=context("run" if span.is_run else f"{span.name}/{host}"),
        parent=None if span.is_run else context("run"),
        resource=resource,
        attributes=span.attributes,
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(StatusCode.OK),
        start_time=span.began_ns,
        end_time=span.ended_ns,
    )


def _number(text: str, size_bytes: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size_bytes], "big")
