"""A service over real small artifacts in this process: for tests of protocols, without the processes of a server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import make_checkpoint
from late_checkpoints import make_late_checkpoint
from m3_checkpoints import make_m3_checkpoint
from starlette.testclient import TestClient

import encast
from encast.engine import Engine
from encast.serve.app import create_app
from encast.serve.http import HttpServer
from encast.serve.models import Models, ServedModel, Timing
from encast.serve.operations import Protocol
from encast.serve.service import Service
from encast.tasks import Run

__all__ = ["ARTIFACTS", "LocalRunner", "artifact", "client", "engine", "local_service", "served"]

_EMBED: dict[str, Any] = {"pooling": ("mean",), "normalize": True}
_TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
ARTIFACTS: dict[str, tuple[str, dict[str, Any]]] = {
    "embed": ("embed", _EMBED),
    "other-embed": ("embed", {**_EMBED, "seed": 1}),
    "embed-sparse": ("embed_sparse", {"splade": "relu"}),
    "embed-tokens": ("embed_tokens", {}),
    "embed-m3": ("embed_m3", {}),
    "rerank": ("classify", {"labels": 1}),
    "classify": ("classify", {"labels": 3}),
    "tag": ("tag", {"labels": 5, "config": {"id2label": {str(i): name for i, name in enumerate(_TAGS)}}}),
    "answer": ("answer", {}),
    "fill-mask": ("fill_mask", {}),
    "features": ("features", {}),
}
"""Name of a small artifact to its task and the options of ``make_checkpoint``; 48 positions, 32 numbers a token."""


@functools.cache
def artifact(base: Path, name: str) -> Path:
    """The compiled artifact of that name, made below ``base`` once a process."""
    task, options = ARTIFACTS[name]
    folder = base / "serve" / name
    if task == "embed_tokens":
        make_late_checkpoint(folder, **options)
    elif task == "embed_m3":
        make_m3_checkpoint(folder)
    else:
        make_checkpoint(folder, "bert", task, layers=2, hidden=32, heads=2, **options)
    return encast.compile(folder, folder.with_suffix(".encast"), dtype="f32", task=task)


@functools.cache
def engine(base: Path, name: str) -> Engine:
    """The offline engine of that artifact, whose answers a server's must equal; open until the process ends."""
    return encast.load(artifact(base, name), threads=1, pin=False)


class LocalRunner:
    """Runs in a thread of this process; keeps the runs that it was asked for.

    ``backlog_s`` and ``full_from``, in bytes: what it says of its queue. A test may put an exception into ``fails``:
    the next run raises it. A run waits while ``go`` is cleared, and ``waiting`` says how many do; ``withdrawn`` counts
    those that were cancelled.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.backlog_s = 0.0
        self.full_from: int | None = None
        self.runs: list[Run] = []
        self.befores: list[int] = []
        self.deadlines: list[float] = []
        self.fails: list[Exception] = []
        self.go = threading.Event()
        self.go.set()
        self.waiting = self.withdrawn = 0

    def full(self, size: int) -> bool:
        return self.full_from is not None and size >= self.full_from

    async def run(
        self, run: Run, *, arrived: float, deadline: float, before: int, size: int, timing: Timing
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        self.runs.append(run)
        self.befores.append(before)
        self.deadlines.append(deadline)
        if self.fails:
            raise self.fails.pop()
        begin = time.monotonic()
        self.waiting += 1
        try:
            while not self.go.is_set():
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise
        finally:
            self.waiting -= 1
        timing.queue_s += time.monotonic() - begin
        rows = await asyncio.to_thread(self.engine.runnable.run, run.output, run.piece.batch, run.select)
        timing.inference_s += time.monotonic() - begin
        timing.batch_tokens = max(timing.batch_tokens, run.piece.batch.tokens)
        return rows


def local_service(base: Path, *names: str, **fields: Any) -> Service:
    """A service of the artifacts of these names (see ``ARTIFACTS``), in their order, each also served as ``the-NAME``.

    ``base``: a folder for the artifacts, such as ``tmp_path_factory.getbasetemp()``, shared by all tests of a process;
    ``fields``: of ``Service``.
    """
    models = {
        name: ServedModel(
            name, engine(base, name).session, LocalRunner(engine(base, name)), sha256="0" * 64, dtype="f32",
            created=1_700_000_000, source=f"tests/{name}", aliases=(f"the-{name}",),
        )
        for name in names
    }  # fmt: skip
    return Service(Models(models), **fields)


def client(service: Service, protocols: Sequence[Protocol]) -> TestClient:
    """Calls the application without a socket; an exception that it lets out is raised in the test."""
    return TestClient(create_app(service, list(protocols)))


@contextlib.contextmanager
def served(service: Service, protocols: Sequence[Protocol]) -> Iterator[str]:
    """The application behind a socket of the loopback, for real clients; gives its URL, without a slash at the end."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        app = create_app(service, list(protocols))
        server = HttpServer(app, service.limits, drain_s=10, started=lambda: None, tls=None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            # Connections wait in the backlog until the server takes them: nothing to wait for here.
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.end()
            thread.join(30)
            assert not thread.is_alive(), "the server did not end"
