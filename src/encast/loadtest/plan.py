"""What a load test does, said before it begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from encast.errors import InputError
from encast.loadtest.requests import Source
from encast.measure.arrivals import poisson, read_trace

__all__ = ["ClosedLoop", "Load", "OpenLoop", "Plan", "Ramp"]


@dataclass(frozen=True)
class ClosedLoop:
    """Each of ``clients`` sends its next request when the last is answered, ``requests`` times or for ``seconds``,
    whichever ends first. Raises ``InputError`` when neither is given."""

    clients: int
    requests: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.clients < 1 or (self.requests is None and self.seconds is None):
            raise InputError("a closed loop needs clients, and the requests of each or the seconds")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise InputError(f"a closed loop of {self.seconds:g} seconds; give a number above 0")

    @property
    def most_requests(self) -> float:
        return math.inf if self.requests is None else self.clients * self.requests

    def __str__(self) -> str:
        each = "" if self.requests is None else f", {self.requests:,} requests each"
        return f"{self.clients:,} clients{each}" + ("" if self.seconds is None else f", {self.seconds:g} s")

    def describe(self) -> dict[str, Any]:
        return {"kind": "closed", "clients": self.clients, "requests": self.requests, "seconds": self.seconds}


@dataclass(frozen=True)
class OpenLoop:
    """Requests that come when they come. ``due``: nanoseconds since the begin, rising; ``what`` says whence."""

    due: Sequence[int]
    what: Mapping[str, Any]

    @staticmethod
    def poisson(rate: float, seconds: float, seed: int = 0) -> OpenLoop:
        """At random, ``rate`` a second; raises ``InputError``."""
        return OpenLoop(poisson(rate, seconds, seed), {"rate": rate, "seconds": seconds, "seed": seed})

    @staticmethod
    def trace(path: str) -> OpenLoop:
        """As they were recorded, see ``read_trace``; raises ``InputError``."""
        due = read_trace(path)
        return OpenLoop(due, {"trace": path, "seconds": due[-1] / 1e9})

    @property
    def most_requests(self) -> float:
        return len(self.due)

    def __str__(self) -> str:
        arrivals = f"arrivals of {self.what['trace']}" if "trace" in self.what else f"{self.what['rate']:g} a second"
        return f"{arrivals}, {self.what['seconds']:g} s"

    def describe(self) -> dict[str, Any]:
        return {"kind": "open", **self.what}


@dataclass(frozen=True)
class Ramp:
    """Poisson arrivals whose rate rises from ``first`` to ``last`` in equal ``steps``, together ``seconds`` long.

    A step ends when all its requests have an end, so none inherits the queue of the one before. A rate is *served*
    when at least 0.95 of its requests are answered in time, and, with ``limit_ms``, their p99 is within it. Two steps
    in a row that are not served end the ramp. Raises ``InputError``.
    """

    first: float
    last: float
    seconds: float
    steps: int = 10
    limit_ms: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.first < self.last < math.inf or not 0 < self.seconds < math.inf or self.steps < 2:
            raise InputError(
                f"a ramp from {self.first:g} to {self.last:g} a second in {self.seconds:g} s and {self.steps} steps; "
                "give a rate above 0, a higher one, and at least 2 steps"
            )
        self.due(self.steps - 1)  # raises when it would be too many

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def rates(self) -> list[float]:
        rise = (self.last - self.first) / (self.steps - 1)
        return [self.first + number * rise for number in range(self.steps)]

    def due(self, number: int) -> list[int]:
        """Arrivals of a step in nanoseconds since its begin."""
        return poisson(self.rates[number], self.step_seconds, (self.seed, number), exact=True)

    @property
    def most_requests(self) -> float:
        return sum(max(1, round(rate * self.step_seconds)) for rate in self.rates)

    def __str__(self) -> str:
        return f"{self.first:g} to {self.last:g} a second, {self.steps} steps of {self.step_seconds:g} s"

    def describe(self) -> dict[str, Any]:
        known = {name: getattr(self, name) for name in ("first", "last", "seconds", "steps", "limit_ms", "seed")}
        return {"kind": "ramp", **known}


Load = ClosedLoop | OpenLoop | Ramp


@dataclass(frozen=True)
class Plan:
    """``url``: the server's address, before the protocol's path. ``model``: None asks the server.

    ``sources`` are taken in turn, ``batch`` texts a request. ``fields`` are added to every body of JSON, such as
    ``{"truncate": True}``. ``timeout``: seconds from sending to the whole answer. ``connections``: the most at once in
    open loops; a request beyond waits, and its latency counts the wait. ``warmup`` requests are sent first and not
    counted, at least one. ``reference``: files of known answers (``read_reference``).
    """

    url: str
    sources: Sequence[Source]
    load: Load
    protocol: str = "openai"
    model: str | None = None
    batch: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 30.0
    connections: int = 1024
    warmup: int = 16
    reference: Sequence[str] = ()
    tolerance: float = 0.0
