"""PyTorch on a GPU: transformers' model with its fused attention, eager and by ``torch.compile``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from encast.batch import Batch
from encast.bench.peers.base import Call, CheckpointPeer, Float32, versions
from encast.bench.peers.card import HostCopy, why_no_card
from encast.bench.peers.pytorch import import_torch, load_encoder, prepare_inductor, quiet
from encast.errors import ResourceError

__all__ = ["PyTorchOnCard"]


class PyTorchOnCard(CheckpointPeer):
    """Padded batches of page-locked ids. Rows of padding are left out on the card, before they are copied.

    ``mode``: ``reduce-overhead`` and ``max-autotune`` compile for the very shape, with CUDA graphs; what shapes
    there are is known when a batch is bound.
    """

    name = "PyTorch"
    dtypes = ("f32", "f16", "bf16")
    modules = ("torch", "transformers")
    extra = "bench-torch"
    accepted: ClassVar = {"device": ("cuda", "torch-cpu"), "mode": ("eager", "reduce-overhead", "max-autotune")}

    @classmethod
    def missing(cls) -> str | None:
        return super().missing() or why_no_card()

    def open(self) -> None:
        torch = import_torch()
        self._device = "cuda" if self.settings["device"] == "cuda" else "cpu"
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[self.dtype]
        module = load_encoder(self.model.checkpoint, self.encoder)
        self._attention = str(module.encoder.config._attn_implementation)
        self._module = module.to(self._device, dtype)
        if self.settings["mode"] != "eager":
            prepare_inductor(self.cache)

    def bind(self, batch: Batch) -> Call:
        self.check(batch)
        torch = import_torch()
        feeds = self.encoder.feeds(batch)
        mask = feeds["attention_mask"]
        # None: no padding, so that all rows are copied as they lie.
        rows = None if mask.all() else torch.from_numpy(np.flatnonzero(mask)).to(self._device)
        given = [torch.from_numpy(array) for array in feeds.values()]
        if self._device == "cuda":
            given = [tensor.pin_memory() for tensor in given]
        run, to_host, hidden, device = self._compiled(), HostCopy(self._device), self.encoder.hidden, self._device

        def call() -> Float32:
            with torch.inference_mode():
                states = run(*(tensor.to(device, non_blocking=True) for tensor in given)).reshape(-1, hidden)
                return to_host(states if rows is None else states[rows])

        if self.settings["mode"] != "eager":
            with quiet():
                for _ in range(3):  # compiles, then records a graph
                    call()
            skipped = importlib.import_module("torch._dynamo.utils").counters["inductor"]["cudagraph_skips"]
            if self._device == "cuda" and skipped:
                raise ResourceError(f"{self.name}: Inductor left out {skipped} CUDA graphs; take mode=eager")
        return call

    def _compiled(self) -> Any:
        if self.settings["mode"] == "eager":
            return self._module
        options: dict[str, Any] = {"dynamic": False, "fullgraph": True}
        if self._device == "cuda":
            options["mode"] = self.settings["mode"]
        return import_torch().compile(self._module, **options)

    def facts(self) -> Mapping[str, Any]:
        torch = import_torch()
        card = torch.cuda.get_device_name() if self._device == "cuda" else None
        return {
            "version": str(torch.__version__),
            **versions("transformers"),
            "card": card,
            "cuda": torch.version.cuda,
            "attention": self._attention,
            **self.settings,
        }
