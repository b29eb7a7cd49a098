"""Spans of requests, as a collector gets them."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import pytest
from local import client, local_service
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from encast.errors import InputError
from encast.serve.protocols.encast import ENCAST
from encast.serve.tracing import Tracing, otlp_exporter

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def ask(tracing: Tracing, base: Path, parent: str | None = None, model: str = "embed") -> None:
    service = local_service(base, "embed")
    service.finished.append(tracing.finished)
    headers = {"x-request-id": "r-1"} if parent is None else {"x-request-id": "r-1", "traceparent": parent}
    with client(service, [ENCAST]) as http:  # one event loop for all that happens
        http.post("/encast/v1/embed", json={"texts": ["a", "b c"], "model": model}, headers=headers)


def test_a_request_and_its_parts_below_the_clients_span(tmp_path_factory: pytest.TempPathFactory) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "front-0")
    ask(tracing, tmp_path_factory.getbasetemp(), f"00-{TRACE}-{PARENT}-01")
    tracing.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"encast.embed", "tokenize", "queue", "inference"}
    request = spans.pop("encast.embed")
    assert request.kind is SpanKind.SERVER
    assert request.parent is not None
    assert request.parent.span_id == int(PARENT, 16)
    attributes = dict(request.attributes or {})
    assert attributes.pop("encast.tokens") > 4  # type: ignore[operator]
    assert attributes == {
        "encast.protocol": "encast", "encast.request_id": "r-1", "http.response.status_code": 200,
        "encast.model": "embed", "encast.texts": 2,
    }  # fmt: skip
    assert request.resource.attributes["service.name"] == "encast"
    at = request.start_time
    for name in ("tokenize", "queue", "inference"):
        span = spans[name]
        assert span.context.trace_id == int(TRACE, 16)
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
        assert span.start_time == at
        at = span.end_time
    assert list(spans["inference"].attributes or {}) == ["encast.batch_tokens"]


@pytest.mark.parametrize("parent", [None, "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
def test_without_a_valid_parent_a_trace_begins(tmp_path_factory: pytest.TempPathFactory, parent: str | None) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    ask(tracing, tmp_path_factory.getbasetemp(), parent)
    tracing.close()
    assert [span.name for span in exporter.get_finished_spans() if span.parent is None] == ["encast.embed"]


def test_a_trace_that_the_client_did_not_sample_is_not_sent(tmp_path_factory: pytest.TempPathFactory) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    ask(tracing, tmp_path_factory.getbasetemp(), f"00-{TRACE}-{PARENT}-00")
    tracing.close()
    assert exporter.get_finished_spans() == ()


def test_a_refusal_says_why(tmp_path_factory: pytest.TempPathFactory) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    ask(tracing, tmp_path_factory.getbasetemp(), model="absent")
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes or {})["error.type"] == "not_found"
    assert span.status.status_code is StatusCode.UNSET, "the client's fault is no error of a server's span"


def test_a_collector_gets_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    heard: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tracing = Tracing(otlp_exporter(f"http://127.0.0.1:{server.server_port}"))
        ask(tracing, tmp_path_factory.getbasetemp())
        tracing.close()
        server.shutdown()
    ((path, data),) = heard
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(data).resource_spans
    assert [span.name for span in resource.scope_spans[0].spans] == ["tokenize", "queue", "inference", "encast.embed"]


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://localhost", "http://", "4318"])
def test_what_is_no_collector(url: str) -> None:
    with pytest.raises(InputError, match="no address of a collector"):
        otlp_exporter(url)
