"""The gateway before servers of this process that answer, hang, end and refuse as they are told."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import encast.cluster.upstream as upstream
from encast.cluster.gateway import _OPEN, Gateway, merged
from encast.cluster.upstream import Answer, Upstreams
from encast.serve.keys import Keys
from encast.serve.protocols.health import HEALTH
from encast.serve.protocols.kserve import KSERVE
from encast.serve.protocols.openai import OPENAI
from encast.serve.protocols.tei import TEI
from encast.serve.service import RequestLimits

Do = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]

HEAD = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nx-request-id: 7\r\nContent-Length: %d\r\n\r\n"


class Server:
    """Reads requests, and does with each what ``do`` says; ``seen``: their heads and bodies."""

    def __init__(self, do: Do) -> None:
        self.do, self.seen = do, list[tuple[bytes, bytes]]()
        self.gone = asyncio.Event()
        self.accepted = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, port: int = 0) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.accepted += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = 0
                for line in head.split(b"\r\n"):
                    if line.startswith(b"content-length: "):
                        size = int(line.split()[1])
                self.seen.append((head, await reader.readexactly(size)))
                await self.do(writer, self.seen[-1][1])
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
            writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def close(self) -> None:
        self._server.close()
        self.cut()


def answering(text: str, status: int = 200) -> Do:
    async def do(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(HEAD % (status, len(text)) + text.encode())

    return do


async def cutting(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.transport.abort()


async def half(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(HEAD % (200, 100) + b"half")
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.transport.abort()


async def hanging(writer: asyncio.StreamWriter, body: bytes) -> None:
    await asyncio.sleep(3600)


@asynccontextmanager
async def gateway(*does: Do, keys: Keys | None = None, **limits: Any) -> AsyncIterator[tuple[Gateway, list[Server]]]:
    servers = [Server(do) for do in does]
    made = Gateway(Upstreams(), RequestLimits(**limits), keys)
    members = [(str(index), "127.0.0.1", await server.start(), 1.0) for index, server in enumerate(servers)]
    made.upstreams.replace(members)
    try:
        yield made, servers
    finally:
        for server in servers:
            server.close()


def scope_of(path: str, method: str, headers: dict[str, str]) -> dict[str, Any]:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": given,
    }  # fmt: skip


async def whole(
    made: Gateway, body: bytes = b"{}", path: str = "/v1/embeddings", method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """As Ray's proxy asks."""
    answer = await made.answer_whole(scope_of(path, method, headers), body)
    return answer.status, {name.decode(): value.decode() for name, value in answer.headers}, answer.body


async def ask(
    made: Gateway, body: bytes = b"{}", path: str = "/v1/embeddings", method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    parts, sent = [body], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await made(scope_of(path, method, headers), receive, send)
    names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], names, sent[1]["body"]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def metric(made: Gateway, name: str) -> float:
    text = (await ask(made, path="/metrics", method="GET"))[2].decode()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def test_an_answer_is_handed_on_as_it_is() -> None:
    async def test() -> None:
        async with gateway(answering('{"a": 1}', 422)) as (made, servers):
            status, headers, body = await ask(made, b'{"input": "a"}', authorization="Bearer k", connection="close")
            assert (status, body) == (422, b'{"a": 1}')
            assert headers == {"content-type": "application/json", "x-request-id": "7", "content-length": "8"}
            head, sent = servers[0].seen[0]
            assert sent == b'{"input": "a"}'
            assert b"authorization: Bearer k\r\n" in head
            assert b"connection" not in head
            # The connection is used again.
            await ask(made)
            assert len(servers[0]._writers) == 1
            assert await metric(made, 'encast_gateway_requests_total{status="422"}') == 2

    run(test)


@pytest.mark.parametrize("ends", [cutting, half])
def test_another_server_is_asked_when_one_is_lost(ends: Do) -> None:
    async def test() -> None:
        async with gateway(ends, answering("good")) as (made, servers):
            for _ in range(4):
                assert await ask(made, b"the same body") == (200, *(await ask(made))[1:])
            assert {body for _, body in servers[0].seen + servers[1].seen} == {b"the same body", b"{}"}
            lost = len(servers[0].seen)
            assert 1 <= lost <= 4  # it is left in peace for a second
            assert await metric(made, 'encast_gateway_retries_total{reason="lost"}') == lost
            assert await metric(made, 'encast_gateway_requests_total{status="200"}') == 8 + 1  # and the first look

    run(test)


