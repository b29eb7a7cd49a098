"""Bars of trouble: three times the load that can be served, processes killed and worse, and a long time."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from loads import Probe, Texts, closed, poisson, reference
from report import held, ratio_text, table
from servers import Encast, Offline, Sample, Watch
from speed import need_right

from encast.loadtest import Result
from encast.loadtest.records import REJECTED
from encast.measure.statistics import ratio_interval

__all__ = ["Clock", "known_texts", "overload", "soak"]

CALM_S = 3.0
FLAT = 1.05
"""Resident memory that grows by no more is flat: the allocator's arenas fill for minutes."""


class Clock:
    """Called with a load's lines, one a second: so it knows when the load began (``perf_counter``)."""

    def __init__(self) -> None:
        self.begun = math.inf
        self.second = 0

    def __call__(self, line: str) -> None:
        self.second += 1
        self.begun = min(self.begun, time.perf_counter() - self.second)  # lines come late, never early


def known_texts(args: Namespace, folder: Path) -> tuple[Texts, tuple[str, ...]]:
    """The texts that were asked for, and the offline engine's answers to them."""
    if args.texts == "queries":
        texts = Texts.queries(args.data, folder)
    else:
        texts = Texts.paragraphs(args.artifact, args.data, folder)
    with Offline(args.artifact, texts.file) as engine:
        return texts, reference(engine, texts, folder)


def capacity(server: Encast, args: Namespace, seconds: float, texts: Texts, known: tuple[str, ...]) -> list[float]:
    """Requests a second of a closed loop, three times."""
    rates = []
    for _ in range(3):
        found = closed(server.url, args.clients, seconds, [texts], batch=args.batch, reference=known)
        need_right(found)
        rates.append(float(found.rates()["requests_per_s"] or 0))
    return rates


def open_capacity(server: Encast, args: Namespace, seconds: float, texts: Texts, known: tuple[str, ...]) -> list[float]:
    """Requests a second of an open loop that is offered what a closed one gets, three times. It is less: the client
    wakes for each arrival, and shares the cores.
    """
    offered = float(np.median(capacity(server, args, seconds, texts, known)))
    rates = []
    for number in range(3):
        found = poisson(server.url, offered, seconds, [texts], seed=number, batch=args.batch, reference=known)
        need_right(found)
        rates.append(float((found.answered.ended <= seconds * 1e9).sum()) / seconds)
    return rates


@dataclass(frozen=True)
class Burst:
    """An open loop beyond the capacity: what became of it, when it began and when its last request was due
    (``perf_counter``), and the requests a second of the closed loop before it."""

    result: Result
    begun: float
    last: float
    capacity: float

    @property
    def goodput(self) -> float:
        """Requests a second that were answered while more came."""
        span = self.last - self.begun
        return float((self.result.answered.ended <= span * 1e9).sum()) / span


