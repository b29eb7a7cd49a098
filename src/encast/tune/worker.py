"""The process in which one set-up is measured: ``python -m encast.tune.worker``.

On cards one process measures all set-ups, one after the other (the command ``use``).

It speaks JSON lines on the descriptors that it is started with as standard input and output; what libraries print goes
to standard error. The first line says what to open, and is answered by ``{"ready": true}``, on cards with their names
in ``cards``; then a line is a command, and its answer a line. ``{"error": ..., "kind": ...}`` answers what failed. It
ends when its input ends.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics as medians
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import IO, Any

import numpy as np

from encast.backends.base import Runnable
from encast.backends.devices import card_names
from encast.backends.groups import read_setup, setup_to_json
from encast.batch import Batch
from encast.engine import load
from encast.errors import EncastError, InputError
from encast.measure.arrivals import Responses, poisson
from encast.measure.statistics import PERCENTS, percent_name, percentiles
from encast.tune.queues import Service, run_threads
from encast.tune.shapes import one_of_each

__all__ = ["main"]


class _Session:
    """An open engine, the requests, and the commands."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.setup = read_setup(job["setup"], "setup", batch_tokens=1)
        self.output, self.selects = str(job["output"]), bool(job["selects"])
        self._open(job)
        with np.load(job["requests"]) as stored:
            types = stored["token_type_ids"] if "token_type_ids" in stored.files else None
            self.requests = _requests(stored["token_ids"], stored["cu_seqlens"], types)
        self.service = Service(self.setup, self.requests, self.run)
        # Opens what is opened at the first run, and shows at once what cannot run.
        for request in self.requests[:4]:
            self.run(request)

    def _open(self, job: dict[str, Any]) -> None:
        document = {"schema": 1, "chosen": setup_to_json(self.setup)}
        self.runnable: Runnable = load(job["artifact"], config=document).runnable

    def ready(self) -> dict[str, Any]:
        """What the parent is told once it is open."""
        return {"ready": True}

    @property
    def commands(self) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        return {"saturate": self.saturate, "stream": self.stream, "probe": self.probe}

    def run(self, batch: Batch) -> Any:
        return self._run_on(self.runnable, batch)

    def _run_on(self, runnable: Runnable, batch: Batch) -> Any:
        select = np.ascontiguousarray(batch.cu_seqlens[:-1]) if self.selects else None
        return runnable.run(self.output, batch, select)

    def saturate(self, command: dict[str, Any]) -> dict[str, Any]:
        found = self.service.saturate(float(command["seconds"]), float(command["longest"]))
        return {"rate": found.rate, "texts": found.texts, "runs_ns": found.runs_ns}

    def stream(self, command: dict[str, Any]) -> dict[str, Any]:
        percent, seconds = float(command["percent"]), float(command["seconds"])
        due = poisson(float(command["rate"]), seconds, int(command["seed"]), exact=True)
        found = self.service.stream(due, int(command["give_up_ns"]))
        texts = len(found.answered)
        if found.gave_up or not texts:
            return {"late": True, "texts": texts}
        # The first tenth found empty queues.
        latency_ms = Responses.of(found.answered).after(seconds * 1e8).latency / 1e6
        known = percentiles(latency_ms, sorted({*PERCENTS, percent}))
        reached = known[percent_name(percent)]
        return {"late": reached is None, "texts": texts, "percentile_ms": reached, "latency_ms": known}

    def probe(self, command: dict[str, Any]) -> dict[str, Any]:
        """The median nanoseconds of runs of ``tokens`` tokens, every instance busy with its own.

        The first run of each warms up, and counts only where it takes all of the time. ``instances``: that are busy, by
        default all.
        """
        instances = int(command.get("instances", sum(group.instances for group in self.setup.groups)))
        batch = _of_tokens(self.requests, int(command["tokens"]))
        end = time.perf_counter() + float(command["seconds"])
        times: list[int] = []

        def timed() -> int:
            start = time.perf_counter_ns()
            self.run(batch)
            return time.perf_counter_ns() - start

        def work(_: int) -> None:
            own = [timed()]
            while time.perf_counter() <= end:
                own.append(timed())
            times.extend(own[1:] or own)

        run_threads(work, range(instances))
        return {"nanoseconds": medians.median(times)}


