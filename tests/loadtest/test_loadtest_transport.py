"""The client's side of HTTP/1.1, against servers that answer byte by byte what a test wants."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from encast.errors import InputError
from encast.loadtest.transport import FailedError, Http, Reply

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def ask(answer: Answer, times: int = 1, *, timeout: float = 5.0, path: str = "/p") -> tuple[list[Reply | str], int]:
    """What became of so many requests, one after the other, and how many connections the server saw."""

    async def run() -> tuple[list[Reply | str], int]:
        seen = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal seen
            seen += 1
            try:
                while (await reader.readuntil(b"\r\n\r\n")) and not writer.is_closing():
                    await reader.readexactly(2)
                    await answer(reader, writer)
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        found: list[Reply | str] = []
        async with Http(url, path, {}, timeout) as http:
            for _ in range(times):
                try:
                    found.append(await http.send(b"{}"))
                except FailedError as failed:
                    found.append(str(failed))
                await asyncio.sleep(0.01)
        server.close()
        return found, seen

    return asyncio.run(run())


def says(*parts: bytes, close: bool = False) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)
        if close:
            writer.close()

    return answer


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize(
    "answer",
    [
        says(OK),
        says(*(bytes([byte]) for byte in OK)),
        says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n"),
        says(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK),
    ],
)
def test_one_connection_serves_all_requests(answer: Answer) -> None:
    assert ask(answer, 3) == ([Reply(b"hello")] * 3, 1)


@pytest.mark.parametrize(
    "answer",
    [
        says(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", close=True),
        says(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"),
        says(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", close=True),
        says(OK, close=True),
    ],
)
def test_a_connection_that_ends_is_not_used_again(answer: Answer) -> None:
    assert ask(answer, 2) == ([Reply(b"hello")] * 2, 2)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (says(OK[:-1], close=True), "connection reset"),
        (says(close=True), "connection reset"),
        (says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", close=True), "connection reset"),
        (says(OK[:-1]), "timeout"),
        (says(b"SSH-2.0-OpenSSH\r\n"), "no HTTP: Expected HTTP/"),
    ],
)
def test_answers_that_are_none(answer: Answer, kind: str) -> None:
    (found,), _ = ask(answer, timeout=0.3)
    assert isinstance(found, str)
    assert found.startswith(kind)


@pytest.mark.parametrize("more", [OK, b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno", b"garbage\r\n"])
def test_an_answer_that_nobody_asked_for_is_nobodys(more: bytes) -> None:
    found, seen = ask(says(OK + more), 2)
    assert found == [Reply(b"hello")] * 2
    assert seen == 2


def test_an_answers_trailer_is_no_header_of_it() -> None:
    head = b"HTTP/1.1 200 OK\r\nX-Tokens: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    (found,), _ = ask(says(head + b"2\r\nhi\r\n0\r\nX-Tokens: 6\r\nX-Compute-Tokens: 7\r\n\r\n"))
    assert found == Reply(b"hi", tokens="5")


def test_a_connection_that_nobody_accepts_takes_the_time_of_one_request() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        filling = [socket.socket() for _ in range(4)]  # the queue of those that wait to be accepted
        for one in filling:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())

        async def run() -> None:
            async with Http(f"http://127.0.0.1:{listener.getsockname()[1]}", "/", {}, 0.3) as http:
                await http.send(b"{}")

        begin = time.monotonic()
        with pytest.raises(FailedError, match=r"^timeout$"):
            asyncio.run(run())
        assert time.monotonic() - begin > 0.29
        for one in filling:
            one.close()


def test_what_a_refusal_says() -> None:
    (found,), _ = ask(says(b"HTTP/1.1 429 Too Many\r\nRETRY-AFTER: 7\r\nContent-Length: 0\r\n\r\n"))
    assert found == Reply(b"", "HTTP 429", rejected=True, retry_after="7")


def test_paths_are_quoted_once() -> None:
    lines: list[bytes] = []

    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            lines.append(await reader.readline())
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)

        server = await asyncio.start_server(serve, "localhost", 0)
        port = server.sockets[0].getsockname()[1]
        async with Http(f"http://localhost:{port}/base/", "/v2/a%2Fb é/infer", {}, 5.0) as http:
            await http.send(b"{}")
        server.close()

    asyncio.run(run())
    assert lines == [b"POST /base/v2/a%2Fb%20%C3%A9/infer HTTP/1.1\r\n"]


@pytest.mark.parametrize(
    ("url", "headers", "words"),
    [
        ("http://127.0.0.1:1", {"x-a": "1\r\nx-b: 2"}, "line break"),
        ("http://127.0.0.1:1", {"Content-Length": "5"}, "content-length is the client's own"),
        ("http://a..b", {}, "no name of a host"),
    ],
)
def test_what_no_request_can_have(url: str, headers: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Http(url, "/", headers, 1.0)
