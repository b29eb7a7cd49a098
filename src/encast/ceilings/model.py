"""What the ceilings are, and which machine they belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from encast.machine import CgroupLimits, Machine, default_threads, this_machine

__all__ = ["FORMAT", "LEVELS", "CacheLevel", "Ceilings", "Fingerprint"]

# Of the measurement and of its file. A change of either makes what is kept old.
FORMAT = 1

# Where bytes can live, nearest first.
LEVELS = ("L1", "L2", "L3", "memory")


@dataclass(frozen=True)
class CacheLevel:
    """One data cache: ``bytes`` of it serve ``cores`` physical cores."""

    name: str  # L1, L2, L3
    bytes: int
    cores: int

    def capacity(self, threads: int) -> int:
        """Bytes that the caches of ``threads`` threads, one a core, hold together."""
        return self.bytes * -(-threads // self.cores)


@dataclass(frozen=True)
class Fingerprint:
    """What a measurement is valid for: where any of it differs, it must be done again."""

    format: int
    processor: str
    isa_levels: tuple[str, ...]  # allowed ones, so ENCAST_ISA has measurements of its own
    features: tuple[str, ...]  # of these levels
    cores: int  # physical ones that the process may use
    threads: int  # that an engine would take
    caches: tuple[CacheLevel, ...]

    @staticmethod
    def here(machine: Machine | None = None) -> Fingerprint:
        """That of this machine (or of the facts given), with the native core's ISA levels.

        Raises ``ResourceError`` when ``ENCAST_ISA`` names no level that this machine has.
        """
        import encast._core as _core

        machine = machine if machine is not None else this_machine()
        allowed = [(name, features) for name, features, _, may, _ in _core.isa_levels() if may]
        return Fingerprint(
            format=FORMAT,
            processor=machine.processor,
            isa_levels=tuple(name for name, _ in allowed),
            features=tuple(sorted({feature for _, features in allowed for feature in features.split()})),
            cores=len(machine.allowed_cores),
            threads=default_threads(machine),
            caches=_data_caches(machine),
        )

    @staticmethod
    def of_all_cores(machine: Machine | None = None) -> Fingerprint:
        """As ``here`` for a process that may use every core: the same, whatever mask and quota a process is given."""
        machine = machine if machine is not None else this_machine()
        return Fingerprint.here(replace(machine, affinity=machine.online, cgroup=CgroupLimits()))

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that name the fingerprint."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _data_caches(machine: Machine) -> tuple[CacheLevel, ...]:
    found: dict[str, CacheLevel] = {}
    for cache in machine.caches:
        name = f"L{cache.level}"
        if cache.kind != "instruction" and cache.bytes > 0 and name in LEVELS and name not in found:
            found[name] = CacheLevel(name, cache.bytes, max(1, cache.shared_by // machine.threads_per_core))
    return tuple(found[name] for name in LEVELS if name in found)


@dataclass(frozen=True)
class Ceilings:
    """What this machine can do at most, measured. Rates of several threads are those of all of them together.

    Thread counts are 1 and ``threads`` in the mappings; ``peak`` and ``read`` answer for any.
    """

    fingerprint: Fingerprint
    measured: datetime
    """When, in UTC."""
    ops_per_second: Mapping[tuple[str, str, int], float]
    """(dtype, ISA level, threads) → multiplications and additions a second of that level's product instruction.

    dtype is ``f32``, ``bf16`` or ``int8``, operands stay in registers. Levels without an instruction of their own for
    the dtype have no entry.
    """
    bandwidth: Mapping[tuple[str, int], float]
    """(level, threads) → bytes a second that can be read from there. Levels: ``memory``, and what caches there are."""
    handoff_ns: float
    """Nanoseconds that a barrier of the busy team of ``threads`` threads takes; 0 for one thread."""
    doubts: tuple[str, ...] = ()
    """Why some figures are not to be trusted: sentences, none on a quiet machine."""

    @property
    def threads(self) -> int:
        """The most threads measured: one a physical core that the process may use."""
        return self.fingerprint.threads

    def level_of(self, bytes: int, threads: int = 1) -> str:
        """The nearest level that holds so many bytes, of which each of ``threads`` threads reads its own share.

        One of ``LEVELS``. A bound, as ceilings are: what just fits a cache shares it with other data in practice.
        """
        for cache in self.fingerprint.caches:
            if bytes <= cache.capacity(threads):
                return cache.name
        return "memory"

    def peak(self, dtype: str, threads: int = 1, isa: str | None = None) -> float:
        """Operations a second of ``threads`` threads at the level ``isa``, or at the fastest one that was measured.

        Counts between 1 and ``self.threads`` scale with the threads up to the measurement of all; there are no more
        cores for more. Raises ``KeyError`` for a dtype or level without entry.
        """
        if isa is None:
            levels = [level for known, level, count in self.ops_per_second if known == dtype and count == 1]
            if not levels:
                raise KeyError(
                    f"no peak of {dtype}; there are {sorted({known for known, _, _ in self.ops_per_second})}"
                )
            isa = max(levels, key=lambda level: self.ops_per_second[dtype, level, 1])
        one, every = self.ops_per_second[dtype, isa, 1], self.ops_per_second[dtype, isa, self.threads]
        return _scaled(one, every, threads, self.threads)

    def read(self, bytes: int, threads: int = 1) -> float:
        """Bytes a second at which ``threads`` threads can go over so many bytes, again and again, from
        ``level_of(bytes, threads)``; between 1 and ``self.threads`` as in ``peak``."""
        return self.read_from(self.level_of(bytes, threads), threads)

    def read_from(self, level: str, threads: int = 1) -> float:
        """Bytes a second that ``threads`` threads read from ``level``; counts in between as in ``peak``."""
        return _scaled(self.bandwidth[level, 1], self.bandwidth[level, self.threads], threads, self.threads)


def _scaled(one: float, every: float, threads: int, all_threads: int) -> float:
    return every if threads >= all_threads else min(one * threads, max(every, one))
