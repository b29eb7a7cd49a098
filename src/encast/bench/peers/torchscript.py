"""TorchScript: the model traced, frozen and stored once, then run by its interpreter without Python in between.

``optimize_for_inference`` is left out: it was measured no faster in f32 and 7 % slower in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encast.bench.cache import cached, seconds_to_make
from encast.bench.peers.base import Float32
from encast.bench.peers.torch_encoder import (
    autocast,
    import_torch,
    load_encoder,
    narrow_linears,
    quantise_linears,
    quiet,
    set_threads,
    tensors,
    torch_facts,
)
from encast.bench.peers.transformer import Feeds, PaddedPeer, States, not_installed, versions

__all__ = ["TorchScript"]


class TorchScript(PaddedPeer):
    """bf16: autocast is part of the trace; int8: linears are quantised dynamically before it."""

    name = "TorchScript"
    dtypes = ("f32", "bf16", "int8")
    modules = ("torch",)

    @classmethod
    def missing(cls) -> str | None:
        return not_installed("bench-torch", "torch", "transformers")

    def export(self) -> Mapping[str, Any]:
        folder = self._folder()
        return {"seconds": seconds_to_make(folder), "path": str(folder / "model.pt")}

    def open(self) -> None:
        set_threads(self.threads)
        with quiet():
            self._module = import_torch().jit.load(str(self._folder() / "model.pt")).eval()

    def compute(self, feeds: Feeds) -> Float32:
        return self.prepare(feeds)()

    def prepare(self, feeds: Feeds) -> States:
        torch, module, given = import_torch(), self._module, tensors(feeds)

        def call() -> Float32:
            with torch.inference_mode():
                states: Float32 = module(*given).float().numpy()
                return states

        return call

    def facts(self) -> Mapping[str, Any]:
        return {**torch_facts(), "traced": True, "frozen": True}

    def _folder(self) -> Path:
        key = {"model": self.model.sha, "dtype": self.dtype, **versions("torch", "transformers")}
        return cached(self.cache, "torchscript", key, lambda folder: self._trace(folder / "model.pt"))

    def _trace(self, path: Path) -> None:
        torch = import_torch()
        module = load_encoder(self.model.checkpoint, self.encoder)
        if self.dtype == "bf16":
            narrow_linears(module)
        elif self.dtype == "int8":
            module = quantise_linears(module)
        with quiet(), torch.inference_mode(), autocast(self.dtype == "bf16"):
            # Two sequences: a trace of one would take the batch for a constant.
            traced = torch.jit.trace(module, tensors(self.encoder.example(2, 16)), check_trace=False, strict=False)
        with quiet():
            torch.jit.freeze(traced.eval()).save(str(path))
