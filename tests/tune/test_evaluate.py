"""Measurements on this machine, with a tiny model: their parts, and what becomes of processes that fail."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from profiles import compiled

from encast.backends.groups import InstanceGroup, Setup
from encast.batch import Batch
from encast.errors import ArtifactError, InputError, ResourceError
from encast.machine import usable_cores
from encast.measure.statistics import percentiles
from encast.tune import process
from encast.tune.evaluate import LiveEvaluator, Pace, crossing, rates_to_try
from encast.tune.measurement import Measurement
from encast.tune.process import Worker
from encast.tune.slo import Slo
from encast.tune.worker import _Session

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")

ONE = Setup((InstanceGroup(1, 1),), 64)
QUICK = Pace(burst=0.05, requests=30, least=0.05, most=0.2)


class Looks:
    """Stands for the yardstick: by how much the machine is slower, look by look, as the last one says from then on."""

    def __init__(self, *slower: float) -> None:
        self.slower_by, self.taken = slower, 0

    def look(self) -> float:
        self.taken += 1
        return self.slower_by[min(self.taken, len(self.slower_by)) - 1]

    def slower(self, looks: Sequence[float]) -> float:
        return max(looks)

    def close(self) -> None:
        pass


# The search for a rate


def tried(percentile: Any, most: float = 1000.0, limit: float = 10.0) -> list[tuple[float, float]]:
    rates = rates_to_try(most, limit)
    seen = []
    rate = next(rates)
    while True:
        seen.append((rate, percentile(rate)))
        try:
            rate = rates.send(seen[-1][1])
        except StopIteration:
            return seen


@pytest.mark.parametrize("capacity", [200.0, 500.0, 610.0, 800.0, 940.0])
def test_a_smooth_queue_is_found_to_a_few_percent(capacity: float) -> None:
    # An M/M/1 queue's percentile, of which 10 ms is reached at the capacity.
    def percentile(rate: float) -> float:
        return 10 * (1.3 * capacity - capacity) / (1.3 * capacity - rate) if rate < 1.3 * capacity else 100.0

    seen = tried(percentile)
    assert len(seen) <= 6
    assert crossing(seen, 10.0) == pytest.approx(capacity, rel=0.05)


def test_nothing_is_tried_beyond_the_throughput_or_below_hope() -> None:
    kept = tried(lambda rate: 1.0)
    assert [rate for rate, _ in kept] == sorted(rate for rate, _ in kept)
    # Streams are short: at 1.05 times the throughput the queue of one of 0.4 s is 20 ms.
    assert crossing(kept, 10.0) == max(rate for rate, _ in kept) == 1000
    lost = tried(lambda rate: 50.0)
    assert crossing(lost, 10.0) == 0.0
    assert min(rate for rate, _ in lost) < 100


def test_a_percentile_that_falls_is_noise() -> None:
    steps = [(100.0, 5.0), (200.0, 12.0), (300.0, 8.0), (400.0, 40.0)]
    assert crossing(steps, 10.0) == pytest.approx(300.0, rel=0.05)
    assert crossing(sorted(steps, reverse=True), 10.0) == crossing(steps, 10.0)
    assert crossing([(100.0, 12.0), (200.0, 8.0)], 10.0) in (0.0, pytest.approx(200.0))


def test_streams_are_long_enough_for_their_percentile() -> None:
    pace = Pace(requests=1000, least=0.3, most=5.0)
    assert pace.seconds(1000.0, Slo(99, 10)) == pytest.approx(1.0)
    assert pace.seconds(100_000.0, Slo(99, 10)) == pytest.approx(0.3)
    assert pace.seconds(10.0, Slo(99, 10)) * 10 >= 299
    assert pace.seconds(10.0, Slo(50, 10)) == pytest.approx(5.0)


def test_streams_are_long_enough_for_a_queue_of_the_limits_length() -> None:
    pace = Pace(requests=1000, queued=4000, least=0.3, most=5.0)
    assert pace.seconds(2500.0, Slo(99, 10)) == pytest.approx(1000 / 2500)
    assert pace.seconds(2500.0, Slo(99, 20)) == pytest.approx(50**2 / 2500)
    assert pace.seconds(2500.0, Slo(99, 1000)) == pytest.approx(4000 / 2500)
    assert pace.seconds(500.0, Slo(99, 1000)) == pytest.approx(5.0)


def test_long_streams_are_tried_less_often() -> None:
    pace = Pace(tries=4, most=5.0)
    assert [pace.most_tries(seconds) for seconds in (0.3, 1.25, 1.5, 2.5, 30.0)] == [4, 4, 3, 2, 2]
    assert Pace(tries=1).most_tries(30.0) == 1


def test_few_set_ups_are_measured_for_longer() -> None:
    assert Pace.of_grid(30).burst == 4.0
    assert Pace.of_grid(50).burst == pytest.approx(2.4)
    assert Pace.of_grid(60).tries == 4
    assert Pace.of_grid(3428) == Pace()


# Processes


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("bert-embed", "int8", tmp_path_factory)


@pytest.fixture
def requests() -> Batch:
    lengths = [4, 20, 7, 40, 12, 5] * 4
    return Batch(np.arange(sum(lengths), dtype=np.int32) % 50, np.cumsum([0, *lengths]).astype(np.int32))


@pytest.fixture
def evaluators(artifact: Path, requests: Batch) -> Iterator[Any]:
    made: list[LiveEvaluator] = []

    def make(slo: Slo | None = None, **other: Any) -> LiveEvaluator:
        options = {"output": "embedding", "selects": False, "cores": 1, "pace": QUICK, **other}
        made.append(LiveEvaluator(options.pop("artifact", artifact), requests, slo=slo, **options))
        return made[-1]

    yield make
    for evaluator in made:
        evaluator.close()


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_throughput(evaluators: Any) -> None:
    (found,) = evaluators().measure([ONE])
    assert found.rate == found.saturated > 0
    assert found.memory_bytes > 1 << 20
    assert found.requests > 10
    assert found.latency_ms["p50"] > 0


def test_rate_under_a_promise(evaluators: Any) -> None:
    (found,) = evaluators(Slo(90, 500.0)).measure([ONE])
    assert 0 < found.rate <= 1.1 * found.saturated
    assert found.excess == 1.0
    assert 0 < found.latency_ms["p90"] <= 500.0
    (lost,) = evaluators(Slo(90, 1e-3)).measure([ONE])
    assert lost.rate == 0
    assert lost.excess > 1


def test_several_by_turns_and_with_groups(evaluators: Any) -> None:
    if len(usable_cores()) < 2:
        pytest.skip("this process may use one core; the set-ups need two")
    setups = [
        ONE,
        Setup((InstanceGroup(2, 1, 8), InstanceGroup(1, 2)), 48, True),
        Setup((InstanceGroup(1, 1, 8), InstanceGroup(1, 1)), 48),
    ]
    evaluator = evaluators(Slo(90, 500.0))
    found = evaluator.measure(setups)
    assert len(found) == 3
    assert all(one.rate > 0 for one in found)


def test_probe(evaluators: Any) -> None:
    evaluator = evaluators()
    assert 0 < evaluator.probe(4, 1, 1) < evaluator.probe(2000, 1, 1)


def test_a_run_longer_than_a_probe_is_not_repeated(requests: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    session = object.__new__(_Session)
    session.setup, session.requests = ONE, [requests]
    ran: list[int] = []
    monkeypatch.setattr(session, "run", lambda batch: ran.append(batch.tokens), raising=False)
    assert session.probe({"tokens": 4, "seconds": 0.0})["nanoseconds"] > 0
    assert ran == [4]


def test_a_large_probe_may_take_long(evaluators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = evaluators()
    given = []
    monkeypatch.setattr(Worker, "ask", lambda self, command, seconds: given.append(seconds) or {"nanoseconds": 1e9})
    for tokens in (4, 16 * 512):
        assert evaluator.probe(tokens, 1, 1) == 1.0
    small, large = given[-2:]
    assert small >= 60
    # BERT-large in f32 makes some hundred tokens a second on a core without AVX-512.
    assert large >= 16 * 512 / 40


def test_nothing_is_left_running_or_lying(evaluators: Any) -> None:
    before = children()
    evaluator = evaluators()
    evaluator.probe(4, 1, 1)
    evaluator.measure([ONE])
    folder = Path(evaluator._job["requests"]).parent
    assert folder.exists()
    evaluator.close()
    assert not folder.exists()
    assert children() == before


class Queue:
    """Stands for a worker: a queue whose percentile is 10 ms at 770 texts a second; the machine stops in ``stops``."""

    def __init__(self, stops: set[int]) -> None:
        self.stops, self.streams = stops, 0

    def memory_bytes(self) -> int:
        return 1

    def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        if command["do"] == "saturate":
            return {"rate": 1000.0, "texts": 1, "runs_ns": [1]}
        self.streams += 1
        rate = command["rate"]
        promised = 35.0 if self.streams in self.stops else 2300 / (1000 - rate) if rate < 1000 else None
        return {"late": promised is None, "promised_ms": promised, "texts": 1, "latency_ms": {"p99": promised}}


@pytest.mark.parametrize(
    ("tries", "stops"), [(2, set()), (2, {1}), (2, {2, 5}), (2, {1, 3, 5, 7}), (4, {1, 2, 3, 5, 6, 8})]
)
def test_stops_of_the_machine_do_not_lower_a_rate(
    evaluators: Any, monkeypatch: pytest.MonkeyPatch, tries: int, stops: set[int]
) -> None:
    queue = Queue(stops)
    evaluator = evaluators(Slo(99, 10.0), pace=replace(QUICK, tries=tries, most=3.0))
    monkeypatch.setattr(evaluator, "_yardstick", Looks(0.0))
    (found,) = evaluator._by_turns([queue])
    assert found.rate == pytest.approx(770, rel=0.03)
    assert found.latency_ms["p99"] <= 10
    assert found.requests == 1 + queue.streams  # those of streams that did not count too


def test_of_several_tries_the_best_counts(evaluators: Any) -> None:
    # 600 texts a second take 5.75 ms, half of it 3.29 and a quarter 2.71: never 2, and the last try of all stops.
    queue = Queue({2, 4, 6, 8})
    (found,) = evaluators(Slo(99, 2.0))._by_turns([queue])
    assert queue.streams == 8
    assert found.excess == pytest.approx(2300 / (1000 - 75) / 2.0)


def test_a_promise_broken_at_every_try_is_broken(evaluators: Any) -> None:
    # Both streams of the first step, at 600 texts a second: no rate above it is tried any more.
    (found,) = evaluators(Slo(99, 10.0))._by_turns([Queue({1, 2})])
    assert 0 < found.rate < 600
    hopeless = Queue(set())
    (found,) = evaluators(Slo(99, 2.0))._by_turns([hopeless])
    assert hopeless.streams == 8  # four rates, each twice
    assert found.rate == 0
    assert found.excess > 1


def test_what_the_worker_refuses_is_said_with_its_set_up(evaluators: Any, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"1x1, 64 tokens: .*absent"):
        evaluators(artifact=tmp_path / "absent.encast").probe(64, 1, 1)
    with pytest.raises(InputError, match=r"needs 4000 cores"):
        evaluators().probe(64, 4, 1000)
    with pytest.raises(InputError, match=r"no output 'logits'|unknown output|logits"):
        evaluators(output="logits").probe(64, 1, 1)


def test_only_the_worker_that_fails_is_blamed(evaluators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = evaluators(Slo(99, 1000.0))
    monkeypatch.setattr(evaluator, "_yardstick", Looks(0.2))  # so that those that run are measured again
    refused, found = evaluator.measure([Setup((InstanceGroup(1000, 4),), 64), ONE])
    assert "needs 4000 cores" in refused.failed
    assert found.failed is None
    assert found.rate > 0


def test_who_dies_among_others_leaves_them_alone(evaluators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(Queue):
        def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
            if self.streams == 2:
                raise ResourceError("the process ended")
            return super().ask(command, seconds)

    evaluator = evaluators(Slo(99, 10.0))
    monkeypatch.setattr(evaluator, "_yardstick", Looks(0.0))
    found, alone = evaluator._by_turns([Dying(set()), Queue(set())]), evaluator._by_turns([Queue(set())])
    assert found[0].failed == "the process ended"
    assert found[1:] == alone


def job(evaluator: LiveEvaluator) -> dict[str, Any]:
    return dict(evaluator._job)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGSEGV, "SIGSEGV"), (40, f"SIGRTMIN+{40 - signal.SIGRTMIN}")])
def test_a_worker_that_dies_is_an_error_with_the_reason(evaluators: Any, number: int, said: str) -> None:
    with Worker(ONE, job(evaluators())) as worker:
        os.kill(worker._process.pid, number)
        with pytest.raises(ResourceError, match=rf"1x1, 64 tokens: .* ended by {re.escape(said)} during saturate"):
            worker.ask({"do": "saturate", "seconds": 0.1, "longest": 0.6}, 30)


def test_a_stream_has_the_rate_that_was_asked_for(evaluators: Any) -> None:
    """Drawn, the number would be the same in every stream of a seed: up to 8 % beside the rate, in all trials."""
    stream = {"do": "stream", "rate": 500.0, "seconds": 0.2, "percent": 50.0, "give_up_ns": 10**10}
    with Worker(ONE, job(evaluators())) as worker:
        assert {worker.ask({**stream, "seed": seed}, 30)["texts"] for seed in range(3)} == {100}


def test_a_command_that_no_worker_knows(evaluators: Any) -> None:
    with Worker(ONE, job(evaluators())) as worker, pytest.raises(InputError, match="'nonsense' is unknown; saturate,"):
        worker.ask({"do": "nonsense"}, 30)


def test_memory_does_not_depend_on_who_else_has_the_artifact_open(evaluators: Any) -> None:
    with Worker(ONE, job(evaluators())) as worker:
        alone = worker.memory_bytes()
        assert alone is not None
        with Worker(ONE, job(evaluators())), Worker(ONE, job(evaluators())):
            assert worker.memory_bytes() == pytest.approx(alone, rel=0.02)


def test_interrupts_are_the_parent_s(evaluators: Any) -> None:
    with Worker(ONE, job(evaluators())) as worker:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker._process.pid, number)
        assert worker.ask({"do": "probe", "tokens": 4, "seconds": 0.01}, 30)["nanoseconds"] > 0


def test_a_worker_that_hangs_is_stopped(evaluators: Any) -> None:
    with Worker(ONE, job(evaluators())) as worker:
        os.kill(worker._process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(ResourceError, match=r"saturate did not end within 0 s; it was stopped"):
            worker.ask({"do": "saturate", "seconds": 0.1, "longest": 0.6}, 0.3)
        assert time.monotonic() - began < 20
        assert not Path(f"/proc/{worker._process.pid}").exists()
        with pytest.raises(ResourceError, match="the process ended by SIGKILL during saturate"):
            worker.ask({"do": "saturate", "seconds": 0.1, "longest": 0.6}, 30)


def test_a_worker_that_cannot_start_says_what_python_said(evaluators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = evaluators(prefix=["/bin/sh", "-c", "echo no luck >&2; exit 3", "--"])
    with pytest.raises(ResourceError, match=r"ended with exit code 3 during opening the artifact: no luck"):
        evaluator.probe(64, 1, 1)
    with pytest.raises(ResourceError, match=r"cannot be started"):
        evaluators(prefix=["/no/such/command"]).probe(64, 1, 1)
    monkeypatch.setattr(process, "_OPEN_SECONDS", 0.01)
    with pytest.raises(ResourceError, match=r"opening the artifact did not end within"):
        evaluators().probe(64, 1, 1)


def test_noise_around_a_measurement_is_measured_again_and_said(
    evaluators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = evaluators(Slo(99, 10.0))
    monkeypatch.setattr(evaluator, "_yardstick", Looks(0.0, 0.2, 0.0, 0.3, 0.2, 0.1, 0.0))
    calls: list[int] = []

    def counted(workers: Any) -> Any:
        evaluator._look = None
        calls.append(len(workers))
        return [Measurement(float(len(calls)), 1.0, noise="its burst was disturbed" if len(calls) == 5 else None)]

    monkeypatch.setattr(evaluator, "_by_turns", counted)
    (quiet,) = evaluator.measure([ONE])
    assert quiet.rate == len(calls) == 2
    assert quiet.noise is None
    (noisy,) = evaluator.measure([ONE])
    assert noisy.rate == len(calls) == 4
    assert noisy.noise == "the machine was 10% slower than usual around it"
    (within,) = evaluator.measure([ONE])
    assert within.rate == len(calls) == 5
    assert within.noise == "its burst was disturbed"


def test_the_end_of_the_yardstick_is_not_the_set_up_s(evaluators: Any) -> None:
    evaluator = evaluators()
    assert 1e3 < evaluator._yardstick.look() < math.inf
    os.kill(evaluator._yardstick._worker._process.pid, signal.SIGKILL)
    (found,) = evaluator.measure([ONE])
    assert found.failed is None
    assert found.rate > 0
    assert evaluator._yardstick.look() < math.inf  # another one


def test_what_is_unknown_of_a_repetition_acquits_nobody(evaluators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a yardstick that has ended nor a worker that ends in it takes away what was measured."""
    evaluator = evaluators(Slo(99, 10.0))
    monkeypatch.setattr(evaluator, "_yardstick", Looks(0.0, 0.2, math.inf, 0.0, 0.2, 0.0, math.inf))
    answers = iter([*[Measurement(rate, rate) for rate in (1.0, 2.0, 3.0)], Measurement.failure(ResourceError("!"))])
    last = Measurement(5.0, 5.0)

    def answered(workers: Any) -> Any:
        evaluator._look = None
        return [next(answers, last)]

    monkeypatch.setattr(evaluator, "_by_turns", answered)
    (found,) = evaluator.measure([ONE])
    assert (found.rate, found.noise) == (1.0, "the machine was 20% slower than usual around it")
    (found,) = evaluator.measure([ONE])
    assert (found.rate, found.failed) == (3.0, None)
    assert next(answers, None) is None
    # A repetition would be as unknown.
    (found,) = evaluator.measure([ONE])
    assert (found.rate, found.noise) == (5.0, "whether the machine was quiet around it is not known")


