"""Says which exp, erf and tanh the kernels use: polynomials within a stated error ("fast") or libm ("exact").

Fast math takes the coarse form of gelu in a product whose outputs are only read to be narrowed. Its error of at most
1e-4 is small beside the rounding that follows: of q8, half a 255th of the row's range; of bf16, up to 0.4 % of each
output, which is more than 1e-4 for outputs beyond 0.05.

    narrow(linear(x, activation=gelu))  →  narrow(linear(x, activation=gelu_coarse))
"""

from __future__ import annotations

from dataclasses import replace

from encast.ir import Graph
from encast.ir.ops import COARSE_ACTIVATIONS
from encast.passes.fuse_narrow import NARROWING
from encast.passes.patch import Index
from encast.passes.report import Outcome

__all__ = ["choose_math"]


def choose_math(graph: Graph, exact: bool) -> Outcome:
    graph.meta = replace(graph.meta, math="exact" if exact else "fast")
    changes = 1
    index = Index(graph)
    for node in graph.nodes:
        coarse = COARSE_ACTIVATIONS.get(node.attrs.get("activation", "none"))
        if exact or coarse is None or index.is_output(node.outputs[0]):
            continue
        users = index.users(node.outputs[0])
        if users and all(user.op in NARROWING for user in users):
            node.attrs["activation"] = coarse
            changes += 1
    return Outcome(changes=changes)
