"""The process of a worker: one peer, its answers to the requests of ``worker.Worker``.

Needs NumPy and no more of encast than ``peers.base``, so that it runs in a peer's own environment. Clocks are
``time.perf_counter_ns``, which all processes of a machine share on Linux.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import mmap
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.bench.peers.base import Call, ModelFiles, Peer, load_peer

__all__ = ["main", "read_batch"]

Float32 = np.ndarray[Any, np.dtype[np.float32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]

_clock = time.perf_counter_ns
_SPIN_NS = 200_000
"""Before a moment that is waited for, this long is spun: sleeping threads wake up late."""


class RefusedError(Exception):
    """The peer did what no peer may; the text says what."""


class Server:
    """The peer and what was asked of it so far. Each public method is a request, and returns plain JSON."""

    def __init__(self) -> None:
        self._class: type[Peer]
        self._other_format: str | None
        self._made: Callable[[], Peer]
        self._peer: Peer
        self._batches: list[Batch] = []
        self._calls: list[Call] = []
        self._rows: list[Int64] = []  # of each batch, the tokens whose states are kept
        self._kept: dict[int, Float32] = {}
        self._wanted: frozenset[int] = frozenset()  # numbers of calls
        self._turn = 0

    def begin(
        self, peer: str, dtype: str, threads: int, cache: str, options: dict[str, Any], model: dict[str, Any]
    ) -> None:
        calibration = tuple(tuple(ids) for ids in model["calibration"])
        files = ModelFiles(**{**model, "checkpoint": Path(model["checkpoint"]), "calibration": calibration})
        self._class, self._other_format = load_peer(peer), files.other_format
        self._made = lambda: self._class(files, dtype, threads, Path(cache), **options)

    def missing(self) -> str | None:
        if self._other_format is not None and not self._class.any_format:
            return f"opens folders in the Hugging Face layout; this is {self._other_format}"
        return self._class.missing()

    def export(self) -> dict[str, Any]:
        return dict(self._made().export())

    def open(self) -> dict[str, int]:
        self._peer = self._made()  # before its imports, for which it may set environment variables
        begin = _clock()
        for name in self._class.modules:
            importlib.import_module(name)
        imported = _clock()
        self._peer.open()
        return {"import_ns": imported - begin, "load_ns": _clock() - imported}

    def bind(self, files: Sequence[str], rows: Sequence[Sequence[Sequence[int]]]) -> dict[str, bool]:
        """Also drops what was bound before. ``rows``: of each file, first and end of the tokens that will be kept."""
        self._batches, self._calls, self._rows, self._kept, self._turn = [], [], [], {}, 0
        self._peer.tried = False
        for file, ranges in zip(files, rows, strict=True):
            self._batches.append(read_batch(file))
            self._calls.append(self._peer.bind(self._batches[-1]))
            self._rows.append(np.concatenate([np.arange(0), *(np.arange(*ends) for ends in ranges)]))
        return {"tried": self._peer.tried}

    def first(self) -> None:
        """The first call of all, for the first batch."""
        self._check(self._calls[0](), self._batches[0])

    def burst(
        self, at: int | None, calls: int | None, seconds: float | None, keep: Sequence[int], step: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Nanoseconds of calls in turn (``ns``), and when it began (``begin``), which should be ``at``.

        The outputs of the calls with the numbers ``keep`` are kept.
        """
        clock, self._wanted = _clock, frozenset(keep)
        wait = _Steps(**step) if step else None
        begin = self._wake(at)
        times: list[int] = []
        end = clock() + int((seconds or 0) * 1e9)
        while len(times) < calls if calls is not None else clock() < end:
            index = self._turn % len(self._calls)
            call = self._calls[index]
            if wait is not None:
                wait(len(times))
            started = clock()
            states = call()
            times.append(clock() - started)
            self._answered(len(times) - 1, index, states)
            self._turn += 1
        return {"begin": begin, "ns": times}

    def stream(self, at: int, arrivals: str, ticket: str, keep: Sequence[int]) -> dict[str, Any]:
        """Takes the oldest request that nobody has taken, again and again.

        ``served``: [number, begun, ended] of each, since ``at``. ``begin``: when it began, which should be ``at``.
        ``arrivals`` is a file of ``i64[n]``, ``ticket`` one that counts the requests taken, for all instances. The
        outputs of the requests with the numbers ``keep`` are kept.
        """
        due: list[int] = np.load(arrivals).tolist()
        begin = self._wake(at)
        self._wanted = frozenset(keep)
        served: list[list[int]] = []
        with open(ticket, "r+b") as file, mmap.mmap(file.fileno(), 8) as counter:
            while (number := _take(file.fileno(), counter)) < len(due):
                _wait_until(at + due[number])
                index = number % len(self._calls)
                begun = _clock()
                states = self._calls[index]()
                served.append([number, begun - at, _clock() - at])
                self._answered(number, index, states)
        return {"begin": begin, "served": served}

    def fresh(self, file: str) -> int:
        """Nanoseconds of the first call of a batch that is bound anew, its threads awake."""
        batch = read_batch(file)
        call = self._peer.bind(batch)
        self._calls[0]()
        started = _clock()
        states = call()
        taken = _clock() - started
        self._check(states, batch)
        return taken

    def outputs(self, folder: str) -> list[list[Any]]:
        """Also drops them."""
        kept, self._kept = self._kept, {}
        saved = []
        for index, states in sorted(kept.items()):
            file = f"{folder}/output-{index}.npy"
            np.save(file, states)
            saved.append([index, file])
        return saved

    def facts(self) -> dict[str, Any]:
        return dict(self._peer.facts())

    def _wake(self, at: int | None) -> int:
        """Calls that are not counted: the pool's threads are awake when it begins, also when it begins later.

        Returns the moment at which it is ready: ``at``, or later where the calls took longer.
        """
        while True:
            started = _clock()
            self._calls[self._turn % len(self._calls)]()
            ended = _clock()
            if at is None:
                return ended
            if at - ended < 1.5 * (ended - started):
                break
        _wait_until(at)
        return _clock()

    def _answered(self, number: int, index: int, states: Float32) -> None:
        self._check(states, self._batches[index])
        if number in self._wanted:
            self._kept[index] = states[self._rows[index]]

    @staticmethod
    def _check(states: Any, batch: Batch) -> None:
        # Lazy arrays would be computed where no clock runs.
        if type(states) is not np.ndarray or states.dtype != np.float32:
            kind = f"{states.dtype} array" if isinstance(states, np.ndarray) else type(states).__qualname__
            raise RefusedError(f"a call returned a {kind}; f32[tokens, hidden], a plain NumPy array, is needed")
        if states.ndim != 2 or len(states) != batch.tokens:
            raise RefusedError(
                f"a call returned f32{list(states.shape)} for {batch.tokens} tokens; a row for every token is needed"
            )


