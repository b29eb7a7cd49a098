"""Backends for the tests: one that is honest, and one for each way not to be. Loaded by path, as a user's own."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.bench.agreement import plain_graph
from encast.bench.peers.base import Call, Peer
from encast.bench.peers.encast import EncastOnCard


class Honest(Peer):
    """The NumPy float64 reference; ``milliseconds`` is the least that a call takes, spent computing."""

    name = "honest"
    dtypes = ("f32",)

    def open(self) -> None:
        from encast.backends.reference import Reference

        self._evaluator = Reference(plain_graph(self.model.checkpoint))

    def bind(self, batch: Batch) -> Call:
        return lambda: self.run(batch)

    def run(self, batch: Batch) -> Any:
        spin(self.options.get("milliseconds", 0))
        return self._evaluator.run("last_hidden_state", batch)

    def facts(self) -> Mapping[str, Any]:
        return {"version": "1.0", **self.options}


def spin(milliseconds: float) -> None:
    """Computes for so long, without Python's lock."""
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        hashlib.sha256(BLOCK)


BLOCK = bytes(1 << 17)


class OnTorch(EncastOnCard):
    """encast's steps of a card on the CPU."""

    @classmethod
    def missing(cls) -> str | None:
        return None


class ManyThreads(Honest):
    """Computes on ``running`` threads, whatever its budget is."""

    name = "many-threads"

    def run(self, batch: Batch) -> Any:
        count = self.options["running"]
        team = [threading.Thread(target=spin, args=(20,)) for _ in range(count - 1)]
        for thread in team:
            thread.start()
        spin(20)
        for thread in team:
            thread.join()
        return super().run(batch)


class Daemon(Honest):
    """Has a daemon compute for it, which is in a session of its own and no child of it: as daemons are made."""

    name = "daemon"

    def open(self) -> None:
        super().open()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        os.setsid()
        if os.fork() == 0:
            with open(self.options["pid_file"], "w") as file:
                file.write(str(os.getpid()))
            spin(120_000)
        os._exit(0)


class Stray(Honest):
    """Takes back the processors that it was not given, and computes on them."""

    name = "stray"

    def open(self) -> None:
        super().open()
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


