"""Says which exp, erf and tanh the kernels use: polynomials within a stated error ("fast") or libm ("exact")."""

from __future__ import annotations

from encast.ir import Graph
from encast.passes.report import Outcome

__all__ = ["choose_math"]


def choose_math(graph: Graph, exact: bool) -> Outcome:
    graph.meta["math"] = "exact" if exact else "fast"
    return Outcome(changes=1)
