"""Measurements on this machine, with a tiny model: their parts, and what becomes of processes that fail."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from profiles import compiled

from encast.backends.groups import InstanceGroup, Setup
from encast.batch import Batch
from encast.errors import ArtifactError, InputError, ResourceError
from encast.machine import usable_cores
from encast.measure.statistics import percentiles
from encast.tune import evaluate, process
from encast.tune.evaluate import LiveEvaluator, crossing, rates_to_try, stream_seconds
from encast.tune.measurement import Measurement
from encast.tune.process import Worker
from encast.tune.slo import Slo
from encast.tune.worker import _Session

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")

ONE = Setup((InstanceGroup(1, 1),), 64)


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
    assert len(seen) == 5
    assert crossing(seen, 10.0) == pytest.approx(capacity, rel=0.05)


def test_nothing_is_tried_beyond_the_throughput_or_below_hope() -> None:
    kept = tried(lambda rate: 1.0)
    assert [rate for rate, _ in kept] == sorted(rate for rate, _ in kept)
    assert 980 < crossing(kept, 10.0) == max(rate for rate, _ in kept) < 1000
    lost = tried(lambda rate: 50.0)
    assert crossing(lost, 10.0) == 0.0
    assert min(rate for rate, _ in lost) < 100


def test_a_percentile_that_falls_is_noise() -> None:
    steps = [(100.0, 5.0), (200.0, 12.0), (300.0, 8.0), (400.0, 40.0)]
    assert crossing(steps, 10.0) == pytest.approx(300.0, rel=0.05)
    assert crossing(sorted(steps, reverse=True), 10.0) == crossing(steps, 10.0)
    assert crossing([(100.0, 12.0), (200.0, 8.0)], 10.0) in (0.0, pytest.approx(200.0))


def test_a_percentile_of_nothing_is_below_every_limit() -> None:
    """Of requests that the clock takes for answered at once."""
    assert crossing([(100.0, 0.0), (200.0, 0.0)], 10.0) == 200.0
    assert 100 < crossing([(100.0, 0.0), (200.0, 20.0)], 10.0) < 200
    assert crossing([(100.0, 20.0), (200.0, 30.0), (400.0, 0.0)], 10.0) == 400.0


def test_streams_are_short_but_long_enough_for_their_percentile() -> None:
    assert stream_seconds(1000.0, Slo(99, 10)) == pytest.approx(1.0)
    assert stream_seconds(100_000.0, Slo(99, 10)) == pytest.approx(0.3)
    assert stream_seconds(300.0, Slo(90, 10)) == pytest.approx(2.0)
    for percent, needed in ((90.0, 29), (99.0, 299), (99.9, 2995)):
        counted = 0.9 * 10.0 * stream_seconds(10.0, Slo(percent, 10))  # the first tenth is left out
        assert 1.15 * needed < counted < 1.5 * needed


# Processes


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("bert-embed", "int8", tmp_path_factory)


@pytest.fixture
def requests() -> Batch:
    lengths = [4, 20, 7, 40, 12, 5] * 4
    return Batch(np.arange(sum(lengths), dtype=np.int32) % 50, np.cumsum([0, *lengths]).astype(np.int32))


@pytest.fixture
def evaluators(artifact: Path, requests: Batch, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, short in (
        ("_BURST_SECONDS", 0.05),
        ("_LONGEST_BURST", 0.2),
        ("_LEAST_SECONDS", 0.05),
        ("_REQUESTS", 30),
        ("_PROBE_SECONDS", 0.05),
    ):
        monkeypatch.setattr(evaluate, name, short)
    made: list[LiveEvaluator] = []

    def make(slo: Slo | None = None, **other: Any) -> LiveEvaluator:
        options = {"output": "embedding", "selects": False, **other}
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


def test_rate_within_a_latency_limit(evaluators: Any) -> None:
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
        reached = 35.0 if self.streams in self.stops else 2300 / (1000 - rate) if rate < 1000 else None
        return {"late": reached is None, "percentile_ms": reached, "texts": 1, "latency_ms": {"p99": reached}}


@pytest.fixture
def measured(evaluators: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measures with stand-ins for workers."""

    def measure(slo: Slo | None, *workers: Any) -> list[Measurement]:
        evaluator, opened = evaluators(slo), iter(workers)
        monkeypatch.setattr(evaluator, "_open", lambda setup: contextlib.nullcontext(next(opened)))
        found: list[Measurement] = evaluator.measure([ONE] * len(workers))
        return [replace(one, seconds=0.0) for one in found]

    return measure


