"""What a step cannot do without: operations and bytes, from its shape alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from encast._core import PlanStep, PlanValue, PlanWeight
from encast.batch import Batch, Int32

__all__ = ["ELEMENT_OPERATIONS", "WORK_OF_KIND", "Chunk", "Work", "chunks_of", "work_of"]

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
    # Two products and a sum a column.
    "rotary": 3,
    # A copy.
    "window": 0,
    "gated": 1,
}
"""f32 operations an element (a fused multiply-add is two) of everything that is no product, in the cheapest form that
the kernels have. Conversions, shuffles and loads are not counted: this is a bound."""


@dataclass(frozen=True)
class Chunk:
    """Whole sequences that go through the plan together: tokens, sequences, selected rows, the sum of the squares of
    the lengths, how many different token ids there are, and the lengths."""

    tokens: int
    seqs: int
    selected: int
    squares: int
    words: int
    lengths: tuple[int, ...] = ()

    def pairs(self, reach: int) -> int:
        """Pairs of a query and a key of its sequence that are at most ``reach`` apart, 0: all; hidden keys too."""
        if reach == 0:
            return self.squares
        near = [min(reach, length - 1) for length in self.lengths]
        return sum(length * (2 * most + 1) - most * (most + 1) for length, most in zip(self.lengths, near, strict=True))

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
                tuple(map(int, lengths[first:end])),
            )
        )
        first = end
    return chunks


def work_of(step: PlanStep, chunk: Chunk, *, heads: bool = False, dense: float = 0) -> Work:
    """The work of a step on one chunk.

    ``heads``: it ran in tasks of heads, so that what the product makes and attention reads is the thread's own.
    ``dense``: the share of the rows of a sparse product for which its weight was multiplied in panels.
    """
    own = "block" if heads else ""
    work = WORK_OF_KIND[step.kind](step, chunk, own)
    if not dense:
        return work
    panels = _panels(step, chunk, own, "dense")
    return replace(
        work,
        products=round(panels.products * dense + work.products * (1 - dense)),
        weight_bytes=sum(one.nbytes for one in product_weights(step, dense=dense)),
    )


def _embed(step: PlanStep, chunk: Chunk, _: str) -> Work:
    out = step.keys["out"]
    tables = sum(key in step.keys for key in ("word", "position", "token_type"))
    norm = ELEMENT_OPERATIONS["norm"] if "gamma" in step.keys else 0
    elements = chunk.tokens * out.cols * (tables - 1 + norm) + _narrowing(step, chunk)
    return Work(0, elements, 0, chunk.tokens * out.cols * 4 * tables, _moved(chunk, step))


def _linear(step: PlanStep, chunk: Chunk, own: str) -> Work:
    return _panels(step, chunk, own, "w")


def _panels(step: PlanStep, chunk: Chunk, own: str, key: str) -> Work:
    weight: PlanWeight = step.keys[key]
    rows = chunk.rows(step.keys["out"].rows)
    return Work(
        products=2 * rows * weight.rows * weight.cols,
        elements=rows * weight.rows * _after_sum(step),
        weight_bytes=sum(one.nbytes for one in product_weights(step, dense=1 if key == "dense" else 0)),
        value_bytes=_moved(chunk, step, columns=weight.rows, out=own),
    )


def _sparse(step: PlanStep, chunk: Chunk, own: str) -> Work:
    # Of the products only those that are left; groups that are not full count whole, as they are computed.
    out = step.keys["out"]
    groups: PlanWeight = step.keys["w"]
    rows = chunk.rows(out.rows)
    return Work(
        products=2 * rows * groups.rows * groups.cols,
        elements=rows * out.cols * _after_sum(step),
        weight_bytes=sum(weight.nbytes for weight in product_weights(step)),
        value_bytes=_moved(chunk, step, out=own),
    )


def _after_sum(step: PlanStep) -> int:
    """Operations an output of a product: its activation, and the residual."""
    return ELEMENT_OPERATIONS[step.keys["act"]] + ("other" in step.keys)


def product_weights(step: PlanStep, *, dense: float = 0) -> list[PlanWeight]:
    """What a product reads of the weights file; ``dense`` as of ``work_of``."""
    sparse = ("w", "columns", "starts") if dense < 1 else ()
    names = (*(("dense",) if dense > 0 else ()), *sparse, "scale", "colsum", "bias")
    return [step.keys[name] for name in names if name in step.keys]


def _attention(step: PlanStep, chunk: Chunk, own: str) -> Work:
    x, out = step.keys["x"], step.keys["out"]
    pairs = chunk.pairs(step.keys["reach"])
    elements = pairs * step.keys["heads"] * ELEMENT_OPERATIONS["softmax"]
    if step.keys["arithmetic"] == "s8":  # queries, keys and values become codes inside
        elements += chunk.tokens * x.cols * ELEMENT_OPERATIONS["narrow"]
    # Of a table of distances those that the longest text has.
    tables = sum(key in step.keys for key in ("key_table", "query_table"))
    width = out.cols // step.keys["heads"] if step.keys["shared_tables"] else out.cols
    table_bytes = tables * (2 * max(chunk.lengths, default=1) - 1) * width * 4
    return Work((4 + 2 * tables) * pairs * out.cols, elements, 0, table_bytes, _moved(chunk, step, x=own))


def _pool(step: PlanStep, chunk: Chunk, _: str) -> Work:
    # It makes the columns of one mode, and reads every row once.
    x: PlanValue = step.keys["x"]
    elements = chunk.rows(x.rows) * x.cols * ELEMENT_OPERATIONS["pool"]
    return Work(0, elements, 0, 0, _moved(chunk, step, columns=x.cols))


def _gather(step: PlanStep, chunk: Chunk, _: str) -> Work:
    # Only the rows that it gathers.
    x, out = step.keys["x"], step.keys["out"]
    rows = chunk.rows(out.rows)
    return Work(value_bytes=_summed([(x.place, rows * x.row_bytes()), (out.place, rows * out.row_bytes())]))


def _rows(step: PlanStep, chunk: Chunk, _: str) -> Work:
    """Of steps that make each row from the same row alone."""
    out: PlanValue = step.keys["out"]
    columns = out.cols
    if step.kind == "elementwise":
        columns = step.keys["x"].cols  # with others it may make one value
        cost = ELEMENT_OPERATIONS[step.keys["act"]] + (step.keys["factor"] != 1)
    elif step.kind == "gated":
        cost = ELEMENT_OPERATIONS[step.keys["act"]] + ELEMENT_OPERATIONS["gated"]
    else:
        cost = ELEMENT_OPERATIONS[step.kind]
    cost += "other" in step.keys
    elements = chunk.rows(out.rows) * columns * cost + _narrowing(step, chunk)
    return Work(0, elements, 0, 0, _moved(chunk, step, columns=columns))


def _rotary(step: PlanStep, chunk: Chunk, _: str) -> Work:
    # Queries and keys; of the table as many rows as the longest sequence has, which are few beside the values.
    out: PlanValue = step.keys["out"]
    turned = out.cols // 3 * 2
    moved = {out.place: 2 * chunk.tokens * out.row_bytes(turned)}
    return Work(0, chunk.tokens * turned * ELEMENT_OPERATIONS["rotary"], 0, 0, moved)


WORK_OF_KIND: dict[str, Callable[[PlanStep, Chunk, str], Work]] = {
    "embed": _embed,
    "norm": _rows,
    "linear": _linear,
    "sparse": _sparse,
    "attention": _attention,
    "rotary": _rotary,
    "narrow": _rows,
    "elementwise": _rows,
    "gated": _rows,
    "pool": _pool,
    "first": _gather,
    "select": _gather,
    "window": _rows,
    "normalize": _rows,
}
"""Of every kind of step; the last argument is the place of what a stage of heads keeps for itself, or empty."""


def _narrowing(step: PlanStep, chunk: Chunk) -> int:
    """Operations of the narrow copy that a step makes beside its output."""
    also: PlanValue | None = step.keys.get("also")
    return chunk.rows(also.rows) * also.cols * ELEMENT_OPERATIONS["narrow"] if also is not None else 0


def _moved(chunk: Chunk, step: PlanStep, *, columns: int | None = None, **places: str) -> dict[str, int]:
    """Place → bytes of all values that a step reads and makes, of ``out`` so many columns. ``places``: of operands
    that lie elsewhere than the plan says; empty: they do not."""
    moved = []
    for key in ("x", "other", "out", "also"):
        value: PlanValue | None = step.keys.get(key)
        if value is not None:
            bytes = chunk.rows(value.rows) * value.row_bytes(columns if key == "out" else None)
            moved.append((places.get(key) or value.place, bytes))
    return _summed(moved)


def _summed(moved: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for place, bytes in moved:
        total[place] = total.get(place, 0) + bytes
    return total
