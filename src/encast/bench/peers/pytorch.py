"""PyTorch: eager, as TorchScript and by ``torch.compile``; and the checkpoint as a torch module, where exporters begin.

bf16 is autocast with the linears' weights narrowed beforehand; int8 is dynamic quantisation of linears.

``torch.compile`` is TorchInductor with freezing, which packs weights as constants and fuses around the products. Its
shapes are symbols: with fixed ones Inductor gives f32 products to MKL instead of oneDNN, which took more than twice as
long on an AMD processor (132 against 57 ms for BERT-base 1x128); in bf16 and int8 the two are equal. ``max_autotune``
chose the same products, after minutes. Its int8 is PyTorch 2 Export quantisation (torchao) with Inductor's x86
quantiser, activations dynamic: 27 ms where a compiled ``quantize_dynamic`` model, cut into pieces by every linear,
took 39.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from encast.bench.peers.base import Encoder, Feeds, Float32, PaddedPeer, States, versions

__all__ = [
    "PyTorch",
    "TorchCompile",
    "TorchScript",
    "import_torch",
    "load_encoder",
    "prepare_inductor",
    "quiet",
    "set_threads",
    "tensors",
    "torch_facts",
]

_MOST_PROGRAMS = 64
_MOST_SEQUENCES = 1 << 20


class _TorchPeer(PaddedPeer):
    """Calls a module, which ``load`` makes, with tensors."""

    dtypes = ("f32", "bf16", "int8")
    needs = ("transformers",)
    extra = "bench-torch"

    @abc.abstractmethod
    def load(self) -> Any:
        """The module from the inputs to the last hidden state; threads are set."""

    def open(self) -> None:
        set_threads(self.threads)
        self._module = self.load()

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """What a call is made in."""
        context: contextlib.AbstractContextManager[Any] = autocast(self.dtype == "bf16")
        return context

    def prepare(self, feeds: Feeds) -> States:
        torch, module, given, context = import_torch(), self._module, tensors(feeds), self.context

        def call() -> Float32:
            with torch.inference_mode(), context():
                states: Float32 = module(*given).float().numpy()
                return states

        return call

    def in_dtype(self) -> Any:
        """The encoder with its linears in the peer's dtype."""
        module = load_encoder(self.model.checkpoint, self.encoder)
        self._attention = str(module.encoder.config._attn_implementation)
        if self.dtype == "bf16":
            return narrow_linears(module)
        return self.quantise(module) if self.dtype == "int8" else module

    def quantise(self, module: Any) -> Any:
        """Linears with s8 weights a scale a channel, and activations quantised as they come, a scale a tensor."""
        torch = import_torch()
        quantisation: Any = importlib.import_module("torch.ao.quantization")
        config = {torch.nn.Linear: quantisation.per_channel_dynamic_qconfig}
        with quiet():
            return quantisation.quantize_dynamic(module, config, dtype=torch.qint8)

    def facts(self) -> Mapping[str, Any]:
        facts = torch_facts()
        if self.dtype == "bf16":
            facts |= {"autocast": "bfloat16", "linear_weights": "bfloat16"}
        return facts


class PyTorch(_TorchPeer):
    """As it is imported: eager operations on the transformers model, under ``inference_mode``.

    Option ``linear``, read for f32 alone: ``mkl`` is what users get; ``onednn`` calls oneDNN with packed weights, which
    is up to twice as fast where MKL does not use the processor's widest vectors.
    """

    name = "PyTorch"
    modules = ("torch", "transformers")
    accepted: ClassVar = {"linear": ("mkl", "onednn")}

    def load(self) -> Any:
        module = self.in_dtype()
        if self.dtype == "f32" and self.settings["linear"] == "onednn":
            onednn_linears(module)
        return module

    def facts(self) -> Mapping[str, Any]:
        facts = {**super().facts(), "attention": self._attention}
        if self.dtype == "f32":
            facts["linear"] = self.settings["linear"]
        elif self.dtype == "int8":
            facts |= {"quantisation": "dynamic", "engine": str(import_torch().backends.quantized.engine)}
        return facts


class TorchScript(_TorchPeer):
    """The model traced, frozen and stored once, then run by its interpreter without Python in between.

    bf16: autocast is part of the trace; int8: linears are quantised dynamically before it. ``optimize_for_inference``
    is left out: it was measured no faster in f32 and 7 % slower in bf16.
    """

    name = "TorchScript"
    modules = ("torch",)

    def converted(self) -> Path:
        return self.kept("torchscript", self._trace, ("torch", "transformers"), dtype=self.dtype) / "model.pt"

    def load(self) -> Any:
        with quiet():
            return import_torch().jit.load(str(self.converted())).eval()

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "traced": True, "frozen": True}

    def _trace(self, folder: Path) -> None:
        torch, module = import_torch(), self.in_dtype()
        with quiet(), torch.inference_mode(), autocast(self.dtype == "bf16"):
            # Two sequences: a trace of one would take the batch for a constant.
            traced = torch.jit.trace(module, tensors(self.encoder.example(2, 16)), check_trace=False, strict=False)
        with quiet():
            torch.jit.freeze(traced.eval()).save(str(folder / "model.pt"))


