"""Measures set-ups on this machine: each in a process of its own, several by turns.

**Throughput**: texts wait without end and the instances take them. The median of three bursts of half a second counts;
where they differ by more than a tenth, the trial says that the machine was noisy.

**Rate within a latency limit**: requests arrive as a Poisson process of which just the expected number comes, at rates
that bisect the throughput. Latency counts from the time at which a request was due. All set-ups see the same requests
in the same order. A stop of the whole machine can break the percentile of a short stream, so a rate that breaks the
limit is tried once more, and the better try counts. A percentile of some hundred requests need not rise with every
step of the rate, so the rate at the limit is read off the line through all steps after isotonic regression.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from encast.backends.groups import InstanceGroup, Setup
from encast.batch import Batch
from encast.errors import EncastError
from encast.measure.statistics import percentiles, samples_needed
from encast.tune.measurement import Measurement
from encast.tune.process import Worker, requests_file
from encast.tune.slo import Slo

__all__ = ["METHOD", "LiveEvaluator", "Opened", "crossing", "rates_to_try", "stream_seconds"]

METHOD = 4
"""Counted up when trials are measured in another way: those of two ways are not comparable."""

_BURSTS, _BURST_SECONDS = 3, 0.5
_LONGEST_BURST = 3.0
"""Seconds of one of runs so large that half a second holds few; two of such are enough."""
_NOISY = 0.1
"""By what share bursts of a quiet machine do not differ."""

_RATES = 5
_FIRST_RATE = 0.75
"""Of the saturated throughput."""
_TRIES = 2
_REQUESTS = 1000
_LEAST_SECONDS, _MOST_SECONDS = 0.3, 2.0
"""Of a stream, unless its percentile needs more."""
_LEAST_MS = 1e-6
"""What the clock tells apart: a percentile below it has no logarithm that means anything."""
_HOPELESS = 10.0
"""Times the limit that a request may wait before a rate is given up; what it counts as then."""

_PROBE_SECONDS = 0.25
_PROBE_TOKENS_PER_S = 20.0
"""What a probe is given up at: large models in f32 make some hundred on one old core."""


class Opened(Protocol):
    """A set-up that is open: what ``LiveEvaluator`` asks of a ``Worker``."""

    def ask(self, command: Mapping[str, Any], seconds: float) -> dict[str, Any]: ...

    def memory_bytes(self) -> int | None: ...


class LiveEvaluator:
    """The ``search.Evaluator`` of this machine; a context manager."""

    def __init__(
        self,
        artifact: Path,
        requests: Batch,
        *,
        output: str,
        selects: bool,
        slo: Slo | None,
        prefix: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        """``requests``: the texts of the workload in their order. ``selects``: whether ``output`` has selected rows."""
        self.slo, self.seed = slo, seed
        self._prefix = tuple(prefix)
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="encast-tune-")))
        self._job: dict[str, Any] = {
            "artifact": str(artifact),
            "requests": str(requests_file(folder, requests.token_ids, requests.cu_seqlens, requests.token_type_ids)),
            "output": output,
            "selects": selects,
        }
        self._probed: Worker | None = None

    def __enter__(self) -> LiveEvaluator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes and removes what they read."""
        self._close_probed()
        self._stack.close()

    def probe(self, tokens: int, threads: int, instances: int) -> float:
        """See ``Evaluator.probe``: the median of runs of a quarter of a second."""
        setup = Setup((InstanceGroup(instances, threads),), tokens)
        if self._probed is None or self._probed.setup.groups != setup.groups:
            self._close_probed()
            self._probed = self._start(setup)
        return self._timed(self._probed, tokens, instances)

    def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
        """See ``Evaluator.measure``: every step of one set-up is followed by that of the next."""
        self._close_probed()
        began = time.perf_counter()
        found: dict[int, Measurement] = {}
        running: dict[int, Generator[None, None, Measurement]] = {}
        with ExitStack() as stack:
            for index, setup in enumerate(setups):
                try:
                    running[index] = self._steps(stack.enter_context(self._open(setup)))
                except EncastError as error:
                    found[index] = Measurement.failure(error)
            while len(found) < len(setups):
                for index, steps in running.items():
                    if index not in found:
                        try:
                            next(steps)
                        except StopIteration as done:
                            found[index] = done.value
                        except EncastError as error:
                            found[index] = Measurement.failure(error)
        each = (time.perf_counter() - began) / len(setups)
        return [replace(found[index], seconds=each) for index in range(len(setups))]

    def _start(self, setup: Setup) -> Worker:
        return Worker(setup, self._job, self._prefix)

    def _open(self, setup: Setup) -> AbstractContextManager[Opened]:
        return self._start(setup)

    @staticmethod
    def _timed(worker: Opened, tokens: int, instances: int) -> float:
        command = {"do": "probe", "tokens": tokens, "instances": instances, "seconds": _PROBE_SECONDS}
        return float(worker.ask(command, 60 + tokens / _PROBE_TOKENS_PER_S)["nanoseconds"]) / 1e9

    def _close_probed(self) -> None:
        if self._probed is not None:
            self._probed.close()
            self._probed = None

    def _steps(self, worker: Opened) -> Generator[None, None, Measurement]:
        bursts: list[dict[str, Any]] = []
        seconds = 0.0
        while len(bursts) < 2 or (len(bursts) < _BURSTS and seconds < _LONGEST_BURST):
            began = time.perf_counter()
            command = {"do": "saturate", "seconds": _BURST_SECONDS, "longest": _LONGEST_BURST}
            bursts.append(worker.ask(command, 60 + 20 * _LONGEST_BURST))
            seconds += time.perf_counter() - began
            yield
        rates = [float(burst["rate"]) for burst in bursts]
        most = float(np.median(rates))
        apart = (max(rates) - min(rates)) / most
        noise = f"its throughput varied by {apart:.0%} from burst to burst" if apart > _NOISY else None
        texts = sum(int(burst["texts"]) for burst in bursts)
        if self.slo is None:
            runs_ms = np.concatenate([burst["runs_ns"] for burst in bursts]) / 1e6
            latency: dict[str, float | None] = percentiles(runs_ms)
            return Measurement(most, most, latency, 1.0, worker.memory_bytes(), texts, noise=noise)
        limit = self.slo.limit_ms
        latency, kept = {}, 0.0
        steps: list[tuple[float, float]] = []
        trying = rates_to_try(most, limit)
        rate = next(trying)
        while True:
            reached = math.inf
            for _ in range(_TRIES):
                stream = self._stream(worker, self.slo, rate)
                texts += int(stream["texts"])
                reached = min(reached, _HOPELESS * limit if stream["late"] else float(stream["percentile_ms"]))
                yield
                if reached <= limit:
                    break
            steps.append((rate, reached))
            if reached <= limit and rate > kept:
                latency, kept = stream["latency_ms"], rate
            try:
                rate = trying.send(reached)
            except StopIteration:
                break
        sustained = crossing(steps, limit)
        excess = 1.0 if sustained > 0 else min(steps)[1] / limit
        return Measurement(sustained, most, latency, excess, worker.memory_bytes(), texts, noise=noise)

    def _stream(self, worker: Opened, slo: Slo, rate: float) -> dict[str, Any]:
        seconds = stream_seconds(rate, slo)
        command = {
            "do": "stream",
            "rate": rate,
            "seconds": seconds,
            "seed": self.seed,
            "percent": slo.percent,
            "give_up_ns": int(_HOPELESS * slo.limit_ms * 1e6),
        }
        return worker.ask(command, 60 + 3 * seconds + _HOPELESS * slo.limit_ms / 1e3)


