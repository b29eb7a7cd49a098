"""Measures set-ups on this machine: each in a process of its own, several by turns.

**Throughput**: texts wait without end and the instances take them; the rate from the first window of them on.

**Rate under a promise**: requests arrive as a Poisson process of which just the expected number comes, at rates up to
the throughput that close in on the one at which the promised percentile reaches its limit. Latency counts from the time
at which a request was due. A percentile of some hundred requests is noisy and need not rise with every step of the
rate, so the answer is not the last step: all steps are made to rise with least change (isotonic regression: Barlow et
al., "Statistical Inference under Order Restrictions", 1972) and the crossing is read off the line between them. All
set-ups see the same requests in the same order. A stop of the whole machine can break the percentile of a short stream
at a rate that is otherwise kept, so a step that breaks it is taken again, with the same arrivals: what differs is the
machine, and the best, which it disturbed least, counts. Near the limit that is hopeful: one kept stream is enough.

**Noise**: the machine is looked at (``yardstick``) before and after every second of a throughput, and around each
search for a rate under a promise. What was disturbed is measured again, for as long at most as the measurement takes
without noise; a trial that has nothing else says so.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from encast.backends.groups import InstanceGroup, Setup
from encast.batch import Batch
from encast.errors import EncastError
from encast.measure.statistics import percentiles, samples_needed
from encast.tune.measurement import Measurement
from encast.tune.process import Worker, requests_file
from encast.tune.slo import Slo
from encast.tune.yardstick import NOISY, Yardstick, noise

__all__ = ["METHOD", "LiveEvaluator", "Pace", "crossing", "rates_to_try"]

METHOD = 3
"""Counted up when trials are measured in another way: those of two ways are not comparable."""

_STEPS = 6
_LADDER = (0.6, 0.85, 0.95, 1.0)
"""Shares of the saturated throughput that are tried while the promise is kept. Beyond the last the queue grows without
end, which a stream of some hundred requests is over too soon to show."""

_LOWEST = 0.05
_HOPELESS = 10.0
"""Times the limit that a request may wait before a rate is given up; what it counts as then."""

_PIECE = 1.0
"""Seconds of a burst between two looks at the machine: a host leaves two virtual processors on one
core for two or three."""
_PATIENCE = 6.0
"""Times ``Pace.burst`` that one of large runs may take."""
_FEW = 60
"""Set-ups that two cores have at most."""
_PROBE_TOKENS_PER_S = 20.0
"""What a probe is given up at: large models in f32 make some hundred on one old core."""


@dataclass(frozen=True)
class Pace:
    """How long measurements take: longer ones are less noisy.

    ``burst``: undisturbed seconds of a saturated one. ``requests`` of a stream, up to ``queued`` where it takes so many
    to queue for as long as the limit, but at least as many as its percentile needs and ``least`` to ``most`` seconds of
    them. ``tries`` of one that breaks the promise, of long ones fewer.
    """

    burst: float = 0.6
    tries: int = 2
    requests: int = 1000
    queued: int = 4000
    least: float = 0.3
    most: float = 5.0

    @staticmethod
    def of_grid(setups: int) -> Pace:
        """For a search of so many set-ups: where they are few, each is measured for longer.

        A quarter of 30 set-ups leaves no trials to measure the best ones again. On two cores bursts of 0.6 s chose a
        set-up that has 95.1 % of the best's throughput, bursts of 2 s the best. On shared cores bursts of 2 s repeat to
        4 %, and the rates of two set-ups under a promise were 2492 to 2995 and 1682 to 2991 texts a second with two
        tries, 2774 to 3028 and 2581 to 3016 with four.
        """
        return Pace(burst=min(4.0, max(0.6, 120 / setups)), tries=4 if setups <= _FEW else 2)

    def seconds(self, rate: float, slo: Slo) -> float:
        """Of a stream at ``rate`` texts a second.

        Where n requests are expected, about the square root of n more or fewer come by chance. So a service without
        room to spare has a queue as long as the limit after the square of what arrives within the limit: a shorter
        stream does not show it, and none shows what hours would. Of one server with runs of one length it says, by
        simulation, rates 3 to 10 % beyond those that keep a p99 for ever. Where the square is above ``queued``, the
        throughput itself is less than 4 % beyond (heavy traffic: 2.3 over what arrives within the limit).
        """
        needed = 1.3 * samples_needed(slo.percent)
        queue = (rate * slo.limit_ms / 1e3) ** 2
        wanted = max(self.requests, min(self.queued, queue))
        return max(self.least, min(self.most, wanted / rate), needed / rate)

    def most_tries(self, seconds: float) -> int:
        """Of a stream of so many seconds: a long one has room for a stop of the machine itself."""
        return min(self.tries, max(2, int(self.most / seconds)))


@dataclass(frozen=True, eq=False)
class _Piece:
    """Of a burst: texts a second, and their number; of each the nanoseconds of its run; ``looks`` before and after."""

    rate: float
    texts: int
    runs_ns: Sequence[int]
    looks: tuple[float, float]
    seconds: float


class LiveEvaluator:
    """The ``search.Evaluator`` of this machine; a context manager."""

    def __init__(
        self,
        artifact: Path,
        requests: Batch,
        *,
        output: str,
        selects: bool,
        cores: int,
        slo: Slo | None,
        pace: Pace | None = None,
        prefix: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        """``requests``: the texts of the workload in their order. ``selects``: whether ``output`` has selected rows."""
        self.slo, self.pace, self.cores, self.seed = slo, pace or Pace(), cores, seed
        self._prefix = tuple(prefix)
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="encast-tune-")))
        self._job = {
            "artifact": str(artifact),
            "requests": str(requests_file(folder, requests.token_ids, requests.cu_seqlens, requests.token_type_ids)),
            "output": output,
            "selects": selects,
        }
        self._probed: Worker | None = None
        self._yardstick = Yardstick(lambda: self._open(Setup((InstanceGroup(cores, 1),), 1024)))
        self._look: float | None = None
        """What was seen last, while nothing ran since."""

    def __enter__(self) -> LiveEvaluator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes and removes what they read."""
        if self._probed is not None:
            self._probed.close()
            self._probed = None
        self._yardstick.close()
        self._stack.close()

    # The cost model's points

    def probe(self, tokens: int, threads: int, instances: int) -> float:
        """See ``Evaluator.probe``: the median of runs of a quarter of a second."""
        setup = Setup((InstanceGroup(instances, threads),), tokens)
        if self._probed is None or self._probed.setup.groups != setup.groups:
            if self._probed is not None:
                self._probed.close()
                self._probed = None
            self._probed = self._open(setup)
        answer = self._probed.ask({"do": "probe", "tokens": tokens, "seconds": 0.25}, 60 + tokens / _PROBE_TOKENS_PER_S)
        return float(answer["nanoseconds"]) / 1e9

    # Set-ups

    def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
        """See ``Evaluator.measure``."""
        if self._probed is not None:
            self._probed.close()
            self._probed = None
        began = time.perf_counter()
        self._look = None
        with ExitStack() as stack:
            workers: list[Worker | Measurement] = []
            for setup in setups:
                try:
                    workers.append(stack.enter_context(self._open(setup)))
                except EncastError as error:
                    workers.append(Measurement.failure(error))
            found = self._by_turns(workers) if self.slo is None else self._repeated(workers)
        each = (time.perf_counter() - began) / len(setups)
        return [replace(one, seconds=each) for one in found]

    def _repeated(self, workers: Sequence[Worker | Measurement]) -> list[Measurement]:
        """``_by_turns``, and once more when the machine was disturbed around it."""
        looks = [self._seen()]
        found = self._by_turns(workers)
        looks.append(self._seen())
        slower = self._yardstick.slower(looks)
        # Where nothing is known, nothing would be known of the repetition.
        if NOISY < slower < math.inf:
            again = self._by_turns(
                [worker if one.failed is None else one for worker, one in zip(workers, found, strict=True)]
            )
            slower_again = self._yardstick.slower([self._seen()])
            if slower_again <= slower:
                # What failed in the repetition was measured once.
                found = [new if new.failed is None else old for new, old in zip(again, found, strict=True)]
                slower = slower_again
        return [replace(one, noise=noise(slower) or one.noise) for one in found]

    def _open(self, setup: Setup) -> Worker:
        return Worker(setup, self._job, self._prefix)

    def _by_turns(self, workers: Sequence[Worker | Measurement]) -> list[Measurement]:
        """Every step of one worker is followed by that of the next; what failed before stays as it is."""
        found = {index: worker for index, worker in enumerate(workers) if isinstance(worker, Measurement)}
        running = {
            index: self._steps(worker) for index, worker in enumerate(workers) if not isinstance(worker, Measurement)
        }
        while len(found) < len(workers):
            for index, steps in running.items():
                if index not in found:
                    try:
                        next(steps)
                    except StopIteration as done:
                        found[index] = done.value
                    except EncastError as error:
                        found[index] = Measurement.failure(error)
        return [found[index] for index in range(len(workers))]

    def _steps(self, worker: Worker) -> Generator[None, None, Measurement]:
        saturated = yield from self._burst(worker)
        if self.slo is None:
            return replace(saturated, memory_bytes=worker.memory_bytes())
        most, texts = saturated.rate, saturated.requests
        yield
        limit = self.slo.limit_ms
        rates = rates_to_try(most, limit)
        kept: dict[str, Any] = {}
        seen: list[tuple[float, float]] = []
        rate = next(rates)
        while True:
            promised = math.inf
            for number in range(self.pace.most_tries(self.pace.seconds(rate, self.slo))):
                if number > 0:
                    yield  # what disturbed this try may be over when all others have had their turn
                stream = self._stream(worker, rate)
                texts += int(stream["texts"])
                if self._promised(stream) < promised:
                    answer, promised = stream, self._promised(stream)
                if promised <= limit:
                    break
            seen.append((rate, promised))
            if promised <= limit and rate >= kept.get("rate", 0.0):
                kept = {"rate": rate, **answer}
            try:
                rate = rates.send(promised)
            except StopIteration:
                break
            yield
        sustained = crossing(seen, limit)
        excess = 1.0 if sustained > 0 else min(seen)[1] / limit
        return Measurement(
            sustained,
            most,
            kept.get("latency_ms", {}),
            excess,
            worker.memory_bytes(),
            texts,
            noise=saturated.noise,
        )

    def _burst(self, worker: Worker) -> Generator[None, None, Measurement]:
        """The throughput, piece by piece, until enough was undisturbed or twice as much time has gone."""
        wanted, piece = self.pace.burst, min(_PIECE, self.pace.burst)
        pieces: list[_Piece] = []
        while True:
            before, began = self._seen(), time.perf_counter()
            longest = max(piece, _PATIENCE * wanted - _seconds(pieces))
            answer = self._ask(
                worker, {"do": "saturate", "seconds": piece, "longest": longest}, 60 + 20 * self.pace.burst
            )
            seconds = max(piece, time.perf_counter() - began)
            looks = before, self._seen()
            pieces.append(_Piece(answer["rate"], answer["texts"], answer["runs_ns"], looks, seconds))
            slower = {one: self._yardstick.slower(one.looks) for one in pieces}
            enough = [one for one in pieces if slower[one] <= NOISY or slower[one] == math.inf]
            if _seconds(enough) > wanted - piece / 2 or _seconds(pieces) > 2 * wanted - piece / 2:
                break
            yield
        quietest = sorted(pieces, key=lambda one: slower[one])
        counted = [one for one in quietest if slower[one] <= NOISY] or quietest[: max(1, round(wanted / piece))]
        rate = sum(one.rate * one.seconds for one in counted) / _seconds(counted)
        runs_ms = np.concatenate([one.runs_ns for one in counted]) / 1e6
        return Measurement(
            rate,
            rate,
            percentiles(runs_ms),
            requests=sum(one.texts for one in pieces),
            noise=noise(max(slower[one] for one in counted)),
        )

    def _promised(self, answer: Mapping[str, Any]) -> float:
        """The promised percentile of a stream in milliseconds."""
        assert self.slo is not None
        return _HOPELESS * self.slo.limit_ms if answer["late"] else float(answer["promised_ms"])

    def _stream(self, worker: Worker, rate: float) -> dict[str, Any]:
        assert self.slo is not None
        seconds = self.pace.seconds(rate, self.slo)
        command = {
            "do": "stream",
            "rate": rate,
            "seconds": seconds,
            "seed": self.seed,
            "percent": self.slo.percent,
            "give_up_ns": int(_HOPELESS * self.slo.limit_ms * 1e6),
        }
        answer = self._ask(worker, command, 60 + 3 * seconds + _HOPELESS * self.slo.limit_ms / 1e3)
        if not answer["late"] and answer["promised_ms"] is None:
            # Fewer arrived than the percentile needs, by chance: once more, for longer.
            answer = self._ask(worker, {**command, "seconds": 2 * seconds, "seed": self.seed + 1}, 60 + 6 * seconds)
        if not answer["late"] and answer["promised_ms"] is None:
            answer["late"] = True
        return answer

    def _ask(self, worker: Worker, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        self._look = None
        return worker.ask(command, seconds)

    def _seen(self) -> float:
        """A look at the machine, or the last one if nothing ran since."""
        if self._look is None:
            self._look = self._yardstick.look()
        return self._look


def _seconds(pieces: Sequence[_Piece]) -> float:
    return sum(piece.seconds for piece in pieces)


def rates_to_try(most: float, limit: float) -> Generator[float, float, None]:
    """Rates at which the promised percentile is wanted, which is sent in: from above 0 towards where it is ``limit``.

    Up the ladder while it is kept, down by halves while it is not, then into the middle of the bracket.
    """
    low, high = 0.0, math.inf
    ladder = list(_LADDER)
    for _ in range(_STEPS):
        if high == math.inf:
            if not ladder:
                return
            share = ladder.pop(0)
        elif low == 0:
            share = high / 2
            if share < _LOWEST:
                return
        else:
            share = (low + high) / 2
        promised = yield share * most
        if promised <= limit:
            low = max(low, share)
        else:
            high = min(high, share)


def crossing(seen: Sequence[tuple[float, float]], limit: float) -> float:
    """The rate at which the promised percentile reaches ``limit``, from (rate, percentile) of the steps; 0 for none.

    Where no step is above the limit, the highest rate that was tried: ``rates_to_try`` ends at the throughput.
    """
    steps = sorted(seen)
    rates = np.array([rate for rate, _ in steps])
    logs = _rising(np.log([promised for _, promised in steps]))
    wanted = math.log(limit)
    if logs[0] > wanted:
        return 0.0
    if logs[-1] <= wanted:
        return float(rates[-1])
    above = int(np.argmax(logs > wanted))
    part = (wanted - logs[above - 1]) / (logs[above] - logs[above - 1])
    return float(rates[above - 1] + (rates[above] - rates[above - 1]) * part)


def _rising(values: Any) -> Any:
    """The rising sequence of least squared distance: neighbours that fall are pooled to their mean."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([float(value)])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1].extend(last)
    return np.array([np.mean(pool) for pool in pools for _ in pool])
