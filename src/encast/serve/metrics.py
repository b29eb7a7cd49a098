"""What a server counts: the table of its metrics, what children count, and the supervisor's sum of it.

Fronts count in a ``Recorder`` and send what came since the last message; engines send ``wire.EngineStats``. The
supervisor's ``Registry`` adds it up, so a child that dies takes at most a quarter of a second of counts with it. Memory
depends on the number of series, never on the traffic: every label comes from a closed set, none from a client.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from encast.measure.price import usd_per_million
from encast.serve.service import Finished
from encast.serve.wire import EngineStats

__all__ = ["METRICS", "Counts", "Delta", "Live", "Metric", "ModelInfo", "Recorder", "Registry", "Span"]

Series = tuple[str, tuple[str, ...]]
"""A metric's name without prefix, and the values of its labels."""

_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
_TOKENS = tuple(float(1 << power) for power in range(3, 16))
_DRIFT = tuple(10.0**power for power in range(-8, 2))
_WINDOW_S = 60
_GROWTH = math.log(1.02)
"""Latencies of the window are kept in buckets that grow by 2 %, so percentiles are within 1 %."""


@dataclass(frozen=True)
class Metric:
    """One metric; its name in Prometheus starts with ``encast_``. ``bounds``: of a histogram, upper ones, inclusive."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("requests_total", "counter", "Requests, by the HTTP status of the answer. 499: the client went away.",
               ("operation", "protocol", "status")),
        Metric("failures_total", "counter", "Requests without an answer. Rejected ones have the reason overloaded.",
               ("reason",)),
        Metric("texts_total", "counter", "Texts, or pairs, or windows of a context, in answered requests.", ("model",)),
        Metric("tokens_total", "counter", "Tokens that the model read for answered requests.", ("model",)),
        Metric("request_seconds", "histogram", "From a request's arrival to its answer, answered ones.",
               ("operation",), _SECONDS),
        Metric("tokenize_seconds", "histogram", "A request's tokenising, and the making of its answer.",
               ("model",), _SECONDS),
        Metric("queue_seconds", "histogram", "What a request's runs waited in the engine.", ("model",), _SECONDS),
        Metric("inference_seconds", "histogram", "What a request's runs took in the engine.", ("model",), _SECONDS),
        Metric("batch_tokens", "histogram", "Tokens of a batch.", ("model",), _TOKENS),
        Metric("batches_total", "counter", "Batches that ran.", ("model",)),
        Metric("rejected_total", "counter", "Runs that the engine refused because its queue was full.", ("model",)),
        Metric("queue_tokens", "gauge", "Tokens that wait.", ("model",)),
        Metric("queue_rows", "gauge", "Texts that wait.", ("model",)),
        Metric("queue_wait_seconds", "gauge", "How long a new run would wait.", ("model",)),
        Metric("instances", "gauge", "Instances, by their group.", ("model", "group")),
        Metric("instances_busy", "gauge", "Instances that run a batch now.", ("model",)),
        Metric("instances_busy_seconds_total", "counter", "Seconds in which instances ran batches.",
               ("model", "group")),
        Metric("shadow_drift", "histogram",
               "From the served model to its reference, a row: 1 - cosine, or the largest difference of its logits.",
               ("model", "measure"), _DRIFT),
        Metric("shadow_compared_total", "counter", "Runs that were compared with the reference.", ("model",)),
        Metric("shadow_labels_changed_total", "counter", "Rows of compared logits whose largest is another one.",
               ("model",)),
        Metric("shadow_dropped_total", "counter",
               "Runs of the sample that could not be compared, most of all for want of time.", ("model",)),
        Metric("log_lines_dropped_total", "counter", "Lines of the log that could not be written.", ("reason",)),
        Metric("restarts_total", "counter", "Processes that were replaced because they ended.", ("process",)),
        Metric("ready", "gauge", "1 when the server is ready, 0 otherwise."),
        Metric("process_resident_memory_bytes", "gauge", "Memory in use, mapped weights included.", ("process",)),
        Metric("process_open_descriptors", "gauge", "Open file descriptors.", ("process",)),
        Metric("build_info", "gauge", "1; the versions are in the labels.", ("version", "python")),
        Metric("model_info", "gauge", "1; the facts are in the labels. sha: the first 12 digits of the artifact's.",
               ("model", "task", "dtype", "sha")),
    )
}  # fmt: skip
"""All metrics by name."""


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """What a front counted since its last message. ``histograms``: of each series the count of every bucket, one for
    values beyond all bounds, and last their sum. ``latencies``: answered requests by the window's bucket.
    """

    counters: dict[Series, float]
    histograms: dict[Series, list[float]]
    latencies: dict[int, int]


class Counts:
    """Counters and histograms that only grow."""

    def __init__(self) -> None:
        self.counters: dict[Series, float] = {}
        self.histograms: dict[Series, list[float]] = {}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Adds to a counter."""
        series = name, labels
        self.counters[series] = self.counters.get(series, 0) + by

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Adds a value to a histogram."""
        buckets = self._buckets((name, labels))
        buckets[bisect_left(METRICS[name].bounds, value)] += 1
        buckets[-1] += value

    def add(self, delta: Delta) -> None:
        """Adds all of them."""
        for series, value in delta.counters.items():
            self.counters[series] = self.counters.get(series, 0) + value
        for series, values in delta.histograms.items():
            buckets = self._buckets(series)
            for index, value in enumerate(values):
                buckets[index] += value

    def _buckets(self, series: Series) -> list[float]:
        found = self.histograms.get(series)
        if found is None:
            found = self.histograms[series] = [0.0] * (len(METRICS[series[0]].bounds) + 2)
        return found


class Recorder(Counts):
    """Counts in a front; ``finished`` belongs into ``Service.finished``."""

    def __init__(self) -> None:
        super().__init__()
        self._latencies: Counter[int] = Counter()

    def finished(self, request: Finished) -> None:
        """Counts a request that is over."""
        self.count("requests_total", request.operation, request.protocol, str(request.status))
        if request.kind:
            self.count("failures_total", request.kind)
            return
        self.observe("request_seconds", request.total_s, request.operation)
        call = request.call
        if call.model is None or not call.timing.tokens:
            return
        model, timing = call.model.name, call.timing
        self.count("texts_total", model, by=timing.texts)
        self.count("tokens_total", model, by=timing.tokens)
        self.observe("tokenize_seconds", timing.tokenize_s, model)
        self.observe("queue_seconds", timing.queue_s, model)
        self.observe("inference_seconds", timing.inference_s, model)
        self._latencies[math.ceil(math.log(max(request.total_s, 1e-6)) / _GROWTH)] += 1

    def take(self) -> Delta:
        """What was counted since the last call."""
        delta = Delta(self.counters, self.histograms, dict(self._latencies))
        self.counters, self.histograms = {}, {}
        self._latencies.clear()
        return delta


class Span(msgspec.Struct, frozen=True):
    """A stretch of time, by the second: texts and tokens of answered requests, requests that asked a model, those that
    were rejected because the server was full, and those that failed by the server's fault. Percentiles of the time from
    arrival to answer are null when nothing was answered.
    """

    texts_s: float
    tokens_s: float
    requests_s: float
    rejected_s: float
    failed_s: float
    p50_ms: float | None
    p99_ms: float | None


class ModelInfo(msgspec.Struct, frozen=True):
    """A served model. ``sha256``: of its artifact; ``dtype``: of its products; ``labels``: how many it has."""

    name: str
    task: str
    dtype: str
    sha256: str
    labels: int = 0


class Live(msgspec.Struct, frozen=True):
    """How the server does: in the last whole ``second``, in the last ``minute``, and now. ``time``: seconds since 1970;
    ``busy``: instances at work, on average over the second; ``wait_s``: how long a new run would wait for the model
    where it would wait longest; ``usd_per_million``: texts, at the minute's rate, null without a price.
    """

    time: float
    ready: bool
    second: Span
    minute: Span
    queue_tokens: int
    queue_rows: int
    wait_s: float
    instances: int
    busy: float
    usd_per_million: float | None
    models: tuple[ModelInfo, ...]


_SERVER_FAULTS = {"failed", "unavailable", "expired"}


@dataclass
class _Second:
    """What was heard in one second."""

    at: int
    counts: Counter[str] = field(default_factory=Counter)
    latencies: Counter[int] = field(default_factory=Counter)
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By model."""