def stream_seconds(rate: float, slo: Slo) -> float:
    """Of a stream at ``rate`` texts a second: what 1,000 requests take, from 0.3 to 2 seconds, but always as many as
    the percentile needs."""
    # The first tenth, while the queues fill, is left out, and chance may put a few more into it.
    needed = 1.3 * samples_needed(slo.percent) + 10
    return max(needed / rate, min(_MOST_SECONDS, max(_LEAST_SECONDS, _REQUESTS / rate)))


def rates_to_try(most: float, limit: float) -> Generator[float, float, None]:
    """Rates at which the percentile is wanted, which is sent in: bisects 0 to ``most`` for where it is ``limit``."""
    low, high, share = 0.0, 1.0, _FIRST_RATE
    for _ in range(_RATES):
        reached = yield share * most
        low, high = (share, high) if reached <= limit else (low, share)
        share = (low + high) / 2


def crossing(steps: Sequence[tuple[float, float]], limit: float) -> float:
    """The rate at which the percentile reaches ``limit``, from (rate, percentile) of the steps; 0 for none.

    Where no step is above the limit, the highest rate that was tried.
    """
    from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

    rates, reached = np.array(sorted(steps)).T
    logs = isotonic_regression(np.log(np.maximum(reached, _LEAST_MS))).x
    if logs[0] > math.log(limit):
        return 0.0
    # To the right of the last step, np.interp gives that; equal percentiles are the right one's.
    above = int(np.searchsorted(logs, math.log(limit), "right"))
    if above == len(logs):
        return float(rates[-1])
    return float(np.interp(math.log(limit), logs[above - 1 : above + 1], rates[above - 1 : above + 1]))
