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

from encast.bench.report.load import Row
from encast.bench.scenarios.base import THROUGHPUT
from encast.measure.statistics import median_interval
from encast.pages import numbers

__all__ = ["CONCLUSIONS", "MARGIN", "Change", "Comparison", "compare"]

MARGIN = 0.03
"""Two runs of the same comparison stay within it on a machine that others share."""

_SAME_RATE = 0.02
"""Rates further apart are other questions: near its limit a queue turns a percent of them into several of latency."""

_MOST_REASONS = 3

CONCLUSIONS = (
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

_Rows = Mapping[tuple[object, ...], Row]


@dataclass(frozen=True)
class Change:
    """``ratio``: how many times as fast the new one is, with its 95 % interval; None where there is none."""

    row: Row
    """The new one, or the old one where there is no new one."""
    conclusion: str
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
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]
    drift: float | None
    """Geometric mean of the ratios of unchanged backends; None when there are none."""

    def counts(self) -> dict[str, int]:
        return {name: sum(one.conclusion == name for one in self.changes) for name in CONCLUSIONS}


def compare(
    old: Iterable[Row], new: Iterable[Row], *, names: tuple[str, str] = ("old", "new"), margin: float = MARGIN
) -> Comparison:
    """Every row of both, matched by what was measured; of rows that come twice the last counts.

    ``faster`` and ``slower``: the interval of the ratio does not hold 1, and the ratio is beyond ``1 + margin`` or
    below its inverse. ``noisy``: the machine was noisy while one of the two was measured, whatever the ratio is.
    ``not comparable``: without rounds of one kind on both sides, or too few of them for an interval, or where the two
    were given other sequences or another rate of requests.
    """
    before = {row.identity: row for row in old}
    after = {row.identity: row for row in new}
    both = ((before.get(identity), after.get(identity)) for identity in {**after, **before})
    changes = [change for pair in both if (change := _change(*pair, margin)) is not None]
    # The largest differences first; of equal ones (those without a ratio) in the order of the rows.
    changes.sort(key=lambda one: (CONCLUSIONS.index(one.conclusion), -abs(math.log(one.ratio or 1.0))))
    steady = [one.ratio for one in changes if one.unchanged and one.ratio is not None and one.conclusion != "noisy"]
    drift = statistics.geometric_mean(steady) if steady else None
    reasons = [one.why for one in changes if one.conclusion == "not comparable"]
    return Comparison(*names, margin, tuple(changes), tuple(_warnings(before, after, drift, margin, reasons)), drift)


def _change(old: Row | None, new: Row | None, margin: float) -> Change | None:
    if new is None:
        assert old is not None
        return Change(old, "only in the old") if old.measured else None
    if old is None:
        return Change(new, "only in the new", why="" if new.measured else _failure(new))
    if not (old.measured or new.measured):
        return None
    if not new.measured:
        return Change(new, "now fails", why=f"was measured, now {_failure(new)}")
    if not old.measured:
        return Change(new, "now works", why=f"was {old.status}")
    version, before = (row.text("backend", "version") for row in (new, old))
    unchanged = not new.name.startswith(_OWN) and version == before != ""
    reason = _not_comparable(old, new)
    if reason:
        return Change(new, "not comparable", why=reason, unchanged=unchanged)
    a, b = _speeds(old), _speeds(new)
    ratio = math.exp(statistics.median(b) - statistics.median(a))
    interval = _interval(a, b)
    why = [f"the machine was noisy in the {name} run" for name, row in (("old", old), ("new", new)) if row.noisy]
    why += ["the model's files differ"] if old.text("model", "sha") != new.text("model", "sha") else []
    if interval is None:
        word = "not comparable"
        why.insert(0, f"{min(len(a), len(b))} rounds are too few for an interval")
    elif old.noisy or new.noisy:
        # What disturbs all rounds of a run alike is not in its interval, so no interval is wide enough to judge by.
        word = "noisy"
    elif interval[0] > 1 and ratio > 1 + margin:
        word = "faster"
    elif interval[1] < 1 and ratio < 1 / (1 + margin):
        word = "slower"
    else:
        word = "within noise"
    return Change(new, word, ratio, interval, "; ".join(why), unchanged)


