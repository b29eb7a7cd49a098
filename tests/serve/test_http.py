"""Clients that are slow, greedy or broken: each is cut off within a bound, and others do not notice."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from local import LocalRunner, local_service, served

import encast.serve.http as serve_http
from encast.serve.call import Call
from encast.serve.operations import Operation, Protocol, Reply, error_body
from encast.serve.protocols.encast import ENCAST
from encast.serve.service import RequestLimits, Service

LIMITS = RequestLimits(
    header_timeout_s=0.3, body_timeout_s=0.5, max_header_bytes=4096, max_body_bytes=1 << 16, max_concurrent=8
)
BODY = b'{"texts": ["a cat"]}'
ASK = b"POST /encast/v1/embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
REQUEST = ASK % len(BODY) + BODY
BIG = 32 << 20


async def _big(service: Service, call: Call, body: None) -> Reply:
    return Reply(b" " * BIG, media_type="text/plain")


PROTOCOLS = [ENCAST, Protocol("test", [Operation("GET", "/big", "big", "", _big, runs=False)], error_body)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return local_service(tmp_path_factory.getbasetemp(), "embed", limits=LIMITS)


@pytest.fixture
def url(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(serve_http, "_UNREAD_S", 0.3)
    with served(service, PROTOCOLS) as address:
        yield address


@contextlib.contextmanager
def connection(url: str) -> Iterator[socket.socket]:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as sock:
        yield sock


def everything(sock: socket.socket) -> bytes:
    """Until the server closes; a reset counts as that."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            parts.append(data)
    return b"".join(parts)


def statuses(data: bytes) -> list[int]:
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


def alive(url: str) -> bool:
    client = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    client.request("POST", "/encast/v1/embed", BODY, {"content-type": "application/json"})
    try:
        return client.getresponse().status == 200
    finally:
        client.close()


def test_a_connection_without_a_request_is_closed(url: str) -> None:
    with connection(url) as sock:
        assert everything(sock) == b""


def test_a_slow_header_is_cut(url: str) -> None:
    with connection(url) as sock:
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            for _ in range(200):
                sock.sendall(b"G" if _ == 0 else b"E")
                time.sleep(0.02)
        assert time.monotonic() - begin < 3.9
        assert statuses(everything(sock)) in ([408], [400], [])
    with connection(url) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nx: ")
        assert statuses(everything(sock)) == [408]


def test_a_slow_header_of_a_second_request_is_cut(url: str) -> None:
    with connection(url) as sock:
        sock.sendall(REQUEST + b"POST / HTTP/1.1\r\nx-a: ")
        assert statuses(everything(sock)) == [200, 408]


@pytest.mark.parametrize("size", [5000, 1 << 20])
@pytest.mark.parametrize("shape", ["one value", "many", "path", "name"])
def test_a_large_header_is_refused(url: str, shape: str, size: int) -> None:
    line = b"GET / HTTP/1.1\r\nhost: x\r\n"
    flood = {
        "one value": line + b"x-a: " + b"a" * size,
        "many": line + b"x-a: b\r\n" * (size // 8),
        "path": b"GET /" + b"a" * size,
        "name": line + b"a" * size,
    }[shape]
    with connection(url) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(flood + (b"\r\n\r\n" if shape != "path" else b" HTTP/1.1\r\n\r\n"))
        answer = statuses(everything(sock))
        # A client that goes on sending may get a reset instead of the answer.
        assert answer == [431] or (answer == [] and size > 5000) or (shape == "name" and answer == [400])
    assert alive(url)


@pytest.mark.parametrize(
    "garbage", [b"\0\1\2\3\r\n\r\n", b"HELLO\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_garbage_gets_400_and_a_close(url: str, garbage: bytes) -> None:
    with connection(url) as sock:
        sock.sendall(garbage)
        assert statuses(everything(sock)) == [400]


def test_requests_before_garbage_are_answered(url: str, service: Service) -> None:
    with connection(url) as sock:
        sock.sendall(REQUEST + b"\0\1garbage\r\n\r\n")
        data = everything(sock)
    assert statuses(data) == [200]  # and not a 400 in its place
    assert b"connection: close" in data


def test_few_requests_may_be_pipelined(url: str) -> None:
    with connection(url) as sock:
        sock.sendall(REQUEST * 3 + b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert statuses(everything(sock)) == [200, 200, 200, 404]
    with connection(url) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(REQUEST * 2000)
        assert len(statuses(everything(sock))) <= serve_http._PIPELINED + 1
    assert alive(url)


def test_connections_are_bounded(url: str) -> None:
    most = 4 * LIMITS.max_concurrent
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connection(url)) for _ in range(most)]
        for sock in socks:
            sock.sendall(b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n")
            assert sock.recv(12) == b"HTTP/1.1 404"
        with connection(url) as one_more:
            answer = everything(one_more)
            assert statuses(answer) == [503]
            assert b"retry-after: 1" in answer
    time.sleep(0.05)
    assert alive(url)


def test_a_body_that_goes_on_after_its_answer_is_cut(url: str) -> None:
    with connection(url) as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 1 << 30:
                sock.sendall(b"1000\r\n" + b"a" * 0x1000 + b"\r\n")
                sent += 0x1000
        assert sent < 64 << 20


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (ASK % (3 << 16), 413),
        (b"POST /encast/v1/embed HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 60000\r\n\r\n", 503),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 5000, 431),
        (b"\0\1garbage\r\n\r\n", 400),
    ],
)
def test_a_client_that_still_sends_gets_its_refusal(url: str, service: Service, head: bytes, status: int) -> None:
    """Clients read once all is sent: none of it may meet a closed connection."""
    service.ready = lambda: status != 503
    try:
        with connection(url) as sock:
            sock.sendall(head)
            for _ in range(6):
                time.sleep(0.03)
                sock.sendall(b"a" * 9000)
            assert statuses(everything(sock)) == [status]
            assert not sock.recv(1)
    finally:
        service.ready = lambda: True
    assert alive(url)