class FirstHalf(Honest):
    """A shorter input: only the first half of every sequence is computed; its states stand in for the rest."""

    name = "first-half"

    def run(self, batch: Batch) -> Any:
        lengths = np.diff(batch.cu_seqlens)
        parts = [
            np.arange(begin, begin + length // 2) for begin, length in zip(batch.cu_seqlens, lengths, strict=False)
        ]
        short = Batch.of([batch.token_ids[part] for part in parts])
        states = np.split(super().run(short), short.cu_seqlens[1:-1])
        return np.concatenate(
            [np.resize(own, (length, own.shape[1])) for own, length in zip(states, lengths, strict=True)]
        )


class FewerRows(Honest):
    """A shorter input that shows in the shape."""

    name = "fewer-rows"

    def run(self, batch: Batch) -> Any:
        return super().run(batch)[:-1]


class SameAnswer(Honest):
    """The first answer, whatever is asked."""

    name = "same-answer"
    answer: Any = None

    def run(self, batch: Batch) -> Any:
        if self.answer is None:
            self.answer = super().run(batch)
        return self.answer


class KeptByIds(Honest):
    """Right answers, looked up by the ids."""

    name = "kept-by-ids"

    def open(self) -> None:
        super().open()
        self._answers: dict[bytes, Any] = {}

    def run(self, batch: Batch) -> Any:
        key = batch.token_ids.tobytes()
        if key not in self._answers:
            self._answers[key] = super().run(batch)
        return self._answers[key]


class KeptByCall(Honest):
    """Right answers, computed at the first call of what was bound."""

    name = "kept-by-call"

    def bind(self, batch: Batch) -> Call:
        found: list[Any] = []

        def call() -> Any:
            if not found:
                found.append(self.run(batch))
            return found[0]

        return call


class SlowClock(Honest):
    """Lets the worker's clock run at a tenth."""

    name = "slow-clock"

    def open(self) -> None:
        super().open()
        clock = time.perf_counter_ns
        vars(sys.modules["__main__"])["_clock"] = lambda: clock() // 10


class SlowClockFor(Honest):
    """As ``SlowClock``, while what is bound has a length of ``lengths``."""

    name = "slow-clock-for"

    def bind(self, batch: Batch) -> Call:
        clock = time.perf_counter_ns
        slow = batch.cu_seqlens[1] in self.options["lengths"]
        vars(sys.modules["__main__"])["_clock"] = (lambda: clock() // 10) if slow else clock
        return super().bind(batch)


class BusyWhenIdle(Honest):
    """Keeps to its budget when it is asked, and takes the processors from others when they are."""

    name = "busy-when-idle"

    def open(self) -> None:
        super().open()
        self._asked = time.perf_counter()
        threading.Thread(target=self._burn, daemon=True).start()

    def run(self, batch: Batch) -> Any:
        try:
            return super().run(batch)
        finally:
            self._asked = time.perf_counter()

    def _burn(self) -> None:
        while True:
            if time.perf_counter() - self._asked > 0.05:
                spin(5)
            else:
                time.sleep(0.005)


class Trying(Honest):
    """Tries ways to compute a batch unless an earlier process has; writes down every process in ``file``."""

    name = "trying"

    def open(self) -> None:
        super().open()
        with open(self.options["file"], "a") as file:
            file.write(f"{os.getpid()}\n")

    def bind(self, batch: Batch) -> Call:
        kept = f"{self.options['file']}.kept"
        if not os.path.exists(kept):
            self.tried = True
            time.sleep(0.5)
            open(kept, "w").close()
        return super().bind(batch)


class AlwaysTrying(Trying):
    """Says of every batch that it has tried ways to compute it."""

    name = "always-trying"

    def bind(self, batch: Batch) -> Call:
        with open(self.options["file"]) as file:
            assert len(file.readlines()) <= 2, "it is opened for ever"
        self.tried = True
        return Honest.bind(self, batch)


class Lazy(Honest):
    """An array of its own kind, which might compute whenever it is looked at."""

    name = "lazy"

    class Array(np.ndarray[Any, Any]):
        pass

    def run(self, batch: Batch) -> Any:
        return super().run(batch).view(self.Array)


class NotANumber(Honest):
    name = "not-a-number"

    def run(self, batch: Batch) -> Any:
        return np.full_like(super().run(batch), np.nan)


class Failing(Honest):
    """Does what ``how`` says, at the step that ``at`` says, from the ``after``-th call on."""

    name = "failing"
    calls = 0

    def open(self) -> None:
        super().open()
        self._held: list[bytearray] = []
        self._at("open")

    def export(self) -> Mapping[str, Any]:
        self._at("export")
        return {}

    def run(self, batch: Batch) -> Any:
        type(self).calls += 1
        if self.calls > self.options.get("after", 0):
            self._at("run")
        return super().run(batch)

    def _at(self, step: str) -> None:
        if self.options.get("at", "run") == step:
            ways: dict[str, Callable[[], object]] = {
                "abort": os.abort,
                "segfault": lambda: ctypes.string_at(0),
                "exit": lambda: (print("going down", file=sys.stderr, flush=True), os._exit(3)),
                "hang": lambda: time.sleep(3600),
                "spin": lambda: spin(3_600_000),
                "leak": lambda: self._held.append(bytearray(os.urandom(1 << 12) * (16 << 8))),
                "swell": lambda: bytearray(os.urandom(1 << 12) * (50 << 10)),
                "raise": lambda: 1 / 0,
            }
            ways[self.options["how"]]()


class Alternating(Honest):
    """Sleeps 20 ms for every batch whose first id is even, or odd where ``ENCAST_TEST_ODD`` is 1."""

    name = "alternating"

    def run(self, batch: Batch) -> Any:
        if batch.token_ids[0] % 2 == int(os.environ["ENCAST_TEST_ODD"]):
            time.sleep(0.02)
        return super().run(batch)


class Absent(Honest):
    """Not there for the reason in ``ENCAST_TEST_MISSING``; "" installs it."""

    name = "absent"

    @classmethod
    def missing(cls) -> str | None:
        return os.environ.get("ENCAST_TEST_MISSING", "not installed: pip install absent") or None