@pytest.mark.parametrize("stops", [set(), {1}, {2, 5}, {1, 3, 5, 7}])
def test_stops_of_the_machine_do_not_lower_a_rate(measured: Any, stops: set[int]) -> None:
    queue = Queue(stops)
    (found,) = measured(Slo(99, 10.0), queue)
    assert found.rate == pytest.approx(770, rel=0.03)
    assert found.latency_ms["p99"] <= 10
    assert found.requests == 3 + queue.streams  # those of streams that did not count too


def test_of_two_tries_the_better_one_counts(measured: Any) -> None:
    # 750 texts a second take 9.2 ms, a sixteenth of it 2.41: never 2, and every second try stops.
    queue = Queue({2, 4, 6, 8, 10})
    (found,) = measured(Slo(99, 2.0), queue)
    assert queue.streams == 10  # five rates, each twice
    assert found.rate == 0
    assert found.excess == pytest.approx(2300 / (1000 - 750 / 16) / 2.0)


def test_a_limit_broken_at_both_tries_is_broken(measured: Any) -> None:
    # Both streams of the first step, at 750 texts a second: no rate above it is tried any more.
    (found,) = measured(Slo(99, 10.0), Queue({1, 2}))
    assert 0 < found.rate < 750


def test_what_the_worker_refuses_is_said_with_its_set_up(evaluators: Any, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"1x1, 64 tokens: .*absent"):
        evaluators(artifact=tmp_path / "absent.encast").probe(64, 1, 1)
    with pytest.raises(InputError, match=r"needs 4000 cores"):
        evaluators().probe(64, 4, 1000)
    with pytest.raises(InputError, match=r"no output 'logits'|unknown output|logits"):
        evaluators(output="logits").probe(64, 1, 1)


def test_only_the_worker_that_fails_is_blamed(evaluators: Any) -> None:
    refused, found = evaluators(Slo(99, 1000.0)).measure([Setup((InstanceGroup(1000, 4),), 64), ONE])
    assert "needs 4000 cores" in refused.failed
    assert found.failed is None
    assert found.rate > 0


def test_who_dies_among_others_leaves_them_alone(measured: Any) -> None:
    class Dying(Queue):
        def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
            if self.streams == 2:
                raise ResourceError("the process ended")
            return super().ask(command, seconds)

    found, alone = measured(Slo(99, 10.0), Dying(set()), Queue(set())), measured(Slo(99, 10.0), Queue(set()))
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


class Bursts:
    """Stands for a worker that answers so many texts a second, burst by burst, and fails where that is 0."""

    def __init__(self, *rates: float, name: str = "", log: list[str] | None = None) -> None:
        self.rates, self.name, self.log = list(rates), name, [] if log is None else log

    def memory_bytes(self) -> int:
        return 1

    def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert command["do"] == "saturate"
        self.log.append(self.name)
        rate = self.rates.pop(0)
        if rate == 0:
            raise ResourceError("the process ended")
        return {"rate": rate, "texts": 10, "runs_ns": [rate * 1e6] * 10}


@pytest.mark.parametrize(
    ("rates", "median", "noise"),
    [
        ((800.0, 820.0, 810.0), 810.0, None),
        ((800.0, 820.0, 500.0), 800.0, "its throughput varied by 40% from burst to burst"),
    ],
)
def test_the_median_of_the_bursts_counts(
    measured: Any, rates: tuple[float, ...], median: float, noise: str | None
) -> None:
    (found,) = measured(None, Bursts(*rates))
    assert found.rate == found.saturated == median
    assert found.requests == 30
    assert found.latency_ms == percentiles(np.repeat(rates, 10))
    assert found.noise == noise


def test_bursts_of_large_runs_are_two(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=2)  # seconds between any two looks at it
    monkeypatch.setattr(evaluate, "_LONGEST_BURST", 3.0)
    monkeypatch.setattr(evaluate, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    worker = Bursts(800.0, 400.0, 900.0)
    (found,) = measured(None, worker)
    assert worker.rates == [900.0]
    assert found.rate == 600.0
    assert "67%" in found.noise


def test_bursts_of_several_go_by_turns(measured: Any) -> None:
    log: list[str] = []
    rates = {"a": (1, 3, 2), "b": (5, 0), "c": (7, 9, 8)}
    a, b, c = measured(None, *(Bursts(*own, name=name, log=log) for name, own in rates.items()))
    assert "".join(log) == "abcabcac"
    assert (a.rate, c.rate) == (2, 8)
    assert b.failed == "the process ended"