def test_who_goes_on_sending_after_a_refusal_is_cut(url: str) -> None:
    """By time, however little it sends, and by bytes."""
    for data, pause in ((b"a", 0.02), (b"a" * 0x10000, 0.0)):
        with connection(url) as sock:
            begin, sent = time.monotonic(), 0
            sock.sendall(ASK % (1 << 30))
            with contextlib.suppress(OSError):
                while sent < 1 << 30:
                    sock.sendall(data)
                    sent += len(data)
                    time.sleep(pause)
            assert time.monotonic() - begin < LIMITS.body_timeout_s + 3
            assert sent < 64 << 20


def test_an_answer_that_nobody_reads_is_dropped(url: str, service: Service) -> None:
    with connection(url) as sock:
        sock.sendall(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        time.sleep(1.0)
        assert len(everything(sock)) < BIG
    with connection(url) as sock:  # one that is read comes whole
        sock.sendall(b"GET /big HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert len(everything(sock)) > BIG


def test_a_client_that_goes_withdraws_its_run(url: str, service: Service) -> None:
    runner: Any = service.models.by_name["embed"].runner
    assert isinstance(runner, LocalRunner)
    runner.go.clear()
    before = runner.withdrawn
    try:
        with connection(url) as sock:
            sock.sendall(REQUEST)
            _until(lambda: runner.waiting == 1)
        _until(lambda: runner.withdrawn == before + 1)
        assert service.running == 0
    finally:
        runner.go.set()
    assert alive(url)


def test_an_answer_leaves_in_one_write() -> None:
    written: list[tuple[bytes, ...]] = []
    transport = SimpleNamespace(
        write=lambda data: written.append((data,)), writelines=written.append, is_closing=lambda: False
    )
    protocol: Any = SimpleNamespace(transport=transport, close=lambda: None)
    output = serve_http._Output(protocol, has_body=True)
    for data in (b"HTTP/1.1 100 Continue\r\n\r\n", b"header", b"", b"more"):
        output.write(data)
    assert written == [(b"HTTP/1.1 100 Continue\r\n\r\n",), (b"header", b""), (b"more",)]


@pytest.mark.parametrize(("given", "status"), [((b"60000", b"soon"), 200), ((b"soon", b"60000"), 400)])
def test_of_a_header_that_comes_twice_the_first_one_counts(url: str, given: tuple[bytes, bytes], status: int) -> None:
    headers = b"host: x\r\nx-timeout-ms: %s\r\nx-timeout-ms: %s" % given
    with connection(url) as sock:
        sock.sendall((ASK % len(BODY)).replace(b"host: x", headers) + BODY)
        assert statuses(sock.recv(1 << 16)) == [status]


def test_answers_without_a_body_and_before_one(url: str) -> None:
    """HEAD's, which ends with its header, and 100 Continue, which must not wait for anything."""
    with connection(url) as sock:
        sock.sendall(b"HEAD /nothing HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 404")
        sock.sendall((ASK % len(BODY)).replace(b"host: x", b"host: x\r\nexpect: 100-continue"))
        assert sock.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_an_upgrade_is_ignored(url: str) -> None:
    with connection(url) as sock:
        sock.sendall(b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
        sock.sendall(b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        data = everything(sock)
    assert statuses(data) == [404, 404], "the connection goes on in HTTP/1.1"


def test_an_idle_connection_serves_a_last_request_while_the_server_ends(service: Service) -> None:
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(contextlib.closing(_Ending(service)))
        with connection(address.url) as sock:
            sock.sendall(REQUEST)
            assert sock.recv(12) == b"HTTP/1.1 200"
            address.end()
            _until(lambda: address.refuses())
            sock.sendall(REQUEST)
            rest = everything(sock)
            assert b"HTTP/1.1 200" in rest
            assert b"connection: close" in rest


class _Ending:
    """A served application whose end begins when told."""

    def __init__(self, service: Service) -> None:
        self._go, ready = threading.Event(), threading.Event()

        def run() -> None:
            with served(service, PROTOCOLS) as url:
                self.url = url
                ready.set()
                self._go.wait()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        ready.wait()

    def end(self) -> None:
        self._go.set()

    def refuses(self) -> bool:
        try:
            with connection(self.url):
                return False
        except ConnectionRefusedError:
            return True

    def close(self) -> None:
        self._go.set()
        self._thread.join()


def _until(condition: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
