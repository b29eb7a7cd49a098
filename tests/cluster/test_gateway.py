"""The gateway before servers of this process that answer, hang, end and refuse as they are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import encast.cluster.upstream as upstream
from encast.cluster.gateway import Gateway, merged
from encast.cluster.upstream import Upstreams
from encast.serve.service import RequestLimits

Do = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]

HEAD = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nx-request-id: 7\r\nContent-Length: %d\r\n\r\n"


class Server:
    """Reads requests, and does with each what ``do`` says; ``seen``: their heads and bodies."""

    def __init__(self, do: Do) -> None:
        self.do, self.seen = do, list[tuple[bytes, bytes]]()
        self.gone = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, port: int = 0) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self.port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
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
async def gateway(*does: Do, **limits: Any) -> AsyncIterator[tuple[Gateway, list[Server]]]:
    servers = [Server(do) for do in does]
    made = Gateway(Upstreams(), RequestLimits(**limits))
    members = [(str(index), "127.0.0.1", await server.start(), 1.0) for index, server in enumerate(servers)]
    made.upstreams.replace(members)
    try:
        yield made, servers
    finally:
        for server in servers:
            server.close()


async def ask(
    made: Gateway, body: bytes = b"{}", path: str = "/v1/embeddings", method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    parts, sent = [body], list[dict[str, Any]]()
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": given,
    }  # fmt: skip
    await made(scope, receive, send)
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


def test_connections_that_ended_while_idle_say_nothing_of_a_server() -> None:
    async def test() -> None:
        async with gateway(answering("good")) as (made, servers):
            await asyncio.gather(*(ask(made) for _ in range(8)))
            for _ in range(3):
                servers[0].cut()  # the gateway may not have heard it yet
                assert (await ask(made))[0] == 200
            assert made.upstreams.by_name["0"].aside_until == 0

    run(test)


def test_a_server_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections stand, as those to a machine that lost its power."""
    monkeypatch.setattr(upstream, "_PROBE_S", 0.1)
    monkeypatch.setattr(upstream, "_PROBE_EVERY_S", 0.02)

    async def test() -> None:
        async with gateway(hanging, answering("good")) as (made, _):
            watching = asyncio.ensure_future(made.upstreams.watch())
            assert [(await ask(made))[2] for _ in range(4)] == [b"good"] * 4
            assert await metric(made, 'encast_gateway_retries_total{reason="lost"}') >= 1
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
            status, _, body = await ask(made)
            assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
            assert sum(len(server.seen) for server in servers) == 4

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
            assert (await ask(made, path="/health/live", method="GET"))[0] == 200

    run(test)


def test_metrics_of_all_servers() -> None:
    one = '# HELP a_total As.\n# TYPE a_total counter\na_total 1.0\n# HELP b Bs.\n# TYPE b gauge\nb{x="y z"} 2.0\n'
    two = '# HELP b Bs.\n# TYPE b gauge\nb{x="y"} 3.0\n# HELP a_total As.\n# TYPE a_total counter\na_total 4.0\n'
    assert merged([("s1", one), ("s2", two)]) == (
        '# HELP a_total As.\n# TYPE a_total counter\na_total{server="s1"} 1.0\na_total{server="s2"} 4.0\n'
        '# HELP b Bs.\n# TYPE b gauge\nb{x="y z",server="s1"} 2.0\nb{x="y",server="s2"} 3.0\n'
    )
    assert merged([]) == ""
