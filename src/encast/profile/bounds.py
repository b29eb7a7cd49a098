"""What bounds a step on this machine: its operations at the measured peaks, its bytes at the measured bandwidths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from encast.ceilings import Ceilings
from encast.profile.work import Work

__all__ = ["Bound", "Homes", "arithmetic_seconds", "bound_of", "memory_seconds", "peak_of", "product_dtype"]

_PRODUCT_DTYPES = {"f32": "f32", "s8": "int8", "bf16_fma": "bf16", "bf16_dp": "bf16", "bf16_tile": "bf16"}


@dataclass(frozen=True)
class Homes:
    """How many bytes live together, which decides the level of memory that they come from.

    ``weights``: of all products of the forward. ``tables``: the looked-up rows of the word table. ``block``: the memory
    of one thread's block of rows. ``arena``: the values between the stages.
    """

    weights: int
    tables: int
    block: int
    arena: int


@dataclass(frozen=True)
class Bound:
    """Seconds that a step cannot be done in less than, each by one resource alone.

    ``memory``: level → seconds that its bytes take. The resources work side by side, so the bound is the largest.
    """

    arithmetic: float
    memory: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return max(self.arithmetic, *self.memory.values(), 0.0)

    @property
    def holds(self) -> str:
        """``arithmetic``, or the level of memory."""
        level = max(self.memory, key=lambda name: self.memory[name], default="")
        return "arithmetic" if not level or self.arithmetic >= self.memory[level] else level


def product_dtype(arithmetic: str) -> str:
    """The dtype whose instruction peak counts for an arithmetic class of products."""
    return _PRODUCT_DTYPES[arithmetic]


def peak_of(ceilings: Ceilings, dtype: str, isa: str, threads: int) -> float:
    """Operations a second of the fastest product instruction of a dtype that a kernel of the level ``isa`` may use."""
    levels = ceilings.fingerprint.isa_levels
    usable = levels[: levels.index(isa) + 1] if isa in levels else levels
    rates = [ceilings.peak(dtype, threads, level) for level in usable if (dtype, level, 1) in ceilings.ops_per_second]
    return max(rates) if rates else ceilings.peak(dtype, threads)


def arithmetic_seconds(work: Work, dtype: str, isa: str, ceilings: Ceilings, threads: int) -> float:
    """Products at their dtype's peak, and after them everything else at the peak of f32: they share the same ports."""
    products = work.products / peak_of(ceilings, dtype, isa, threads) if work.products else 0.0
    elements = work.elements / peak_of(ceilings, "f32", isa, threads) if work.elements else 0.0
    return products + elements


def memory_seconds(work: Work, homes: Homes, ceilings: Ceilings, threads: int) -> dict[str, float]:
    """Level → seconds at its bandwidth. Writes count as reads, which are never slower."""
    seconds: dict[str, float] = {}

    def add(moved: int, living: int, sharers: int) -> None:
        if moved:
            level = ceilings.level_of(living, sharers)
            seconds[level] = seconds.get(level, 0.0) + moved / ceilings.read_from(level, threads)

    add(work.weight_bytes, homes.weights, threads)
    add(work.table_bytes, homes.tables, threads)
    add(work.value_bytes.get("block", 0), homes.block, 1)
    add(work.value_bytes.get("arena", 0), homes.arena, threads)
    add(work.value_bytes.get("caller", 0), homes.arena, threads)
    return seconds


def bound_of(work: Work, dtype: str, isa: str, homes: Homes, ceilings: Ceilings, threads: int) -> Bound:
    """The bound of a step's work; ``dtype`` is its products' (any where it has none)."""
    return Bound(
        arithmetic_seconds(work, dtype, isa, ceilings, threads), memory_seconds(work, homes, ceilings, threads)
    )