class _Steps:
    """Lets no instance begin a call before all have ended the one before, by counters in a shared file."""

    def __init__(self, file: str, instances: int, own: int) -> None:
        counters = np.memmap(file, np.int64, "r+", shape=(instances,))
        self._counters, self._own = counters, own

    def __call__(self, number: int) -> None:
        self._counters[self._own] = number + 1
        give_up = _clock() + 60_000_000_000
        while self._counters.min() <= number:
            if _clock() > give_up:
                raise RefusedError("another instance has not reached this call for 60 s")


def read_batch(file: str) -> Batch:
    """What ``worker.write_batch`` wrote."""
    with np.load(file) as arrays:
        types = arrays["token_type_ids"]
        return Batch(arrays["token_ids"], arrays["cu_seqlens"], types if types.size else None)


def _wait_until(moment: int) -> None:
    while (left := moment - _clock()) > 0:
        if left > _SPIN_NS:
            time.sleep((left - _SPIN_NS) / 1e9)


def _take(fd: int, counter: mmap.mmap) -> int:
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        number = int.from_bytes(counter[:8], "little")
        counter[:8] = (number + 1).to_bytes(8, "little")
        return number
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def main(fd: int) -> None:
    """Serves until the other side closes the connection."""
    server = Server()
    with socket.socket(fileno=fd) as connection, connection.makefile("rwb") as lines:
        for line in lines:
            request = json.loads(line)
            do = request.pop("do")
            try:
                answer = {"value": getattr(server, do)(**request)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            if do == "begin" and "error" not in answer:
                continue  # nothing is awaited but its error, which takes the place of the next answer
            lines.write(json.dumps(answer, default=str).encode() + b"\n")
            lines.flush()
            if do == "begin":
                return


if __name__ == "__main__":
    main(int(sys.argv[1]))