class TorchCompile(_TorchPeer):
    """Programs are compiled when a batch is bound."""

    name = "torch.compile"
    modules = ("torch", "transformers", "torch._inductor")
    needs = ("torchao",)

    @classmethod
    def missing(cls) -> str | None:
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return f"Inductor compiles with {compiler}, which is not there: install g++, or name a compiler with CXX"
        return super().missing()

    def load(self) -> Any:
        prepare_inductor(self.cache)
        inductor: Any = importlib.import_module("torch._inductor.config")
        # Of the whole process: Dynamo asks before options of one compilation are known.
        inductor.freezing = True
        # Sequences and length are different symbols also where they are equal at first.
        symbols: Any = importlib.import_module("torch.fx.experimental._config")
        symbols.use_duck_shape = False
        return import_torch().compile(self.in_dtype(), dynamic=True, fullgraph=True)

    def prepare(self, feeds: Feeds) -> States:
        call = super().prepare(feeds)
        call()
        return call

    def quantise(self, module: Any) -> Any:
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
        facts = {**super().facts(), "attention": self._attention, "freezing": True, "shapes": "dynamic"}
        if self.dtype == "int8":
            facts |= {"quantisation": "PT2E dynamic, X86InductorQuantizer", **versions("torchao")}
        return facts


def import_torch() -> Any:
    return importlib.import_module("torch")


def set_threads(threads: int) -> None:
    """``threads`` inside an operation, one operation at a time."""
    torch = import_torch()
    torch.set_num_threads(threads)
    # A process may set it once, before the first operation between whose parts it could divide threads.
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def prepare_inductor(cache: Path) -> None:
    """``torch.compile`` makes a program for each of many shapes, in this process, and fails beyond."""
    # Compiled code is kept as other conversions are; graphs with frozen weights it never keeps.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    # No processes beside this one, whose threads would count and whose memory would stay.
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.compile_threads = 1
    dynamo: Any = importlib.import_module("torch._dynamo").config
    dynamo.recompile_limit = _MOST_PROGRAMS
    dynamo.fail_on_recompile_limit_hit = True  # the alternative is to go on uncompiled, and to say nothing


def load_encoder(checkpoint: Path, encoder: Encoder, attention: str | None = None) -> Any:
    """A torch module in f32 from the inputs, in ``Encoder.inputs``'s order, to the last hidden state.

    ``attention`` is the form in which transformers states attention; None: its own choice, SDPA wherever the
    architecture has it. The pooler is left out: nothing here reads it.
    """
    torch = import_torch()
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    chosen = {} if attention is None else {"attn_implementation": attention}
    # Without a dtype it would be the checkpoint's, which may be f16.
    model = transformers.AutoModel.from_pretrained(
        checkpoint, local_files_only=True, dtype=torch.float32, **chosen
    ).eval()
    if getattr(model, "pooler", None) is not None:
        model.pooler = None

    class LastHiddenState(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
            given = {"input_ids": input_ids, "attention_mask": attention_mask}
            if token_type_ids is not None:
                given["token_type_ids"] = token_type_ids
            return self.encoder(**given).last_hidden_state

    return LastHiddenState().eval().requires_grad_(False)


def tensors(feeds: Feeds) -> tuple[Any, ...]:
    """The inputs as tensors, without copies."""
    torch = import_torch()
    return tuple(torch.from_numpy(array) for array in feeds.values())


def autocast(enabled: bool) -> Any:
    """Products in bf16. It keeps casts of trained parameters alone, so its cache only costs here."""
    return import_torch().autocast("cpu", dtype=import_torch().bfloat16, enabled=enabled, cache_enabled=False)


def narrow_linears(module: Any) -> Any:
    """Weights of linears in bf16, in place: autocast would cast them anew in every call (a fifth of 1x128)."""
    torch = import_torch()
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.to(torch.bfloat16)
    return module


def onednn_linears(module: Any) -> Any:
    """Linears with weights in oneDNN's blocked layout, in place; everything between them stays as it is."""
    torch = import_torch()
    linear = importlib.import_module("torch.utils.mkldnn").MkldnnLinear
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, torch.nn.Linear):
                setattr(parent, name, linear(layer, torch.float))
    return module


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leaves out what torch and transformers say of their own futures and of traces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def torch_facts() -> dict[str, Any]:
    """Versions, threads and vectors in force."""
    torch = import_torch()
    return {
        "version": str(torch.__version__),
        **versions("transformers"),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
