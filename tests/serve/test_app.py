"""What the application does for every protocol: admission, limits, deadlines, headers, errors."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import msgspec
import pytest
from local import LocalRunner, client, local_service, served
from starlette.testclient import TestClient

from encast.errors import InputError
from encast.serve.call import INLINE_BYTES, Call
from encast.serve.errors import STATUS, Kind, RefusalError
from encast.serve.operations import Operation, Protocol, Reply
from encast.serve.service import Finished, RequestLimits, Service
from encast.tasks.embed import embed
from encast.tasks.session import Run, Steps


class Body(msgspec.Struct):
    texts: list[str]
    fail: str = ""


async def run(service: Service, call: Call, body: Body) -> Reply:
    service.limits.check_texts(body.texts, "texts")
    if body.fail:
        raise {"defect": ZeroDivisionError("/secret/path"), "refusal": RefusalError("failed", "sorry")}[body.fail]
    model = service.models.find("embed")
    rows = await call.run(model, embed(model.session, body.texts))
    return Reply(msgspec.json.encode(rows.tolist()))


async def words(service: Service, call: Call, body: Body) -> Reply:
    return Reply(msgspec.json.encode(len(body.texts)))


async def look(service: Service, call: Call, body: None) -> Reply:
    return Reply(msgspec.json.encode({"one": call.path["one"]}))


def error(refusal: RefusalError) -> bytes:
    return msgspec.json.encode({"why": refusal.kind, "words": refusal.message})


PROTOCOL = Protocol(
    "test",
    [
        Operation("POST", "/run", "test.run", "Runs", run, Body),
        Operation("POST", "/words", "test.words", "Counts", words, Body, runs=False),
        Operation("GET", "/look/{one:path}", "test.look", "Looks", look, runs=False),
        Operation("POST", "/look/{one:path}", "test.post", "Looks", look, runs=False),
        Operation("GET", "/open/{one}", "test.open", "Open", look, runs=False, open=True),
    ],
    error,
    {"unprocessable": 424},
)


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return local_service(tmp_path_factory.getbasetemp(), "embed")


@pytest.fixture
def app(service: Service) -> TestClient:
    return client(service, [PROTOCOL])


def runner(service: Service) -> LocalRunner:
    found = service.models.by_name["embed"].runner
    assert isinstance(found, LocalRunner)
    return found


def test_every_answer_has_its_headers(app: TestClient) -> None:
    found = app.post("/run", json={"texts": ["a cat", "b"]}, headers={"x-request-id": "mine-1"})
    assert found.status_code == 200
    assert found.headers["x-request-id"] == "mine-1"
    assert found.headers["x-tokens"] == "8"
    times = {part: float(found.headers[f"x-{part}-time-ms"]) for part in ("total", "tokenize", "queue", "inference")}
    assert times["total"] >= times["tokenize"] + times["inference"] > 0
    assert found.headers["content-type"] == "application/json"


@pytest.mark.parametrize("name", ["", "two words", "caf\u00e9", "x" * 129, "tab\t"])
def test_a_strange_request_id_is_replaced(app: TestClient, name: str) -> None:
    found = app.get("/look/x", headers={"x-request-id": name.encode("latin-1")})
    assert len(found.headers["x-request-id"]) == 32


def test_two_methods_share_a_path(app: TestClient) -> None:
    assert app.get("/look/a/b").json() == app.post("/look/a/b").json() == {"one": "a/b"}
    assert app.head("/look/a").status_code == 200
    refused = app.delete("/look/a")
    assert refused.status_code == 405
    assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("POST", "/run/", 404), ("GET", "/run", 405), ("OPTIONS", "/run", 405)],
)
def test_what_no_route_takes_is_refused_in_json(app: TestClient, method: str, path: str, status: int) -> None:
    found = app.request(method, path, headers={"x-request-id": "i"})
    assert (found.status_code, found.headers["x-request-id"]) == (status, "i")
    assert set(found.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'{"texts": "a"}', b'{"texts": ["\xff"]}', b'{"texts": ["\xed\xa0\x80"]}', b"\0", b"null",
        b'{"texts": ["\\ud800"]}', b'{"x":' * 50_000, b'{"texts": [], "x": ' + b"[" * 100_000, b"9" * 10_000,
    ],
    ids=range(12),
)  # fmt: skip
def test_bad_json_is_the_clients_fault(app: TestClient, content: bytes) -> None:
    found = app.post("/run", content=content, headers={"content-type": "application/json"})
    assert (found.status_code, found.json()["why"]) == (400, "invalid")


def test_nul_and_charset_are_fine(app: TestClient) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert app.post("/run", content=b'{"texts": ["a\\u0000b"]}', headers=headers).status_code == 200


def test_other_content_types_are_refused(app: TestClient) -> None:
    found = app.post("/run", data={"texts": "a"})
    assert (found.status_code, found.json()["why"]) == (415, "media_type")


def test_an_input_error_of_the_model_is_unprocessable(app: TestClient, service: Service) -> None:
    runner(service).fails.append(InputError("the model says no"))
    found = app.post("/run", json={"texts": ["a"]})
    assert (found.status_code, found.json()) == (424, {"why": "unprocessable", "words": "the model says no"})


def test_a_defect_is_logged_and_not_shown(app: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "encast.serve"):
        found = app.post("/run", json={"texts": [], "fail": "defect"}, headers={"x-request-id": "abc"})
    assert found.status_code == 500
    assert "secret" not in found.text
    assert "Traceback" not in found.text
    assert "abc" in found.json()["words"]
    assert "ZeroDivisionError: /secret/path" in caplog.text
    assert "abc" in caplog.text


@pytest.mark.parametrize(
    ("limits", "body"),
    [
        ({"max_texts": 2}, {"texts": ["a", "b", "c"]}),
        ({"max_text_bytes": 3}, {"texts": ["a", "\u20ac\u20ac"]}),
        ({"max_body_bytes": 30}, {"texts": ["a" * 30]}),
    ],
)
def test_what_is_too_large_is_refused(tmp_path_factory: pytest.TempPathFactory, limits: Any, body: Any) -> None:
    service = local_service(tmp_path_factory.getbasetemp(), "embed", limits=RequestLimits(**limits))
    found = client(service, [PROTOCOL]).post("/run", json=body)
    assert (found.status_code, found.json()["why"]) == (413, "too_large")
    assert str(next(iter(limits.values()))) in found.json()["words"]
    assert runner(service).runs == []


def test_a_text_of_just_the_limit_is_served(tmp_path_factory: pytest.TempPathFactory) -> None:
    limits = RequestLimits(max_text_bytes=6, max_texts=2)
    app = client(local_service(tmp_path_factory.getbasetemp(), "embed", limits=limits), [PROTOCOL])
    assert app.post("/run", json={"texts": ["\u20ac\u20ac", "abcdef"]}).status_code == 200


def test_a_body_in_chunks_is_bounded_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    service = local_service(tmp_path_factory.getbasetemp(), "embed", limits=RequestLimits(max_body_bytes=100))
    found = client(service, [PROTOCOL]).post("/run", content=iter([b"x" * 60, b"x" * 60]))
    assert (found.status_code, found.headers["connection"]) == (413, "close")


def test_all_bodies_together_are_bounded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Beyond the bound 429; what a request held is free when it ends, refused or answered; one is always taken."""
    service = local_service(tmp_path_factory.getbasetemp(), "embed", limits=RequestLimits(max_inflight_bytes=1000))
    app, held = client(service, [PROTOCOL]), runner(service)
    alone = {"texts": ["a " * 1000]}
    assert app.post("/run", json=alone).status_code == 200
    held.go.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client(service, [PROTOCOL]).post, "/run", json={"texts": ["a " * 300]})
        while not held.waiting:
            time.sleep(0.002)
        before = service.inflight_bytes
        assert before > 600
        found = app.post("/run", json={"texts": ["a " * 300]})
        chunks = app.post("/look/x", content=iter([b"b" * 300, b"b" * 300]))
        assert app.post("/look/x", content=b"b" * 300).status_code == 200
        assert service.inflight_bytes == before
        held.go.set()
        assert first.result().status_code == 200
    for refused in (found, chunks):
        assert (refused.status_code, refused.json()["why"]) == (429, "overloaded")
        assert refused.headers["retry-after"] == "1"
    assert service.inflight_bytes == 0
    assert app.post("/run", json=alone).status_code == 200


