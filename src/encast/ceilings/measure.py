"""Measures the ceilings, on the threads that an engine would take. Some ten seconds on a quiet machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from encast.ceilings.model import Ceilings, Fingerprint
from encast.machine import Machine, this_machine, usable_cores

__all__ = ["Rate", "judge", "measure", "rate_of", "working_set"]

# Everything is measured several times, seconds apart: what else a server runs comes and goes.
_PASSES = 3
# Rounds shorter than the scheduler's time slice: some find all threads running even on a busy machine.
_ROUND_SECONDS = 0.002
_PEAK_ROUNDS, _READ_ROUNDS, _BARRIER_ROUNDS = 20, 40, 40
# A round counts as undisturbed when every thread had a processor for so much of it.
_RUNNING = 0.95
_MIN_UNDISTURBED = 5
# A rate is what the best tenth of the rounds reach: the single best one may have been lucky with what was cached.
_QUANTILE = 0.9
# The passes of a quiet machine agree within 3 %, about memory within 10.
_SPREAD = 0.15
_MIN_MEMORY_BYTES = 128 << 20

Rounds = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Rate:
    """What one pass found: units a second, and the part of the time that the threads were running."""

    value: float
    running: float


def rate_of(rounds: Rounds, *, shared: bool) -> Rate:
    """The rate of one pass's rounds (rate, part of the round that every thread was running).

    ``shared``: the threads share what they use. Then a round in which one of them waited shows the others too fast,
    and only undisturbed ones are taken, or the least disturbed ones where these are too few.
    """
    calm = sorted(rounds, key=lambda round: -round[1])
    if shared:
        undisturbed = sum(running >= _RUNNING for _, running in calm)
        calm = calm[: max(undisturbed, _MIN_UNDISTURBED)]
    rates = sorted(rate for rate, _ in calm)
    return Rate(rates[round(_QUANTILE * (len(rates) - 1))], calm[-1][1] if shared else 1.0)


def judge(passes: Sequence[Rate]) -> tuple[float, str | None]:
    """The best of the passes, undisturbed ones first, and why it is not to be trusted."""
    calm = [one for one in passes if one.running >= _RUNNING]
    values = [one.value for one in calm or passes]
    best, worst = max(values), min(values)
    if not calm:
        return min(values), f"other processes left a thread {max(one.running for one in passes):.0%} of the time"
    if worst < (1 - _SPREAD) * best:
        return best, f"a measurement seconds earlier or later gave {1 - worst / best:.0%} less"
    return best, None


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
    import encast._core as _core

    machine = machine if machine is not None else this_machine()
    fingerprint = Fingerprint.here(machine)
    cpus = usable_cores(machine)
    limits = [limit for limit in (machine.memory_bytes, machine.cgroup.memory_bytes) if limit is not None]
    levels = [*(cache.name for cache in fingerprint.caches), "memory"]
    teams = list(dict.fromkeys((tuple(cpus[:1]), tuple(cpus))))
    peaks: dict[tuple[str, str, int], list[Rate]] = {}
    reads: dict[tuple[str, int], list[Rate]] = {}
    barriers: list[float] = []
    for turn in range(_PASSES):
        for team in teams:
            threads = len(team)
            if progress is not None:
                progress(f"pass {turn + 1} of {_PASSES}, {_threads(threads)}")
            for dtype, isa in _core.peak_probes():
                rounds = _core.measure_ops(dtype, isa, team, _PEAK_ROUNDS, _ROUND_SECONDS)
                peaks.setdefault((dtype, isa, threads), []).append(rate_of(rounds, shared=False))
            for level in levels:
                size = working_set(level, fingerprint, threads, min(limits, default=None))
                size = max(size // _core.READ_BLOCK_BYTES, 1) * _core.READ_BLOCK_BYTES
                shared = threads > 1 and level not in ("L1", "L2")
                forms = [
                    rate_of(_core.measure_reads(size, prefetch, team, _READ_ROUNDS, _ROUND_SECONDS), shared=shared)
                    for prefetch in (False, True)
                ]
                reads.setdefault((level, threads), []).append(max(forms, key=lambda rate: rate.value))
        # Wall time: the median ignores rounds in which a thread waited.
        barriers.append(statistics.median(_core.measure_barriers(cpus, _BARRIER_ROUNDS)))
    doubts: list[str] = []

    def judged(what: str, threads: int, passes: Sequence[Rate]) -> float:
        value, doubt = judge(passes)
        if doubt is not None:
            doubts.append(f"{what}, {_threads(threads)}: {doubt}")
        return value

    return Ceilings(
        fingerprint,
        datetime.now(timezone.utc).replace(microsecond=0),
        {key: judged(f"{key[0]} at {key[1]}", key[2], passes) for key, passes in peaks.items()},
        {key: judged(f"reads from {key[0]}", key[1], passes) for key, passes in reads.items()},
        # Teams fall into step at different paces and keep theirs: the quickest is the bound.
        min(barriers),
        tuple(doubts),
    )


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"
