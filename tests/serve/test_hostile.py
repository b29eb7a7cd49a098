"""Clients that mean no good, against a running server.

Every attack ends with an answer that blames the client, or with the connection's end, within the timeouts; the server
then answers others rightly, and has no more descriptors, memory or threads than before.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import random
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
from local import artifact, engine
from servers import Running, start_server

from encast.tasks.features import hidden_states

TEXT = "the cat sat on the mat"
SECRET = "zzsecretzz"
"""In every hostile text: it may never be in a log."""

BODY_S = 1.0
HEADER_S = 1.0
"""What the server is told to allow."""

noise = random.Random(0).randbytes
"""The same in every process: pytest-xdist compares the names of tests, in which parameters stand."""

INSIDE = re.compile(rb'Traceback|File "|\.py\b|site-packages|/tmp/|/root/|/home/')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    base = tmp_path_factory.getbasetemp()
    log = base / "hostile.jsonl"
    models = [
        artifact(base, name) for name in ("embed", "embed-sparse", "rerank", "tag", "fill-mask", "answer", "classify")
    ]
    limits = ("--max-body-mb", "4", "--max-texts", "64", "--max-text-kb", "64", "--max-concurrent", "64")
    times = ("--header-timeout-s", HEADER_S, "--body-timeout-s", BODY_S)
    # Small batches: what is asked for at once runs in parts, on several instances.
    with start_server(
        *models, "--grpc-port", "0", "--log", log, "--batch-tokens", "256", *limits, *map(str, times)
    ) as running:
        for model in models:  # a front connects to an engine when it is first asked for it
            body = json.dumps({"model": model.stem, "texts": ["a"]}).encode()
            assert _post(running.url, "/encast/v1/hidden-states", body)[0] == 200
        yield running
        assert running.end() == 0
        written = log.read_text() + "\n".join(running.err + running.out)
        assert '"event":"request"' in written
        assert SECRET not in written, "a client's text is in the log"
        assert running.err == [], "a client's fault is no line on standard error"


@pytest.fixture
def right(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After the test the server is as it was before."""
    wanted = engine(tmp_path_factory.getbasetemp(), "embed").embed([TEXT])
    _embed(server.url, wanted)
    before = _held(server)
    yield
    _embed(server.url, wanted)
    end = time.monotonic() + 20
    while any(now > 2 + was for now, was in zip(_held(server), before, strict=True)):
        assert time.monotonic() < end, f"(descriptors, threads) {_held(server)}, before {before}"
        time.sleep(0.1)


def _held(server: Running) -> list[int]:
    """Descriptors and threads of every process of the server."""
    held = []
    for pid in sorted([server.process.pid, *server.children("front"), *server.children("engine")]):
        held += [len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))]
    return held


def _resident(server: Running) -> int:
    """Bytes of all fronts."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in server.children("front")]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def _embed(url: str, wanted: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    body = json.dumps({"model": "embed", "texts": [TEXT]}).encode()
    end = time.monotonic() + 30
    while True:
        status, _, answer = _post(url, "/encast/v1/embed", body)
        if status != 429 or time.monotonic() > end:  # what an attack left behind may fill the server a moment longer
            break
        time.sleep(0.1)
    assert status == 200, answer
    assert np.array_equal(np.array(json.loads(answer)["results"], np.float32), wanted)


def _post(url: str, path: str, body: bytes | None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer, which must be one that a client may see."""
    names = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = urllib.request.Request(url + path, body, names)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            found = error.code, dict(error.headers), error.read()
    _check(*found)
    return found


def _check(status: int, headers: dict[str, str], body: bytes) -> None:
    if status >= 400:
        shown = body + repr(headers).encode()
        assert INSIDE.search(shown) is None, shown
        assert len(body) <= 4096, "a refusal quotes all of the request"


