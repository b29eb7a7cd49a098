"""DeBERTa's scores that know of distances: rows by vectors of relative positions, picked by the distance.

The table of these vectors is a constant that norms and products of the graph go through, though no token does: it
becomes a value of the graph (``lift``), as architectures write it. What GatherElements picks is compared with one row
for every distance, and these rows with the architecture's rule (``archs/comparison.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.importers.onnx.folding import place_of
from encast.importers.onnx.reader import Reader, Value, handles
from encast.importers.onnx.values import ARGUMENTS, Axes, Known, Seen, labels, shape_of

__all__ = ["added", "as_table", "lift", "of_positions", "together_relative"]

Array = np.ndarray[Any, Any]

_LIFTED = ("LayerNormalization", "MatMul", "ReduceMean")
"""What a table goes through first: its norm, perhaps in parts, or a projection."""


@dataclass(frozen=True)
class Picked:
    """Products of rows ``x`` with a ``table``, of which ``index: i64[own positions, others]`` picks one for a pair."""

    x: str
    table: str
    index: Array


@dataclass(frozen=True)
class Term:
    """What is added to scores: ``of`` the "query" or the "key", times ``factor``; ``rows``: the table's by distance
    query - key, from the most negative on."""

    of: str
    x: str
    table: str
    rows: tuple[int, ...]
    factor: float


def lift(reader: Reader, known: Sequence[Known]) -> Known | Seen:
    """The first of constant inputs, as a value of the graph where it is a table that a norm or a product reads."""
    fits = reader.node.op in _LIFTED and all(one.constant for one in known)
    return (as_table(reader, known[0]) if fits else None) or known[0]


def as_table(reader: Reader, known: Known) -> Seen | None:
    """A constant as rows of a table, None if it has no rows of numbers."""
    array = known.array
    if not known.constant or array.dtype.kind != "f" or array.ndim not in (2, 3) or array.shape[:-2] not in ((), (1,)):
        return None
    rows, width = array.shape[-2:]
    value = reader.constant(known, array.reshape(rows, width))
    return Seen("table", value, (*((),) * (array.ndim - 2), (("t", rows),), (("n", width),)))


@handles("Tile")
def _tile(reader: Reader) -> list[Value]:
    """A table in heads, once more for every sequence."""
    seen, repeats = reader.inputs[0], reader.known(1)
    sequences = reader.probe.ids.shape[0]
    if isinstance(seen, Seen) and repeats is not None and labels(seen.axes[:1]) == "h" and seen.axes[0]:
        whole = reader.rows(seen)
        if whole.kind == "table" and repeats.array.tolist() == [sequences, *[1] * (len(seen.axes) - 1)]:
            return [Seen("table", whole.value, ((("b", sequences), *whole.axes[0]), *whole.axes[1:]))]
    raise reader.fail("what is repeated is a table of relative positions in heads, for every sequence")


def of_positions(rows: Seen, table: Seen, factor: float) -> Seen | None:
    """Rows in heads times a table in heads, None if they are others."""
    sides = (labels(rows.axes), labels(table.axes))
    fits = sides in (("bh,s,d", "bh,d,t"), ("b,h,s,d", "b,h,d,t"))
    if rows.kind != "rows" or table.kind != "table" or not fits or rows.axes[:-2] != table.axes[:-2]:
        return None
    curve = None if factor == 1.0 else factor * ARGUMENTS
    return Seen("by position", rows.value, (*rows.axes[:-1], table.axes[-1]), curve, table.value)


@handles("GatherElements")
def _gather_elements(reader: Reader) -> list[Value]:
    seen, index = reader.inputs[0], reader.known(1)
    if isinstance(seen, Seen) and seen.kind == "by position" and index is not None and index.array.dtype.kind == "i":
        positions = reader.probe.ids.shape[1]
        wanted = (*shape_of(seen.axes)[:-1], positions)
        last = place_of(reader.node.attributes.get("axis", 0), len(seen.axes)) == len(seen.axes) - 1
        if last and index.array.shape == wanted:
            # Axes along which it is spread hold it once.
            steps = index.array.strides[:-2]
            flat = index.array[tuple(slice(1 if step == 0 else None) for step in steps)]
            flat = flat.reshape(-1, positions, positions)
            if (flat == flat[0]).all():
                axes = (*seen.axes[:-1], (("o", positions),))
                return [Seen("picked", "", axes, seen.curve, Picked(seen.value, seen.extra, flat[0]))]
    raise reader.fail(
        "what is gathered is rows in heads times a table of relative positions, by an index that is the same for every "
        "head and sequence"
    )


def _terms(reader: Reader, seen: Seen) -> tuple[tuple[Term, ...], Axes]:
    """What a value adds to scores, and their axes."""
    if seen.kind == "relative":
        return seen.extra, seen.axes
    held: Picked = seen.extra
    curve = ARGUMENTS if seen.curve is None else seen.curve
    factor = float(curve[-1] / ARGUMENTS[-1])
    front = labels(seen.axes[:-2])
    of = {"s,o": "query", "o,s": "key"}.get(labels(seen.axes[-2:]))
    if front not in ("bh", "b,h") or of is None or not np.allclose(curve, factor * ARGUMENTS, rtol=1e-6, atol=0.0):
        raise reader.fail("scores by relative positions are those of queries, or of keys with queries first, scaled")
    # Own position less the other's; of keys the other is the query.
    index = held.index if of == "query" else held.index.T
    positions = len(index)
    rows = np.concatenate([index[0, :0:-1], index[:, 0]])
    places = np.arange(positions)
    if not np.array_equal(index, rows[places[:, None] - places + positions - 1]):
        raise reader.fail("the row of a table of relative positions depends on the distance of query and key alone")
    axes = (*seen.axes[:-2], (("q", positions),), (("k", positions),))
    return (Term(of, held.x, held.table, tuple(rows.tolist()), factor),), axes


def together_relative(reader: Reader, a: Seen, b: Seen) -> Seen:
    """The sum of two values that are added to scores."""
    (first, axes), (second, other) = _terms(reader, a), _terms(reader, b)
    if axes != other:
        raise reader.fail("scores by relative positions are added to those of the same arrangement")
    return Seen("relative", "", axes, None, (*first, *second))


def added(reader: Reader, scores: Seen, relative: Seen) -> Seen:
    """Scores and what is added to them."""
    terms, axes = _terms(reader, relative)
    curve = ARGUMENTS if scores.curve is None else scores.curve
    same = all(np.allclose(curve, term.factor * ARGUMENTS, rtol=1e-6, atol=0.0) for term in terms)
    if axes != scores.axes or not same:
        raise reader.fail("scores by content and by relative positions have one arrangement and one scale")
    value = scores.value
    for term in sorted(terms, key=lambda one: one.of, reverse=True):
        # The rule is told from the rows; this one has no logarithm.
        value = reader.emit("relative_scores", value, term.x, term.table, of=term.of, max_distance=0)
        reader.distances[value] = np.array(term.rows)
    return Seen("scores", value, scores.axes, scores.curve, hidden=scores.hidden)
