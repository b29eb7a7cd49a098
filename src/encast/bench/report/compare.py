"""Two experiments, row by row: faster, slower, within noise, or too noisy to say.

The rounds of two experiments are not paired, so each median has its own bootstrap interval over rounds (on logarithms),
and the interval of their ratio is put together from the two by the method of variance estimates recovery (Zou and
Donner, "Construction of confidence limits about effect measures", Statistics in Medicine 27, 2008). Such an interval
holds what differs between the rounds of a run, not what differs between runs (the hour, the placement of memory), so a
difference must also be larger than a margin to count. What the machine itself did in between shows in the backends
whose version is the same on both sides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from encast.bench.placement import PLACES
from encast.bench.report import numbers
from encast.bench.report.load import Row
from encast.bench.scenarios.base import THROUGHPUT
from encast.measure.statistics import median_interval

__all__ = ["MARGIN", "VERDICTS", "Comparison", "Verdict", "compare"]

MARGIN = 0.03
"""Two runs of the same comparison stay within it on a machine that others share."""

_SAME_RATE = 0.02
"""Rates further apart are other questions: near its limit a queue turns a percent of them into several of latency."""

_MOST_REASONS = 3

VERDICTS = (
    "slower",
    "now fails",
    "faster",
    "now works",
    "within noise",
    "noisy",
    "not comparable",
    "only in the old",
    "only in the new",
)
"""In the order in which a reader wants them."""

_OWN = "encast"


@dataclass(frozen=True)
class Verdict:
    """``ratio``: how many times as fast the new one is, with its 95 % interval; None where there is none."""

    row: Row
    """The new one, or the old one where there is no new one."""
    verdict: str
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    why: str = ""
    unchanged: bool = False
    """Another's backend, of the same version on both sides."""


@dataclass(frozen=True)
class Comparison:
    old: str
    new: str
    margin: float
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...]
    drift: float | None
    """Geometric mean of the ratios of unchanged backends; None when there are none."""

    def counts(self) -> dict[str, int]:
        return {name: sum(one.verdict == name for one in self.verdicts) for name in VERDICTS}


def compare(
    old: Iterable[Row], new: Iterable[Row], *, names: tuple[str, str] = ("old", "new"), margin: float = MARGIN
) -> Comparison:
    """Every row of both, matched by what was measured; of rows that come twice the last counts.

    ``faster`` and ``slower``: the interval of the ratio does not hold 1, and the ratio is beyond ``1 + margin`` or
    below its inverse. ``noisy``: the machine was noisy while one of the two was measured, which is no verdict, however
    far the ratio is from 1. ``not comparable``: without rounds of one kind on both sides, or too few of them for an
    interval, or where the two were given other sequences or another rate of requests.
    """
    before: Mapping[tuple[object, ...], Row] = {row.identity: row for row in old}
    after: Mapping[tuple[object, ...], Row] = {row.identity: row for row in new}
    verdicts = []
    for identity in dict.fromkeys([*after, *before]):
        verdict = _verdict(before.get(identity), after.get(identity), margin)
        if verdict is not None:
            verdicts.append(verdict)
    # The largest differences first; of equal ones (those without a ratio) in the order of the rows.
    verdicts.sort(key=lambda one: (VERDICTS.index(one.verdict), -abs(math.log(one.ratio or 1.0))))
    steady = [one.ratio for one in verdicts if one.unchanged and one.ratio is not None and one.verdict != "noisy"]
    drift = statistics.geometric_mean(steady) if steady else None
    reasons = [one.why for one in verdicts if one.verdict == "not comparable"]
    return Comparison(*names, margin, tuple(verdicts), tuple(_warnings(before, after, drift, margin, reasons)), drift)


def _verdict(old: Row | None, new: Row | None, margin: float) -> Verdict | None:
    if new is None:
        assert old is not None
        return Verdict(old, "only in the old") if old.measured else None
    if old is None:
        return Verdict(new, "only in the new", why="" if new.measured else _failure(new))
    if not (old.measured or new.measured):
        return None
    if not new.measured:
        return Verdict(new, "now fails", why=f"was measured, now {_failure(new)}")
    if not old.measured:
        return Verdict(new, "now works", why=f"was {old.status}")
    unchanged = not new.name.startswith(_OWN) and _version(old) == _version(new) != ""
    sampled = _other_input(old, new) or _speeds(old, new)
    if isinstance(sampled, str):
        return Verdict(new, "not comparable", why=sampled, unchanged=unchanged)
    places = [row.at("noise", "placement") for row in (old, new)]
    if places[0] != places[1] and set(places) <= set(PLACES):
        why = f"processors were {places[0]} in the old run and {places[1]} in the new one"
        return Verdict(new, "not comparable", why=why, unchanged=unchanged)
    a, b = sampled
    ratio = math.exp(statistics.median(b) - statistics.median(a))
    interval = _interval(a, b)
    why = "; ".join(
        [f"the machine was noisy in the {name} run" for name, row in (("old", old), ("new", new)) if row.noisy]
        + (["the model's files differ"] if _sha(old) != _sha(new) else [])
    )
    if interval is None:
        fewer = f"{min(len(a), len(b))} rounds are too few for an interval"
        return Verdict(new, "not comparable", ratio, None, "; ".join(filter(None, (fewer, why))), unchanged)
    if old.noisy or new.noisy:
        # What disturbs all rounds of a run alike is not in its interval, so no interval is wide enough to judge by.
        word = "noisy"
    elif interval[0] > 1 and ratio > 1 + margin:
        word = "faster"
    elif interval[1] < 1 and ratio < 1 / (1 + margin):
        word = "slower"
    else:
        word = "within noise"
    return Verdict(new, word, ratio, interval, why, unchanged)