def test_admission(app: TestClient, service: Service) -> None:
    body = {"texts": ["a"]}
    runner(service).full_from, runner(service).backlog_s = 20, 2.4
    full = app.post("/run", content=b"no JSON: it is not read")
    assert (full.status_code, full.headers["retry-after"]) == (429, "3")
    assert app.post("/run", json=body).status_code == 200, "a smaller one"
    chunks = app.post("/run", content=iter([b'{"texts":', b'["a a a a a a"]}']))
    assert (chunks.status_code, chunks.headers["retry-after"]) == (429, "3"), "once its size is known"
    assert app.get("/look/x").status_code == 200
    runner(service).full_from = None
    service.ready = lambda: False
    found = app.post("/run", json=body)
    assert (found.status_code, found.headers["retry-after"]) == (503, "1")
    service.ready = lambda: True
    service.running = service.limits.max_concurrent
    assert app.post("/run", json=body).status_code == 429
    assert app.post("/words", json=body).status_code == 429
    assert app.get("/look/x").status_code == 200
    service.running = 0
    assert app.post("/words", json=body).status_code == 200
    assert app.post("/run", json=body).status_code == 200
    assert service.running == 0


def test_a_refusal_of_the_engine_reaches_the_client(app: TestClient, service: Service) -> None:
    runner(service).fails.append(RefusalError("overloaded", "full", retry_after=0.2))
    found = app.post("/run", json={"texts": ["a"]})
    assert (found.status_code, found.headers["retry-after"]) == (429, "1")