def _talk(server: Running, *parts: bytes, pause: float = 0.0, half: bool = False, seconds: float = 30.0) -> bytes:
    """Sends bytes, and reads until the server closes; fails when it does not within ``seconds``."""
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), timeout=seconds) as sock:
        with contextlib.suppress(OSError):  # cut off while it still sends
            for part in parts:
                sock.sendall(part)
                if pause:
                    time.sleep(pause)
            if half:
                sock.shutdown(socket.SHUT_WR)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(1 << 16):
                got += part
    assert INSIDE.search(got) is None, got
    return got


def _statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


JSON = b"POST /encast/v1/embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GOOD = json.dumps({"model": "embed", "texts": [TEXT]}).encode()
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


# Bodies


def _bodies() -> dict[str, tuple[bytes, set[int]]]:
    """A hostile body by name, and the statuses that blame the client."""
    text = json.dumps(SECRET)[1:-1]
    return {
        "deep brackets": (b'{"texts":' + b"[" * 100_000, {400}),
        "deep and closed": (b'{"texts":' + b"[" * 100_000 + b"]" * 100_000 + b"}", {400}),
        "deep in an unknown field": (b'{"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b',"texts":["a"]}', {400}),
        "a huge number": (b'{"texts":["a"],"on_long":' + b"9" * 100_000 + b"}", {400}),
        "a huge exponent": (b'{"texts":[1e999999999]}', {400}),
        "not a number": (b'{"texts":[NaN]}', {400}),
        "half a text": (b'{"texts":["a', {400}),
        "invalid UTF-8": (b'{"texts":["\xff\xfe' + text.encode() + b'"]}', {400}),
        "overlong UTF-8": (b'{"texts":["\xc0\xaf"]}', {400}),
        "a lone surrogate": (b'{"texts":["\\ud800 ' + text.encode() + b'"]}', {400, 422}),
        "a surrogate in UTF-8": (b'{"texts":["\xed\xa0\x80"]}', {400}),
        "a raw control character": (b'{"texts":["\x00\x1b[31m"]}', {400}),
        "a null character": (b'{"texts":["a\\u0000b"]}', {200}),
        "UTF-16": ('{"texts":["a"]}'.encode("utf-16"), {400}),
        "a byte order mark": (b'\xef\xbb\xbf{"texts":["a"]}', {400}),
        "nothing": (b"", {400}),
        "null": (b"null", {400}),
        "a wrong type": (json.dumps({"texts": {SECRET: SECRET}}).encode(), {400}),
        "a wrong choice, at length": (json.dumps({"texts": ["a"], "on_long": SECRET * 10_000}).encode(), {400}),
        "a model, at length": (json.dumps({"model": SECRET * 10_000, "texts": ["a"]}).encode(), {404}),
        "a model with escapes": (json.dumps({"model": "\x1b[2J\r\nx: y\0", "texts": ["a"]}).encode(), {404}),
        "a prompt, at length": (json.dumps({"texts": ["a"], "prompt_name": SECRET * 10_000}).encode(), {400, 422}),
        "a text too many": (json.dumps({"texts": ["a"] * 65}).encode(), {413}),
        "a million texts": (b'{"texts":[' + b",".join([b'""'] * 1_000_000) + b"]}", {413}),
        "no texts": (b'{"texts":[]}', {200, 400, 422}),
        "a long text": (json.dumps({"texts": [(SECRET + " ") * 10_000]}).encode(), {413}),
        "a huge text": (json.dumps({"texts": ["a" * (3 << 20)]}).encode(), {413}),
        "one word": (json.dumps({"texts": ["a" * 60_000]}).encode(), {200, 422}),
        "combining marks": (json.dumps({"texts": ["e" + "\u0301" * 15_000]}, ensure_ascii=False).encode(), {200, 422}),
        "doubled keys": (b'{"texts":["a"],' * 1 + b'"texts":["b"],' * 10_000 + b'"texts":["c"]}', {200}),
        "spaces": (b" " * (3 << 20) + b'{"texts":["a"]}', {200}),
    }


@pytest.mark.usefixtures("right")
@pytest.mark.parametrize("name", _bodies())
def test_hostile_bodies(server: Running, name: str) -> None:
    body, statuses = _bodies()[name]
    status, _, answer = _post(server.url, "/encast/v1/embed", body)
    assert status in statuses, answer[:500]
    assert name == "a null character" or status < 300 or json.loads(answer)


