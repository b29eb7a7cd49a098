"""Metrics: what is counted adds up, whatever becomes of the processes that counted it."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from encast.serve.call import Call
from encast.serve.live import live_text
from encast.serve.metrics import METRICS, Delta, ModelInfo, Recorder, Registry
from encast.serve.models import ServedModel
from encast.serve.service import Finished
from encast.serve.wire import EngineStats


class Clock:
    now = 1_000_000.25

    def __call__(self) -> float:
        return self.now


def finished(total_s: float = 0.01, *, texts: int = 2, kind: str = "", status: int = 200) -> Finished:
    call = Call(arrived=0, deadline=1)
    if texts:
        call.model = object.__new__(ServedModel)
        object.__setattr__(call.model, "name", "minilm")
        call.timing.texts, call.timing.tokens = texts, 10 * texts
        call.timing.queue_s, call.timing.inference_s, call.timing.tokenize_s = total_s / 4, total_s / 2, total_s / 8
    return Finished("encast.embed", "encast", status, kind, "", call, total_s, "", "id", 10)


def stats(**changes: object) -> EngineStats:
    fields: dict[str, object] = {
        "queue_rows": 3, "queue_tokens": 60, "backlog_s": 0.5, "running": 1, "fronts": 1, "runs": 5, "rows": 10,
        "tokens": 100, "batches": 4, "refused": 2, "expired": 0, "cancelled": 0, "failed": 0, "busy_s": [1.5, 0.5],
        "instances": [2, 1], "batch_tokens": [8, 9, 1024],
    }  # fmt: skip
    return EngineStats(**{**fields, **changes})  # type: ignore[arg-type]


def over_the_wire(recorder: Recorder) -> Delta:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(recorder.take()), type=Delta)


def samples(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(registry.text().decode())
        for sample in family.samples
    }


def value(registry: Registry, name: str, **labels: str) -> float:
    return samples(registry)[f"encast_{name}", tuple(sorted(labels.items()))]


def test_counts_add_up_over_fronts_that_come_and_go() -> None:
    registry, fronts = Registry(), [Recorder(), Recorder()]
    for front in fronts:
        for _ in range(3):
            front.finished(finished())
        registry.heard_front(over_the_wire(front))
    fronts[0] = Recorder()  # the first was killed, another one took its place
    for front in fronts:
        front.finished(finished())
        registry.heard_front(over_the_wire(front))
        registry.heard_front(over_the_wire(front))  # nothing twice
    assert value(registry, "requests_total", operation="encast.embed", protocol="encast", status="200") == 8
    assert value(registry, "texts_total", model="minilm") == 16
    assert value(registry, "tokens_total", model="minilm") == 160
    assert value(registry, "request_seconds_count", operation="encast.embed") == 8
    assert value(registry, "request_seconds_sum", operation="encast.embed") == pytest.approx(0.08)
    assert value(registry, "queue_seconds_sum", model="minilm") == pytest.approx(0.02)
    assert value(registry, "inference_seconds_sum", model="minilm") == pytest.approx(0.04)
    assert value(registry, "tokenize_seconds_sum", model="minilm") == pytest.approx(0.01)


def test_buckets_are_cumulative_and_their_bounds_inclusive() -> None:
    registry, front = Registry(), Recorder()
    for seconds in (0.0005, 0.0006, 0.01, 60.0):
        front.finished(finished(seconds))
    registry.heard_front(over_the_wire(front))
    found = {
        le: value(registry, "request_seconds_bucket", operation="encast.embed", le=le)
        for le in ("0.0005", "0.001", "0.01", "30.0", "+Inf")
    }
    assert found == {"0.0005": 1, "0.001": 2, "0.01": 3, "30.0": 3, "+Inf": 4}


def test_an_engine_that_is_replaced_goes_on_where_the_old_one_ended() -> None:
    registry = Registry()
    registry.heard_engine("minilm", 1, stats())
    registry.heard_engine("minilm", 1, stats(batches=6, refused=3, busy_s=[2.5, 0.5], batch_tokens=[1024]))
    assert value(registry, "batches_total", model="minilm") == 6
    assert value(registry, "queue_tokens", model="minilm") == 60
    registry.ended(1)
    assert ("encast_queue_tokens", (("model", "minilm"),)) not in samples(registry)
    registry.heard_engine("minilm", 2, stats(batches=1, refused=0, busy_s=[0.25, 0.0], batch_tokens=[]))
    assert value(registry, "batches_total", model="minilm") == 7
    assert value(registry, "rejected_total", model="minilm") == 3
    assert value(registry, "instances_busy_seconds_total", model="minilm", group="0") == 2.75
    assert value(registry, "instances", model="minilm", group="0") == 2
    assert value(registry, "batch_tokens_count", model="minilm") == 4
    assert value(registry, "batch_tokens_bucket", model="minilm", le="8.0") == 1


def test_every_metric_is_written_with_its_labels() -> None:
    registry, front = Registry(), Recorder()
    front.finished(finished())
    front.finished(finished(texts=0, kind="overloaded", status=429))
    for metric in METRICS.values():
        labels = ["x"] * len(metric.labels)
        if metric.kind == "counter":
            front.count(metric.name, *labels)
        elif metric.kind == "histogram":
            front.observe(metric.name, 1.0, *labels)
    registry.heard_front(over_the_wire(front))
    registry.heard_engine("minilm", os.getpid(), stats())
    registry.models = (ModelInfo("minilm", "embed", "int8", "0123456789abcdef"),)
    families = {family.name: family for family in text_string_to_metric_families(registry.text().decode())}
    for metric in METRICS.values():
        name = f"encast_{metric.name}"
        # The parser's name of a counter is without its ending.
        family = families[name.removesuffix("_total") if metric.kind == "counter" else name]
        assert family.type == metric.kind
        assert family.documentation == metric.help
        assert family.samples, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), sample
    assert len(families) == len(METRICS)
    assert value(registry, "failures_total", reason="overloaded") == 1
    assert value(registry, "model_info", model="minilm", task="embed", dtype="int8", sha="0123456789ab") == 1


def test_processes_are_looked_at_while_they_live() -> None:
    registry = Registry()
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        child.stdout.readline()
        registry.processes["front-0"] = child.pid
        assert value(registry, "process_resident_memory_bytes", process="front-0") > 1e6
        assert value(registry, "process_open_descriptors", process="front-0") >= 3
    assert value(registry, "process_open_descriptors", process="supervisor") > 3
    assert ("encast_process_open_descriptors", (("process", "front-0"),)) not in samples(registry)


def test_memory_does_not_grow_with_traffic() -> None:
    """The same series whatever the values: after 20,000 requests as much is kept as after 200."""
    clock = Clock()
    registry, front = Registry(clock=clock), Recorder()
    sizes = []
    for count in (200, 20_000):
        for index in range(count):
            front.finished(finished(0.0001 * 1.001 ** (index % 5000)))
        clock.now += 0.25
        delta = over_the_wire(front)
        registry.heard_front(delta)
        sizes.append((len(delta.counters), len(delta.histograms), sum(map(len, delta.histograms.values()))))
        assert len(delta.latencies) < 700
    assert sizes[0] == sizes[1]
    for _ in range(500):
        clock.now += 1
        front.finished(finished())
        registry.heard_front(over_the_wire(front))
    assert len(registry._seconds) <= 61


def test_the_window_is_the_last_whole_second_and_the_last_minute() -> None:
    clock = Clock()
    registry, front = Registry(usd_per_hour=3.6, clock=clock), Recorder()
    registry.models = (ModelInfo("minilm", "embed", "int8", "0" * 64),)
    for milliseconds in range(1, 101):
        front.finished(finished(milliseconds / 1e3, texts=1))
    front.finished(finished(texts=0, kind="overloaded", status=429))
    front.finished(finished(texts=0, kind="failed", status=500))
    front.finished(finished(texts=0, kind="invalid", status=400))
    registry.heard_front(over_the_wire(front))
    registry.heard_engine("minilm", 1, stats())
    registry.heard_engine("shadow", 2, stats())  # of no served model
    assert registry.live().second.texts_s == 0, "this second is not over"
    clock.now += 1
    live = registry.live()
    assert (live.second.texts_s, live.second.tokens_s, live.second.requests_s) == (100, 1000, 100)
    assert (live.second.rejected_s, live.second.failed_s) == (1, 1)
    assert live.second.p50_ms == pytest.approx(50, rel=0.011)
    assert live.second.p99_ms == pytest.approx(99, rel=0.011)
    assert (live.queue_tokens, live.queue_rows, live.wait_s, live.instances, live.busy) == (60, 3, 0.5, 3, 2.0)
    assert live.usd_per_million == pytest.approx(3.6 / 3600 / 100 * 1e6)
    clock.now += 9
    live = registry.live()
    assert live.second.p50_ms is None
    assert live.minute.texts_s == 10
    clock.now += 60
    assert registry.live().minute.texts_s == 0
    assert registry.live().usd_per_million is None


def test_the_live_line() -> None:
    clock = Clock()
    registry, front = Registry(usd_per_hour=3.6, clock=clock), Recorder()
    registry.models = (ModelInfo("minilm", "embed", "int8", "0" * 64),)
    registry.ready = True
    for _ in range(1200):
        front.finished(finished(0.0035, texts=1))
    registry.heard_front(over_the_wire(front))
    registry.heard_engine("minilm", 1, stats())
    clock.now += 1
    assert live_text(registry.live()).split("  ") == [
        "1,200 inferences/s", "12,000 tokens/s", "queue 3 (60 tokens)", f"p50 {_near(3.5)} ms", f"p99 {_near(3.5)} ms",
        "0 rejected/s", "$0.833 per million",
    ]  # fmt: skip


def _near(milliseconds: float) -> str:
    bucket = math.ceil(math.log(milliseconds / 1e3) / math.log(1.02))
    return f"{1e3 * 1.02 ** (bucket - 0.5):.3g}"
