"""One process a backend: it sleeps on its standard input until it is asked for a burst of calls.

Peers' thread pools spin after a call, ours for ENCAST_SPIN_US, so two of them in one process, or busy at once, would
take the cores from each other. Here only one worker is asked at a time, and the others' threads have gone to sleep
before the next burst begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from peers.backends import open_backend

__all__ = ["Worker"]

SETTLE_SECONDS = 0.03
"""Longer than any of the thread pools spins without work."""


class Worker:
    """A backend in a process of its own. ``options`` are those of ``backends.open_backend``."""

    def __init__(self, **options: Any) -> None:
        folder = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "peers.worker", json.dumps(options, default=str)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request, default=str) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a worker ended early with {self.process.wait()}; its message stands above")
        return json.loads(answer)

    def burst(self, calls: int) -> float:
        """The median of ``calls`` calls, in seconds, once the other workers' threads sleep."""
        time.sleep(SETTLE_SECONDS)
        return float(np.median(self.ask(do="burst", calls=calls, warm=True)))

    def once(self, calls: int) -> float:
        """As ``burst``, for calls of seconds: none goes before them to wake the threads."""
        time.sleep(SETTLE_SECONDS)
        return float(np.median(self.ask(do="burst", calls=calls, warm=False)))

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _timed(call: Callable[[], Any], calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _serve(options: dict[str, Any]) -> None:
    # Libraries print what they please on stdout; answers alone go there.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    backend = open_backend(**options)
    call: Callable[[], Any] = lambda: None  # noqa: E731
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        if request["do"] == "shape":
            call, answer = backend.prepare(tuple(request["shape"]))
        elif request["do"] == "texts":
            texts = json.loads(Path(request["file"]).read_text())
            call, answer = backend.prepare_texts(texts, request["settings"])
        elif request["do"] == "save":
            np.save(request["file"], np.asarray(call()))
        else:
            if request["warm"]:
                call()  # wakes threads and warms caches
            answer = _timed(call, request["calls"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