@pytest.mark.usefixtures("right")
def test_a_body_beyond_the_limit_is_not_read(server: Running) -> None:
    """It is refused by its announced length, or where it passes the limit; the client may still be sending."""
    ten = json.dumps({"texts": [SECRET * (1 << 20)]}).encode()
    announced = _talk(server, JSON + b"content-length: %d\r\n\r\n" % len(ten), half=True)
    assert _statuses(announced) == [413]
    assert _statuses(_talk(server, JSON + b"content-length: %d\r\n\r\n" % len(ten), ten)) == [413]
    chunk = b"%x\r\n" % len(ten) + ten + b"\r\n0\r\n\r\n"
    assert _statuses(_talk(server, JSON + b"transfer-encoding: chunked\r\n\r\n", chunk)) == [413]


@pytest.mark.usefixtures("right")
def test_hostile_numbers(server: Running) -> None:
    """Fields that are sizes, counts and ids, at and beyond every limit."""
    numbers = [-1, 0, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**40, -(2**63) - 1]
    bodies: list[tuple[str, dict[str, Any]]] = []
    for number in numbers:
        bodies += [
            ("/v1/embeddings", {"model": "embed", "input": [number]}),
            ("/v1/embeddings", {"model": "embed", "input": [[5, number]]}),
            ("/v1/embeddings", {"model": "embed", "input": "a", "dimensions": number}),
            ("/embed", {"inputs": [[number]]}),
            ("/decode", {"ids": [number]}),
            ("/decode", {"ids": [[5, number]]}),
            ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": number}),
            ("/encast/v1/fill-mask", {"texts": ["a [MASK]"], "top_k": number}),
            ("/encast/v1/answer", {"question": "a", "context": "b", "n_best": number}),
            ("/encast/v1/answer", {"question": "a", "context": "b", "max_answer_len": number}),
            ("/encast/v1/answer", {"question": "a", "context": "b", "stride": number}),
            ("/encast/v1/answer", {"question": "a", "context": "b", "null_threshold": number}),
        ]
        bodies += [
            ("/v2/models/embed/infer", {"inputs": [{"name": "text", "datatype": kind, "shape": shape, "data": data}]})
            for kind in ("BYTES", "INT64", "FP32", "NONE")
            for shape in ([number], [1, number], [number, 2], [number] * 40, [])
            for data in (["a"], [[1, 2]], [number], [[]], [], [None])
        ]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda one: (one, _post(server.url, one[0], json.dumps(one[1]).encode())), bodies))
    wrong = [(body, answer) for body, answer in answers if answer[0] >= 500]
    # TEI says 424 for failures of the server as well.
    wrong += [(body, answer) for body, answer in answers if answer[0] == 424 and b"its log has the reason" in answer[2]]
    assert not wrong, wrong[:5]


@pytest.mark.usefixtures("right")
@pytest.mark.parametrize(
    ("headers", "statuses"),
    [
        ({"content_type": "text/plain"}, {415}),
        ({"content_type": "multipart/form-data; boundary=x"}, {415}),
        ({"content_type": "application/json; charset=utf-16"}, {200, 415}),
        ({"content_type": "\xff" * 1000}, {415}),
        ({"content_encoding": "gzip"}, {200, 415}),
        ({"x_timeout_ms": "9" * 4000}, {400}),
        ({"x_timeout_ms": "-1"}, {400}),
        ({"x_timeout_ms": "\u00b2"}, {400}),
        ({"x_request_id": "a" * 10_000}, {200}),
        ({"x_request_id": "\x1b[31m"}, {200, 400}),
        ({"authorization": "Bearer " + "a" * 10_000}, {200}),
        ({"traceparent": "00-" + "f" * 5000}, {200}),
        ({"expect": "200-nonsense"}, {200, 417}),
        ({"range": "bytes=0-999999999999999999999"}, {200}),
    ],
)
def test_hostile_headers(server: Running, headers: dict[str, str], statuses: set[int]) -> None:
    status, answered, answer = _post(server.url, "/encast/v1/embed", GOOD, **headers)
    assert status in statuses, answer
    assert re.fullmatch(r"[!-~]{1,128}", answered.get("x-request-id", "a"))