class _CardSession(_Session):
    """The artifact on every card; a run is on one that is free."""

    def _open(self, job: dict[str, Any]) -> None:
        self._devices = [str(name) for name in job["devices"]]
        self._cards = [load(job["artifact"], device=name, dtype=job["dtype"]).runnable for name in self._devices]
        self._free: SimpleQueue[Runnable] = SimpleQueue()
        for card in self._cards:
            self._free.put(card)
        self._batches: dict[int, list[Batch]] = {}

    def ready(self) -> dict[str, Any]:
        return {**super().ready(), "cards": card_names(self._devices)}

    @property
    def commands(self) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        return {**super().commands, "use": self.use}

    def run(self, batch: Batch) -> Any:
        card = self._free.get()
        try:
            return self._run_on(card, batch)
        finally:
            self._free.put(card)

    def use(self, command: dict[str, Any]) -> dict[str, Any]:
        """Takes batches of up to ``batch_tokens`` from now on, and captures every graph that they need.

        Also those that it had before: other set-ups may have taken their place.
        """
        tokens = int(command["batch_tokens"])
        self.service = Service(replace(self.setup, batch_tokens=tokens), self.requests, self.run)
        if tokens not in self._batches:
            from encast.backends.gpu.graphs import bucket

            lengths = [request.tokens for request in self.requests]
            self._batches[tokens] = [
                self.service.joined([(first + index) % len(lengths) for index in range(texts)])
                for first, texts in one_of_each(lengths, tokens, bucket)
            ]
        self._warm(self._batches[tokens])
        return {"ready": True}

    def probe(self, command: dict[str, Any]) -> dict[str, Any]:
        self._warm([_of_tokens(self.requests, int(command["tokens"]))])
        return super().probe(command)

    def _warm(self, batches: list[Batch]) -> None:
        for card in self._cards:
            for batch in batches:
                self._run_on(card, batch)


def _requests(token_ids: Any, cu_seqlens: Any, token_type_ids: Any) -> list[Batch]:
    return [
        Batch(
            np.ascontiguousarray(token_ids[begin:end]),
            np.array([0, end - begin], np.int32),
            None if token_type_ids is None else np.ascontiguousarray(token_type_ids[begin:end]),
        )
        for begin, end in itertools.pairwise(cu_seqlens)
    ]


def _of_tokens(requests: list[Batch], tokens: int) -> Batch:
    """A batch of the requests' texts, over and over, the last one cut, that has exactly so many tokens."""
    ids: list[Any] = []
    left = tokens
    while left > 0:
        request = requests[len(ids) % len(requests)]
        ids.append(request.token_ids[:left])
        left -= len(ids[-1])
    return Batch(np.concatenate(ids), np.cumsum([0, *map(len, ids)]).astype(np.int32))


def _answer(session: _Session, line: str) -> dict[str, Any]:
    command = json.loads(line)
    commands = session.commands
    if command.get("do") not in commands:
        raise InputError(f"the command {command.get('do')!r} is unknown; {', '.join(commands)} are known")
    return commands[command["do"]](command)


def _serve(lines: IO[str], answers: IO[str]) -> None:
    session: _Session | None = None
    for line in lines:
        try:
            if session is None:
                job = json.loads(line)
                session = _CardSession(job) if "devices" in job else _Session(job)
                answer = session.ready()
            else:
                answer = _answer(session, line)
        except EncastError as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        except MemoryError:
            answer = {"error": "out of memory", "kind": "ResourceError"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serves one parent until it closes the pipe."""
    # An interrupt is the parent's to handle, also where a service manager sends it to all processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, answers)
    # Threads of a measurement that the parent gave up on are not waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
