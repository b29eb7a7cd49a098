"""What the backends share that compute encast's own graph: a program for each shape."""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from encast.bench.environments import THIS_PYTHON, WORKER_NEEDS, how_to_make
from encast.bench.peers.base import Float32, Int32
from encast.bench.peers.interpret import MASKED
from encast.bench.peers.transformer import Feeds, PaddedPeer, Shape, States
from encast.ir import Graph

__all__ = ["Inputs", "InterpretedPeer", "Program", "only_apart"]

RUN_COLUMNS = 16
"""``run`` rounds the length of a rectangle up to a multiple of this, so that few programs serve all lengths."""


@dataclass(frozen=True)
class Inputs:
    """A rectangle as programs take it: ids ``i32[rows * columns]``, ``bias: f32[rows, 1, 1, columns]``."""

    token_ids: Int32
    token_type_ids: Int32
    bias: Float32


Program = Callable[[Inputs], States]
"""Takes inputs once and gives a call that computes ``f32[rows * columns, hidden]`` of them each time."""


class InterpretedPeer(PaddedPeer):
    """Opens the graph and compiles a program for each shape (rows, columns) when it first occurs."""

    graph: Graph

    @abc.abstractmethod
    def start(self) -> None:
        """Sets the library up; ``graph`` is there."""

    @abc.abstractmethod
    def compile(self, shape: Shape) -> Program:
        """The program of a shape; called once for each."""

    def open(self) -> None:
        from encast.archs import build_graph  # here, so that `missing` can say what a bare environment needs for it
        from encast.importers import open_checkpoint

        self.graph = build_graph(open_checkpoint(self.model.checkpoint), "features")
        self._programs: dict[Shape, Program] = {}
        self.start()

    def prepare(self, feeds: Feeds) -> States:
        rows, columns = feeds["input_ids"].shape
        if (rows, columns) not in self._programs:
            self._programs[rows, columns] = self.compile((rows, columns))
        call = self._programs[rows, columns](inputs_of(feeds))
        return lambda: call().reshape(rows, columns, -1)

    def compute(self, feeds: Feeds) -> Float32:
        columns = feeds["input_ids"].shape[1]
        widened = min(-(-columns // RUN_COLUMNS) * RUN_COLUMNS, self.encoder.max_len)
        wide = {name: np.pad(array, ((0, 0), (0, widened - columns))) for name, array in feeds.items()}
        return self.prepare(wide)()[:, :columns]


def inputs_of(feeds: Feeds) -> Inputs:
    ids, mask = feeds["input_ids"].astype(np.int32), feeds["attention_mask"]
    types = feeds["token_type_ids"].astype(np.int32) if "token_type_ids" in feeds else np.zeros_like(ids)
    bias = np.where(mask == 0, np.float32(MASKED), np.float32(0))[:, None, None, :]
    return Inputs(ids.reshape(-1), types.reshape(-1), bias)


def only_apart(name: str, module: str, *requirements: str, python: str = THIS_PYTHON) -> str | None:
    """As ``not_installed``, for packages that do not go together with encast's: how to make their environment."""
    absent = [needed for needed in (module, *WORKER_NEEDS) if importlib.util.find_spec(needed) is None]
    if not absent:
        return None
    command = how_to_make(name, *requirements, python=python)
    return f"not installed ({', '.join(absent)}; it has an environment of its own): {command}"
