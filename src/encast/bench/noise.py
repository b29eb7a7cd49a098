"""How much the machine did besides what was measured, and how much the rounds differ."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["NoiseMeter"]

# Beyond these a row says that the machine was noisy.
MOST_STEAL = 0.02
MOST_OTHER_CPU = 0.05
MOST_SPREAD = 0.15
"""Of the quartiles of the rounds, over their median."""


class NoiseMeter:
    """What the processors ``cpus`` do from its making to ``stop``.

    ``siblings``: hardware threads of the same cores that were given to nobody. What runs there takes from the core.
    ``steal``: the share of the processors' time that a host gave to others; ``other_cpu``: that processes other than
    the measured ones used; both None where /proc/stat does not say.
    """

    steal: float | None = None
    other_cpu: float | None = None

    def __init__(self, cpus: Collection[int], siblings: Collection[int] = (), stat: Path = Path("/proc/stat")) -> None:
        self._cpus, self._siblings, self._stat = set(cpus), set(siblings) - set(cpus), stat
        self._before, self._began = self._times(), time.perf_counter()

    def stop(self, own_cpu_s: float) -> None:
        """``own_cpu_s``: processor seconds of the measured processes and of this one since then."""
        after, seconds = self._times(), time.perf_counter() - self._began
        if self._before is None or after is None or not self._cpus or seconds <= 0:
            return
        # Ticks are counted when they fall, so the sum of all fields may miss the clock by one or two.
        steal, busy = (now - then for now, then in zip(after, self._before, strict=True))
        whole = seconds * len(self._cpus)
        self.steal, self.other_cpu = max(0.0, steal) / whole, max(0.0, busy - own_cpu_s) / whole

    def record(self, figures: Sequence[float]) -> dict[str, Any]:
        """The field ``noise`` of a row whose rounds gave these figures."""
        low, middle, high = np.percentile(figures, (25, 50, 75)) if len(figures) > 2 else (0, 0, 0)
        wide = float((high - low) / middle) if middle else None
        why = []
        if self.steal is not None and self.steal > MOST_STEAL:
            why.append(f"the host took {self.steal:.1%} of the processors' time")
        if self.other_cpu is not None and self.other_cpu > MOST_OTHER_CPU:
            why.append(f"other processes used {self.other_cpu:.1%} of the processors' time")
        if wide is not None and wide > MOST_SPREAD:
            why.append(f"half of the rounds differ by {wide:.1%} of their median")
        return {"steal": self.steal, "other_cpu": self.other_cpu, "spread": wide, "noisy": bool(why), "why": why}

    def _times(self) -> tuple[float, float] | None:
        """Seconds of steal, and, siblings counted, of user, nice, system, irq and softirq, since the machine started.

        See proc(5). psutil numbers the lines of the file, which is wrong where a processor is offline.
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
