"""What backends on a GPU share: whether there is a card, CUDA graphs, and arrays that come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from encast.bench.peers.base import Float32
from encast.bench.peers.pytorch import import_torch

__all__ = ["HostCopy", "captured", "why_no_card"]


def why_no_card() -> str | None:
    """None where PyTorch finds a card, or why it does not and what to do, in one sentence."""
    torch = import_torch()
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) is built without CUDA; install one that is"
    if torch.cuda.device_count() == 0:
        return "PyTorch finds no CUDA card; look at what nvidia-smi shows, and at CUDA_VISIBLE_DEVICES"
    return None


def captured(run: Callable[[int], Any], device: str) -> Callable[[], Any]:
    """``run``, which is given the address of a stream, as a CUDA graph: each call makes its tensor anew, in the same
    memory. On the CPU ``run`` itself."""
    if not device.startswith("cuda"):
        return lambda: run(0)
    torch = import_torch()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(stream.cuda_stream)  # what is allocated and chosen at first, which no graph may do
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        made = run(stream.cuda_stream)

    # A graph has the addresses of what ``run`` reads and holds none of it: it lives as long as the calls.
    def replay(_held: Callable[[int], Any] = run) -> Any:
        graph.replay()
        return made

    return replay


class HostCopy:
    """f32 copies on the host, in one page-locked array, of tensors ``[rows, columns]`` on a card or the CPU."""

    def __init__(self, device: str) -> None:
        self._card = device.startswith("cuda")
        self._array: Any = None

    def __call__(self, tensor: Any) -> Float32:
        """Waits for the card. The array is overwritten by the next copy."""
        torch = import_torch()
        if self._array is None or self._array.shape != tensor.shape:
            self._array = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=self._card)
        self._array.copy_(tensor, non_blocking=self._card)
        if self._card:
            torch.cuda.current_stream(tensor.device).synchronize()
        states: np.ndarray[Any, np.dtype[np.float32]] = self._array.numpy()
        return states
