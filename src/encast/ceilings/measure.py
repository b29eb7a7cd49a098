"""Measures the ceilings, on the threads that an engine would take. Some ten seconds on a quiet machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

from encast.ceilings.model import Ceilings, Fingerprint
from encast.machine import Machine, this_machine, usable_cores

__all__ = ["Rate", "judge", "measure", "working_set"]

_PEAK_ROUNDS, _PEAK_SECONDS = 20, 0.006
_READ_ROUNDS, _READ_SECONDS = 20, 0.01
_BARRIER_ROUNDS = 100
# A round counts as undisturbed when every thread had a processor for so much of it.
_RUNNING = 0.9
_MIN_UNDISTURBED = 3
# Rounds of a quiet machine lie within 6 % of the best one; memory's, which other tenants of a server share, within 10.
_SPREAD = 0.15
_MIN_MEMORY_BYTES = 128 << 20

Rounds = Sequence[tuple[float, float]]


class Rate(float):
    """A rate with the ``doubt`` that its rounds leave, in words, or None."""

    doubt: str | None

    def __new__(cls, value: float, doubt: str | None = None) -> Rate:
        self = super().__new__(cls, value)
        self.doubt = doubt
        return self


def judge(rounds: Rounds, *, shared: bool) -> Rate:
    """The best of the rounds (rate, part of the time that the threads were running), and what to think of it.

    ``shared``: the threads share what they use. Then a round in which one of them waited shows the others too fast,
    and only undisturbed ones are taken, or the least disturbed quarter where these are too few.
    """
    rates = [rate for rate, _ in rounds]
    doubt = None
    if shared:
        undisturbed = [rate for rate, running in rounds if running >= _RUNNING]
        if len(undisturbed) >= _MIN_UNDISTURBED:
            rates = undisturbed
        else:
            calmest = sorted(rounds, key=lambda round: -round[1])[: max(1, len(rounds) // 4)]
            rates = [rate for rate, _ in calmest]
            doubt = f"other processes left a thread {calmest[-1][1]:.0%} of the time"
    best = max(rates)
    spread = 1 - statistics.median(rates) / best
    if doubt is None and spread > _SPREAD:
        doubt = f"half of the rounds are more than {spread:.0%} below the best"
    return Rate(best, doubt)


def working_set(level: str, fingerprint: Fingerprint, threads: int, memory_bytes: int | None = None) -> int:
    """Bytes that each of ``threads`` threads goes over so that they come from ``level``.

    Half of the level's share leaves room for what else lives there, and is far more than the nearer caches keep of a
    cyclic sweep. Where a share is not: the nearer one on top, which suits caches that exclude each other.
    ``memory_bytes`` is what there is of memory; a quarter of it is used at most.
    """
    nearer = 0
    for cache in fingerprint.caches:
        share = cache.capacity(threads) // threads
        if cache.name == level:
            return share // 2 if share >= 4 * nearer else nearer + share // 2
        nearer = share
    total = max(4 * nearer * threads, _MIN_MEMORY_BYTES)
    if memory_bytes is not None:
        total = min(total, memory_bytes // 4)
    return total // threads


def measure(machine: Machine | None = None, progress: Callable[[str], None] | None = None) -> Ceilings:
    """Measures this machine with one thread and with all that an engine would take, pinned one a core.

    ``progress`` hears what is measured next. Raises ``ResourceError`` when ``ENCAST_ISA`` names no level that this
    machine has, a thread cannot be started or pinned, or memory is short.
    """
    from encast import _core

    machine = machine if machine is not None else this_machine()
    fingerprint = Fingerprint.here(machine)
    cpus = usable_cores(machine)
    limits = [limit for limit in (machine.memory_bytes, machine.cgroup.memory_bytes) if limit is not None]
    levels = [*(cache.name for cache in fingerprint.caches), "memory"]
    say = progress if progress is not None else lambda _: None
    peaks: dict[tuple[str, str, int], Rate] = {}
    reads: dict[tuple[str, int], Rate] = {}
    for team in dict.fromkeys((tuple(cpus[:1]), tuple(cpus))):
        threads = len(team)
        several = f"{threads} thread{'s' if threads > 1 else ''}"
        say(f"product instructions, {several}")
        for dtype, isa in _core.peak_probes():
            rounds = _core.measure_ops(dtype, isa, team, _PEAK_ROUNDS, _PEAK_SECONDS)
            peaks[dtype, isa, threads] = judge(rounds, shared=False)
        for level in levels:
            say(f"reads from {level}, {several}")
            bytes = working_set(level, fingerprint, threads, min(limits, default=None))
            bytes = max(bytes // _core.READ_BLOCK_BYTES, 1) * _core.READ_BLOCK_BYTES
            shared = threads > 1 and level not in ("L1", "L2")
            reads[level, threads] = max(
                judge(_core.measure_reads(bytes, prefetch, team, _READ_ROUNDS, _READ_SECONDS), shared=shared)
                for prefetch in (False, True)
            )
    say("hand-over between threads")
    # Wall time, so only the calm rounds tell; the longest run of them is at the low end.
    barriers = sorted(_core.measure_barriers(cpus, _BARRIER_ROUNDS))
    handoff = statistics.median(barriers[: len(barriers) // 2])
    doubts = [
        *(_doubt(f"{dtype} at {isa}", count, rate) for (dtype, isa, count), rate in peaks.items()),
        *(_doubt(f"reads from {level}", count, rate) for (level, count), rate in reads.items()),
    ]
    return Ceilings(
        fingerprint,
        datetime.now(timezone.utc).replace(microsecond=0),
        {key: float(rate) for key, rate in peaks.items()},
        {key: float(rate) for key, rate in reads.items()},
        handoff,
        tuple(doubt for doubt in doubts if doubt),
    )


def _doubt(what: str, threads: int, rate: Rate) -> str | None:
    return None if rate.doubt is None else f"{what}, {threads} thread{'s' if threads > 1 else ''}: {rate.doubt}"