@pytest.mark.usefixtures("right")
@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd", "/..%2f..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
        "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%00", "/v1/models/%ff%fe", "/v2/models/../../x/ready",
        "/v1/models/" + "a" * 20_000, "/" + "a/" * 10_000, "/?" + "a=b&" * 5_000, "/%0d%0aset-cookie:x=y",
        "/health/live/",
    ],
)  # fmt: skip
def test_hostile_paths(server: Running, path: str) -> None:
    answer = _talk(server, b"GET " + path.encode() + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert _statuses(answer)[0] in (200, 400, 404, 405, 414, 431), answer
    assert b"root:" not in answer
    assert b"\r\nset-cookie" not in answer.lower()
    assert len(answer) < 1 << 16


# What is no HTTP


@pytest.mark.usefixtures("right")
@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
        bytes.fromhex("16030100dc010000d80303") + noise(200),
        b"\x00" * 1000,
        noise(4000),
        b"GET\r\n\r\n",
        b"GET /health/live HTTP/9.9\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\n: x\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nhost: a\x00b\r\n\r\n",
        b"\r\n" * 20_000,
        b"QUIT\r\n",
        JSON + b"content-length: -1\r\n\r\n" + GOOD,
        JSON + b"content-length: 99999999999999999999999\r\n\r\n" + GOOD,
        JSON + b"content-length: 5, 6\r\n\r\n" + GOOD,
        JSON + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + GOOD,
        JSON + b"content-length: 0x10\r\n\r\n" + GOOD,
        JSON + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + GOOD,
        JSON + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + GOOD,
        JSON + b"transfer-encoding: chunked\r\n\r\n-5\r\n" + GOOD,
        JSON + b"transfer-encoding: chunked\r\n\r\n5\r\nhello!!!!\r\n0\r\n\r\n",
        # Smuggling: what is one request to a proxy must not be two to the server.
        JSON + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + LIVE,
        JSON + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n" + LIVE,
        JSON + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + LIVE,
        JSON + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + LIVE,
        JSON + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + LIVE,
        JSON + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + LIVE,
        JSON + b"x: y\r\n transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + LIVE,
    ],
)  # fmt: skip
def test_what_is_no_http_is_refused_once(server: Running, sent: bytes) -> None:
    found = _statuses(_talk(server, sent, half=True, seconds=HEADER_S + 10))
    assert found in ([400], [408], [413], [431], [501], [505], []), "one refusal and no second answer"


