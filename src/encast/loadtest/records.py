"""What became of every request, in columns: cheap to add to while the clock runs."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from encast.measure.arrivals import Responses

__all__ = ["ANSWERED", "REJECTED", "WRONG", "Columns", "Records"]

ANSWERED, REJECTED, WRONG = 0, 1, 2
"""Outcomes; higher ones are errors, by the place of their kind in ``Records.kinds``."""

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Records:
    """``due``, ``begun``, ``ended``: nanoseconds since the test began; in closed loops ``due`` is ``begun``."""

    def __init__(self) -> None:
        self.kinds = ["answered", "rejected", "wrong answer"]
        self._codes = {kind: code for code, kind in enumerate(self.kinds)}
        self._due, self._begun, self._ended = array("q"), array("q"), array("q")
        self._texts, self._tokens, self._source, self._outcome = array("q"), array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._due)

    def add(self, times: tuple[int, int, int], source: int, texts: int, tokens: int | None, outcome: int) -> None:
        """``times``: due, begun, ended. ``tokens``: None when the server does not say, which is kept as -1."""
        self._due.append(times[0])
        self._begun.append(times[1])
        self._ended.append(times[2])
        self._source.append(source)
        self._texts.append(texts)
        self._tokens.append(-1 if tokens is None else tokens)
        self._outcome.append(outcome)

    def error(self, kind: str) -> int:
        """The outcome of this kind of error."""
        if kind not in self._codes:
            self._codes[kind] = len(self.kinds)
            self.kinds.append(kind)
        return self._codes[kind]

    def since(self, first: int) -> Columns:
        """A copy of all from the ``first`` on."""
        columns = (self._due, self._begun, self._ended, self._source, self._texts, self._tokens, self._outcome)
        return Columns(*(np.array(column[first:], np.int64) for column in columns))


class Columns:
    """``i64[n]`` each, in the order in which requests ended."""

    def __init__(self, *columns: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self.due, self.begun, self.ended, self.source, self.texts, self.tokens, self.outcome = columns

    def __len__(self) -> int:
        return len(self.due)

    def where(self, chosen: Bools) -> Columns:
        columns = (self.due, self.begun, self.ended, self.source, self.texts, self.tokens, self.outcome)
        return Columns(*(column[chosen] for column in columns))

    def of(self, outcome: int) -> Columns:
        return self.where(self.outcome == outcome)

    @property
    def responses(self) -> Responses:
        return Responses(*(column.astype(np.float64) for column in (self.due, self.begun, self.ended)))