@pytest.mark.parametrize("status", [499, 503])
def test_a_server_that_ends_is_no_answer(status: int) -> None:
    async def test() -> None:
        async with gateway(answering("ending", status), answering("good")) as (made, _):
            assert [(await ask(made))[2] for _ in range(4)] == [b"good"] * 4

    run(test)


def test_where_all_refuse_the_client_hears_it() -> None:
    async def test() -> None:
        async with gateway(answering("starting", 503)) as (made, servers):
            status, _, body = await ask(made, x_timeout_ms="300")
            assert (status, body) == (503, b"starting")
            assert len(servers[0].seen) > 1

    run(test)


def test_a_request_waits_for_a_server() -> None:
    async def test() -> None:
        async with gateway() as (made, _):
            late = Server(answering("late"))
            waiting = asyncio.ensure_future(ask(made))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            made.upstreams.replace([("late", "127.0.0.1", await late.start(), 1.0)])
            assert (await waiting)[2] == b"late"
            late.close()
            status, headers, body = await ask(made, x_timeout_ms="200")
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["error"]["message"] == "no server can be reached; try again"
            assert await metric(made, 'encast_gateway_failures_total{reason="unavailable"}') == 1

    run(test)


async def warm(made: Gateway, servers: list[Server], count: int = 8) -> None:
    """So many idle connections to each server."""
    for name, one in made.upstreams.by_name.items():
        before = servers[int(name)].do

        async def gathering(writer: asyncio.StreamWriter, body: bytes) -> None:
            await asyncio.sleep(0.05)
            await answering("warm")(writer, body)

        servers[int(name)].do = gathering
        await asyncio.gather(*(one.ask([b"GET / HTTP/1.1\r\n\r\n"], 0) for _ in range(count)))
        servers[int(name)].do = before
        servers[int(name)].seen.clear()
        assert servers[int(name)].accepted == count


def test_connections_that_ended_while_idle_say_nothing_of_a_server() -> None:
    async def test() -> None:
        async with gateway(answering("good")) as (made, servers):
            for _ in range(3):
                servers[0].accepted = 0
                await warm(made, servers)
                servers[0].cut()  # the gateway may not have heard it yet
                assert (await ask(made))[0] == 200
                servers[0].cut()
                await asyncio.sleep(0.05)
            assert made.upstreams.by_name["0"].aside_until == 0

    run(test)


def test_a_connection_that_was_never_used_is_not_stale() -> None:
    async def test() -> None:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        one = upstream.Upstream("0", "127.0.0.1", server.sockets[0].getsockname()[1], 1.0)
        connection = await one._connect()
        while not connection.closed:
            await asyncio.sleep(0.01)
        with pytest.raises(upstream.LostError) as lost:
            await connection.ask([b"GET / HTTP/1.1\r\n\r\n"])
        assert (lost.value.stale, lost.value.sent) == (False, False)
        server.close()

    run(test)


