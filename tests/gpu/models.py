"""The GPU backend over graphs as they are compiled: on the CPU, or on a card with ``ENCAST_TEST_DEVICE=cuda``."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from cases import Opened, open_case

from encast.backends.gpu.runnable import GpuRunnable
from encast.ir import Graph
from encast.passes import optimise
from encast.quant import QuantSpec

__all__ = ["DEVICE", "FAST_ELEMENTARY", "HERE", "compiled_graph", "open_gpu", "rms", "tensor"]

DEVICE = os.environ.get("ENCAST_TEST_DEVICE", "torch-cpu")
HERE = torch.device("cpu") if DEVICE == "torch-cpu" else torch.device(DEVICE, 0)

FAST_ELEMENTARY = 16 * 2.0**-24
"""The error of PyTorch's exp, erf and tanh is allowed what that of the CPU's kernels is."""


def compiled_graph(name: str, dtype: str, factory: pytest.TempPathFactory) -> tuple[Opened, Graph]:
    """A case of ``checkpoints.CASES``, and its graph compiled to ``dtype``."""
    opened = open_case(name, factory)
    return opened, optimise(opened.graph, QuantSpec(dtype), strict=True)[0]


def open_gpu(name: str, compiled: str, factory: pytest.TempPathFactory, **options: Any) -> GpuRunnable:
    return GpuRunnable(compiled_graph(name, compiled, factory)[1], DEVICE, **options)


def tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array).to(HERE)


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
