"""A graph with every weight moved by a last bit or two: what that does to the answers is what rounding does to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from encast.ir import Graph

__all__ = ["shaken"]

_SEED = 23


def shaken(graph: Graph) -> Graph:
    """A copy of ``graph`` with each f32 weight times 1 + 2^-23 or 1 - 2^-23, at random."""
    made, random = graph.copy(), np.random.default_rng(_SEED)
    for name, constant in graph.constants.items():
        if constant.type.dtype == "f32":
            signs = random.integers(0, 2, constant.array.shape, np.int8) * 2 - 1
            with np.errstate(over="ignore"):
                moved = constant.array * (1 + signs.astype(np.float32) * np.float32(2.0**-23))
            made.constants[name] = replace(constant, array=moved, integers=None)
    return made