def _failure(row: Row) -> str:
    return f"{row.status}: {row.reason}" if row.reason else row.status


def _other_input(old: Row, new: Row) -> str:
    """In what the two were not asked the same, "" where they were as far as the rows say."""
    for field in ("sequences", "tokens", "lengths"):
        a, b = (row.at("workload", field) for row in (old, new))
        if a is not None and b is not None and a != b:
            said = [row.text("workload", field) for row in (old, new)]
            return f"the workload has other {field}: {said[0]:.40} in the old run, {said[1]:.40} in the new one"
    a, b = (_offered(row) for row in (old, new))
    if a and b and not 1 / (1 + _SAME_RATE) <= b / a <= 1 + _SAME_RATE:
        advice = "; measure both with the same scenario.rate" if "load" in new.point else ""
        said = [numbers.amount(rate) for rate in (a, b)]
        return f"{said[0]} requests a second were offered in the old run, {said[1]} in the new one{advice}"
    return ""


def _offered(row: Row) -> float | None:
    """Requests a second; None where the point says the rate, or nobody does.

    Of a share of what the first backend can do it is the rate itself: how many came by chance differs with the rounds.
    """
    load, capacity = row.number("point", "load"), row.number("metrics", "capacity_per_s")
    if "rate" in row.point:
        return None
    return load * capacity if load and capacity else row.number("metrics", "offered_per_s")


def _speeds(old: Row, new: Row) -> tuple[list[float], list[float]] | str:
    """Logarithms of the speed in each round of both, or why there are none."""
    a, b = old.rounds(), new.rounds()
    if a is None or b is None:
        return f"the {'old' if a is None else 'new'} row has no rounds under samples"
    # Rows from before they named it: those of one scenario alone were compared by something else than today.
    by = [row.compared_by or (THROUGHPUT if row.scenario == "batch_scaling" else "") for row in (old, new)]
    if all(by) and by[0] != by[1]:
        return f"rounds are of {by[0]} in the old row and of {by[1]} in the new one"
    if a[0] != b[0]:
        return f"samples are {a[0]} in the old row and {b[0]} in the new one"
    sign = -1.0 if _is_time(a[0]) else 1.0
    return [sign * math.log(value) for value in a[1]], [sign * math.log(value) for value in b[1]]


def _is_time(name: str) -> bool:
    return name.endswith(("_ms", "_ns", "_us", "seconds")) or "latency" in name


def _interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
    """Of exp(median(b) - median(a)); None with too few rounds."""
    of_a, of_b = median_interval(a), median_interval(b, seed=1)
    if of_a is None or of_b is None:
        return None
    middle_a, middle_b = statistics.median(a), statistics.median(b)
    between = middle_b - middle_a
    low = between - math.hypot(middle_b - of_b[0], of_a[1] - middle_a)
    high = between + math.hypot(of_b[1] - middle_b, middle_a - of_a[0])
    return math.exp(low), math.exp(high)


def _warnings(
    old: Mapping[tuple[object, ...], Row],
    new: Mapping[tuple[object, ...], Row],
    drift: float | None,
    margin: float,
    reasons: Sequence[str],
) -> Iterable[str]:
    """``reasons``: why rows are not comparable, of each."""
    machines = [{_machine(row) for row in rows.values()} for rows in (old, new)]
    if machines[0] and machines[1] and machines[0] != machines[1]:
        yield "The two were not measured on the same machine: their ratios compare machines as well."
    if not set(old) & set(new):
        yield "No row of one has the same backend, model, workload, scenario and point as a row of the other."
    if drift is not None and not 1 / (1 + margin) <= drift <= 1 + margin:
        yield (
            f"Backends that did not change are {drift:.2f} times as fast as before: that much is the machine's, not "
            "the code's."
        )
    if reasons:
        distinct = list(dict.fromkeys(reasons))
        more = f"; and {len(distinct) - _MOST_REASONS} more reasons" if len(distinct) > _MOST_REASONS else ""
        rows = f"{len(reasons)} rows are" if len(reasons) > 1 else "1 row is"
        yield f"{rows} not comparable: {'; '.join(distinct[:_MOST_REASONS])}{more}."


def _version(row: Row) -> str:
    return row.text("backend", "version")


def _sha(row: Row) -> str:
    return row.text("model", "sha")


def _machine(row: Row) -> str:
    return row.text("machine", "fingerprint") or row.text("machine", "processor")
