"""The checkpoint as a torch module, and torch's own settings: where PyTorch, its compilers and the exporters begin."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from encast.bench.peers.transformer import Encoder, Feeds, versions

__all__ = [
    "LINEAR",
    "autocast",
    "import_torch",
    "load_encoder",
    "narrow_linears",
    "onednn_linears",
    "quantise_linears",
    "quiet",
    "set_threads",
    "tensors",
    "torch_facts",
]

LINEAR = ("mkl", "onednn")
"""Libraries for f32 products: torch's default, and what ``torch.utils.mkldnn`` offers."""


def import_torch() -> Any:
    return importlib.import_module("torch")


def set_threads(threads: int) -> None:
    """``threads`` inside an operation, one operation at a time."""
    torch = import_torch()
    torch.set_num_threads(threads)
    # A process may set it once, before the first operation between whose parts it could divide threads.
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


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


def quantise_linears(module: Any) -> Any:
    """Linears with s8 weights a scale a channel, and activations quantised as they come, a scale a tensor."""
    torch = import_torch()
    quantisation: Any = importlib.import_module("torch.ao.quantization")
    config = quantisation.per_channel_dynamic_qconfig
    with quiet():
        return quantisation.quantize_dynamic(module, {torch.nn.Linear: config}, dtype=torch.qint8)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leaves out what torch and transformers say of their own futures and of traces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def torch_facts(module: Any = None) -> dict[str, Any]:
    """Version, threads and libraries in force; with a module of ``load_encoder`` its attention."""
    torch = import_torch()
    facts: dict[str, Any] = {
        "version": str(torch.__version__),
        "transformers": versions("transformers")["transformers"],
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    if module is not None:
        facts["attention"] = str(module.encoder.config._attn_implementation)
    return facts
