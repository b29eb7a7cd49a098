"""What the machine allows: arithmetic at the measured instruction peak, weights at the measured bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import encast.knobs as knobs
from encast.batch import Batch
from encast.ceilings import Ceilings
from encast.ir import Graph

__all__ = ["Limit", "Sizes", "peak", "peak_is_the_machine_s", "quickest", "settled_peak"]

_PAUSES = (0.3, 1.0, 3.0)
"""Seconds before a peak is measured again: two to three are what processors stayed on one core for."""
_SAMPLES = 3
_SCALES = 0.75
"""Of what cores reach one by one, busy ones reach more than this together, except where their clock falls further."""

WEIGHT_BYTES = {"f32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class Sizes:
    """``weights``: of the products that every token goes through; ``layers`` attend over ``hidden`` columns."""

    weights: int
    layers: int
    hidden: int

    @staticmethod
    def of(graph: Graph) -> Sizes:
        """Of a plain graph: a weight that several layers share is multiplied in each of them."""
        products = [node for node in graph.nodes if node.op == "linear"]
        weights = sum(graph.constants[node.inputs[1]].array.size for node in products)
        return Sizes(weights, graph.meta.layers, graph.meta.hidden)

    def operations(self, batch: Batch) -> int:
        """Multiplications and additions: the products, and attention's two of length x length."""
        lengths = np.diff(batch.cu_seqlens).astype(np.int64)
        attention = 4 * self.layers * self.hidden * int((lengths * lengths).sum())
        return 2 * self.weights * batch.tokens + attention


@dataclass(frozen=True)
class Limit:
    """What bounds sequences a second when ``instances`` take batches side by side, or share each batch (``split``).

    ``operations`` and ``sequences`` are of a batch, a mean over the id sets. ``read_bytes_per_second`` is None where
    this machine's ceilings have not been measured (`encast doctor --measure`); arithmetic alone is the limit then.
    """

    operations: float
    sequences: float
    weight_bytes: int
    instances: int
    split: bool
    ops_per_second: float
    read_bytes_per_second: float | None

    @staticmethod
    def of(
        sizes: Sizes,
        dtype: str,
        batches: Sequence[Batch],
        *,
        instances: int,
        split: bool,
        threads: int,
        ops_per_second: float,
        ceilings: Ceilings | None,
    ) -> Limit:
        """``threads`` and ``ops_per_second``: of all instances together."""
        size = sizes.weights * WEIGHT_BYTES[dtype]
        return Limit(
            operations=float(np.mean([sizes.operations(batch) for batch in batches])),
            sequences=float(np.mean([batch.seqs for batch in batches])),
            weight_bytes=size,
            instances=instances,
            split=split,
            ops_per_second=ops_per_second,
            read_bytes_per_second=None if ceilings is None else ceilings.read(size, min(threads, ceilings.threads)),
        )

    @property
    def sequences_per_second(self) -> float:
        """No contender of the dtype can answer more."""
        at_once = 1 if self.split else self.instances
        arithmetic = at_once * self.operations / self.ops_per_second
        return at_once * self.sequences / max(arithmetic, self._read_seconds)

    @property
    def bound(self) -> str:
        """``arithmetic``, or ``weights`` when every instance waits longer for them."""
        at_once = 1 if self.split else self.instances
        return "arithmetic" if at_once * self.operations / self.ops_per_second >= self._read_seconds else "weights"

    @property
    def _read_seconds(self) -> float:
        if not self.read_bytes_per_second:
            return 0.0
        return self.instances * self.weight_bytes / self.read_bytes_per_second

    def record(self, sequences_per_second: float | None) -> dict[str, Any]:
        """The field ``limit`` of a row; ``fraction`` is what was reached of it."""
        return {
            "operations": self.operations,
            "ops_per_second": self.ops_per_second,
            "read_bytes_per_second": self.read_bytes_per_second,
            "bound": self.bound,
            "sequences_per_s": self.sequences_per_second,
            "fraction": None if sequences_per_second is None else sequences_per_second / self.sequences_per_second,
        }


def peak(dtype: str, threads: int, seconds: float = 0.06) -> float:
    """Operations a second that the product instructions of so many threads reach, operands in registers."""
    import encast._core as _core

    return float(_core.peak_ops_per_second(dtype, threads, seconds))


def settled_peak(dtype: str, threads: int, cores: int, wait: Callable[[float], None] = time.sleep) -> float:
    """The best ``peak`` of threads on so many cores, measured again, later, while they do far less than one by one.

    One sample is of one moment, in which neighbours may take some percent. A host that has put two processors on one
    core for a while halves it. Where the clock of many busy cores is as low, that costs some seconds, once.
    """
    found, alone = (max(peak(dtype, count) for _ in range(_SAMPLES)) for count in (threads, 1))
    for pause in _PAUSES:
        if found >= _SCALES * cores * alone:
            break
        wait(pause)
        found = max(found, peak(dtype, threads))
    return found


def quickest(dtype: str, threads: int, cores: int) -> float:
    """Operations a second that no runtime whose answers agree as ``dtype`` asks can exceed on threads on so many cores.

    As many times what one core reaches, where that is more than all reach at once: a host that puts two processors on
    one core for a while halves what is measured of both, and a runtime that is timed before or after exceeds it.

    For f32 that may be more than the f32 instructions reach: tiles take bf16 operands only, but two or three bf16
    products give what one in f32 does, and tiles for TF32 run at half of bf16's rate. One bf16 product is not enough:
    the answers would not agree.
    """
    most = max(peak(dtype, threads), cores * peak(dtype, 1))
    return max(most, quickest("bf16", threads, cores) / 2) if dtype == "f32" else most


def peak_is_the_machine_s() -> bool:
    """Whether ``peak`` is measured with the fastest product instructions that there are.

    Not where ``ENCAST_ISA`` forbids some of them, nor on a processor for which there are only scalar ones.
    """
    import encast._core as _core

    allowed = [name for name, _, _, allowed, _ in _core.isa_levels() if allowed]
    return knobs.get("ENCAST_ISA") is None and allowed[-1] != "scalar"
