"""A result as a page: percentiles of latency, throughput and errors over time, the steps of a ramp."""

from __future__ import annotations

import numpy as np

from encast.loadtest.records import REJECTED, Columns
from encast.loadtest.result import Result, latency_ms
from encast.loadtest.summary import latency_cells, summary_lines
from encast.measure.statistics import PERCENTS, samples_needed
from encast.pages.charts import Axis, Chart, Guide, Mark, Series
from encast.pages.document import Block, Cell, Document, Figure, Section, Text, table, text, to_html
from encast.pages.numbers import amount

__all__ = ["to_page"]

_SHARES = (50.0, 75.0, 90.0, 95.0, 98.0, 99.0, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99)
_MOST_POINTS = 120


def to_page(result: Result) -> str:
    """One HTML file that loads nothing; raises ``InputError`` without the extra ``plot``."""
    lines = list(summary_lines(result))
    summary = [Text(lines[0])]
    summary += [Text(warning, warning=True) for warning in result.warnings]
    if result.served_rate is not None:
        summary.insert(1, Text(f"The highest rate that was served: {result.served_rate:,.1f} requests a second."))
    # Percentiles over rates that were served and rates that were not would say nothing.
    main = Section("Rising rate", tuple(_ramp(result))) if result.steps else Section("Latency", tuple(_latency(result)))
    sections = [main, Section("Over time", (_over_time(result),))]
    if problems := [[Cell(kind), str(count), _example(result, kind)] for kind, count in result.errors.items()]:
        columns = [text("kind"), "requests", text("the first")]
        sections.append(Section("Errors", (table("Requests without a right answer", columns, problems),)))
    title = f"Load test of {result.plan.url}, {result.plan.protocol}: {result.plan.load}"
    return to_html(Document(title, tuple(summary), tuple(sections)))


def _example(result: Result, kind: str) -> str:
    return result.first_wrong if kind == "wrong answer" else result.examples.get(kind, "")


def _parts(result: Result) -> dict[str, Columns]:
    """Answered requests, by source where there are several; rejected ones."""
    answered = result.answered
    parts = {"answered": answered}
    if len(result.plan.sources) > 1:
        parts |= {one.name: answered.where(answered.source == at) for at, one in enumerate(result.plan.sources)}
    parts["rejected (429)"] = result.columns.of(REJECTED)
    return {name: columns for name, columns in parts.items() if len(columns)}


def _latency(result: Result) -> list[Block]:
    since = "sent" if result.closed else "due"
    parts = _parts(result)
    series = []
    for number, (name, columns) in enumerate(parts.items()):
        ms = columns.responses.latency / 1e6
        known = [share for share in _SHARES if len(ms) >= samples_needed(share)]
        marks = tuple(
            Mark(100 / (100 - share), float(value), f"{name}: p{share:g} {value:,.2f} ms")
            for share, value in zip(known, np.percentile(ms, known), strict=True)
            if value > 0
        )
        if marks:
            series.append(Series(name, number, marks))
    caption = (
        f"Milliseconds since a request was {since}. One request in 10 is slower than the value at 10 (p90), one in 100 "
        "than that at 100 (p99). What too few requests were seen beyond is not shown."
    )
    blocks: list[Block] = []
    if series:
        alt = f"Latency in ms over one request in N that is slower, for {', '.join(one.name for one in series)}"
        chart = Chart("", alt, Axis("one request in N is slower", "values"), Axis("ms"), tuple(series), size=(900, 380))
        blocks.append(Figure(caption, (chart,)))
    lines = [[name, f"{len(columns):,}", *latency_cells(latency_ms(columns))] for name, columns in parts.items()]
    heads = [text(""), "requests", *(f"p{percent:g}" for percent in PERCENTS), "max"]
    return [*blocks, table("Latency in ms", heads, lines)]


def _over_time(result: Result) -> Figure:
    whole = max(1, int(result.seconds))
    by_second = {name: values[:whole] for name, values in result.by_second().items()}
    stretch = max(1, -(-len(by_second["due"]) // _MOST_POINTS))

    def series(name: str, values: list[float], colour: int, mean: bool = True) -> Series:
        groups = [values[begin : begin + stretch] for begin in range(0, len(values), stretch)]
        marks = tuple(
            Mark(float(number * stretch), made, f"{name}, second {number * stretch}: {made:,.1f}", area=10)
            for number, made in enumerate(sum(group) / len(group) if mean else max(group) for group in groups)
        )
        return Series(name, colour, marks)

    seconds = Axis("seconds", "linear")
    throughput = Chart(
        "texts a second",
        "Texts answered with success in every second of the test",
        seconds,
        Axis("texts/s", "linear"),
        (series("answered", by_second["texts"], 0),),
        legend=False,
    )
    requests = [series("due" if not result.closed else "sent", by_second["due"], 1)]
    requests += [series(name, by_second[name], colour) for name, colour in (("rejected", 5), ("failed", 3))]
    counts = Chart(
        "requests a second",
        "Requests that were due, rejected and failed in every second of the test",
        seconds,
        Axis("requests/s", "linear"),
        tuple(requests),
    )
    most = Chart(
        "largest latency",
        "The largest latency of the requests that were answered in every second of the test",
        seconds,
        Axis("ms", "linear"),
        (series("answered", by_second["latency_ms_max"], 0, mean=False),),
        legend=False,
    )
    each = "second" if stretch == 1 else f"{stretch} seconds"
    return Figure(
        f"A mark every {each}. Requests count when they are due, answers when they come.", (throughput, counts, most)
    )


def _ramp(result: Result) -> list[Block]:
    steps = result.steps
    marks = tuple(
        Mark(
            one.rate,
            one.answered_rate,
            f"{one.rate:,.1f} a second: {one.answered_rate:,.1f} answered",
            filled=one.served,
        )
        for one in steps
    )
    ends = (steps[0].rate, steps[-1].rate)
    answered = Chart(
        "answered in time",
        "Answered over offered requests a second; hollow marks were not served",
        Axis("offered requests/s", "linear"),
        Axis("answered requests/s", "linear"),
        (Series("answered", 0, marks),),
        (Guide(tuple((rate, rate) for rate in ends)),),
        legend=False,
    )
    charts = [answered]
    slow = tuple(
        Mark(one.rate, one.p99_ms, f"{one.rate:,.1f} a second: p99 {one.p99_ms:,.1f} ms", filled=one.served)
        for one in steps
        if one.p99_ms is not None
    )
    if slow:
        limit = getattr(result.plan.load, "limit_ms", None)
        guides = () if limit is None else (Guide(tuple((rate, limit) for rate in ends), "limit", end=True),)
        alt = "The 99th percentile of latency over offered requests a second; hollow marks were not served"
        axis = Axis("offered requests/s", "linear")
        charts.append(Chart("p99", alt, axis, Axis("ms"), (Series("p99", 0, slow),), guides, legend=False))
    lines = [
        [
            Cell(f"{one.rate:,.1f}"),
            f"{one.answered_rate:,.1f}",
            *(amount(value) for value in (one.p50_ms, one.p99_ms)),
            f"{one.rejected:,}",
            f"{one.failed:,}",
            Cell("served" if one.served else "not served", kind="good" if one.served else "bad"),
        ]
        for one in steps
    ]
    heads = ["offered/s", "answered in time/s", "p50 ms", "p99 ms", "rejected", "failed", text("")]
    caption = "Requests a second. Hollow: not served. Dashed: every request answered, or the limit."
    return [Figure(caption, tuple(charts)), table("Steps", heads, lines)]
