"""What the machine allows: arithmetic at the measured instruction peak, weights at the measured bandwidth."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import encast.knobs as knobs
from encast.batch import Batch
from encast.bench.scenarios.base import Point
from encast.ceilings import Ceilings
from encast.ceilings.card import CardCeilings
from encast.ir import Graph

__all__ = ["WEIGHT_BYTES", "Sizes", "card_limit", "most", "peak", "peak_is_known", "roofline"]

_SAMPLES = 5
_PAUSE = 0.2
WEIGHT_BYTES = {"f32": 4, "bf16": 2, "int8": 1}
"""Of the dtypes that processors have product instructions for."""

_CARD_WEIGHT_BYTES = {**WEIGHT_BYTES, "f16": 2, "f8": 1}


@dataclass(frozen=True)
class Sizes:
    """``weights``: not zero, of the products that every token goes through; ``layers`` attend over ``hidden`` columns.
    ``distances``: products of tokens with vectors of distances, in all layers (DeBERTa).
    """

    weights: int
    layers: int
    hidden: int
    distances: int = 0

    @staticmethod
    def of(graph: Graph) -> Sizes:
        """Of a plain graph: a weight that several layers share is multiplied in each of them. What tables go through
        is computed once, when a model is made. Zeros of a pruned weight need neither be read nor multiplied.
        """
        linears = [node for node in graph.nodes if node.op == "linear"]
        products = [node for node in linears if graph.type_of(node.outputs[0]).shape[0] == "tokens"]
        weights = sum(int(np.count_nonzero(graph.constants[node.inputs[1]].array)) for node in products)
        distances = sum(node.op == "relative_scores" for node in graph.nodes)
        return Sizes(weights, graph.meta.layers, graph.meta.hidden, distances)

    def operations(self, batch: Batch) -> int:
        """Multiplications and additions: the products, attention's two of length x length, and those of distances."""
        lengths = np.diff(batch.cu_seqlens).astype(np.int64)
        attention = (4 * self.layers + 2 * self.distances) * self.hidden * int((lengths * lengths).sum())
        return 2 * self.weights * batch.tokens + attention


def roofline(
    sizes: Sizes, dtype: str, point: Point, ceilings: Ceilings | None, sequences_per_s: float | None
) -> dict[str, Any]:
    """The field ``limit`` of a row: the sequences a second that no system of the dtype can exceed at the point.

    Instances take batches side by side, or share each batch (``split``). ``operations`` are of a batch, a mean over the
    id sets. ``bound`` is ``weights`` where every instance waits longer for them than for arithmetic.
    ``read_bytes_per_second`` is None where this machine's ceilings have not been measured (`encast doctor --measure`);
    arithmetic alone is the limit then. ``fraction`` is what was reached of it.
    """
    threads = point.instances * point.threads
    weight_bytes = sizes.weights * WEIGHT_BYTES[dtype]
    read = None if ceilings is None else ceilings.read(weight_bytes, min(threads, ceilings.threads))
    return _limit(sizes, point, peak(dtype, threads), read, weight_bytes, sequences_per_s)


def card_limit(
    sizes: Sizes, dtype: str, point: Point, ceilings: CardCeilings, sequences_per_s: float | None
) -> dict[str, Any] | None:
    """``roofline`` of a card that all instances share; None where its ceilings have no product of the dtype.

    Its arithmetic is that of the best large product of its library, so a fraction above 1 is possible.
    """
    if dtype not in ceilings.ops_per_second:
        return None
    weight_bytes = sizes.weights * _CARD_WEIGHT_BYTES[dtype]
    return _limit(
        sizes, point, ceilings.ops_per_second[dtype], ceilings.bytes_per_second, weight_bytes, sequences_per_s
    )


def _limit(
    sizes: Sizes,
    point: Point,
    ops_per_second: float,
    read: float | None,
    weight_bytes: int,
    sequences_per_s: float | None,
) -> dict[str, Any]:
    at_once = 1 if point.split else point.instances
    operations = float(np.mean([sizes.operations(batch) for batch in point.batches]))
    arithmetic_s = at_once * operations / ops_per_second
    weights_s = point.instances * weight_bytes / read if read else 0.0
    sequences = at_once * float(np.mean([batch.seqs for batch in point.batches]))
    limit = sequences / max(arithmetic_s, weights_s)
    return {
        "operations": operations,
        "ops_per_second": ops_per_second,
        "read_bytes_per_second": read,
        "bound": "arithmetic" if arithmetic_s >= weights_s else "weights",
        "sequences_per_s": limit,
        "fraction": None if sequences_per_s is None else sequences_per_s / limit,
    }


_peaks: dict[tuple[str, int], float] = {}


def peak(dtype: str, threads: int, again: bool = False) -> float:
    """Operations a second that the product instructions of so many threads reach, operands in registers.

    The best of some samples over a second, in which a host may take the processors for others. Measured once, so that
    rows of one command have one limit, and ``again`` where a backend would be accused; the best of all counts.
    """
    import encast._core as _core

    best = _peaks.get((dtype, threads), 0.0)
    if again or not best:
        for number in range(_SAMPLES):
            time.sleep(_PAUSE if number else 0)
            best = max(best, float(_core.peak_ops_per_second(dtype, threads, 0.06)))
        _peaks[dtype, threads] = best
    return best


def most(dtype: str, threads: int, cores: int, again: bool = False) -> float:
    """Operations a second that no runtime whose answers agree as ``dtype`` asks can exceed on threads on so many cores.

    As many times what one core reaches, where that is more than all reach at once: their clock may have been lower when
    they were measured.

    For f32 that may be more than the f32 instructions reach: tiles take bf16 operands only, but two or three bf16
    products give what one in f32 does, and tiles for TF32 run at half of bf16's rate. One bf16 product is not enough:
    the answers would not agree.
    """
    found = max(peak(dtype, threads, again), cores * peak(dtype, 1, again))
    return max(found, most("bf16", threads, cores, again) / 2) if dtype == "f32" else found


def peak_is_known() -> bool:
    """Whether ``peak`` is measured with the fastest product instructions that there are.

    Not where ``ENCAST_ISA`` forbids some of them, nor on a processor for which there are only scalar ones.
    """
    import encast._core as _core

    allowed = [name for name, _, _, allowed, _ in _core.isa_levels() if allowed]
    return knobs.get("ENCAST_ISA") is None and allowed[-1] != "scalar"
