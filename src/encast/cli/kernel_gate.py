"""Times the gemm kernels on a product, and judges whether selection chose well."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from encast.errors import InputError

__all__ = ["DTYPES", "SLACK", "Product", "TimedKernel", "TimedProduct", "Timer", "parse_product", "time_product"]

DTYPES = ("f32", "bf16", "int8")
SLACK = 0.10
"""A chosen kernel may be so much slower than the best one of its class before the gate fails."""

# A measurement is a run of calls of about so long, since reading the clock takes some tenths of a microsecond. The
# kernels take turns, a run each.
_RUN_SECONDS = 1e-3
_MIN_RUNS = 5
# A kernel whose first runs are so much slower than the best one's has shown enough: of one thread alone, since wall
# time says nothing when another process had one of the cores.
_TRIALS = 3
_HOPELESS = 3.0


@dataclass(frozen=True)
class Product:
    """``c[m, n] = a[m, k] @ w[n, k]`` with operands of ``dtype``."""

    m: int
    n: int
    k: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k} {self.dtype}"

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k


def parse_product(text: str) -> list[Product]:
    """``M,N,K`` (every dtype) or ``M,N,K,dtype``. Raises ``InputError``."""
    size = "([1-9][0-9]{0,7})"
    found = re.fullmatch(rf"{size},{size},{size}(?:,(\w+))?", text.strip())
    if found is None or found[4] not in (None, *DTYPES):
        raise InputError(
            f"--time {text!r}: M,N,K[,dtype] is accepted, with rows, columns and depth from 1 on and one of "
            f"{', '.join(DTYPES)}; for instance 1024,768,3072,int8"
        )
    m, n, k = (int(size) for size in found.groups()[:3])
    return [Product(m, n, k, dtype) for dtype in ([found[4]] if found[4] else DTYPES)]


class Timer(Protocol):
    """What ``_core.GemmTimer`` offers."""

    def kernels(self) -> list[str]: ...
    @property
    def weight_bytes(self) -> int: ...
    def check(self, kernel: str) -> bool: ...
    def run(self, kernel: str, calls: int) -> float: ...


@dataclass(frozen=True)
class TimedKernel:
    """One kernel's times. A wrong answer is not timed: ``seconds`` is empty then."""

    name: str
    arithmetic: str
    isa: str
    chosen: bool
    right: bool
    seconds: tuple[float, ...]
    """Of a call, one value a run."""
    peak: float | None
    """Operations a second of its level's instruction with the same threads; None where that cannot be measured."""

    @property
    def best(self) -> float:
        """Seconds of a call in the quickest run: the machine's answer."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Seconds of a call in the middle run: the machine's mood."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class TimedProduct:
    """A product with all kernels that may compute it here."""

    product: Product
    threads: int
    weight_bytes: int
    kernels: tuple[TimedKernel, ...]

    def joined(self, later: TimedProduct) -> TimedProduct:
        """The runs of both timings of one product, and the higher of their peaks."""

        def join(first: TimedKernel, second: TimedKernel) -> TimedKernel:
            peaks = [peak for peak in (first.peak, second.peak) if peak is not None]
            return replace(
                first,
                right=first.right and second.right,
                seconds=first.seconds + second.seconds,
                peak=max(peaks, default=None),
            )

        return replace(self, kernels=tuple(map(join, self.kernels, later.kernels)))

    def wrong(self) -> list[str]:
        """A sentence for every kernel whose answer is wrong."""
        return [
            f"{self.product}: {kernel.name} is wrong: its answer is outside of the bound of the reference"
            for kernel in self.kernels
            if not kernel.right
        ]

    def fraction(self, kernel: TimedKernel) -> float | None:
        """The kernel's operations a second in its quickest run over its level's peak."""
        return None if kernel.peak is None else self.product.operations / kernel.best / kernel.peak

    def failures(self, min_peak: float | None = None) -> list[str]:
        """Why the gate fails, a sentence each: what is compared are kernels of the chosen one's arithmetic class,
        which give the same bits. ``min_peak`` is the fraction of the peak that the chosen one must reach."""
        (chosen,) = (kernel for kernel in self.kernels if kernel.chosen)
        if not chosen.right:
            return []  # said by wrong()
        rivals = [kernel for kernel in self.kernels if kernel.right and kernel.arithmetic == chosen.arithmetic]
        best = min(rivals, key=lambda kernel: kernel.best)
        found = []
        if chosen.best > (1 + SLACK) * best.best:
            found.append(
                f"{self.product}: {chosen.name} is chosen and takes {_microseconds(chosen.best)}, "
                f"{chosen.best / best.best - 1:.0%} more than {best.name} with {_microseconds(best.best)}"
            )
        if min_peak is not None:
            fraction = self.fraction(chosen)
            if fraction is None:
                found.append(f"{self.product}: the peak of {chosen.isa} cannot be measured for {chosen.name}")
            elif fraction < min_peak:
                found.append(
                    f"{self.product}: {chosen.name} reaches {fraction:.2f} of the peak of {chosen.isa}, "
                    f"less than {min_peak:g}"
                )
        return found


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def time_product(
    product: Product,
    timer: Timer,
    kernels: Sequence[tuple[str, str, str]],
    chosen: str,
    threads: int,
    seconds: float,
    peak: Callable[[str, str], float | None],
) -> TimedProduct:
    """Times every kernel that ``timer`` has, each for at least ``seconds`` and some runs; hopeless ones less.

    ``kernels``: (name, arithmetic class, ISA level) of at least those; ``chosen``: what selection would take.
    ``peak(dtype, isa)``: operations a second of the level's instruction, asked before and after.
    """
    facts = {name: (arithmetic, isa) for name, arithmetic, isa in kernels}
    names = timer.kernels()
    right = {name: timer.check(name) for name in names}
    runs: dict[str, list[float]] = {name: [] for name in names}
    calls = dict.fromkeys(names, 1)
    peaks: dict[str, list[float]] = {isa: [] for isa in {facts[name][1] for name in names}}

    def ask_peaks() -> None:
        for isa, found in peaks.items():
            rate = peak(product.dtype, isa)
            found.extend([] if rate is None else [rate])

    spent = dict.fromkeys(names, 0.0)

    def run(name: str, calls: int) -> float:
        value = timer.run(name, calls)
        spent[name] += value * calls
        return value

    ask_peaks()
    racing = [name for name in names if right[name]]
    for name in racing:
        single = [run(name, 1)]
        while len(single) < _TRIALS and spent[name] < seconds:
            single.append(run(name, 1))
        calls[name] = max(1, round(_RUN_SECONDS / max(min(single), 1e-7)))
        runs[name] = single if calls[name] == 1 else [run(name, calls[name])]
    leader = min((min(runs[name]) for name in racing), default=0.0)
    racing = [name for name in racing if threads > 1 or name == chosen or min(runs[name]) <= _HOPELESS * leader]
    while racing:
        for name in racing:
            runs[name].append(run(name, calls[name]))
        racing = [name for name in racing if spent[name] < seconds or len(runs[name]) < _MIN_RUNS]
    ask_peaks()
    return TimedProduct(
        product,
        threads,
        timer.weight_bytes,
        tuple(
            TimedKernel(
                name,
                *facts[name],
                name == chosen,
                right[name],
                tuple(runs[name]),
                max(peaks[facts[name][1]], default=None),
            )
            for name in names
        ),
    )
