"""``Calibration``: what the inputs of a model's products held while it read some texts, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from encast.errors import InputError
from encast.quant.ranges import BINS, Histogram, fixed_point, range_of
from encast.quant.spec import QuantSpec

__all__ = ["Calibration", "Observed"]

Array = np.ndarray[Any, Any]


@dataclass
class Observed:
    """Of one value: the extremes of every channel, ``low`` and ``high: f64[channels]``, and all elements' histogram."""

    low: Array
    high: Array
    histogram: Histogram = field(default_factory=Histogram)

    @staticmethod
    def of(channels: int) -> Observed:
        """Nothing seen yet."""
        return Observed(np.full(channels, np.inf), np.full(channels, -np.inf))

    def add(self, rows: Array) -> None:
        """Takes in finite ``rows: [n, channels]``."""
        self.low = np.minimum(self.low, rows.min(axis=0, initial=np.inf))
        self.high = np.maximum(self.high, rows.max(axis=0, initial=-np.inf))
        self.histogram.add(rows)

    def largest(self) -> Array:
        """The largest magnitude of every channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


@dataclass(frozen=True)
class Calibration:
    """``values``: by the value's name, of the graph that is to be quantised.

    ``tokens``: how many rows were seen. ``move_outliers``: the exponent with which outliers were moved to the weights
    before ``values`` were observed, or None; ``largest``: then the largest magnitudes ``f64[channels]`` of the values
    as they were before.
    """

    values: Mapping[str, Observed]
    tokens: int
    move_outliers: float | None = None
    largest: Mapping[str, Array] = field(default_factory=dict)

    @staticmethod
    def of_fixed(ranges: Mapping[str, tuple[float, int]]) -> Calibration:
        """What ``fixed`` gives back exactly, with ranges ``minmax`` and zero points: by the value, an f32 scale that is
        no smaller than the smallest normal one and the zero point of unsigned bytes.

        No rows were seen, so histograms are empty and ``minmax`` is the only method.
        """
        seen = {}
        for name, (scale, zero) in ranges.items():
            # In f64 both ends and their distance, 255 scales, are exact.
            low, high = np.array([-zero * scale]), np.array([(255 - zero) * scale])
            seen[name] = Observed(low, high)
        return Calibration(seen, 0)

    def fixed(self, value: str, spec: QuantSpec, zero_point: bool) -> tuple[float, int]:
        """Scale and zero point of a value's bytes, as ``spec`` chooses them; raises ``InputError`` for one not seen."""
        seen = self.values.get(value)
        if seen is None:
            raise InputError(
                f"the calibration has not seen {value!r}, which a product reads: it is of another model or task; "
                "calibrate the checkpoint that you compile, with the same task"
            )
        low, high = float(seen.low.min()), float(seen.high.max())
        return fixed_point(*range_of(seen.histogram, low, high, spec.ranges, spec.percentile), zero_point)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "tokens": self.tokens,
            "move_outliers": self.move_outliers,
            "values": {
                name: {
                    "low": seen.low.tolist(),
                    "high": seen.high.tolist(),
                    "reach": seen.histogram.reach,
                    "counts": seen.histogram.counts.tolist(),
                }
                for name, seen in self.values.items()
            },
            "largest": {name: largest.tolist() for name, largest in self.largest.items()},
        }

    @staticmethod
    def from_json(data: Any) -> Calibration:
        """The inverse of ``to_json`` for data that nobody vouches for; raises ``InputError``."""
        try:
            values = {
                str(name): Observed(
                    _vector(item["low"]),
                    _vector(item["high"]),
                    Histogram(_reach(item["reach"]), _counts(item["counts"])),
                )
                for name, item in data["values"].items()
            }
            largest = {str(name): _vector(item) for name, item in data["largest"].items()}
            exponent = data["move_outliers"]
            return Calibration(values, int(data["tokens"]), None if exponent is None else float(exponent), largest)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InputError(
                f"the calibration is malformed ({type(error).__name__}: {str(error)[:200]}); make it again with "
                "encast.calibrate"
            ) from None


def _vector(item: Any) -> Array:
    vector = np.asarray(item, np.float64)
    if vector.ndim != 1 or not len(vector) or not (np.abs(vector) <= np.finfo(np.float32).max).all():
        raise ValueError("a list of finite f32 numbers is needed")
    return vector


def _reach(item: Any) -> float:
    reach = float(item)
    if not 0 < reach <= 2.0**128:
        raise ValueError(f"reach is {reach}")
    return reach


def _counts(item: Any) -> Array:
    counts = np.asarray(item)
    if counts.dtype != np.int64 or counts.shape != (BINS,) or not counts.any():
        raise ValueError(f"counts are not {BINS} counts")
    if (counts < 0).any() or (counts > np.iinfo(np.int64).max // BINS).any():
        raise ValueError(f"counts are not {BINS} counts")
    return counts
