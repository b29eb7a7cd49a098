"""What a value of an ONNX graph can mean.

``Known`` values are arrays: constants, shapes, and what follows from the ids and the mask of a probe batch (see
``read.py``). All others are ``Seen``: a value of encast's graph, in some arrangement of its axes, possibly on the way
through an elementwise function or a norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "ARGUMENTS",
    "Axes",
    "Known",
    "Rounding",
    "Seen",
    "arguments",
    "arrange",
    "columns",
    "labels",
    "shape_of",
    "together",
]

Atom = tuple[str, int]
Axes = tuple[tuple[Atom, ...], ...]
"""For each axis of the ONNX value the axes of ours that it holds, as (label, size): ``b`` sequences, ``s`` positions,
``n`` columns, ``h`` heads, ``d`` columns of a head, ``q`` and ``k`` positions of queries and keys, ``p`` the parts
of a head of packed rows, ``t`` rows of a table of relative positions, ``o`` the other position of a pair, ``g`` and
``r`` groups of heads that share a key and the heads of a group. An axis of size 1 holds none, unless it is that of the
one sequence that a file takes."""

ARGUMENTS = np.concatenate([-np.logspace(6, 1, 16), np.linspace(-8.0, 8.0, 128), np.logspace(1, 6, 16)])
"""Where elementwise functions are compared: f64, without 0. The large ones show a function that is cut off."""

_POSITIVE = np.concatenate([[0.0], np.logspace(-10, 12, 220)])
"""The same for values that are never negative, with 0 first."""

_NAMES = {
    "rows": "a row for every token",
    "sequences": "a row for every sequence",
    "scores": "attention scores",
    "probabilities": "attention probabilities",
    "product": "rows times a weight",
    "bias": "a relative attention bias",
    "table": "a table of relative positions",
    "by position": "rows times a table of relative positions",
    "picked": "what a distance picks of these",
    "relative": "scores by relative positions",
    "part": "columns of a product",
    "half": "half of the columns of heads",
    "turned": "heads with their halves exchanged",
    "cosines": "heads times cosines",
    "sines": "exchanged halves times sines",
    "mean": "the mean of rows",
    "centred": "rows less their mean",
    "variance": "the variance of rows",
    "normed": "rows over their deviation",
    "norm scale": "gamma over the deviation of rows",
    "scaled": "rows times gamma over their deviation",
    "scaled mean": "the mean of rows times gamma over their deviation",
    "norm shift": "beta less the scaled mean of rows",
    "squares": "the sum of squares of rows",
    "mean square": "the mean square of rows",
    "rooted": "rows over the root of their mean square",
    "smoothed": "rows times a number for each column",
    "masked": "rows with zeros for padding",
    "lowered": "rows with low values for padding",
    "sum": "the sum of a sequence's rows",
    "column": "a column of rows",
    "invalid": "where probabilities are NaN",
    "bytes": "rows in bytes",
    "byte scale": "the scale of rows in bytes",
    "byte zero": "the zero point of rows in bytes",
    "integer sums": "the sums of a product of integers",
    "table bytes": "rows of a table of integers",
}


@dataclass(frozen=True)
class Known:
    """``constant``: whether it is the same for all inputs. ``name``: that of the initializer, if it is one.

    ``source``: the input of the file that it is, number for number, perhaps in another shape.
    """

    array: np.ndarray[Any, Any]
    constant: bool
    name: str = ""
    source: str = ""

    @property
    def meaning(self) -> str:
        what = "a constant" if self.constant else "ids, a mask or a shape"
        return f"{what} {list(self.array.shape)}"


@dataclass(frozen=True)
class Rounding:
    """``node``: which one; ``fixed``: scale and zero point as of unsigned bytes, None where that is not exact."""

    node: str
    fixed: tuple[float, int] | None


@dataclass(frozen=True)
class Seen:
    """``kind``: a key of ``_NAMES``; ``value``: a name in the graph; ``curve``: a function of it, at ``arguments``.

    ``extra``: of a product the weight, of ``normed`` and the other parts of a norm epsilon and gamma (``norm.py``), of
    a part the first column and the one behind it, of a half whether it is the second, of ``cosines`` and ``sines``
    these. ``rounded``: how the file rounds it just before, if it does so with a fixed scale. ``hidden``: of scores and
    of what is added to them the weakest (largest) number that masks have made of padding's or of keys' outside of a
    window; None without a mask.
    """

    kind: str
    value: str
    axes: Axes
    curve: np.ndarray[Any, Any] | None = None
    extra: Any = None
    rounded: Rounding | None = None
    hidden: float | None = None

    @property
    def meaning(self) -> str:
        through = "a function of " if self.curve is not None else ""
        return f"{through}{_NAMES[self.kind]} {list(shape_of(self.axes))}"


def arguments(seen: Seen) -> np.ndarray[Any, Any]:
    """Where the curve of a value is known."""
    return _POSITIVE if seen.kind in ("variance", "squares", "mean square") else ARGUMENTS


def shape_of(axes: Axes) -> tuple[int, ...]:
    return tuple(math.prod(size for _, size in axis) for axis in axes)


def labels(axes: Axes) -> str:
    """The labels of all axes in order, those of one axis side by side: ``b,s,hd``."""
    return ",".join(columns(axis) for axis in axes if axis)


def columns(axis: tuple[Atom, ...]) -> str:
    """Heads side by side are columns again."""
    return "".join(label for label, _ in axis).replace("hd", "n")


def together(a: Axes, b: Axes) -> Axes | None:
    """The axes of two values that are spread over each other; None if one's axis would meet another of the other's."""
    rank = max(len(a), len(b))
    empty: Axes = ((),)
    pairs = list(zip(empty * (rank - len(a)) + a, empty * (rank - len(b)) + b, strict=True))
    if any(x and y and x != y for x, y in pairs):
        return None
    return tuple(x or y for x, y in pairs)


def arrange(axes: Axes, shape: tuple[int, ...]) -> Axes | None:
    """The axes of a value after a reshape, or None if that would cut one that is no row of columns."""
    rest = [atom for axis in axes for atom in axis]
    result: list[tuple[Atom, ...]] = []
    for size in shape:
        taken: list[Atom] = []
        product = 1
        if size == 1 and rest and rest[0] == ("b", 1):
            taken.append(rest.pop(0))  # the one sequence of a file that takes no more
        while product < size and rest:
            label, width = rest.pop(0)
            if size % (product * width) == 0:
                taken.append((label, width))
                product *= width
                continue
            part, remainder = divmod(size, product)
            if remainder or label not in ("n", "d") or width % part:
                return None
            taken.append(("h" if label == "n" else "p", part))
            rest.insert(0, ("d", width // part))
            product *= part
        if product != size:
            return None
        if [label for label, _ in taken] == ["g", "r"]:
            taken = [("h", product)]  # each group as often as heads share it
        result.append(tuple(taken))
    return None if rest else tuple(result)
