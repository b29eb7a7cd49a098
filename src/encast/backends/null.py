"""A backend that compiles everything and computes nothing: what the code around a model costs."""

from __future__ import annotations

import numpy as np

from encast.backends.base import Float32, Int32, check_request, rows_of
from encast.batch import Batch
from encast.ir import Graph, verify

__all__ = ["Null"]


class Null:
    """Verifies the graph, checks requests as the other backends do, and answers zeros."""

    def __init__(self, graph: Graph) -> None:
        verify(graph)
        self._meta = graph.meta
        self._types = {public: graph.type_of(value) for public, value in graph.outputs.items()}

    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        """See ``Runnable.run``."""
        check_request(self._meta, self._types, output, batch, select)
        type = self._types[output]
        return np.zeros((rows_of(type, batch, select), *(int(size) for size in type.shape[1:])), np.float32)
