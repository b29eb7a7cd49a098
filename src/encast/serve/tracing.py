"""Traces: a span for every request, sent to a collector of OpenTelemetry; the extra ``trace``.

A request's span begins where the client's ``traceparent`` ends. Below it lie ``tokenize``, ``queue`` and ``inference``,
one after the other: each is as long as all runs of the request took together.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from encast.errors import InputError, need_modules
from encast.serve.service import Finished

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Tracing", "collector_address", "otlp_exporter"]

_TIMEOUT_S = 2.0
"""For a batch of spans, all attempts together: the end of a front waits for the last one."""


def collector_address(url: str) -> str:
    """Where a collector takes traces: a URL without a path gets ``/v1/traces``.

    Raises ``InputError`` for what is no URL, and without the extra ``trace``.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InputError(f"{url!r} is no address of a collector; give one such as http://localhost:4318")
    need_modules("trace", "opentelemetry")
    need_modules("trace", "opentelemetry.sdk", "opentelemetry.exporter")
    return url if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


def otlp_exporter(url: str) -> SpanExporter:
    """Sends spans to a collector as OTLP over HTTP. Raises as ``collector_address``."""
    address = collector_address(url)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(address, timeout=_TIMEOUT_S)


class Tracing:
    """Makes spans of finished requests; ``finished`` belongs into ``Service.finished``. ``process`` names the front."""

    def __init__(self, exporter: SpanExporter, process: str = "") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Environment variables of OpenTelemetry go before these, as its users expect.
        resource = Resource.create({"service.name": "encast", "service.instance.id": process})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("encast.serve")
        self._server, self._within = SpanKind.SERVER, set_span_in_context
        self._extract = TraceContextTextMapPropagator().extract
        self._error = Status(StatusCode.ERROR)

    def finished(self, request: Finished) -> None:
        """Makes the spans of a request, once its answer is on its way."""
        self._make(request, time.time_ns())

    def close(self) -> None:
        """Sends what was not sent yet; call it in a thread, since it waits for the collector."""
        self._provider.shutdown()

    def _make(self, request: Finished, end: int) -> None:
        call, timing = request.call, request.call.timing
        begin = end - int(1e9 * request.total_s)
        attributes: dict[str, Any] = {
            "encast.protocol": request.protocol,
            "encast.request_id": request.request_id,
            "http.response.status_code": request.status,
        }
        if request.kind:
            attributes["error.type"] = request.kind
        if call.model is not None:
            attributes["encast.model"] = call.model.name
        if timing.tokens:
            attributes.update({"encast.texts": timing.texts, "encast.tokens": timing.tokens})
        context = self._extract({name: call.headers[name] for name in _HEADERS if name in call.headers})
        span = self._tracer.start_span(
            request.operation, context=context, kind=self._server, attributes=attributes, start_time=begin
        )
        if request.status >= 500:
            span.set_status(self._error)
        if timing.tokens:
            inside, at = self._within(span, context), begin
            batch = {"encast.batch_tokens": timing.batch_tokens}
            for name, seconds, more in (
                ("tokenize", timing.tokenize_s, None),
                ("queue", timing.queue_s, None),
                ("inference", timing.inference_s, batch),
            ):
                child = self._tracer.start_span(name, context=inside, attributes=more, start_time=at)
                at += int(1e9 * seconds)
                child.end(at)
        span.end(end)


_HEADERS = ("traceparent", "tracestate")
