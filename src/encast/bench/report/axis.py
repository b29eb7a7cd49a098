"""Axes: where values go, and which ticks say so in few round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from encast.bench.report.numbers import plain

__all__ = ["Axis", "categories", "linear", "logarithmic", "thinned"]

_CANDIDATES = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))


@dataclass(frozen=True)
class Axis:
    """``low`` to ``high``, which are above 0 on a logarithmic axis; ``ticks``: values with their texts."""

    title: str
    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """How far along the axis the value is: 0 at ``low``, 1 at ``high``; what lies beyond is put at the end."""
        if self.log:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, part))


def logarithmic(title: str, values: Iterable[float], margin: float = 1.12, least: float = 1.5) -> Axis:
    """Over positive values, with a few round ticks. The axis spans at least the factor ``least``, lest values that
    hardly differ seem to."""
    found = sorted(value for value in values if value > 0)
    low, high = (found[0] / margin, found[-1] * margin) if found else (1.0, 10.0)
    if high / low < least:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(least), middle * math.sqrt(least)
    return Axis(title, low, high, True, _log_ticks(low, high))


def categories(title: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis whose ticks are the values themselves: batches, lengths, cores."""
    found = sorted(set(values))
    low, high = found[0], found[-1]
    spread = (high / low) ** 0.04 if high > low else 1.5
    return Axis(title, low / spread, high * spread, True, tuple((value, plain(value)) for value in found))


def linear(title: str, low: float, high: float) -> Axis:
    """From ``low`` to a round number at or above ``high``."""
    step = _round_step((high - low) / 4 or 1.0)
    top = low + step * math.ceil((high - low) / step - 1e-9)
    count = round((top - low) / step)
    ticks = tuple((low + step * index, _text(low + step * index, step)) for index in range(count + 1))
    return Axis(title, low, top, False, ticks)


def thinned(axis: Axis, room: float, pitch: float) -> list[tuple[float, str]]:
    """Ticks whose texts, ``pitch`` wide a character, do not touch along ``room``; the first and the last stay."""
    kept: list[tuple[float, str]] = []
    last_value, last_text = axis.ticks[-1]
    last_left = axis.at(last_value) * room - pitch * len(last_text) / 2
    right = -math.inf
    for value, text in axis.ticks[:-1]:
        place, half = axis.at(value) * room, pitch * len(text) / 2
        if place - half > right and place + half + pitch < last_left:
            kept.append((value, text))
            right = place + half + pitch
    return [*kept, axis.ticks[-1]]


def _log_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in _CANDIDATES:
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) > 9:
            ticks = ticks[:: math.ceil(len(ticks) / 6)]
        if len(ticks) >= 4:
            return tuple((tick, _log_text(tick)) for tick in ticks)
    step = _round_step((high - low) / 5)
    first = math.ceil(low / step)
    return tuple((step * index, _text(step * index, step)) for index in range(first, math.floor(high / step) + 1))


def _log_text(value: float) -> str:
    # Float noise of 3 * 10**-5 must not show.
    return f"{value:,.10g}" if 1e-3 < value < 1e6 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1.0, 2.0, 2.5, 5.0, 10.0) if digit * power >= rough * (1 - 1e-9))


def _text(value: float, step: float) -> str:
    places = max(0, -math.floor(math.log10(step)) + (1 if f"{step:.1e}".startswith("2.5") else 0))
    return f"{value:,.{places}f}"
