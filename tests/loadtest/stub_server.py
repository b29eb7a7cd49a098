"""A server that answers as tests want it to: HTTP/1.1 in a thread, on a port that the system chooses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DIM = 8


def vector(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """f32[8] that only this text has."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)


def score(text: str) -> float:
    return float(vector(text)[0])


def openai(document: Any) -> Any:
    def shown(text: str) -> Any:
        if document["encoding_format"] == "base64":
            return base64.b64encode(vector(text).tobytes()).decode()
        return [float(number) for number in vector(text)]

    data = [{"index": index, "embedding": shown(text)} for index, text in enumerate(document["input"])]
    return {"data": data[::-1], "usage": {"total_tokens": 5 * len(data)}}


METADATA = {"name": "stub", "inputs": [{"name": "ids", "datatype": "INT64"}, {"name": "words", "datatype": "BYTES"}]}


def kserve(document: Any) -> Any:
    (given,) = document["inputs"]
    assert given["name"] == "words"
    numbers = [float(number) for text in given["data"] for number in vector(text)]
    output = {"name": "embedding", "datatype": "FP32", "shape": [len(given["data"]), DIM], "data": numbers}
    return {"outputs": [output]}


def rerank(documents: list[str], name: str) -> list[Any]:
    found = [{"index": index, name: score(text)} for index, text in enumerate(documents)]
    return sorted(found, key=lambda one: -float(one[name]))


ANSWERS: Mapping[str, Callable[[Any], Any]] = {
    "/v1/models": lambda document: {"data": [{"id": "stub"}]},
    "/v1/embeddings": openai,
    "/embed": lambda document: [[float(number) for number in vector(text)] for text in document["inputs"]],
    "/predict": lambda document: [
        [{"label": "b", "score": score(row[-1])}, {"label": "a", "score": 0.25}] for row in document["inputs"]
    ],
    "/rerank": lambda document: rerank(document["texts"], "score"),
    "/v1/rerank": lambda document: {"results": rerank(document["documents"], "relevance_score")},
    "/v2/rerank": lambda document: {"results": rerank(document["documents"], "relevance_score")},
    "/v2/models/stub": lambda document: METADATA,
    "/v2/models/stub/infer": kserve,
}


@dataclass
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """Before it is sent."""
    reset: bool = False


@dataclass
class Asked:
    path: str
    headers: Mapping[str, str]
    document: Any


class Stub:
    """``reply``: what is answered to the n-th request for answers (from 0), where it is not what the path answers."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.paths: list[str] = []
        """Of all requests, also those for no answers."""
        self.reply: Callable[[int, Asked], Reply | None] = lambda number, asked: None
        self.url = ""
        self.close: Callable[[], None] = lambda: None
        """From within ``reply``: nobody can connect any more."""
        self.most_at_once = self.at_once = 0
        self.busy: asyncio.Lock | None = None
        """Held while a request waits: a server that answers one after the other."""

    def one_at_a_time(self) -> None:
        self.busy = asyncio.Lock()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(first.split()[1], headers, json.loads(body) if body else None)
        reply = Reply()
        self.paths.append(asked.path)
        if asked.document is not None:
            self.asked.append(asked)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            reply = self.reply(len(self.asked) - 1, asked) or Reply()
            if self.busy is not None:
                async with self.busy:
                    await asyncio.sleep(reply.seconds)
            else:
                await asyncio.sleep(reply.seconds)
            self.at_once -= 1
        if reply.reset:
            writer.transport.abort()
            return False
        if asked.path not in ANSWERS:
            reply = Reply(404, b'{"error": "no such path"}')
        elif reply.status == 200 and not reply.body:
            reply.body = json.dumps(ANSWERS[asked.path](asked.document)).encode()
        lines = [f"HTTP/1.1 {reply.status} X", f"content-length: {len(reply.body)}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + reply.body)
        return True


@contextmanager
def running() -> Iterator[Stub]:
    stub = Stub()
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(stub.serve, "127.0.0.1", 0, backlog=1024))
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    stub.close = server.close
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield stub
    finally:

        async def end() -> None:
            server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