def test_keys(tmp_path_factory: pytest.TempPathFactory) -> None:
    told: list[Finished] = []
    service = local_service(
        tmp_path_factory.getbasetemp(), "embed", finished=[told.append],
        authorise=lambda header: "alice" if header == "Bearer right" else None,
    )  # fmt: skip
    app = client(service, [PROTOCOL])
    for headers in ({}, {"authorization": "Bearer wrong"}):
        found = app.get("/look/x", headers=headers)
        assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")
    assert app.get("/openapi.json").status_code == 401
    assert app.get("/open/x").status_code == 200
    assert app.get("/look/x", headers={"authorization": "Bearer right"}).status_code == 200
    assert [one.key for one in told][-2:] == ["", "alice"]


def test_those_who_count_are_told(app: TestClient, service: Service) -> None:
    told: list[Finished] = []
    service.finished.append(told.append)
    app.post("/run", json={"texts": ["a", "b"]}, headers={"x-request-id": "r"})
    app.post("/run", json={"texts": 1})
    app.get("/nowhere")
    assert [(one.operation, one.protocol, one.status, one.kind) for one in told] == [
        ("test.run", "test", 200, ""), ("test.run", "test", 400, "invalid"), ("unknown", "", 404, "not_found"),
    ]  # fmt: skip
    assert told[0].call.timing.texts == 2
    assert told[0].call.model is service.models.by_name["embed"]
    assert told[0].request_id == told[0].call.id == "r"


@pytest.mark.parametrize("text", ["", "-1", "1.5", "0", "9" * 13, "\u0661", "ten"])
def test_a_strange_timeout_is_refused(app: TestClient, text: str) -> None:
    found = app.post("/run", json={"texts": ["a"]}, headers={"x-timeout-ms": text.encode()})
    assert (found.status_code, found.json()["why"]) == (400, "invalid")


def test_a_timeout_shortens_and_never_lengthens(app: TestClient, service: Service) -> None:
    for milliseconds, most in (("5000", 5.0), ("999999999", service.limits.timeout_s)):
        begin = time.monotonic()
        assert app.post("/run", json={"texts": ["a"]}, headers={"x-timeout-ms": milliseconds}).status_code == 200
        assert begin + most - 0.5 < runner(service).deadlines[-1] <= time.monotonic() + most


def test_a_request_whose_deadline_passes_is_withdrawn(app: TestClient, service: Service) -> None:
    runner(service).go.clear()
    found = app.post("/run", json={"texts": ["a"]}, headers={"x-timeout-ms": "30"})
    assert (found.status_code, found.json()["why"]) == (504, "expired")
    assert (runner(service).withdrawn, runner(service).waiting, service.running) == (1, 0, 0)


