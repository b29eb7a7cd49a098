"""Writes ``golden/onnx``, exports by torch's two exporters, some of them optimised, that tests read without torch.
Those by tf2onnx are ``make_tensorflow_onnx.py``'s.

Run with torch (2.13), transformers (5.23), onnx, onnxscript and, for what is done to exports, onnxruntime (1.32):
``python tests/make_onnx_exports.py [NAME ...]``. The
weights are those of ``checkpoints.py``; sentence embeddings are pooled as sentence-transformers' modules do it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
import transformers
from onnx_files import CASES, NEWER, Export, checkpoint_of
from onnxruntime.transformers import float16, fusion_options, optimizer
from safetensors.torch import load_file
from shorten_onnx import shorten

__all__ = ["export"]

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_HEADS = {
    "features": ("AutoModel", ["last_hidden_state"]),
    "embed": ("AutoModel", ["sentence_embedding"]),
    "classify": ("AutoModelForSequenceClassification", ["logits"]),
    "tag": ("AutoModelForTokenClassification", ["logits"]),
    "answer": ("AutoModelForQuestionAnswering", ["start_logits", "end_logits"]),
    "fill_mask": ("AutoModelForMaskedLM", ["logits"]),
}


class Wrapped(torch.nn.Module):
    """A model with inputs by position, and sentence embeddings where ``export`` asks for them."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str], outputs: Sequence[str], export: Export) -> None:
        super().__init__()
        self.model, self.names, self.outputs, self.options = model, names, outputs, export.options
        self.dense: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, *inputs: torch.Tensor) -> Any:
        given = dict(zip(self.names, inputs, strict=True))
        answer = self.model(**given)
        if self.outputs == ["sentence_embedding"]:
            return self.embed(answer.last_hidden_state, given["attention_mask"])
        return tuple(answer[name] for name in self.outputs)

    def embed(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        spread = mask.unsqueeze(-1).expand(x.size()).to(x.dtype)
        if self.options["pooling"] == ("mean",):
            x = torch.sum(x * spread, 1) / torch.clamp(spread.sum(1), min=1e-9)
        elif self.options["pooling"] == ("max",):
            x = torch.max(torch.where(spread == 0, torch.tensor(-1e9), x), 1)[0]
        else:
            x = x[:, 0]
        for weight, bias in self.dense:
            x = torch.tanh(torch.nn.functional.linear(x, weight, bias))
        return torch.nn.functional.normalize(x, p=2, dim=1) if self.options.get("normalize") else x


def export(case: Export, folder: Path, out: Path) -> None:
    """Exports the checkpoint in ``folder`` to the file ``out``."""
    kind, outputs = _HEADS[case.head]
    model = getattr(transformers, kind).from_pretrained(
        folder, attn_implementation=case.attention, dtype=_DTYPES[case.dtype]
    )
    model.eval()
    sizes = tuple(size or most for size, most in zip(case.fixed, (2, 7), strict=True))
    ids = torch.randint(5, 20, sizes)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    wrapped = Wrapped(model, list(inputs), outputs, case)
    for path in sorted(folder.glob("*_Dense/model.safetensors")):
        tensors = load_file(path)
        wrapped.dense.append((tensors["linear.weight"], tensors["linear.bias"]))
    moving = [axis for axis, size in enumerate(case.fixed) if size is None]
    shared: dict[str, Any] = {"input_names": list(inputs), "output_names": outputs, "opset_version": case.opset}
    if case.exporter == "torchscript":
        axes = {name: {axis: ("batch", "sequence")[axis] for axis in moving} for name in inputs}
        torch.onnx.export(wrapped, tuple(inputs.values()), str(out), dynamic_axes=axes, dynamo=False, **shared)
        if case.arch in NEWER:
            shorten(out)
        return
    dims = {axis: torch.export.Dim(("batch", "sequence")[axis]) for axis in moving}
    program = torch.onnx.export(
        wrapped,
        tuple(inputs.values()),
        dynamic_shapes=(tuple(dims for _ in inputs),),
        dynamo=True,
        verbose=False,
        **shared,
    )
    assert program is not None
    for node in program.model.graph:
        # Stack traces and module names: most of the bytes of a small file, and no part of the model.
        node.metadata_props.clear()
        node.doc_string = None
    program.save(str(out), external_data=False)


def _optimise(path: Path, *, heads: bool) -> None:
    options = fusion_options.FusionOptions("bert")
    options.use_multi_head_attention = heads
    made = optimizer.optimize_model(
        str(path), "bert", num_heads=4, hidden_size=32, optimization_options=options, opt_level=0
    )
    made.save_model_to_file(str(path))


def _open_session(path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _halve(path: Path) -> None:
    made = float16.convert_float_to_float16(onnx.load(str(path)), keep_io_types=True, disable_shape_infer=True)
    onnx.save(made, str(path))


_STEPS: dict[str, Callable[[Path], None]] = {
    "transformers": lambda path: _optimise(path, heads=False),
    "heads": lambda path: _optimise(path, heads=True),
    "session": _open_session,
    "f16": _halve,
}
"""``Export.then``: what is done to a file, in its place."""


def main(names: Sequence[str]) -> None:
    target = Path(__file__).parent / "golden" / "onnx"
    target.mkdir(exist_ok=True)
    for case in CASES:
        if (names and case.file not in names) or not case.by_torch:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            checkpoint_of(case, folder)
            export(case, folder, target / case.file)
            for step in case.then:
                _STEPS[step](target / case.file)


if __name__ == "__main__":
    main(sys.argv[1:])