class Pieces:
    """Stands for a worker that answers so many texts a second, one number for each piece of a burst of two seconds, and
    fails where that is 0.
    """

    def __init__(self, *rates: float, name: str = "", log: list[str] | None = None) -> None:
        self.rates, self.asked, self.name = rates, 0, name
        self.log = [] if log is None else log
        self.longest: list[float] = []

    def memory_bytes(self) -> int:
        return 1

    def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert (command["do"], command["seconds"]) == ("saturate", 1.0)
        self.longest.append(command["longest"])
        self.log.append(self.name)
        rate = self.rates[self.asked]
        self.asked += 1
        if rate == 0:
            raise ResourceError("the process ended")
        return {"rate": rate, "texts": 10, "runs_ns": [rate * 1e6] * 10}


@pytest.mark.parametrize(
    ("rates", "looks", "counted", "noise"),
    [
        ((800.0, 820.0), (0.0, 0.0, 0.05), (800.0, 820.0), None),
        ((400.0, 800.0, 820.0), (0.5, 0.0), (800.0, 820.0), None),  # slow before the first
        ((800.0, 400.0, 410.0, 820.0), (0.0, 0.0, 0.06, 0.0), (800.0, 820.0), None),  # between two
        ((400.0, 500.0, 410.0, 800.0), (0.5, 0.5, 0.5, 0.0), (800.0,), None),
        ((400.0, 500.0, 420.0, 440.0), (0.5, 0.4, 0.3, 0.2, 0.1), (420.0, 440.0), "30% slower than usual"),
        ((400.0, 500.0), (math.inf,), (400.0, 500.0), "is not known"),
    ],
)
def test_disturbed_seconds_of_a_burst_are_made_up_for(
    evaluators: Any, monkeypatch: pytest.MonkeyPatch, rates: tuple[float, ...], looks: tuple[float, ...],
    counted: tuple[float, ...], noise: str | None,
) -> None:  # fmt: skip
    evaluator = evaluators(pace=Pace(burst=2.0))
    monkeypatch.setattr(evaluator, "_yardstick", Looks(*looks))
    worker = Pieces(*rates)
    (found,) = evaluator._by_turns([worker])
    assert worker.asked == len(rates)
    assert evaluator._yardstick.taken == len(rates) + 1
    assert found.rate == found.saturated == pytest.approx(np.mean(counted))
    assert found.requests == 10 * len(rates)
    assert found.latency_ms == percentiles(np.repeat(counted, 10))
    assert (found.noise is None) == (noise is None)
    assert (noise or "") in (found.noise or "")


