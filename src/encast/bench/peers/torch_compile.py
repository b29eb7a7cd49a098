"""torch.compile: TorchInductor with freezing, which packs weights as constants and fuses around the products.

Shapes are symbols by default. With fixed ones Inductor gives f32 products to MKL instead of oneDNN, which took more
than twice as long on an AMD processor (132 against 57 ms for BERT-base 1x128); in bf16 and int8 the two are equal.
``max_autotune`` chose the same products, after minutes. int8 is PyTorch 2 Export quantisation (torchao) with Inductor's
x86 quantiser, activations dynamic: 27 ms where a compiled ``quantize_dynamic`` model, cut into pieces by every linear,
took 39.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping
from typing import Any, ClassVar

from encast.bench.peers.base import Float32
from encast.bench.peers.torch_encoder import (
    autocast,
    import_torch,
    load_encoder,
    narrow_linears,
    quiet,
    set_threads,
    tensors,
    torch_facts,
)
from encast.bench.peers.transformer import Choices, Feeds, PaddedPeer, States, not_installed, versions

__all__ = ["TorchCompile"]

_MOST_PROGRAMS = 64
_MOST_SEQUENCES = 1 << 20


class TorchCompile(PaddedPeer):
    """Option ``shapes``: see the module. Programs are compiled when a batch is bound, or at its first call."""

    name = "torch.compile"
    dtypes = ("f32", "bf16", "int8")
    modules = ("torch", "transformers", "torch._inductor")
    defaults: ClassVar[Mapping[str, Any]] = {"shapes": "dynamic"}
    choices: ClassVar[Choices] = {"shapes": ("dynamic", "static")}

    @classmethod
    def missing(cls) -> str | None:
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return f"Inductor compiles with {compiler}, which is not there: install g++, or name a compiler with CXX"
        return not_installed("bench-torch", "torch", "transformers", "torchao")

    def open(self) -> None:
        set_threads(self.threads)
        torch = import_torch()
        # Compiled C++ is kept as other conversions are; graphs with frozen weights it never keeps.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.cache / "inductor")
        inductor: Any = importlib.import_module("torch._inductor.config")
        # Of the whole process: Dynamo asks before options of one compilation are known.
        inductor.freezing = True
        # No processes beside this one, whose threads would count and whose memory would stay.
        inductor.compile_threads = 1
        dynamo: Any = importlib.import_module("torch._dynamo").config
        dynamo.recompile_limit = _MOST_PROGRAMS
        dynamo.fail_on_recompile_limit_hit = True  # the alternative is to go on uncompiled, and to say nothing
        # Sequences and length are different symbols also where they are equal at first.
        symbols: Any = importlib.import_module("torch.fx.experimental._config")
        symbols.use_duck_shape = False
        module = load_encoder(self.model.checkpoint, self.encoder)
        self._attention = torch_facts(module)["attention"]
        if self.dtype == "bf16":
            narrow_linears(module)
        elif self.dtype == "int8":
            module = self._quantise(module)
        self._compiled = torch.compile(module, dynamic=self.settings["shapes"] == "dynamic", fullgraph=True)

    def compute(self, feeds: Feeds) -> Float32:
        return self._call(feeds)()

    def prepare(self, feeds: Feeds) -> States:
        call = self._call(feeds)
        call()
        return call

    def _call(self, feeds: Feeds) -> States:
        torch, compiled, given, narrow = import_torch(), self._compiled, tensors(feeds), self.dtype == "bf16"

        def call() -> Float32:
            with torch.inference_mode(), autocast(narrow):
                states: Float32 = compiled(*given).float().numpy()
                return states

        return call

    def _quantise(self, module: Any) -> Any:
        torch = import_torch()
        steps: Any = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
        x86: Any = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
        example = tensors(self.encoder.example(2, 16))
        axes = {
            0: torch.export.Dim("seqs", min=1, max=_MOST_SEQUENCES),
            1: torch.export.Dim("length", min=1, max=self.encoder.max_len),
        }
        with quiet(), torch.no_grad():
            exported = torch.export.export(module, example, dynamic_shapes=(axes,) * len(example)).module()
            config = x86.get_default_x86_inductor_quantization_config(is_dynamic=True)
            # Set for all operations, it would take the integer ones that count positions for numbers, too.
            quantiser = x86.X86InductorQuantizer().set_function_type_qconfig(torch.nn.functional.linear, config)
            prepared = steps.prepare_pt2e(exported, quantiser)
            prepared(*example)
            return steps.convert_pt2e(prepared)

    def facts(self) -> Mapping[str, Any]:
        facts = {**torch_facts(), "attention": self._attention, "freezing": True, "shapes": self.settings["shapes"]}
        if self.dtype == "bf16":
            facts |= {"autocast": "bfloat16", "linear_weights": "bfloat16"}
        elif self.dtype == "int8":
            facts |= {"quantisation": "PT2E dynamic, X86InductorQuantizer", **versions("torchao")}
        return facts