def test_runs_of_one_request_are_told_what_came_before(app: TestClient, service: Service) -> None:
    tokens = service.models.by_name["embed"].session.batch_tokens
    texts = ["abcdefgh " * 20] * (tokens // 40 + 1)
    assert app.post("/run", json={"texts": texts}).status_code == 200
    sizes = [run.piece.batch.tokens for run in runner(service).runs]
    assert len(sizes) == 2
    assert runner(service).befores == [0, sizes[0]]


# On a socket


@contextlib.contextmanager
def connected(service: Service) -> Iterator[tuple[socket.socket, str]]:
    with served(service, [PROTOCOL]) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(30)
            yield connection, url


def _post(content: bytes, length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    return b"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (size, content)


def _until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_client_that_goes_takes_its_run_along(service: Service) -> None:
    told: list[Finished] = []
    service.finished.append(told.append)
    runner(service).go.clear()
    with connected(service) as (connection, _):
        connection.sendall(_post(b'{"texts": ["a"]}'))
        _until(lambda: runner(service).waiting == 1)
        connection.close()
        _until(lambda: runner(service).withdrawn == 1)
        _until(lambda: told)
    assert (told[0].kind, told[0].status) == ("cancelled", 499)
    assert service.running == 0


def test_a_client_that_goes_while_it_sends(service: Service) -> None:
    told: list[Finished] = []
    service.finished.append(told.append)
    with connected(service) as (connection, _):
        connection.sendall(_post(b'{"texts": ', length=100))
        _until(lambda: service.running == 1)
        connection.close()
        _until(lambda: told)
    assert told[0].kind == "cancelled"


def test_a_body_that_stalls_is_cut(tmp_path_factory: pytest.TempPathFactory) -> None:
    service = local_service(tmp_path_factory.getbasetemp(), "embed", limits=RequestLimits(body_timeout_s=0.05))
    with connected(service) as (connection, _):
        connection.sendall(_post(b'{"texts": ', length=100))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert json.loads(answer.read())["why"] == "stalled"
        assert connection.recv(1) == b""


@pytest.mark.parametrize(("announced", "goes_on"), [(40, True), (200, False)])
def test_a_body_that_nobody_reads(service: Service, announced: int, goes_on: bool) -> None:
    """A refusal that comes before the body keeps the connection when the rest of the body is within the limit."""
    service.limits = RequestLimits(max_body_bytes=100)
    service.ready = lambda: False
    with connected(service) as (connection, _):
        connection.sendall(_post(b"", length=announced))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        answer.read()
        assert answer.status == 503
        if goes_on:
            connection.sendall(b"x" * announced + b"GET /look/x HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        else:
            assert connection.recv(1) == b""


def test_a_large_request_does_not_hold_up_the_event_loop(service: Service) -> None:
    """Tokenising 2,000 texts happens in a thread: the loop turns meanwhile."""
    model = service.models.by_name["embed"]
    texts = ["abc def " * 10] * 2000

    async def turns() -> int:
        call = Call(arrived=0.0, deadline=1e9, body=b"x" * 100_000)
        work = asyncio.ensure_future(call.run(model, embed(model.session, texts)))
        count = 0
        while not runner(service).runs:
            count += 1
            await asyncio.sleep(0)
        await work
        return count

    assert asyncio.run(turns()) > 3


def test_a_large_output_does_not_hold_up_the_event_loop(service: Service) -> None:
    """A short request can ask for much: what is made of its rows happens in a thread as well."""
    model = service.models.by_name["embed"]

    def steps() -> Steps[tuple[bool, bool]]:
        inline = threading.current_thread() is threading.main_thread()
        (piece,) = model.session.stream(["abc def ghi jkl " * 10])
        rows = yield Run("last_hidden_state", piece)
        assert rows.nbytes > INLINE_BYTES
        return inline, threading.current_thread() is threading.main_thread()

    call = Call(arrived=0.0, deadline=1e9, body=b"x")
    assert asyncio.run(call.run(model, steps())) == (True, False)


def test_every_kind_has_a_status() -> None:
    assert set(STATUS) == set(get_args(Kind))
