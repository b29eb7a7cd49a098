"""Drops what no output needs: nodes, constants (an unused pooler) and inputs."""

from __future__ import annotations

from encast.ir import Graph
from encast.passes.report import Outcome

__all__ = ["drop_unused"]


def drop_unused(graph: Graph) -> Outcome:
    return Outcome(changes=len(graph.drop_unused()))