class Registry:
    """The supervisor's sum of all that its children count.

    ``processes``: the pid of each process by its name (``supervisor``, ``front-0``, ``engine-NAME``). ``clock``:
    seconds since 1970. ``usd_per_hour``: the price of the machine.
    """

    def __init__(self, *, usd_per_hour: float | None = None, clock: Callable[[], float] = time.time) -> None:
        self.counts = Counts()
        self.ready = False
        self.models: tuple[ModelInfo, ...] = ()
        self.processes: dict[str, int] = {"supervisor": os.getpid()}
        self._usd_per_hour, self._clock, self._begin = usd_per_hour, clock, clock()
        self._engines: dict[int, tuple[str, EngineStats]] = {}
        self._seconds: deque[_Second] = deque(maxlen=_WINDOW_S + 1)
        self._exposition = CollectorRegistry(auto_describe=False)
        self._exposition.register(_Exposition(self))

    def heard_front(self, delta: Delta) -> None:
        """Adds what a front sent."""
        self.counts.add(delta)
        second = self._second()
        second.latencies.update(delta.latencies)
        for (name, labels), value in delta.counters.items():
            if name in ("texts_total", "tokens_total"):
                second.counts[name] += int(value)
            elif name == "failures_total" and labels[0] == "overloaded":
                second.counts["rejected"] += int(value)
            elif name == "failures_total" and labels[0] in _SERVER_FAULTS:
                second.counts["failed"] += int(value)

    def heard_engine(self, model: str, pid: int, stats: EngineStats) -> None:
        """Adds what the engine of that process counted since its last message."""
        _, before = self._engines.get(pid, (model, None))
        self._engines[pid] = model, stats
        second = self._second()
        for group, busy_s in enumerate(stats.busy_s):
            more = busy_s - (0.0 if before is None else before.busy_s[group])
            self.counts.count("instances_busy_seconds_total", model, str(group), by=more)
            second.busy_s[model] += more
        self.counts.count("batches_total", model, by=stats.batches - (0 if before is None else before.batches))
        self.counts.count("rejected_total", model, by=stats.refused - (0 if before is None else before.refused))
        for tokens in stats.batch_tokens:
            self.counts.observe("batch_tokens", tokens, model)

    def ended(self, pid: int) -> None:
        """Forgets how a process was doing that has ended; what it counted stays."""
        self._engines.pop(pid, None)
        self.processes = {name: other for name, other in self.processes.items() if other != pid}

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus, version 0.0.4."""
        text: bytes = generate_latest(self._exposition)
        return text

    def live(self) -> Live:
        """How the server does."""
        now = self._clock()
        last = [second for second in self._seconds if second.at == int(now) - 1]
        minute = [second for second in self._seconds if int(now) - _WINDOW_S <= second.at < int(now)]
        over = _span(minute, min(_WINDOW_S, max(1.0, int(now) - int(self._begin))))
        usd = None
        if self._usd_per_hour is not None and over.texts_s > 0:
            usd = usd_per_million(self._usd_per_hour, over.texts_s)
        names = {model.name for model in self.models}  # not the shadow's
        engines = [stats for name, stats in self._engines.values() if name in names]
        busy = sum(busy_s for second in last for name, busy_s in second.busy_s.items() if name in names)
        return Live(
            now, self.ready, _span(last, 1.0), over,
            sum(stats.queue_tokens for stats in engines), sum(stats.queue_rows for stats in engines),
            max((stats.backlog_s for stats in engines), default=0.0),
            sum(sum(stats.instances) for stats in engines), busy, usd, self.models,
        )  # fmt: skip

    def gauges(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """The values of the moment, by name and labels."""
        yield "ready", (), float(self.ready)
        yield "build_info", (importlib.metadata.version("encast"), platform.python_version()), 1.0
        for model in self.models:
            yield "model_info", (model.name, model.task, model.dtype, model.sha256[:12]), 1.0
        sums: dict[Series, float] = defaultdict(float)
        for name, stats in self._engines.values():  # two of one model, while a reload replaces it
            sums["queue_tokens", (name,)] += stats.queue_tokens
            sums["queue_rows", (name,)] += stats.queue_rows
            sums["instances_busy", (name,)] += stats.running
            for group, instances in enumerate(stats.instances):
                sums["instances", (name, str(group))] += instances
            wait = "queue_wait_seconds", (name,)
            sums[wait] = max(sums[wait], stats.backlog_s)
        for (metric, labels), value in sums.items():
            yield metric, labels, value
        for process, pid in self.processes.items():
            with contextlib.suppress(OSError):  # it has just ended
                with open(f"/proc/{pid}/statm") as statm:
                    resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                yield "process_resident_memory_bytes", (process,), float(resident)
                yield "process_open_descriptors", (process,), float(len(os.listdir(f"/proc/{pid}/fd")))

    def _second(self) -> _Second:
        at = int(self._clock())
        if not self._seconds or self._seconds[-1].at != at:
            self._seconds.append(_Second(at))
        return self._seconds[-1]


def _span(seconds: Iterable[_Second], length_s: float) -> Span:
    counts: Counter[str] = Counter()
    latencies: Counter[int] = Counter()
    for second in seconds:
        counts.update(second.counts)
        latencies.update(second.latencies)
    answered = sum(latencies.values())
    return Span(
        counts["texts_total"] / length_s, counts["tokens_total"] / length_s, answered / length_s,
        counts["rejected"] / length_s, counts["failed"] / length_s,
        _percentile_ms(latencies, answered, 0.50), _percentile_ms(latencies, answered, 0.99),
    )  # fmt: skip


def _percentile_ms(latencies: Counter[int], total: int, fraction: float) -> float | None:
    """By nearest rank: the middle of the bucket in which the value of that rank lies."""
    rank = math.ceil(fraction * total)
    for bucket in sorted(latencies):
        rank -= latencies[bucket]
        if rank <= 0:
            return 1e3 * math.exp((bucket - 0.5) * _GROWTH)
    return None


class _Exposition(Collector):
    """Writes a registry as families of Prometheus."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Family]:
        counts = self._registry.counts
        families: dict[str, Any] = {}
        for metric in METRICS.values():
            name = f"encast_{metric.name}"
            if metric.kind == "counter":
                families[metric.name] = CounterMetricFamily(name, metric.help, labels=metric.labels)
            elif metric.kind == "gauge":
                families[metric.name] = GaugeMetricFamily(name, metric.help, labels=metric.labels)
            else:
                families[metric.name] = HistogramMetricFamily(name, metric.help, labels=metric.labels)
        for (name, labels), value in counts.counters.items():
            families[name].add_metric(labels, value)
        for name, labels, value in self._registry.gauges():
            families[name].add_metric(labels, value)
        for (name, labels), values in counts.histograms.items():
            upper = [*map(str, METRICS[name].bounds), "+Inf"]
            sums = [sum(values[: index + 1]) for index in range(len(upper))]
            families[name].add_metric(labels, list(zip(upper, sums, strict=True)), values[-1])
        yield from families.values()
