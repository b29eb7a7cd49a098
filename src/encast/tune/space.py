"""The set-ups that a search chooses from: all that fit the machine and differ in something that a workload can feel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from encast.backends.groups import InstanceGroup, Setup
from encast.errors import InputError

__all__ = ["Point", "Space", "make_card_space", "make_space", "thresholds_of"]

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_FILLS = (0.25, 0.5, 0.75, 1.0)
_SHARES = (0.125, 0.25, 0.5, 0.75)
_BATCH_TOKENS = (256, 512, 1024, 2048, 4096, 8192)
_CARD_BATCH_TOKENS = (*(tokens for power in range(8, 15) for tokens in (1 << power, 3 << (power - 1))), 1 << 15)
"""Up to the largest batch that runs as a CUDA graph. All are sizes that graphs have, so that a full batch has no
padding."""
_THRESHOLD_QUANTILES = (0.5, 0.75, 0.9)
_THRESHOLD_GRAIN = 8


class Point(NamedTuple):
    """The coordinates that samplers work with. Several points may be one set-up, and some are none."""

    kind: str
    """``one`` group of instances; two groups ``apart``, on cores of their own; or two that have ``shared`` cores."""
    wide: int
    """Threads of an instance of the group that takes every text."""
    fill: float
    """The share of the cores that its instances take. For ``one`` only: two groups take all that they have, since
    idle cores help only where all instances wait for the same memory."""
    narrow: int
    """Threads of an instance of the group for short texts."""
    share: float
    """The share of the cores that this group has, if they are apart."""
    threshold: int
    """Its longest text."""
    batch_tokens: int


def thresholds_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths at which dispatch may part the texts: their median, third quartile and ninth decile.

    Rounded up to multiples of 8 and left out where no text would be longer. Texts that are nearly all alike have none.
    """
    if not lengths:
        raise InputError("the workload has no text; give at least one")
    array = np.asarray(lengths)
    # Lengths that occur: between two of them every threshold parts the texts alike.
    found = np.quantile(array, _THRESHOLD_QUANTILES, method="inverted_cdf")
    rounded = {math.ceil(tokens / _THRESHOLD_GRAIN) * _THRESHOLD_GRAIN for tokens in found}
    return tuple(sorted(tokens for tokens in rounded if tokens < array.max()))


@dataclass(frozen=True)
class Space:
    """The set-ups for ``cores`` cores, instances of ``widths`` threads, and texts that ``thresholds`` part.

    Without thresholds there is one group. ``on_cards``: every core stands for a card, which has one instance always.
    """

    cores: int
    widths: tuple[int, ...]
    thresholds: tuple[int, ...]
    batch_tokens: tuple[int, ...]
    on_cards: bool = False

    @property
    def fills(self) -> tuple[float, ...]:
        """What ``Point.fill`` may be."""
        return (1.0,) if self.on_cards else _FILLS

    @property
    def choices(self) -> Mapping[str, tuple[str | int | float, ...]]:
        """What each coordinate of a point may be."""
        parted = bool(self.thresholds) and self.cores > 1
        return {
            "kind": ("one", "apart", "shared") if parted else ("one",),
            "wide": self.widths,
            "fill": self.fills,
            "narrow": self.widths,
            "share": _SHARES,
            "threshold": self.thresholds or (0,),
            "batch_tokens": self.batch_tokens,
        }

    @cached_property
    def setups(self) -> dict[Setup, Point]:
        """Every set-up of the full grid, and one of its points."""
        found: dict[Setup, Point] = {}
        for point in self._points():
            setup = self.setup(point)
            if setup is not None:
                found.setdefault(setup, point)
        return found

    def setup(self, point: Point) -> Setup | None:
        """The set-up of a point; None when it does not fit the machine, or is what a simpler one is."""
        if point.kind == "one":
            instances = max(1, round(self.cores * point.fill / point.wide))
            fits = instances * point.wide <= self.cores
            return Setup((InstanceGroup(instances, point.wide),), point.batch_tokens) if fits else None
        if point.kind == "shared":
            # Of one width they would be one group whose instances stand in each other's way.
            if point.narrow >= point.wide:
                return None
            small, large = self.cores // point.narrow, self.cores // point.wide
        else:
            own = self._own(point.share)
            if point.narrow > point.wide:
                return None
            small, large = own // point.narrow, (self.cores - own) // point.wide
        if not small or not large:
            return None
        groups = (InstanceGroup(small, point.narrow, point.threshold), InstanceGroup(large, point.wide))
        return Setup(groups, point.batch_tokens, point.kind == "shared")

    def nearest(self, point: Point) -> Point:
        """A point that is a set-up: the one given, or with widths that fit, or of one group where two do not."""
        if self.setup(point) is not None:
            return point
        if point.kind == "one":
            # One instance of any width fits.
            return point._replace(fill=next(fill for fill in self.fills if self.setup(point._replace(fill=fill))))
        own = self._own(point.share)
        if point.kind == "shared":
            narrow = max((width for width in self.widths if width < point.wide), default=0)
            fitting = point._replace(narrow=narrow)
        else:
            wide = max(width for width in self.widths if width <= min(point.wide, self.cores - own))
            narrow = max(width for width in self.widths if width <= min(point.narrow, own, wide))
            fitting = point._replace(wide=wide, narrow=narrow)
        if fitting.narrow and self.setup(fitting) is not None:
            return fitting
        return self.nearest(point._replace(kind="one"))

    def _own(self, share: float) -> int:
        """The cores of the group for short texts; both groups have at least one."""
        return min(max(1, round(self.cores * share)), self.cores - 1)

    def _points(self) -> Iterator[Point]:
        """Points in which only the coordinates that their kind has vary."""
        some = Point("one", 1, self.fills[0], 1, _SHARES[0], self.choices["threshold"][0], 1)  # type: ignore[arg-type]
        for tokens in self.batch_tokens:
            for wide in self.widths:
                here = some._replace(wide=wide, batch_tokens=tokens)
                for fill in self.fills:
                    yield here._replace(fill=fill)
                if len(self.choices["kind"]) == 1:
                    continue
                for narrow in self.widths:
                    for threshold in self.thresholds:
                        two = here._replace(kind="shared", narrow=narrow, threshold=threshold)
                        yield two
                        for share in _SHARES:
                            yield two._replace(kind="apart", share=share)


def make_space(cores: int, lengths: Sequence[int]) -> Space:
    """The space of a machine with that many usable cores, for texts of these lengths.

    Runs hold at least the longest text, so smaller bounds than that are left out. Raises ``InputError`` without cores
    or texts.
    """
    if cores < 1:
        raise InputError(f"{cores} cores; a machine has at least one")
    thresholds = thresholds_of(lengths)
    widths = tuple(sorted({width for width in _WIDTHS if width <= cores} | {cores}))
    longest = max(lengths)
    tokens = tuple(bound for bound in _BATCH_TOKENS if bound >= longest) or (longest,)
    return Space(cores, widths, thresholds if cores > 1 else (), tokens)


def make_card_space(cards: int, lengths: Sequence[int]) -> Space:
    """The space of so many cards: the tokens of a batch, with one instance on each card.

    As ``make_space`` it leaves out what does not hold the longest text, and raises ``InputError`` without texts.
    """
    if not lengths:
        raise InputError("the workload has no text; give at least one")
    longest = max(lengths)
    tokens = tuple(bound for bound in _CARD_BATCH_TOKENS if bound >= longest) or (longest,)
    return Space(cards, (1,), (), tokens, on_cards=True)
