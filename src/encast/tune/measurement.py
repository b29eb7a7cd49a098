"""What was measured for a set-up, and which set-ups no other one beats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from encast.backends.groups import Setup, read_setup, setup_to_json
from encast.errors import EncastError, InputError

__all__ = ["Measurement", "Trial", "median_trial", "pareto_front"]

_JSON_NAMES = {"rate": "sequences_per_s", "saturated": "saturated_sequences_per_s"}


@dataclass(frozen=True)
class Measurement:
    """One measurement of one set-up under the workload."""

    rate: float
    """Texts a second: the highest rate at which the latency limit was kept, 0 where none was; without a limit,
    the throughput with endless texts waiting."""
    saturated: float
    """Texts a second with endless texts waiting."""
    latency_ms: Mapping[str, float | None] = field(default_factory=dict)
    """Percentiles by name (``p50``): from arrival to answer, at the highest rate tried that kept the limit; without
    a limit, of the runs."""
    excess: float = 1.0
    """Where ``rate`` is 0: the percentile over its limit, at the lowest rate that was tried."""
    memory_bytes: int | None = None
    """Resident memory of the process, shared pages in full: what a service alone with this set-up would hold."""
    requests: int = 0
    """Texts that were answered for it."""
    seconds: float = 0.0
    """What it took, opening included."""
    noise: str | None = None
    """Why the machine was not quiet, if it was not."""
    failed: str | None = None
    """Why there is no measurement, if there is none."""

    @staticmethod
    def failure(error: EncastError) -> Measurement:
        return Measurement(0.0, 0.0, excess=1e9, failed=str(error)[:500])

    @property
    def score(self) -> float:
        """What a search maximises: the rate, and where there is none, the nearer to the limit the greater."""
        return self.rate if self.rate > 0 else -self.excess

    def to_json(self) -> dict[str, Any]:
        fields = {**vars(self), "latency_ms": dict(self.latency_ms), "seconds": round(self.seconds, 3)}
        return {_JSON_NAMES.get(name, name): value for name, value in fields.items()}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Measurement:
        """What ``to_json`` wrote; raises ``InputError`` for anything else."""

        def maybe(kind: Callable[[Any], Any], value: Any) -> Any:
            return None if value is None else kind(value)

        kinds: dict[str, Callable[[Any], Any]] = {
            "rate": _finite,
            "saturated": _finite,
            "latency_ms": lambda those: {str(name): maybe(_finite, value) for name, value in dict(those).items()},
            "excess": _finite,
            "memory_bytes": lambda value: maybe(_whole, value),
            "requests": _whole,
            "seconds": _finite,
            "noise": lambda value: maybe(str, value),
            "failed": lambda value: maybe(str, value),
        }
        try:
            return Measurement(**{name: kind(document[_JSON_NAMES.get(name, name)]) for name, kind in kinds.items()})
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"no measurement ({type(error).__name__}: {error})") from None


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _whole(value: Any) -> int:
    _finite(value)
    return int(value)


@dataclass(frozen=True)
class Trial:
    """One measurement of a search: ``source`` says why this set-up was tried."""

    setup: Setup
    measurement: Measurement
    source: str

    def to_json(self, usd_per_million: float | None = None) -> dict[str, Any]:
        """A row of ``trials`` or ``front`` of the configuration file."""
        return {
            "setup": setup_to_json(self.setup),
            "source": self.source,
            **self.measurement.to_json(),
            "cores": self.setup.cores,
            "usd_per_million": usd_per_million,
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Trial:
        """What ``to_json`` wrote; raises ``InputError`` for anything else."""
        setup = read_setup(document.get("setup"), "setup", batch_tokens=1)
        return Trial(setup, Measurement.from_json(document), str(document.get("source")))


def median_trial(trials: Sequence[Trial]) -> Trial:
    """By score; of two the lower one."""
    return sorted(trials, key=lambda trial: trial.measurement.score)[(len(trials) - 1) // 2]


def pareto_front(trials: Sequence[Trial], percent: str) -> list[Trial]:
    """The trials of which no other is at least as good in throughput, latency and memory and better in one.

    ``percent`` names the latency that counts (``p99``). Cost is the price of the machine over the throughput, so that
    it has the throughput's order. Best throughput first; of several trials of one set-up the median one stands for all.
    """
    by_setup: dict[Setup, list[Trial]] = {}
    for trial in trials:
        if trial.measurement.failed is None and trial.measurement.rate > 0:
            by_setup.setdefault(trial.setup, []).append(trial)
    middle = [median_trial(of) for of in by_setup.values()]

    def costs(trial: Trial) -> tuple[float, ...]:
        latency = trial.measurement.latency_ms.get(percent)
        memory = trial.measurement.memory_bytes
        return (
            -trial.measurement.rate,
            math.inf if latency is None else latency,
            math.inf if memory is None else float(memory),
        )

    def beaten(one: Trial) -> bool:
        mine = costs(one)
        return any(
            costs(other) != mine and all(a <= b for a, b in zip(costs(other), mine, strict=True)) for other in middle
        )

    return sorted((one for one in middle if not beaten(one)), key=costs)
