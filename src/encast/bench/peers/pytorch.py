"""PyTorch as it is imported: eager operations on the transformers model, under ``inference_mode``.

bf16 is autocast with the linears' weights narrowed beforehand; int8 is torch's dynamic quantisation of linears. In f32
``linear: mkl`` is what users get; ``linear: onednn`` calls oneDNN with packed weights, which is up to twice as fast
where MKL does not use the processor's widest vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from encast.bench.peers.base import Float32
from encast.bench.peers.torch_encoder import (
    LINEAR,
    autocast,
    import_torch,
    load_encoder,
    narrow_linears,
    onednn_linears,
    quantise_linears,
    set_threads,
    tensors,
    torch_facts,
)
from encast.bench.peers.transformer import Choices, Feeds, PaddedPeer, States, not_installed

__all__ = ["PyTorch"]


class PyTorch(PaddedPeer):
    """Option ``linear``: see the module; read for f32 alone."""

    name = "PyTorch"
    dtypes = ("f32", "bf16", "int8")
    modules = ("torch", "transformers")
    defaults: ClassVar[Mapping[str, Any]] = {"linear": "mkl"}
    choices: ClassVar[Choices] = {"linear": LINEAR}

    @classmethod
    def missing(cls) -> str | None:
        return not_installed("bench-torch", "torch", "transformers")

    def open(self) -> None:
        set_threads(self.threads)
        self._module = load_encoder(self.model.checkpoint, self.encoder)
        if self.dtype == "bf16":
            narrow_linears(self._module)
        elif self.dtype == "int8":
            self._module = quantise_linears(self._module)
        elif self.settings["linear"] == "onednn":
            onednn_linears(self._module)

    def compute(self, feeds: Feeds) -> Float32:
        return self.prepare(feeds)()

    def prepare(self, feeds: Feeds) -> States:
        torch, module, given, narrow = import_torch(), self._module, tensors(feeds), self.dtype == "bf16"

        def call() -> Float32:
            with torch.inference_mode(), autocast(narrow):
                states: Float32 = module(*given).float().numpy()
                return states

        return call

    def facts(self) -> Mapping[str, Any]:
        arithmetic = {
            "f32": {"linear": self.settings["linear"]},
            "bf16": {"autocast": "bfloat16", "linear_weights": "bfloat16"},
            "int8": {"quantisation": "dynamic", "engine": str(import_torch().backends.quantized.engine)},
        }
        return {**torch_facts(self._module), **arithmetic[self.dtype]}