def _failure(row: Row) -> str:
    return f"{row.status}: {row.reason}" if row.reason else row.status


def _not_comparable(old: Row, new: Row) -> str:
    """In what the two were not asked or measured alike, "" where they were as far as the rows say."""
    for field in ("sequences", "tokens", "lengths"):
        if None not in (old.at("workload", field), new.at("workload", field)):
            a, b = (row.text("workload", field) for row in (old, new))
            if a != b:
                return f"the workload has other {field}: {a:.40} in the old run, {b:.40} in the new one"
    rates = [_offered(row) for row in (old, new)]
    if rates[0] and rates[1] and not 1 / (1 + _SAME_RATE) <= rates[1] / rates[0] <= 1 + _SAME_RATE:
        advice = "; measure both with the same scenario.rate" if "load" in new.point else ""
        a, b = map(numbers.amount, rates)
        return f"{a} requests a second were offered in the old run, {b} in the new one{advice}"
    rounds = [row.rounds() for row in (old, new)]
    if rounds[0] is None or rounds[1] is None:
        return f"the {'old' if rounds[0] is None else 'new'} row has no rounds under samples"
    # Rows from before they named it: those of one scenario alone were compared by something else than today.
    a, b = (row.compared_by or (THROUGHPUT if row.scenario == "batch_scaling" else "") for row in (old, new))
    if a and b and a != b:
        return f"rounds are of {a} in the old row and of {b} in the new one"
    if rounds[0][0] != rounds[1][0]:
        return f"samples are {rounds[0][0]} in the old row and {rounds[1][0]} in the new one"
    a, b = (row.text("noise", "placement") for row in (old, new))
    if a != b and {a, b} <= {"near", "far", "halved"}:
        return f"processors were {a} in the old run and {b} in the new one"
    return ""


def _offered(row: Row) -> float | None:
    """Requests a second; None where the point says the rate, or nobody does.

    Of a share of what the first backend can do it is the rate itself: how many came by chance differs with the rounds.
    """
    load, capacity = row.number("point", "load"), row.number("metrics", "capacity_per_s")
    if "rate" in row.point:
        return None
    return load * capacity if load and capacity else row.number("metrics", "offered_per_s")


def _speeds(row: Row) -> list[float]:
    """Logarithms of the speed in each round."""
    name, values = row.rounds() or ("", ())
    is_time = name.endswith(("_ms", "_ns", "_us", "seconds")) or "latency" in name
    return [(-1.0 if is_time else 1.0) * math.log(value) for value in values]


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


def _warnings(old: _Rows, new: _Rows, drift: float | None, margin: float, reasons: Sequence[str]) -> Iterable[str]:
    """``reasons``: why rows are not comparable, of each."""
    machines = [
        {row.text("machine", "fingerprint") or row.text("machine", "processor") for row in rows.values()}
        for rows in (old, new)
    ]
    if machines[0] and machines[1] and machines[0] != machines[1]:
        yield "The two were not measured on the same machine: their ratios compare machines as well."
    if not set(old) & set(new):
        yield "No row of one has the same backend, model, workload, scenario and point as a row of the other."
    if drift is not None and not 1 / (1 + margin) <= drift <= 1 + margin:
        said = f"Backends that did not change are {drift:.2f} times as fast as before"
        yield f"{said}: that much is the machine's, not the code's."
    if reasons:
        distinct = list(dict.fromkeys(reasons))
        more = f"; and {len(distinct) - _MOST_REASONS} more reasons" if len(distinct) > _MOST_REASONS else ""
        rows = f"{len(reasons)} rows are" if len(reasons) > 1 else "1 row is"
        yield f"{rows} not comparable: {'; '.join(distinct[:_MOST_REASONS])}{more}."
