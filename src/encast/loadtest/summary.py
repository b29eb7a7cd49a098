"""A result in lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from encast.loadtest.records import REJECTED
from encast.loadtest.result import Result, Step, latency_ms
from encast.measure.statistics import PERCENTS, percent_name, samples_needed
from encast.pages.numbers import amount

__all__ = ["latency_cells", "summary_lines"]

_WIDTH = 10


def summary_lines(result: Result) -> Iterator[str]:
    answered, rejected = result.answered, result.columns.of(REJECTED)
    rates = result.rates()
    tokens = "" if rates["tokens_per_s"] is None else f", {rates['tokens_per_s']:,.0f} tokens"
    yield (
        f"{len(answered):,} requests, {int(answered.texts.sum()):,} texts answered in {result.seconds:.1f} s: "
        f"{rates['requests_per_s']:,.1f} requests, {rates['texts_per_s']:,.1f} texts{tokens} a second"
    )
    yield ""
    yield from map(Step.line, result.steps) if result.steps else _latencies(result)
    yield ""
    if len(rejected):
        waits = result.retry_after
        yield f"{len(rejected):,} rejected with 429" + (
            f"; Retry-After {min(waits):g} to {max(waits):g} s" if waits else ", without Retry-After"
        )
    for kind, count in result.errors.items():
        example = result.first_wrong if kind == "wrong answer" else result.examples.get(kind, "")
        yield f"{count:,} x {kind}" + (f", the first: {example}" if example else "")
    if result.steps:
        best = result.served_rate
        yield "no rate was served" if best is None else f"the highest rate that was served: {best:,.1f} a second"
    yield f"the client used {result.cpu_seconds:.1f} s of a processor, {result.core_share:.0%} of a core"
    for warning in result.warnings:
        yield f"note: {warning}"


def _latencies(result: Result) -> Iterator[str]:
    answered, rejected = result.answered, result.columns.of(REJECTED)
    since = "sent" if result.closed else "due"
    yield f"{f'ms since a request was {since}':32}" + "".join(f"{name:>{_WIDTH}}" for name in (*_NAMES, "max"))
    rows = {"answered": latency_ms(answered)}
    if len(result.plan.sources) > 1:
        rows |= {name: one["latency_ms"] for name, one in result.by_source().items()}
    if len(rejected):
        rows["rejected (429)"] = latency_ms(rejected)
    for name, known in rows.items():
        yield f"{name[-32:]:32}" + "".join(f"{cell:>{_WIDTH}}" for cell in latency_cells(known))
    if unknown := [percent for percent in PERCENTS if len(answered) < samples_needed(percent)]:
        yield f"p{unknown[0]:g} needs {samples_needed(unknown[0]):,} answers"


_NAMES = tuple(f"p{percent:g}" for percent in PERCENTS)


def latency_cells(known: Mapping[str, float | None]) -> list[str]:
    """The percentiles and the largest, three digits each; a dash for what is not known."""
    return [amount(known[name]) for name in (*map(percent_name, PERCENTS), "max")]
