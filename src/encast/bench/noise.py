"""How much the machine did besides what was measured, and how much the rounds differ."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np

from encast.bench.placement import HALVED, PLACES

__all__ = ["Noise", "NoiseLimits", "NoiseMeter", "rounds_suffice", "spread", "steady_place"]


@dataclass(frozen=True)
class NoiseLimits:
    """Beyond these a row says that the machine was noisy; shares of the processors' time, and of the median round."""

    steal: float = 0.02
    other_cpu: float = 0.05
    spread: float = 0.15


@dataclass(frozen=True)
class Noise:
    """``steal``: the share of the processors' time that a host gave to others; ``other_cpu``: that processes other
    than the measured ones used, on their cores' other hardware threads too; both None where /proc/stat does not say."""

    steal: float | None
    other_cpu: float | None

    def record(self, figures: Sequence[float], places: Sequence[str], limits: NoiseLimits) -> dict[str, Any]:
        """The field ``noise`` of a row whose rounds gave these figures at these places."""
        wide = spread(figures)
        why = []
        if self.steal is not None and self.steal > limits.steal:
            why.append(f"the host took {self.steal:.1%} of the processors' time")
        if self.other_cpu is not None and self.other_cpu > limits.other_cpu:
            why.append(f"other processes used {self.other_cpu:.1%} of the processors' time")
        if wide is not None and wide > limits.spread:
            why.append(f"half of the rounds differ by {wide:.1%} of their median")
        kinds = Counter(places)
        if len(kinds) > 1:
            counted = ", ".join(f"{count} {place}" for place, count in kinds.most_common())
            why.append(f"processors moved between cores or caches during the rounds ({counted})")
        elif HALVED in kinds:
            why.append("of two processors that were busy each did half, as threads of one core do")
        return {
            "steal": self.steal,
            "other_cpu": self.other_cpu,
            "spread": wide,
            "placement": next(iter(kinds)) if len(kinds) == 1 else "mixed",
            "noisy": bool(why),
            "why": why,
        }


class NoiseMeter:
    """What the processors ``cpus`` do from its making to ``read``.

    ``siblings``: hardware threads of the same cores that were given to nobody. What runs there takes from the core.
    """

    def __init__(self, cpus: Collection[int], siblings: Collection[int] = (), stat: Path = Path("/proc/stat")) -> None:
        self._cpus, self._siblings, self._stat = set(cpus), set(siblings) - set(cpus), stat
        self._before, self._began = self._times(), time.perf_counter()

    def read(self, own_cpu_s: float) -> Noise:
        """``own_cpu_s``: processor seconds of the measured processes and of this one since then."""
        after, seconds = self._times(), time.perf_counter() - self._began
        if self._before is None or after is None or not self._cpus or seconds <= 0:
            return Noise(None, None)
        # Ticks are counted when they fall, so the sum of all fields may miss the clock by one or two.
        steal, busy = (now - then for now, then in zip(after, self._before, strict=True))
        whole = seconds * len(self._cpus)
        return Noise(max(0.0, steal) / whole, max(0.0, busy - own_cpu_s) / whole)

    def _times(self) -> tuple[float, float] | None:
        """Seconds of steal, and, siblings counted, of user, nice, system, irq and softirq, since the machine started.

        See proc(5).
        """
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return None
        tick = os.sysconf("SC_CLK_TCK")
        steal = busy = 0
        found = set()
        for line in lines:
            name, *fields = line.split()
            if not (name.startswith("cpu") and name[3:].isdigit() and len(fields) >= 8):
                continue
            cpu = int(name[3:])
            user, nice, system, _, _, irq, softirq, stolen = map(int, fields[:8])
            if cpu in self._cpus:
                found.add(cpu)
                steal += stolen
            if cpu in self._cpus or cpu in self._siblings:
                busy += user + nice + system + irq + softirq
        # A container's own file may number its processors anew.
        return (steal / tick, busy / tick) if found == self._cpus else None


def spread(figures: Sequence[float]) -> float | None:
    """The distance of the quartiles over the median; None with fewer than three figures."""
    if len(figures) < 3:
        return None
    low, middle, high = np.percentile(figures, (25, 50, 75))
    return float((high - low) / middle) if middle else None


def steady_place(places: Sequence[Mapping[int, str]], least: int) -> str | None:
    """The place whose rounds are kept: the first of ``PLACES`` at which every contender was in ``least`` rounds.

    ``places``: of every round, where each contender was. One at which every two were in as many together goes before,
    because a ratio is of the rounds that both were in. None when none is: then all rounds count. Rounds with processors
    on one core and on two, or in one cache and in two, have different times, so a row that mixes them says little.
    """
    kept = [place for place in PLACES if _fewest_rounds(places, place, 1) >= least]
    return next(iter([*_paired(places, least), *kept]), None)


def rounds_suffice(places: Sequence[Mapping[int, str]], least: int) -> bool:
    """Whether more time would better nothing: every ratio has ``least`` rounds of one place that is not halved, or
    where the last was is not known."""
    return "unknown" in places[-1].values() or bool(_paired(places, least))


def _paired(places: Sequence[Mapping[int, str]], least: int) -> list[str]:
    return [place for place in PLACES if place != HALVED and _fewest_rounds(places, place, 2) >= least]


def _fewest_rounds(places: Sequence[Mapping[int, str]], place: str, together: int) -> int:
    """In how many rounds any so many contenders were at the place together, at least; 0 where there is no contender."""
    contenders = {index for one in places for index in one}
    return min(
        (
            sum(all(one.get(index) == place for index in group) for one in places)
            for group in combinations_with_replacement(contenders, together)
        ),
        default=0,
    )
