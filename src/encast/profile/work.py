"""What a step cannot do without: operations and bytes, from its shape alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from encast.batch import Batch, Int32
from encast.profile.plan_text import PlanText, StepText, ValueText

__all__ = ["ELEMENT_OPERATIONS", "Chunk", "Work", "chunks_of", "work_of"]

ELEMENT_OPERATIONS = {
    "none": 0,
    "relu": 1,
    "gelu": 8,
    "gelu_tanh": 8,
    "silu": 16,
    "tanh": 16,
    # A score: the largest so far, its distance from that, the power (reduction of the argument and a polynomial of
    # degree five), its share of the sum.
    "softmax": 16,
    # A column of a row: mean, difference, square and sum, scale and shift.
    "norm": 7,
    # Extremes, scale, round.
    "narrow": 4,
    "add": 1,
    "scale": 1,
    "pool": 1,
    "normalize": 3,
}
"""f32 operations an element (a fused multiply-add is two) of everything that is no product, in the cheapest form that
the kernels have. Conversions, shuffles and loads are not counted: this is a bound."""


@dataclass(frozen=True)
class Chunk:
    """Whole sequences that go through the plan together: tokens, sequences, selected rows, the sum of the squares of
    the lengths, and how many different token ids there are."""

    tokens: int
    seqs: int
    selected: int
    squares: int
    words: int

    def rows(self, symbol: str) -> int:
        """Rows of values of a kind: tokens, seqs or selected."""
        return {"tokens": self.tokens, "seqs": self.seqs, "selected": self.selected}[symbol]


@dataclass(frozen=True)
class Work:
    """``products``: multiplications and additions of the step's products; ``elements``: f32 operations beside them.

    ``weight_bytes`` are read once; ``table_bytes`` are the rows of the embedding tables that are looked up.
    ``value_bytes``: place of values (``block``, ``arena``, ``caller``) → bytes read and written there.
    """

    products: int = 0
    elements: int = 0
    weight_bytes: int = 0
    table_bytes: int = 0
    value_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.table_bytes + sum(self.value_bytes.values())

    def __add__(self, other: Work) -> Work:
        places = {*self.value_bytes, *other.value_bytes}
        return Work(
            self.products + other.products,
            self.elements + other.elements,
            self.weight_bytes + other.weight_bytes,
            self.table_bytes + other.table_bytes,
            {place: self.value_bytes.get(place, 0) + other.value_bytes.get(place, 0) for place in places},
        )


def chunks_of(batch: Batch, chunk_tokens: int, select: Int32 | None = None) -> list[Chunk]:
    """The chunks in which the executor takes a batch: as many whole sequences as fit, one after the other."""
    bounds = batch.cu_seqlens.astype(np.int64)
    lengths = np.diff(bounds)
    chunks = []
    first = 0
    while first < batch.seqs:
        end = max(first + 1, int(np.searchsorted(bounds, bounds[first] + chunk_tokens, "right")) - 1)
        begin, stop = int(bounds[first]), int(bounds[end])
        selected = 0 if select is None else int(np.count_nonzero((select >= begin) & (select < stop)))
        chunks.append(
            Chunk(
                stop - begin,
                end - first,
                selected,
                int(np.sum(lengths[first:end] ** 2)),
                int(np.unique(batch.token_ids[begin:stop]).size),
            )
        )
        first = end
    return chunks


def work_of(plan: PlanText, step: StepText, chunk: Chunk) -> Work:
    """The work of a step on one chunk."""
    out = plan.made(step)
    x = plan.value(step, "x")
    rows = chunk.rows(out.rows)
    read = [(x, chunk.rows(x.rows))] if x is not None else []
    if (other := plan.value(step, "other")) is not None:
        read.append((other, rows))
    also = plan.value(step, "also")
    written = [(value, rows) for value in (out, also) if value is not None]
    elements = 0
    if also is not None:
        elements += rows * also.cols * ELEMENT_OPERATIONS["narrow"]
    if step.kind == "linear":
        return _linear(plan, step, rows, read, written)
    if step.kind == "attention":
        assert x is not None
        elements += chunk.squares * int(step.keys["heads"]) * ELEMENT_OPERATIONS["softmax"]
        if step.keys["arithmetic"] == "s8":  # queries, keys and values become codes inside
            elements += rows * x.cols * ELEMENT_OPERATIONS["narrow"]
        return Work(
            products=4 * chunk.squares * out.cols,
            elements=elements,
            value_bytes=_moved([*read, *written]),
        )
    if step.kind == "embed":
        tables = [table for key in ("word", "position", "token_type") if (table := plan.weight(step, key)) is not None]
        elements += rows * out.cols * (len(tables) - 1 + ELEMENT_OPERATIONS["norm"])
        return Work(0, elements, 0, rows * out.cols * 4 * len(tables), _moved(written))
    if step.kind == "pool":
        # It makes the columns of one mode, and reads every row once.
        assert x is not None
        return Work(0, chunk.rows(x.rows) * x.cols, 0, 0, _moved([*read, (_columns(out, x.cols), rows)]))
    if step.kind in ("first", "select"):
        # Only the rows that it gathers.
        assert x is not None
        return Work(value_bytes=_moved([(x, rows), *written]))
    cost = ELEMENT_OPERATIONS.get(step.kind, 0)
    if step.kind == "elementwise":
        cost = ELEMENT_OPERATIONS[step.keys["act"]] + (step.keys["factor"] != "1")
    cost += other is not None
    return Work(0, elements + rows * out.cols * cost, 0, 0, _moved([*read, *written]))


def _linear(
    plan: PlanText,
    step: StepText,
    rows: int,
    read: Iterable[tuple[ValueText, int]],
    written: Iterable[tuple[ValueText, int]],
) -> Work:
    weight = plan.weight(step, "w")
    assert weight is not None
    out = plan.made(step)
    vectors = [one for key in ("scale", "colsum", "bias") if (one := plan.weight(step, key)) is not None]
    return Work(
        products=2 * rows * weight.rows * weight.cols,
        elements=rows * weight.rows * ELEMENT_OPERATIONS[step.keys["act"].removesuffix("_coarse")],
        weight_bytes=weight.nbytes + sum(vector.nbytes for vector in vectors),
        value_bytes=_moved(
            [*read, *((_columns(value, weight.rows) if value is out else value, n) for value, n in written)]
        ),
    )


def _columns(value: ValueText, cols: int) -> ValueText:
    """Some of a value's columns."""
    return ValueText(value.dtype, value.rows, cols, value.place)


def _moved(values: Sequence[tuple[ValueText, int]]) -> dict[str, int]:
    moved: dict[str, int] = {}
    for value, rows in values:
        moved[value.place] = moved.get(value.place, 0) + rows * value.row_bytes
    return moved