def test_a_server_that_hangs_is_left_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections stand, as those to a machine that lost its power. That they were used before, and that it has
    the least to do, wins it no request.
    """
    monkeypatch.setattr(upstream, "_PROBE_S", 0.1)
    monkeypatch.setattr(upstream, "_PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(upstream, "_ASIDE_S", 0.0)

    async def test() -> None:
        async with gateway(answering("back"), answering("good")) as (made, servers):
            await warm(made, servers)
            servers[0].do = hanging
            watching = asyncio.ensure_future(made.upstreams.watch())
            assert [(await ask(made))[2] for _ in range(4)] == [b"good"] * 4
            assert await metric(made, 'encast_gateway_retries_total{reason="lost"}') == 1
            assert len([body for _, body in servers[0].seen if body]) == 1
            # It is left in peace while nobody answers a probe, however long, though nothing waits there.
            for _ in range(5):
                await asyncio.sleep(0.1)
                assert (await ask(made))[2] == b"good"
            assert len([body for _, body in servers[0].seen if body]) == 1
            servers[0].do = answering("back")
            while made.upstreams.by_name["0"].hangs:
                await asyncio.sleep(0.01)
            assert b"back" in [(await ask(made))[2] for _ in range(4)]
            watching.cancel()

    run(test)


def test_a_server_that_was_taken_away_and_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_PROBE_S", 0.05)
    monkeypatch.setattr(upstream, "_PROBE_EVERY_S", 0.02)

    async def test() -> None:
        async with gateway(hanging) as (made, servers):
            watching = asyncio.ensure_future(made.upstreams.watch())
            waiting = asyncio.ensure_future(ask(made))
            while not servers[0].seen:
                await asyncio.sleep(0.01)
            other = Server(answering("other"))
            made.upstreams.replace([("other", "127.0.0.1", await other.start(), 1.0)])
            assert (await asyncio.wait_for(waiting, 5))[2] == b"other"
            other.close()
            watching.cancel()

    run(test)


def test_a_probe_that_fails_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_PROBE_EVERY_S", 0.01)

    async def test() -> None:
        async with gateway(answering("a"), answering("b")) as (made, servers):
            bad, good = made.upstreams.by_name.values()

            async def failing() -> None:
                raise RuntimeError

            monkeypatch.setattr(bad, "probe", failing)
            made.upstreams.put_aside(bad)
            watching = asyncio.ensure_future(made.upstreams.watch())
            await asyncio.sleep(0.1)
            made.upstreams.put_aside(good)  # without load it is probed as well
            while good.doubted:
                await asyncio.sleep(0.01)
            assert servers[1].seen
            assert not watching.done()
            watching.cancel()

    run(test)


def test_a_slow_server_that_lives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_PROBE_EVERY_S", 0.02)

    async def slow(writer: asyncio.StreamWriter, body: bytes) -> None:
        if body:
            await asyncio.sleep(0.5)
        await answering("slow")(writer, body)

    async def test() -> None:
        async with gateway(slow) as (made, servers):
            watching = asyncio.ensure_future(made.upstreams.watch())
            assert (await ask(made))[2] == b"slow"
            assert len([body for _, body in servers[0].seen if body]) == 1
            assert len(servers[0].seen) > 3
            watching.cancel()

    run(test)


def test_a_request_that_ends_every_server_is_given_up() -> None:
    async def test() -> None:
        async with gateway(cutting, cutting) as (made, servers):
            await warm(made, servers)
            status, _, body = await ask(made)
            assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
            # One loss looked like that of a stale connection.
            assert sum(len(server.seen) for server in servers) == 4 + 1

    run(test)


EVIL = b"POST /evil HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"


async def echoing(writer: asyncio.StreamWriter, body: bytes) -> None:
    await answering("echo " + body.decode())(writer, body)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("way", [ask, whole])
def test_a_body_that_has_no_meaning_is_no_request(method: str, way: Any) -> None:
    async def test() -> None:
        async with gateway(echoing) as (made, servers):
            assert (await way(made, EVIL, "/v1/models", method))[0] == 200
            await asyncio.sleep(0.05)
            assert (await way(made, b"mine"))[2] == b"echo mine"
            assert [head.split()[1] for head, _ in servers[0].seen] == [b"/v1/models", b"/v1/embeddings"]
            assert servers[0].accepted == 1

    run(test)


@pytest.mark.parametrize(
    ("surplus", "pause"),
    [(one, pause) for one in (HEAD % (200, 6) + b"others", b"H", b"others") for pause in (0.0, 0.05)]
    + [(b"\r\n", 0.05)],
)
def test_a_server_that_says_more_than_it_was_asked_loses_its_connection(surplus: bytes, pause: float) -> None:
    async def test() -> None:
        async def double(writer: asyncio.StreamWriter, body: bytes) -> None:
            text = HEAD % (200, 3) + b"own"
            if pause:
                writer.write(text)
                await asyncio.sleep(pause)
                writer.write(surplus)
            else:
                writer.write(text + surplus)

        async with gateway(double) as (made, servers):
            for number in range(1, 4):
                answer = await made.answer_whole(scope_of("/", "POST", {}), b"{}")
                assert answer.body == b"own"
                await asyncio.sleep(2 * pause)
                assert (answer.body, len(answer.headers)) == (b"own", 3)
                assert servers[0].accepted == number

    run(test)


def test_short_requests_go_where_less_waits() -> None:
    """By bytes, not by requests: one long text is more than many short ones."""

    async def test() -> None:
        async with gateway(hanging, answering("good")) as (made, servers):
            long = asyncio.ensure_future(ask(made, b"x" * 100_000))
            while not servers[0].seen and not servers[1].seen:
                await asyncio.sleep(0.01)
            if servers[1].seen:  # it was the turn of the one that answers
                await long
                long = asyncio.ensure_future(ask(made, b"x" * 100_000))
                while not servers[0].seen:
                    await asyncio.sleep(0.01)
            before = len(servers[1].seen)
            await asyncio.gather(*(ask(made, b"y" * 100) for _ in range(20)))
            assert len(servers[1].seen) == before + 20
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            assert made.upstreams.by_name["0"].load == 0
            servers[0].do = answering("good")
            assert await metric(made, 'encast_gateway_requests_total{status="499"}') == 1

    run(test)


def test_weights_share_the_work() -> None:
    async def test() -> None:
        async with gateway() as (made, _):
            made.upstreams.replace([("small", "127.0.0.1", 1, 2.0), ("large", "127.0.0.1", 2, 6.0)])
            counts = {"small": 0, "large": 0}
            for _ in range(80):
                chosen = made.upstreams.choose()
                assert chosen is not None
                chosen.load += 1000
                counts[chosen.name] += 1
            assert counts == {"small": 20, "large": 60}

    run(test)


def test_a_server_that_leaves_still_answers() -> None:
    async def test() -> None:
        held = asyncio.Event()

        async def holding(writer: asyncio.StreamWriter, body: bytes) -> None:
            await held.wait()
            writer.write(HEAD % (200, 4) + b"last")

        async with gateway(holding) as (made, servers):
            waiting = asyncio.ensure_future(ask(made))
            while not servers[0].seen:
                await asyncio.sleep(0.01)
            other = Server(answering("other"))
            made.upstreams.replace([("other", "127.0.0.1", await other.start(), 1.0)])
            assert (await ask(made))[2] == b"other"
            held.set()
            assert (await waiting)[2] == b"last"
            assert len(servers[0].seen) == 1
            # Where nobody is left the last ones are asked on.
            made.upstreams.replace([])
            assert (await ask(made))[2] == b"other"
            other.close()

    run(test)


def test_bodies_are_bounded() -> None:
    async def test() -> None:
        async with gateway(answering("good"), max_body_bytes=1000) as (made, servers):
            status, headers, _ = await ask(made, b"x" * 1001)
            assert (status, headers["connection"]) == (413, "close")
            assert not servers[0].seen
            assert (await ask(made, b"x" * 1000))[0] == 200
            assert (await whole(made, b"x" * 1001))[0] == 413
            assert len(servers[0].seen) == 1

    run(test)


def test_a_body_that_is_announced_too_large_is_not_read() -> None:
    async def test() -> None:
        async with gateway(answering("good"), max_body_bytes=1000) as (made, _):
            status, headers, _ = await whole(made, b"", content_length="1001")
            assert (status, headers["connection"]) == (413, "close")
            assert (await whole(made, b"", content_length="1000"))[0] == 200

    run(test)


@pytest.mark.parametrize("way", [ask, whole])
def test_requests_under_way_are_bounded(way: Any) -> None:
    async def test() -> None:
        async with gateway(hanging, max_concurrent=2) as (made, servers):
            waiting = [asyncio.ensure_future(way(made)) for _ in range(2)]
            while len(servers[0].seen) < 2:
                await asyncio.sleep(0.01)
            status, headers, body = await way(made)
            assert (status, headers["retry-after"]) == (429, "1")
            assert json.loads(body)["error"]["message"] == "2 requests are under way; try again"
            assert (await way(made, path="/health/live", method="GET"))[0] == 200
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            servers[0].do = answering("good")
            assert (await way(made))[0] == 200

    run(test)


@pytest.mark.parametrize("way", [ask, whole])
def test_bytes_under_way_are_bounded(way: Any) -> None:
    async def test() -> None:
        async with gateway(hanging, max_inflight_bytes=1000) as (made, servers):
            waiting = asyncio.ensure_future(way(made, b"x" * 900))
            while not servers[0].seen:
                await asyncio.sleep(0.01)
            assert (await way(made, b"x" * 101))[0] == 429
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            servers[0].do = answering("good")
            assert (await way(made, b"x" * 101))[0] == 200
            assert (await way(made, b"x" * 1001))[0] == 200  # one alone is always taken
            assert made._held == made._running == 0

    run(test)


def test_an_answer_is_held_until_it_is_sent() -> None:
    async def test() -> None:
        async with gateway(answering("y" * 100_000), max_inflight_bytes=1000) as (made, _):
            read, sent = asyncio.Event(), list[dict[str, Any]]()

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"{}"}

            async def send(message: dict[str, Any]) -> None:
                # As uvicorn does: the message after a large one waits until that was read.
                if sent and len(sent[-1].get("body", b"")) > 65536:
                    await read.wait()
                sent.append(message)

            waiting = asyncio.ensure_future(made(scope_of("/", "POST", {}), receive, send))
            while len(sent) < 2:
                await asyncio.sleep(0.01)
            assert made._held == 100_002
            assert (await ask(made))[0] == 429
            read.set()
            await waiting
            assert made._held == 0
            assert [one.get("more_body", False) for one in sent] == [False, True, False]

    run(test)


def keys_of(folder: Path) -> Keys:
    file = folder / "keys"
    file.write_text(f"me sha256:{hashlib.sha256(b'secret').hexdigest()}\n")
    return Keys(file, lambda text: None)


def test_a_key_is_asked_for_before_the_body(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(answering("good"), keys=keys_of(tmp_path)) as (made, servers):
            sent = list[dict[str, Any]]()

            async def receive() -> dict[str, Any]:
                raise AssertionError

            async def send(message: dict[str, Any]) -> None:
                sent.append(message)

            scope = scope_of("/v1/embeddings", "POST", {"authorization": "Bearer wrong", "content_length": "5"})
            await made(scope, receive, send)
            assert sent[0]["status"] == 401
            assert (b"www-authenticate", b"Bearer") in sent[0]["headers"]
            for way in (ask, whole):
                assert (await way(made))[0] == 401
                assert (await way(made, path="/metrics", method="GET"))[0] == 401
                assert (await way(made, path="/health/live", method="POST"))[0] == 401
                assert not servers[0].seen
                assert (await way(made, authorization="Bearer secret"))[0] == 200
                for path in ("/health/live", "/health/ready", "/-/healthz", "/health", "/v2/models/a/b/ready"):
                    assert (await way(made, path=path, method="GET"))[0] == 200
                servers[0].seen.clear()

    run(test)


def test_what_is_open_is_what_is_open_on_a_server() -> None:
    operations = [one for protocol in (HEALTH, KSERVE, TEI, OPENAI) for one in protocol.operations]
    assert any(one.open for one in operations)
    for one in operations:
        path = one.path.replace("{model:path}", "a/b").replace("{version}", "1")
        opened = one.method == "GET" and _OPEN.fullmatch(path) is not None
        assert opened == one.open, one.path


def test_headers_of_a_connection_are_not_handed_on() -> None:
    async def test() -> None:
        async def naming(writer: asyncio.StreamWriter, body: bytes) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\nContent-Length: 0\r\n\r\n")

        async with gateway(naming) as (made, servers):
            _, headers, _ = await ask(made, connection="close, X-Mine", x_mine="1", x_other="2")
            assert headers == {"content-length": "0"}
            head = servers[0].seen[0][0]
            assert b"x-mine" not in head
            assert b"x-other: 2\r\n" in head

    run(test)


@pytest.mark.parametrize("port", [None, 1])
def test_servers_that_refuse_are_asked_ever_more_seldom(port: int | None) -> None:
    async def test() -> None:
        async with gateway(answering("starting", 503)) as (made, _):
            asked = 0
            if port is not None:
                made.upstreams.replace([("nobody", "127.0.0.1", port, 1.0)])
            one = next(iter(made.upstreams.by_name.values()))
            before = one.ask

            async def counting(*args: Any, **kwargs: Any) -> Answer:
                nonlocal asked
                asked += 1
                return await before(*args, **kwargs)

            one.ask = counting  # type: ignore[method-assign]
            assert (await ask(made, x_timeout_ms="1500"))[0] == 503
            assert 4 <= asked <= 10
            # Who waits long hears of a new server at once.
            waiting = asyncio.ensure_future(ask(made))
            await asyncio.sleep(1.5)
            other = Server(answering("other"))
            made.upstreams.replace([("other", "127.0.0.1", await other.start(), 1.0)])
            began = time.monotonic()
            assert (await waiting)[2] == b"other"
            assert time.monotonic() - began < 0.2
            other.close()

    run(test)


def test_a_client_that_goes_while_it_sends_is_counted() -> None:
    async def test() -> None:
        async with gateway(answering("good")) as (made, _):

            async def receive() -> dict[str, Any]:
                await asyncio.sleep(3600)
                return {}

            async def send(message: dict[str, Any]) -> None:
                raise AssertionError

            scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
            task = asyncio.ensure_future(made(scope, receive, send))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await metric(made, 'encast_gateway_requests_total{status="499"}') == 1

    run(test)


def test_health_is_that_of_a_server() -> None:
    async def test() -> None:
        async with gateway(answering("ready")) as (made, servers):
            assert (await ask(made, path="/health/ready", method="GET"))[::2] == (200, b"ready")
            assert (await ask(made, path="/-/healthz", method="GET"))[::2] == (200, b"success")
            servers[0].close()
            assert (await ask(made, path="/health/ready", method="GET"))[0] == 503
            assert (await ask(made, path="/-/healthz", method="GET"))[0] == 503
            seen = len(servers[0].seen)
            assert (await ask(made, path="/health/live", method="GET"))[0] == 200
            assert len(servers[0].seen) == seen

    run(test)


def test_health_does_not_wait_for_servers_that_hang() -> None:
    async def test() -> None:
        async with gateway(*[hanging] * 8, answering("ready")) as (made, servers):
            began = time.monotonic()
            assert (await ask(made, path="/health/ready", method="GET"))[0] == 200
            assert time.monotonic() - began < 1.5
            assert (await ask(made, path="/health/live", method="GET"))[0] == 200
            servers[-1].do = hanging
            began = time.monotonic()
            assert (await ask(made, path="/health/ready", method="GET"))[0] == 503
            assert time.monotonic() - began < 2.5
            await asyncio.sleep(0.05)
            assert [one.load for one in made.upstreams.by_name.values()] == [0] * 9

    run(test)


def test_metrics_of_all_servers() -> None:
    one = '# HELP a_total As.\n# TYPE a_total counter\na_total 1.0\n# HELP b Bs.\n# TYPE b gauge\nb{x="y z"} 2.0\n'
    two = '# HELP b Bs.\n# TYPE b gauge\nb{x="y"} 3.0\n# HELP a_total As.\n# TYPE a_total counter\na_total 4.0\n'
    assert merged([("s1", one), ("s2", two)]) == (
        '# HELP a_total As.\n# TYPE a_total counter\na_total{server="s1"} 1.0\na_total{server="s2"} 4.0\n'
        '# HELP b Bs.\n# TYPE b gauge\nb{x="y z",server="s1"} 2.0\nb{x="y",server="s2"} 3.0\n'
    )
    assert merged([]) == ""
    # Other comments say nothing; what has no HELP is kept.
    other = "# EOF\n#\nc 1\n# TYPE d gauge\nd 2\n"
    assert merged([("s", other), ("t", "e 3\ne 4\nc 2\n")]) == (
        'c{server="s"} 1\nc{server="t"} 2\n# TYPE d gauge\nd{server="s"} 2\ne{server="t"} 3\ne{server="t"} 4\n'
    )
