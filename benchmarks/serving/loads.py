"""Texts, loads and one bare client: what every bar is measured with. Loads are those of ``encast.loadtest``."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
from servers import Offline
from tokenizers import Tokenizer

from encast.errors import EncastError
from encast.loadtest import ClosedLoop, OpenLoop, Plan, Result, Source, run
from encast.measure.workloads import real_texts

__all__ = ["Bare", "Probe", "Texts", "apply", "body_of", "closed", "model_of", "poisson", "reference"]

PROTOCOL = "openai"
"""Embeddings come back as base64, as OpenAI's own clients ask for them."""

PARAGRAPHS = 1024


@dataclass(frozen=True)
class Texts:
    """Of ``name``, for the load's reports. ``file``: the same as a JSON list, for the offline engine."""

    source: Source
    file: Path

    @property
    def rows(self) -> list[str]:
        return [str(row) for row in self.source.rows]

    @staticmethod
    def of(name: str, rows: Sequence[str], folder: Path) -> Texts:
        file = folder / f"{name}.json"
        file.write_text(json.dumps(list(rows)), encoding="utf-8")
        return Texts(Source(name, list(rows)), file)

    @staticmethod
    def queries(data: Path, folder: Path) -> Texts:
        """The questions of NQ-open's dev set."""
        return Texts.of("queries", _read("nq-queries", data), folder)

    @staticmethod
    def paragraphs(artifact: Path, data: Path, folder: Path) -> Texts:
        """The first 1,024 paragraphs of SQuAD's dev set, cut where the model stops reading: the API refuses more."""
        tokenizer, limit = _tokenizer(artifact)
        rows = [_first(tokenizer, text, limit) for text in _read("squad-paragraphs", data)[:PARAGRAPHS]]
        return Texts.of("paragraphs", rows, folder)

    @staticmethod
    def of_tokens(name: str, length: int, artifact: Path, data: Path, folder: Path) -> Texts:
        """Texts of exactly so many tokens, special ones included: paragraphs one after the other, cut, or with 16 at
        most the queries that have them."""
        tokenizer, limit = _tokenizer(artifact)
        if length > limit:
            raise SystemExit(
                f"{artifact} reads {limit} tokens of a text and {length} are needed; compile it from a checkpoint "
                "whose sentence_bert_config.json says max_seq_length 512, or give --length"
            )
        rows = _read("nq-queries", data)
        if length > 16:
            paragraphs = _read("squad-paragraphs", data)
            rows = [_first(tokenizer, " ".join(paragraphs[at : at + 8]), length) for at in range(0, len(paragraphs), 4)]
        encodings = tokenizer.encode_batch(rows)
        rows = [text for text, one in zip(rows, encodings, strict=True) if len(one.ids) == length]
        return Texts.of(name, rows, folder)


def _tokenizer(artifact: Path) -> tuple[Tokenizer, int]:
    """The artifact's, without its limit, and the limit in tokens."""
    tokenizer = Tokenizer.from_file(str(artifact / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, json.loads((artifact / "card.json").read_text())["tokenizer"]["max_length"]


def _first(tokenizer: Tokenizer, text: str, length: int) -> str:
    """As much of the text as has so many tokens, special ones included."""
    room = length - tokenizer.num_special_tokens_to_add(False)
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    return text if len(offsets) <= room else text[: offsets[room - 1][1]]


def _read(name: str, data: Path) -> list[str]:
    try:
        return [str(text) for text in real_texts(name, data)]
    except EncastError as error:
        raise SystemExit(f"{error}; --data names the folder with squad-v1.1/ and queries/") from None


def reference(offline: Offline, texts: Texts, folder: Path) -> tuple[str, ...]:
    """The offline engine's answers to all of the texts, as a load compares with."""
    path = folder / f"{texts.source.name}.reference.jsonl"
    offline.ask(do="reference", path=str(path), texts=texts.rows)
    return (str(path),)


# Loads


def apply(url: str, load: Any, texts: Sequence[Texts], say: Callable[[str], None] | None = None, **more: Any) -> Result:
    """A load on the server; Ctrl-C ends the program, after the load. ``more``: of ``Plan``."""
    try:
        result = run(Plan(url, [one.source for one in texts], load, PROTOCOL, **more), say)
    except EncastError as error:
        raise SystemExit(str(error)) from None
    if result.interrupted:
        raise KeyboardInterrupt
    return result


def closed(url: str, clients: int, seconds: float, texts: Sequence[Texts], **more: Any) -> Result:
    return apply(url, ClosedLoop(clients, seconds=seconds), texts, warmup=max(16, clients), **more)


def poisson(url: str, rate: float, seconds: float, texts: Sequence[Texts], seed: int, **more: Any) -> Result:
    return apply(url, OpenLoop.poisson(rate, seconds, seed), texts, **more)


# One client


def model_of(url: str) -> str:
    with urlopen(f"{url}/v1/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


def body_of(model: str, texts: Sequence[str]) -> bytes:
    """Of a request for the embeddings of these texts."""
    return json.dumps({"model": model, "input": list(texts), "encoding_format": "base64"}).encode()


class Bare:
    """A client of one kept connection and one request at a time: a blocking socket, whole messages, no library."""

    def __init__(self, url: str, timeout: float = 30.0):
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._at, self._timeout = (parts.hostname, parts.port), timeout
        self._socket: socket.socket | None = None

    @staticmethod
    def request(body: bytes) -> bytes:
        head = "POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def ask(self, request: bytes) -> tuple[int, int]:
        """The status and nanoseconds from before sending until the last byte; raises ``OSError``."""
        begin = time.perf_counter_ns()
        if self._socket is None:
            self._socket = socket.create_connection(self._at, self._timeout)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._socket.sendall(request)
            data = b""
            while (end := data.find(b"\r\n\r\n")) < 0:
                data += self._more()
            head = data[:end].lower()
            size = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            missing = end + 4 + size - len(data)
            while missing > 0:
                missing -= len(self._more())
        except (OSError, IndexError, ValueError) as error:
            self.close()
            raise OSError(f"no answer: {error}") from error
        took = time.perf_counter_ns() - begin
        if b"connection: close" in head:
            self.close()
        return int(head.split(None, 2)[1]), took

    def _more(self) -> bytes:
        assert self._socket is not None
        data = self._socket.recv(1 << 16)
        if not data:
            raise OSError("the server closed the connection")
        return data

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Probe:
    """One query every so many seconds by a ``Bare`` client in a thread, until the block ends.

    ``seen``: when it was sent (``time.perf_counter``), the status (0: no answer), and milliseconds.
    """

    def __init__(self, url: str, query: str, every: float):
        self.seen: list[tuple[float, int, float]] = []
        self._over = threading.Event()
        request = Bare.request(body_of(model_of(url), [query]))
        self._thread = threading.Thread(target=self._run, args=(Bare(url), request, every), daemon=True)

    def _run(self, client: Bare, request: bytes, every: float) -> None:
        with contextlib.closing(client):
            while not self._over.wait(every):
                begin, status = time.perf_counter(), 0
                with contextlib.suppress(OSError):
                    status, _ = client.ask(request)
                self.seen.append((begin, status, (time.perf_counter() - begin) * 1e3))

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(35)

    def median_ms(self, begin: float, end: float) -> float | None:
        """Of answers to what was sent between the two moments; None where there is none."""
        found = [ms for at, status, ms in self.seen if begin <= at < end and status == 200]
        return float(np.median(found)) if found else None