def test_under_a_promise_a_disturbed_burst_is_said_too(evaluators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = evaluators(Slo(99, 10.0))
    monkeypatch.setattr(evaluator, "_yardstick", Looks(0.0, 0.2, 0.2, 0.0))
    monkeypatch.setattr(evaluator, "_open", lambda setup: contextlib.nullcontext(Queue(set())))
    (found,) = evaluator.measure([ONE])
    assert found.noise == "the machine was 20% slower than usual around it"


def test_pieces_count_by_their_seconds(evaluators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = evaluators(pace=Pace(burst=2.0))
    monkeypatch.setattr(evaluator, "_yardstick", Looks(0.0))
    clock = iter([0.0, 1.0, 1.0, 4.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    worker = Pieces(800.0, 400.0)
    assert evaluator._by_turns([worker])[0].rate == (800.0 + 3 * 400.0) / 4
    assert worker.longest == [12.0, 11.0]
    # One of large runs takes as long as it needs, and is one piece.
    clock = iter([0.0, 6.0])
    assert evaluator._by_turns([Pieces(800.0)])[0].rate == 800.0


def test_bursts_of_several_go_by_turns(evaluators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = evaluators(pace=Pace(burst=2.0))
    monkeypatch.setattr(evaluator, "_yardstick", Looks(0.0))
    log: list[str] = []
    workers = [Pieces(*rates, name=name, log=log) for name, rates in (("a", (1, 3)), ("b", (5, 0)), ("c", (7, 9)))]
    a, b, c = evaluator._by_turns(workers)
    assert log == ["a", "b", "c", "a", "b", "c"]
    assert (a.rate, c.rate) == (2, 8)
    assert b.failed == "the process ended"
    assert evaluator._yardstick.taken == 7  # what is seen after one is seen before the next
