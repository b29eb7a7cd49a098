"""How long a batch takes, learnt from those that ran; and how much work waits."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CostModel"]

_FORGET = 0.98
"""Weight of what was known, after each new batch: about the last 50 count."""

_OUTLIER = 3.0
"""A batch that took longer than so many times what was expected counts as one that took that long: it was disturbed."""

_FIRST = 3
"""Batches for which what is expected is a guess."""

_SPREAD = 0.01
"""Of the sizes of batches, relative to their mean square; with less, overhead and speed cannot be told apart."""

_LEAST = 1e-6
"""Seconds of a batch."""

_GUESS = (1e-3, 5e-5)
"""Before anything ran: 1 ms and 50 us a token."""


@dataclass
class _Fit:
    """Least squares of seconds = overhead + token * tokens over relative errors, old batches forgotten step by step.

    Errors are relative to what was expected. Relative to what was found, batches that took longer than the others would
    count less than these, and sums of estimates would fall short of the sum of times.
    """

    overhead: float
    token: float
    seen: int = 0
    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        expected = self.overhead + self.token * tokens
        if self.seen >= _FIRST:
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
        else:
            expected = seconds
        self.seen += 1
        seconds = max(seconds, _LEAST)
        weight = 1.0 / max(expected, _LEAST) ** 2
        self.n = self.n * _FORGET + weight
        self.x = self.x * _FORGET + weight * tokens
        self.xx = self.xx * _FORGET + weight * (tokens * tokens)
        self.y = self.y * _FORGET + weight * seconds
        self.xy = self.xy * _FORGET + weight * (tokens * seconds)
        spread = self.n * self.xx - self.x * self.x
        if spread > _SPREAD * self.n * self.xx:
            self.token = (self.n * self.xy - self.x * self.y) / spread
            self.overhead = (self.y - self.token * self.x) / self.n
        else:
            # Batches of one size say nothing about the overhead: it stays.
            self.token = (self.y - self.overhead * self.n) / self.x
        if self.token <= 0 or self.overhead < 0:
            self.overhead, self.token = 0.0, self.xy / self.xx


class CostModel:
    """Seconds of a batch by (group of instances, output). A pair that has not run yet borrows from another one."""

    def __init__(self) -> None:
        self._fits: dict[tuple[int, str], _Fit] = {}

    def observe(self, group: int, output: str, tokens: int, seconds: float) -> None:
        """Learns from a batch that ran alone on an instance of the group."""
        key = (group, output)
        if key not in self._fits:
            self._fits[key] = _Fit(*self.line(group, output))
        self._fits[key].observe(tokens, seconds)

    def line(self, group: int, output: str) -> tuple[float, float]:
        """Seconds of a batch whatever it holds, and of each token in it."""
        fit = self._fits.get((group, output))
        if fit is None:
            others = sorted(self._fits, key=lambda key: (key[0] != group, key[1] != output))
            if not others:
                return _GUESS
            fit = self._fits[others[0]]
        return fit.overhead, fit.token

    def seconds(self, group: int, output: str, tokens: int) -> float:
        """What a batch of so many tokens is expected to take."""
        overhead, token = self.line(group, output)
        return overhead + token * tokens
