"""A gRPC server over a service of this process, in a thread, for real clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import uvloop

from encast.serve.protocols.kserve_grpc import GrpcServer, serve_grpc
from encast.serve.service import Service

__all__ = ["grpc_served"]


@contextlib.contextmanager
def grpc_served(service: Service, *, grace: float | None = None) -> Iterator[str]:
    """The service behind a port of the loopback; gives ``host:port``. It ends after ``grace`` seconds."""
    loop = uvloop.new_event_loop()
    started: Future[GrpcServer] = Future()

    async def main() -> None:
        try:
            started.set_result(await serve_grpc(service, "127.0.0.1:0"))
        except BaseException as error:
            started.set_exception(error)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        server = started.result(30)
        yield f"127.0.0.1:{server.port}"
        asyncio.run_coroutine_threadsafe(server.stop(grace), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
        loop.close()
