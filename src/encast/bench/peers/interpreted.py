"""What the backends share that compute encast's own graph: a program for each shape, and padding around it."""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from encast.archs import build_graph
from encast.backends.base import check_request
from encast.batch import Batch
from encast.bench.peers.base import Call, Float32, Int32, Peer, pad, unpad
from encast.bench.peers.interpret import MASKED, OUTPUT
from encast.importers import open_checkpoint
from encast.ir import Graph

__all__ = ["Feeds", "InterpretedPeer", "Program", "Shape", "absent"]

RUN_COLUMNS = 16
"""``run`` rounds the length of a rectangle up to a multiple of this, so that few programs serve all lengths."""


class Shape(NamedTuple):
    """What a program is compiled for. Programs of full rectangles have no mask."""

    rows: int
    columns: int
    masked: bool


@dataclass(frozen=True)
class Feeds:
    """A batch as programs take it: ids ``i32[rows * columns]``, ``bias: f32[rows, 1, 1, columns]`` if masked."""

    token_ids: Int32
    token_type_ids: Int32
    bias: Float32 | None


Program = Callable[[Feeds], Call]
"""Takes inputs once and gives a call that computes ``f32[rows * columns, hidden]`` of them each time."""


class InterpretedPeer(Peer):
    """Opens the graph, compiles a program for each shape when it first occurs, takes padding out of the answers."""

    graph: Graph

    @abc.abstractmethod
    def start(self) -> None:
        """Imports the library and sets it up; ``graph`` is there."""

    @abc.abstractmethod
    def compile(self, shape: Shape) -> Program:
        """The program of a shape; called once for each."""

    def open(self) -> None:
        self.graph = build_graph(open_checkpoint(self.model.checkpoint), "features")
        self.programs: dict[Shape, Program] = {}
        self.start()

    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        self._check(output, batch, select)
        longest = int(np.diff(batch.cu_seqlens).max())
        return self._ready(batch, min(-(-longest // RUN_COLUMNS) * RUN_COLUMNS, int(self.graph.meta["max_len"])))()

    def bind(self, batch: Batch) -> Call:
        self._check(OUTPUT, batch, None)
        return self._ready(batch, int(np.diff(batch.cu_seqlens).max()))

    def _check(self, output: str, batch: Batch, select: Int32 | None) -> None:
        types = {name: self.graph.type_of(value) for name, value in self.graph.outputs.items()}
        check_request(self.graph.meta, types, output, batch, select)

    def _ready(self, batch: Batch, columns: int) -> Call:
        rectangle = pad(batch, columns)
        shape = Shape(batch.seqs, columns, batch.seqs * columns != batch.tokens)
        bias = np.where(rectangle.mask == 0, np.float32(MASKED), np.float32(0))[:, None, None, :]
        feeds = Feeds(
            rectangle.token_ids.astype(np.int32).reshape(-1),
            rectangle.token_type_ids.astype(np.int32).reshape(-1),
            bias if shape.masked else None,
        )
        if shape not in self.programs:
            self.programs[shape] = self.compile(shape)
        call = self.programs[shape](feeds)
        return lambda: unpad(call().reshape(*shape[:2], -1), batch)


def absent(module: str, extra: str) -> str | None:
    """None when ``module`` can be imported, found without importing it; else how to install it."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"not installed: pip install 'encast[{extra}]'"
