"""An artifact's graph that runs on one device of PyTorch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from encast.backends.base import Float32, check_request
from encast.backends.devices import RUNS_A_CARD
from encast.backends.gpu.adapt import adapt
from encast.backends.gpu.clocks import CYCLES, CardClock, HostClock
from encast.backends.gpu.device import (
    card_name,
    choose_device,
    first_line,
    need_bf16,
    need_int8,
    stored_dtype,
    why_no_triton,
)
from encast.backends.gpu.graphs import Capture, Graphs
from encast.backends.gpu.packed import pack, to_host
from encast.backends.gpu.program import Program, Signature, build
from encast.backends.gpu.steps import STEPS
from encast.backends.gpu.steps.context import Step
from encast.batch import Batch, Int32
from encast.errors import InputError, ResourceError, need_modules
from encast.ir.graph import Graph
from encast.ir.types import ValueType

__all__ = ["KERNELS", "GpuRunnable"]

KERNELS = ("auto", "torch", "triton")


class GpuRunnable:
    """Runs ``graph``, of an artifact and with its arrays, on a card ("cuda") or on the CPU ("torch-cpu").

    ``dtype``: what floating values are stored and multiplied in, "f32", "f16" or "bf16"; "f8": stored in f16, and
    multiplied by weights in f8 with a scale a row; "f16-acc16": f16, and products with weights summed in f16; by
    default values are f32 and products as the artifact was compiled.
    ``kernels``: "torch", "triton", or "auto": Triton's on a card where they can run. ``cuda_graphs``: whether batches
    run as CUDA graphs, on a card. ``adapt`` says what of the graph is computed otherwise. Safe to call from any number
    of threads.

    Raises ``InputError`` for options that are unknown, ``ResourceError`` where the device is not there or lacks
    something, ``UnsupportedModelError`` for a graph with an op that it has no step for.
    """

    at_once = RUNS_A_CARD

    def __init__(
        self,
        graph: Graph,
        kind: str,
        *,
        index: int | None = None,
        dtype: str | None = None,
        kernels: str = "auto",
        cuda_graphs: bool = True,
    ) -> None:
        if kernels not in KERNELS:
            raise InputError(f"kernels is {kernels!r}; {', '.join(map(repr, KERNELS))} are known")
        self.device = choose_device(kind, index)
        if dtype == "f8" and kernels == "torch" and self.device.type == "cuda":
            raise InputError("dtype is 'f8' and kernels is 'torch': products of f8 are Triton's; leave kernels out")
        self.stored, self._half_sums = stored_dtype(dtype, self.device), dtype == "f16-acc16"
        made, self._changes = adapt(graph, f8=dtype == "f8")
        _need_arithmetic(made, self.stored, self.device)
        steps, self._without_triton = self._steps(made, kernels)
        try:
            self._programs, self._made_by = build(made, steps, self.stored, self.device, half_sums=self._half_sums)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"{self.device}: no memory is left for the model's weights ({first_line(error)}); give dtype='f16', or "
                "free the card of other models"
            ) from error
        self._meta = made.meta
        self._types = {public: made.type_of(value) for public, value in made.outputs.items()}
        self._graphs = Graphs(self.device, Capture(self.device)) if cuda_graphs and self.device.type == "cuda" else None
        # A card does one thing after the other, and nothing may run while a graph is captured.
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def _steps(self, graph: Graph, kernels: str) -> tuple[Mapping[str, Step], str | None]:
        """The table of steps, and why it is PyTorch's on a card where Triton's was wanted."""
        on_card = self.device.type == "cuda"
        if kernels == "torch" or (kernels == "auto" and not on_card):
            return STEPS, None
        if kernels == "triton":
            need_modules("cuda", "triton")
        if on_card and (why := why_no_triton(self.device)) is not None:
            if kernels == "triton":
                raise ResourceError(f"kernels is 'triton': {why}; mend that, or leave kernels out for PyTorch's")
            return STEPS, why
        from encast.backends.gpu.kernels import INTERPRETED, steps_for

        if not on_card and not INTERPRETED:
            raise InputError(
                "kernels is 'triton': on the CPU they need TRITON_INTERPRET=1 in the environment before encast is "
                "imported; leave kernels out for PyTorch's"
            )
        return steps_for(graph), None

    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        """See ``Runnable.run``. Raises ``ResourceError`` where the card's memory does not hold the batch."""
        with self._ready(output, batch, select) as program:
            rows = batch.tokens if self._types[output].shape[0] == "tokens" else batch.seqs
            if batch.tokens == 0 or (select is not None and select.size == 0):
                return np.empty((0, int(self._types[output].shape[1])), np.float32)
            made = self._graphs.run(output, program, batch, rows) if self._graphs is not None else None
            if made is None:
                made = to_host(program.run(pack(batch, select, self.device)))
            answer: Float32 = made.numpy()
        return answer

    @property
    def outputs(self) -> Mapping[str, ValueType]:
        """Types of the public outputs, by name."""
        return self._types

    def trace(
        self, output: str, batch: Batch, select: Int32 | None = None
    ) -> tuple[Float32, list[tuple[Signature, float]], bool]:
        """What ``run`` answers, the seconds that every step took on the device, without a CUDA graph, and whether none
        of them waited for the host.

        On a card the steps wait until all are given to it. Raises as ``run``.
        """
        with self._ready(output, batch, select) as program:
            if batch.tokens == 0:
                raise InputError("there is nothing to trace in an empty batch; give one sequence at least")
            packed = pack(batch, select, self.device)
            if program.by_length:
                packed.groups()  # which waits for the card
            for cycles in CYCLES:
                clock = CardClock(len(program.calls), cycles) if self.device.type == "cuda" else HostClock()
                clock.start()
                made = program.run(packed, clock.mark)
                if clock.ahead:
                    break
            answer: Float32 = to_host(made).numpy()
            return answer, list(zip(program.signatures, clock.seconds(), strict=True)), clock.ahead

    @contextmanager
    def _ready(self, output: str, batch: Batch, select: Int32 | None) -> Iterator[Program]:
        """The program to run, after the request was checked, alone on the card."""
        self._need_own_process()
        check_request(self._meta, self._types, output, batch, select)
        with self._lock, torch.inference_mode(), self._current():
            try:
                yield self._program(output)  # here: another thread may have closed the model
            except torch.OutOfMemoryError as error:
                raise ResourceError(
                    f"{self.device}: no memory is left for a batch of {batch.tokens} tokens ({first_line(error)}); "
                    "give encast.load a smaller batch_tokens, or dtype='f16'"
                ) from error

    def _program(self, output: str) -> Program:
        if not self._programs:
            raise InputError("the model is closed; load the artifact again")
        return self._programs[output]

    def _current(self) -> AbstractContextManager[object]:
        """Triton launches on the current card."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def report(self) -> list[str]:
        """What runs where: the device, the dtypes, what is computed otherwise than compiled, and whose steps run."""
        graphs = self._graphs
        by = {maker: sorted(op for op, one in self._made_by.items() if one == maker) for maker in ("Triton", "PyTorch")}
        return [
            f"device: {self.device} ({card_name(self.device)}), PyTorch {torch.__version__}",
            f"values: {str(self.stored).removeprefix('torch.')}",
            *(["sums of f16 products with weights: float16"] if self._half_sums else []),
            *(f"changed: {change}" for change in self._changes),
            *(f"by {maker}: {', '.join(ops)}" for maker, ops in by.items() if ops),
            *([] if self._without_triton is None else [f"without Triton's kernels: {self._without_triton}"]),
            *([] if graphs is None else graphs.report()),
        ]

    def numbers(self) -> dict[str, str]:
        """What the bits of its answers depend on besides artifact, dtype and batch."""
        triton = "not used"
        if "Triton" in self._made_by.values():
            from encast.backends.gpu.kernels import VERSION

            triton = VERSION
        return {
            "the card": card_name(self.device),
            "PyTorch": torch.__version__,
            "CUDA": str(torch.version.cuda),
            "Triton": triton,
        }

    def close(self) -> None:
        """Frees the weights, after a run that goes on; the card's memory goes back to PyTorch's cache."""
        with self._lock:
            self._programs, self._graphs = {}, None

    def _need_own_process(self) -> None:
        if os.getpid() != self._pid and self.device.type == "cuda":
            raise ResourceError(
                "this model was loaded on a card in another process, and CUDA does not work in a forked child; load "
                "the artifact in the child, or start it with the method 'spawn'"
            )


def _need_arithmetic(graph: Graph, stored: torch.dtype, device: torch.device) -> None:
    """Raises ``ResourceError`` where a product of the graph is none that the card has."""
    if any(node.op == "linear_int8" for node in graph.nodes):
        need_int8(device)
    if stored == torch.float32 and any(
        node.op == "linear_bf16" or node.attrs.get("products") == "bf16" for node in graph.nodes
    ):
        need_bf16(device)