def overload(args: Namespace, folder: Path) -> dict[str, Any]:
    """By turns a closed loop, which finds the capacity, and several times that much in an open loop."""
    texts, known = known_texts(args, folder)
    short = min(texts.rows, key=len)
    bursts: list[Burst] = []
    serve = [*args.serve, "--max-wait-ms", f"{args.max_wait_ms:g}"]
    with (
        Encast(args.artifact, folder, serve) as server,
        Watch(server, 0.5) as watch,
        Probe(server.url, short, 0.1) as probe,
    ):
        calm = time.perf_counter()
        time.sleep(CALM_S)
        for number in range(args.rounds):
            found = closed(server.url, args.clients, args.seconds, [texts], batch=args.batch, reference=known)
            need_right(found)
            rates = [*(burst.capacity for burst in bursts), float(found.rates()["requests_per_s"] or 0)]
            clock = Clock()
            result = poisson(
                server.url, args.times * float(np.median(rates)), args.seconds, [texts], seed=number, batch=args.batch,
                reference=known, say=clock, connections=args.connections,
            )  # fmt: skip
            last = clock.begun + float(result.columns.due.max()) / 1e9
            bursts.append(Burst(result, clock.begun, last, rates[-1]))
            time.sleep(max(0.0, last + 2 + CALM_S - time.perf_counter()))
        left = Sample.of(server)
    results = [burst.result for burst in bursts]
    ratio = ratio_interval([burst.goodput for burst in bursts], [burst.capacity for burst in bursts])
    rejected = [result.columns.of(REJECTED) for result in results]
    calm_ms = probe.median_ms(calm, calm + CALM_S)
    loaded_ms = probe.median_ms(bursts[-1].begun + 1, bursts[-1].last)
    after_ms = probe.median_ms(bursts[-1].last + 2, bursts[-1].last + 2 + CALM_S)
    refused = sum(
        status != 200 and any(burst.last + 2 <= at <= burst.last + 2 + CALM_S for burst in bursts)
        for at, status, _ in probe.seen
    )
    resident = [
        max((sample.total_mb for sample in watch.samples if burst.begun <= sample.at <= burst.last), default=0.0)
        for burst in bursts
    ]
    halves = max(resident[: -(-len(resident) // 2)]), max(resident[len(resident) // 2 :])
    ms = {
        "answered": joined(sent_ms(result.answered) for result in results),
        "answered, since due": joined(due_ms(result.answered) for result in results),
        "429": joined(map(sent_ms, rejected)),
    }
    errors = dict(sum((Counter(result.errors or {}) for result in results), Counter()))
    count, wanted_retries = sum(map(len, rejected)), sum(len(result.retry_after) for result in results)
    print(
        f"requests of {args.batch} {args.texts}; {args.rounds} rounds of {args.seconds:g} s of {args.clients} "
        f"closed-loop clients and {args.seconds:g} s of {args.times:g} times their rate, "
        f"--max-wait-ms {args.max_wait_ms:g}"
    )
    table(
        ["round", "closed loop, requests a second", "answered beyond the capacity", "resident, MB"],
        [(number + 1, burst.capacity, burst.goodput, mb)
         for number, (burst, mb) in enumerate(zip(bursts, resident, strict=True))],
    )  # fmt: skip
    table(
        ["", "requests", "p50, ms", "p99, ms", "most, ms"],
        [(kind, len(own), *(own and np.percentile(own, (50, 99, 100)).tolist())) for kind, own in ms.items()],
    )
    print(f"one text, median: {shown(calm_ms)} before, {shown(loaded_ms)} meanwhile, {shown(after_ms)} from 2 s after")
    print(f"client: {max(result.core_share for result in results):.0%} of a core; errors: {errors or 'none'}")
    rejection, p99 = percentile(ms["429"], 50), percentile(ms["answered, since due"], 99)
    bars = [
        held("goodput at least 0.9 of the maximum", ratio_text(ratio), ratio.ratio >= 0.9),
        held("rejections in under 20 ms at the median", shown(rejection),
             None if rejection is None else rejection < 20),
        held(
            f"p99 of accepted requests within {args.max_wait_ms:g} ms", shown(p99),
            None if p99 is None else p99 <= args.max_wait_ms,
        ),
        held("every rejection has Retry-After", count - wanted_retries, count == wanted_retries),
        held("nothing else than 200 and 429, no wrong answer", errors or "none", not errors),
        held(f"resident memory of the second half at most {FLAT} of the first", f"{halves[1]:.0f}, {halves[0]:.0f} MB",
             halves[1] <= FLAT * halves[0]),
        held("2 s after, a single text takes at most 1.5 times its time before",
             f"{shown(after_ms)}, {refused} refused",
             None if after_ms is None or calm_ms is None else after_ms <= 1.5 * calm_ms and not refused),
    ]  # fmt: skip
    return {
        "capacity": [burst.capacity for burst in bursts], "goodput": [burst.goodput for burst in bursts],
        "ratio": ratio.record(), "ms": {kind: quantiles(own) for kind, own in ms.items()},
        "probe_ms": {"before": calm_ms, "during": loaded_ms, "after": after_ms, "refused_after": refused},
        "memory": [vars(sample) for sample in watch.samples], "left": vars(left),
        "loads": [result.to_json() for result in results], "bars": bars,
    }  # fmt: skip


def soak(args: Namespace, folder: Path) -> dict[str, Any]:
    """Minutes at a share of the capacity: memory, descriptors and p99 by minute."""
    texts, known = known_texts(args, folder)
    clock = Clock()
    with Encast(args.artifact, folder, args.serve) as server:
        rates = open_capacity(server, args, min(10.0, 20 * args.minutes), texts, known)
        rate = args.share * float(np.median(rates))
        time.sleep(CALM_S)
        idle = Sample.of(server)
        with Watch(server, 1.0) as watch:
            result = poisson(
                server.url, rate, 60 * args.minutes, [texts], seed=0, batch=args.batch, reference=known, say=clock
            )
        time.sleep(CALM_S)
        left = Sample.of(server)
    minutes = by_minute(result, watch.samples, clock.begun)
    print(f"{rate:.1f} requests a second of {args.batch} {args.texts}, {args.share:g} of the capacity")
    table(
        ["minute", "answered", "p50, ms", "p99, ms", "resident, MB", "proportional, MB", "descriptors"],
        [[number + 1, *minute.values()] for number, minute in enumerate(minutes)],
    )
    print(f"descriptors: {idle.descriptors} before, {left.descriptors} after; errors: {result.errors or 'none'}")
    first, last = minutes[0], minutes[-1]
    settled = minutes[min(1, len(minutes) - 1)]  # the first one fills the allocator's arenas
    growth = last["rss_mb"] / settled["rss_mb"]
    bars = [
        held("no error, no wrong answer, nothing refused", result.errors or "none",
             not result.errors and not len(result.columns.of(REJECTED))),
        held("p99 of the last minute at most 1.1 of the first", f"{last['p99_ms'] / first['p99_ms']:.3f}",
             last["p99_ms"] <= 1.1 * first["p99_ms"]),
        held(f"resident memory at the end at most {FLAT} of the second minute's", f"{growth:.3f}", growth <= FLAT),
        held("no more descriptors after than before", f"{left.total_descriptors} and {idle.total_descriptors}",
             left.total_descriptors <= idle.total_descriptors),
    ]  # fmt: skip
    return {
        "capacity": rates, "rate": rate, "minutes": minutes, "idle": vars(idle), "left": vars(left),
        "errors": result.errors, "client_core_share": result.core_share, "bars": bars,
    }  # fmt: skip


def by_minute(result: Result, samples: list[Sample], begun: float) -> list[dict[str, Any]]:
    answered = result.answered
    minute_of = answered.due // 60_000_000_000
    found = []
    for number in range(int(minute_of.max()) + 1):
        ms = answered.where(minute_of == number).responses.latency / 1e6
        own = [one for one in samples if 60 * number <= one.at - begun < 60 * (number + 1)] or samples[-1:]
        found.append(
            {
                "answered": len(ms),
                "p50_ms": float(np.median(ms)),
                "p99_ms": float(np.percentile(ms, 99)),
                "rss_mb": float(np.mean([one.total_mb for one in own])),
                "pss_mb": float(np.mean([one.pss_mb for one in own])),
                "descriptors": max(one.total_descriptors for one in own),
            }
        )
    return found


def joined(lists: Iterable[list[float]]) -> list[float]:
    return [one for values in lists for one in values]


def sent_ms(columns: Any) -> list[float]:
    return [float(one) for one in (columns.ended - columns.begun) / 1e6]


def due_ms(columns: Any) -> list[float]:
    return [float(one) for one in columns.responses.latency / 1e6]


def percentile(values: list[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def quantiles(values: list[float]) -> dict[str, float | None]:
    return {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99, 100)}


def shown(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3g} ms"