@pytest.mark.usefixtures("right")
def test_http_1_0_and_pipelines(server: Running) -> None:
    assert _statuses(_talk(server, b"GET /health/live HTTP/1.0\r\n\r\n")) == [200]
    assert _statuses(_talk(server, LIVE * 5 + LAST)) == [200] * 6
    assert set(_statuses(_talk(server, LIVE * 3 + b"garbage\r\n\r\n" + LAST))) <= {200, 400}
    flood = _statuses(_talk(server, LIVE * 20_000 + LAST))
    assert set(flood) <= {200, 400}
    body = JSON + b"content-length: %d\r\n\r\n" % len(GOOD) + GOOD
    assert _statuses(_talk(server, body * 3 + LAST)) == [200] * 4
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in GOOD)
    assert (
        _statuses(_talk(server, JSON + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n" + LAST))
        == [200] * 2
    )
    upgrade = JSON + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    assert _statuses(_talk(server, upgrade + b"content-length: %d\r\n\r\n" % len(GOOD) + GOOD + LAST)) == [200] * 2
    waits = JSON + b"expect: 100-continue\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(GOOD)
    assert _statuses(_talk(server, waits, GOOD, pause=0.2)) == [100, 200]


@pytest.mark.usefixtures("right")
def test_header_floods(server: Running) -> None:
    flood = b"GET /health/live HTTP/1.1\r\nhost: x\r\n" + b"x-a: b\r\n" * 100_000 + b"\r\n"
    assert _statuses(_talk(server, flood)) in ([431], [])
    assert _statuses(_talk(server, b"GET /health/live HTTP/1.1\r\nx-a: " + b"b" * (1 << 20) + b"\r\n\r\n")) in (
        [431],
        [],
    )
    assert _statuses(_talk(server, b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n")) in ([431], [])
    trailers = JSON + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x-a: b\r\n" * 100_000 + b"\r\n"
    assert _statuses(_talk(server, trailers, half=True)) in ([400], [431], [400, 431], [])
    extensions = JSON + b"transfer-encoding: chunked\r\n\r\n" + b"1;" + b"x" * (8 << 20) + b"\r\n"
    _talk(server, extensions, half=True)


# Time


@pytest.mark.usefixtures("right")
def test_slow_clients_are_cut(server: Running) -> None:
    """All at once, as they take as long as they may."""
    whole = JSON + b"content-length: %d\r\n\r\n" % len(GOOD)
    slow: dict[str, tuple[tuple[bytes, ...], float, set[int]]] = {
        "says nothing": ((), 0.0, set()),
        "a header without end": ((b"GET /health/live HTTP/1.1\r\n", *[b"x: y\r\n"] * 100), 0.3, {408}),
        "half a header": ((b"GET /heal",), 0.0, {408}),
        "a body without end": ((whole, *[bytes((byte,)) for byte in GOOD[:-1]]), 0.3, {408}),
        "half a body": ((whole + GOOD[:5],), 0.0, {408}),
        "no body": ((whole,), 0.0, {408}),
        "half a chunk": ((JSON + b"transfer-encoding: chunked\r\n\r\n10\r\n" + GOOD[:5],), 0.0, {408}),
        "a second request without end": ((LIVE + b"GET /x",), 0.0, {200, 408}),
    }

    def one(parts: tuple[bytes, ...], pause: float) -> tuple[list[int], float]:
        begin = time.monotonic()
        found = _statuses(_talk(server, *parts, pause=pause, seconds=60))
        return found, time.monotonic() - begin

    with ThreadPoolExecutor(len(slow)) as pool:
        running = {name: pool.submit(one, parts, pause) for name, (parts, pause, _) in slow.items()}
        for name, future in running.items():
            found, seconds = future.result()
            assert set(found) == slow[name][2], name
            # Sending on after the end is noticed by the next send but one.
            assert seconds < max(BODY_S, HEADER_S) + 5, name


@pytest.mark.usefixtures("right")
def test_half_closed_and_vanished_clients(server: Running) -> None:
    whole = JSON + b"content-length: %d\r\n\r\n" % len(GOOD)
    assert _statuses(_talk(server, whole + GOOD, half=True)) in ([200], [])
    assert _statuses(_talk(server, whole + GOOD[:5], half=True)) in ([400], [])
    where = urlsplit(server.url)
    reset = struct.pack("ii", 1, 0)
    for sent in (b"", b"GET", whole, whole + GOOD[:5], whole + GOOD):
        for _ in range(50):
            sock = socket.create_connection((where.hostname, where.port))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            sock.sendall(sent)
            sock.close()


@pytest.mark.usefixtures("right")
def test_connections_by_the_thousand(server: Running) -> None:
    """More than the server takes say nothing; those that it has taken before are served on, and others later."""
    where = urlsplit(server.url)
    assert where.hostname is not None

    def live() -> int:
        known.request("GET", "/health/live")
        answer = known.getresponse()
        answer.read()
        return answer.status

    with contextlib.ExitStack() as held:
        known = http.client.HTTPConnection(where.hostname, where.port or 0, timeout=30)
        held.callback(known.close)
        assert live() == 200
        for _ in range(2_000):
            held.enter_context(socket.create_connection((where.hostname, where.port), timeout=30))
        assert live() == 200


@pytest.mark.usefixtures("right")
def test_memory_is_bounded(server: Running) -> None:
    """Bodies as large as they may be, again and again, and answers that nobody reads."""
    large = json.dumps({"texts": ["a b " * 200] * 60, "on_long": "truncate"}).encode()

    def round_of_requests() -> None:
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda path: _post(server.url, path, large), ["/encast/v1/embed"] * 16))
        assert not [answer for answer in answers if answer[0] not in (200, 429)]
        where = urlsplit(server.url)
        asks = json.dumps({"texts": ["a b " * 100] * 64, "on_long": "truncate"}).encode()
        head = b"POST /encast/v1/hidden-states HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        for _ in range(20):
            with socket.create_connection((where.hostname, where.port)) as sock:
                sock.sendall((head + b"content-length: %d\r\n\r\n" % len(asks) + asks) * 4)

    # An allocator keeps what it once had, in every thread of every front.
    for _ in range(4):
        round_of_requests()
    before = _resident(server)
    for _ in range(4):
        round_of_requests()
    assert _resident(server) < before + (64 << 20)


# gRPC


def _frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


@pytest.mark.usefixtures("right")
def test_hostile_grpc(server: Running) -> None:
    grpc = pytest.importorskip("grpc")
    found = re.search(r"gRPC on port (\d+)", "\n".join(server.out))
    assert found is not None
    port = int(found[1])
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"")
    for sent in (
        b"GET / HTTP/1.1\r\n\r\n",
        noise(4000),
        preface + _frame(0, 0, 1, b"x", 0xFFFFFF),
        preface + _frame(1, 4, 1, b"\xff" * 100),
        preface + _frame(9, 0, 1, b"\x00" * 1000),
        preface + b"".join(_frame(6, 0, 0, bytes(8)) for _ in range(20_000)),
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock, contextlib.suppress(OSError):
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    ours = {
        "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "FAILED_PRECONDITION", "OUT_OF_RANGE",
    }  # fmt: skip
    raw = lambda data: data  # noqa: E731
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name in ("ModelInfer", "ModelReady", "ModelMetadata", "Nothing"):
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{name}", raw, raw)
            for message in _messages():
                done = call.future(message, timeout=20)
                if done.exception() is not None:
                    assert done.code().name in ours, (name, message[:100], done.exception())
                    assert INSIDE.search(done.details().encode()) is None
                    assert len(done.details()) <= 4096


def _messages() -> Iterator[bytes]:
    """Protobuf with lies about lengths, names, shapes and raw contents."""

    def field(number: int, data: bytes, length: int | None = None) -> bytes:
        return _varint(number << 3 | 2) + _varint(len(data) if length is None else length) + data

    def tensor(shape: list[int], datatype: bytes = b"BYTES", name: bytes = b"text") -> bytes:
        dims = b"".join(_varint(one & (1 << 64) - 1) for one in shape)
        return field(5, field(1, name) + field(2, datatype) + field(3, dims))

    yield b""
    yield b"\xff" * 1000
    yield field(1, b"embed", 1 << 40)
    yield field(1, b"\xff\xfe")
    yield field(1, b"a" * 1_000_000)
    embed = field(1, b"embed")
    for shape in ([1], [-1], [0], [2**62], [2**62, 4], [1] * 100, []):
        for datatype in (b"BYTES", b"INT64", b"FP32", b"x" * 100_000):
            for contents in (
                b"",
                b"\xff\xff\xff\xff",
                b"\x01\0\0\0a",
                b"\x05\0\0\0a",
                bytes(7),
                b"\x04\0\0\0\xff\xfe\xfd\xfc",
            ):
                yield embed + tensor(shape, datatype) + field(7, contents)
    yield embed + tensor([1]) * 1000
    yield embed + field(7, b"\x01\0\0\0a") * 1000


def _varint(number: int) -> bytes:
    found = bytearray()
    while True:
        found.append(number & 127 | (128 if number > 127 else 0))
        number >>= 7
        if not number:
            return bytes(found)


# Load


@pytest.mark.usefixtures("right")
def test_bits_under_load(server: Running, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Mixed requests from many threads, some of which go away; every answer is the offline engine's."""
    base = tmp_path_factory.getbasetemp()
    chooser = np.random.default_rng(5)
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "bark", "at", "night", "and", "birds", "sing"]
    texts = [" ".join(chooser.choice(words, int(chooser.integers(1, 30)))) for _ in range(200)]
    embedded = engine(base, "embed").embed(texts)
    ranks = engine(base, "rerank").rerank("where is the cat", texts[:20])
    labels = [
        {"label": one.label, "score": one.score, "scores": [{"label": a, "score": b} for a, b in one.scores.items()]}
        for one in engine(base, "classify").classify(texts)
    ]
    masked = [f"[MASK] {text}" for text in texts]
    tagger = engine(base, "tag")
    wanted = {
        "embed": ("texts", embedded.tolist()),
        "embed-sparse": (
            "texts",
            [
                {"indices": one.indices.tolist(), "values": one.values.tolist()}
                for one in engine(base, "embed-sparse").embed_sparse(texts)
            ],
        ),
        "classify": ("texts", labels),
        "tag": ("texts", _json(tagger.tag(texts))),
        "hidden-states": ("texts", [one.tolist() for one in tagger.drive(hidden_states(tagger.session, texts))]),
        "fill-mask": ("texts", _json(engine(base, "fill-mask").fill_mask(masked))),
        "answer": ("context", _json(engine(base, "answer").answer(["where is the cat"] * len(texts), texts))),
    }
    ended = threading.Event()

    def go_away() -> None:
        where = urlsplit(server.url)
        body = json.dumps({"model": "embed", "texts": texts[:64]}).encode()
        while not ended.wait(0.02):
            with socket.create_connection((where.hostname, where.port)) as sock:
                sock.sendall(JSON + b"content-length: %d\r\n\r\n" % len(body) + body)

    def ask(seed: int) -> Counter[str]:
        own, right = np.random.default_rng(seed), Counter[str]()
        for _ in range(60):
            first, count = int(own.integers(0, 136)), int(own.choice([1, 1, 1, 3, 17, 64]))
            part = slice(first, first + count)
            name = str(own.choice([*wanted, "openai", "rerank"]))
            if name == "openai":
                body = {"model": "embed", "input": texts[part], "encoding_format": "base64"}
                body["truncate_prompt_tokens"] = -1
                status, _, answer = _post(server.url, "/v1/embeddings", json.dumps(body).encode())
                rows = [one["embedding"] for one in json.loads(answer)["data"]] if status == 200 else []
                got = [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in rows]
                expected = embedded[part].tolist()
            else:
                if name == "rerank":
                    body = {"query": "where is the cat", "documents": texts[:20]}
                    expected = [{"index": index, "score": score} for index, score in ranks]
                else:
                    body = {wanted[name][0]: (masked if name == "fill-mask" else texts)[part]}
                    expected = wanted[name][1][part]
                body |= {"question": ["where is the cat"] * count} if name == "answer" else {"on_long": "truncate"}
                body["model"] = "tag" if name == "hidden-states" else name
                status, _, answer = _post(server.url, f"/encast/v1/{name}", json.dumps(body).encode())
                got = json.loads(answer)["results"] if status == 200 else None
                if name in ("embed", "hidden-states") and status == 200:
                    got = _floats(got)
                elif name == "embed-sparse" and status == 200:
                    got = [one | {"values": np.float32(one["values"]).tolist()} for one in got]
            assert status in (200, 429), (name, answer)
            if status == 200:
                assert got == expected, name
                right[name] += 1
        return right

    leaving = threading.Thread(target=go_away)
    leaving.start()
    try:
        with ThreadPoolExecutor(16) as pool:
            answered = sum(pool.map(ask, range(16)), Counter[str]())
    finally:
        ended.set()
        leaving.join()
    assert answered.total() > 16 * 60 / 2
    assert set(answered) == {*wanted, "openai", "rerank"}


def _json(answers: object) -> Any:
    """As the server says them."""
    return json.loads(msgspec.json.encode(answers))


def _floats(rows: list[Any]) -> list[Any]:
    """Numbers of JSON, at any depth, as the f32 that they stand for."""
    return [np.array(row, np.float32).tolist() for row in rows]
