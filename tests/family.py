"""What the tests have to know of an architecture that stands in one file, ``NAME_family.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Family", "FeedForward", "Shapes", "linear_shapes", "norm_shapes"]

Array = np.ndarray[Any, Any]
Shapes = Iterator[tuple[str, tuple[int, ...], str]]
"""Name, shape and kind of every tensor; a kind says how it is filled."""


def linear_shapes(path: str, rows: int, columns: int, kind: str = "weight") -> Shapes:
    """A linear layer with a bias."""
    yield f"{path}.weight", (rows, columns), kind
    yield f"{path}.bias", (rows,), "bias"


def norm_shapes(path: str, size: int) -> Shapes:
    """A layer norm."""
    yield f"{path}.weight", (size,), "gamma"
    yield f"{path}.bias", (size,), "beta"


@dataclass(frozen=True)
class FeedForward:
    """Where a layer's feed-forward stands, below the layer's path: the norm before it, the products that read that, the
    one with the rows that the gate multiplies, of which they begin at ``offset``, and the second product.
    """

    norm: str
    read: tuple[str, ...]
    up: str
    offset: int
    down: str


@dataclass(frozen=True)
class Family:
    """What ``make_checkpoint`` and the suites have to know of an architecture.

    ``config`` and ``shapes`` take the checkpoint to make; ``config`` also the fields in BERT's words. ``cases`` are
    (name, head, options of ``make_checkpoint``); ``usual`` the options of the five that every architecture has.
    ``products``: weights of products in a layer, as tensors. ``class_names``: by head, where they are not the stem and
    the usual suffix. ``order``: of a tensor, its rows and the heads, the rows as the product has them where that is
    another order. ``answers``: of a model that transformers does not have, a second implementation (see
    ``numpy_encoders``). ``norms_before``: of products; else they stand behind the sums.
    """

    arch: str
    stem: str
    seed: int
    config: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
    shapes: Callable[[Any], Shapes]
    inner: Callable[[Any], int]
    feed_forward: Callable[[Any], FeedForward]
    products: int
    activation: str = "silu"
    tokenizer: str = "Bert"
    usual: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    class_names: Mapping[str, str] = field(default_factory=dict)
    order: Callable[[str, int, int], Array | None] = lambda name, rows, heads: None
    answers: Callable[..., tuple[Array, list[Array]]] | None = None
    norms_before: bool = True
