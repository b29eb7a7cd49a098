"""A checkpoint's ONNX exports beside the checkpoint itself: the distance of their artifacts' answers.

    python benchmarks/onnx_exports.py CHECKPOINT [FILE.onnx ...]

The checkpoint (BERT, features) is exported by torch's two exporters, optimised and quantised by the tools that users
have, and every file is compiled to f32 and verified against ONNX Runtime; FILEs are exports made elsewhere, tf2onnx's
say, in one file each. A row has the norm of the difference of the artifact's rows from those of the checkpoint's, over
that of these, the lowest cosine of two rows, and the same difference from ONNX Runtime, as the card has it with its
limit. 0 is the same bits. Needs torch, transformers, onnx, onnxruntime, onnxscript and nncf.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import onnx
import onnxruntime
import torch
import transformers
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers import float16, fusion_options, optimizer

import encast
from encast.errors import EncastError

NAMES = ["input_ids", "attention_mask", "token_type_ids"]
LENGTHS = (5, 64, 17, 1, 33)
Step = Callable[[Path, Path], object]


class Rows(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.model(ids, attention_mask=mask, token_type_ids=types).last_hidden_state
        return rows


class Texts(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self.batches = [feed(seed) for seed in range(8)]

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        return self.batches.pop() if self.batches else None


def feed(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    ids = np.random.default_rng(seed).integers(1000, 20000, (2, 32))
    return dict(zip(NAMES, (ids, np.ones_like(ids), np.zeros_like(ids)), strict=True))


def script(model: Rows, opset: int, *, fixed: bool = False) -> Step:
    def run(_: Path, out: Path) -> None:
        axes = {name: {0: "batch", 1: "sequence"} for name in NAMES}
        torch.onnx.export(
            model, _example(), str(out), dynamo=False, opset_version=opset, input_names=NAMES, output_names=["rows"],
            dynamic_axes=None if fixed else axes,
        )  # fmt: skip

    return run


def dynamo(model: Rows, opset: int) -> Step:
    def run(_: Path, out: Path) -> None:
        dims = {axis: torch.export.Dim(name) for axis, name in enumerate(("batch", "sequence"))}
        torch.onnx.export(
            model, _example(), str(out), dynamo=True, opset_version=opset, input_names=NAMES, output_names=["rows"],
            dynamic_shapes=(dims, dims, dims), external_data=False, verbose=False,
        )  # fmt: skip

    return run


def _example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two texts, of which one is padded."""
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[1, 40:] = 0
    return torch.randint(1000, 20000, (2, 64)), mask, torch.zeros(2, 64, dtype=torch.long)


def fused(source: Path, out: Path) -> None:
    model = optimizer.optimize_model(
        str(source), "bert", num_heads=0, hidden_size=0, optimization_options=fusion_options.FusionOptions("bert")
    )
    model.save_model_to_file(str(out))


def session(source: Path, out: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(out)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def halved(source: Path, out: Path) -> None:
    onnx.save(float16.convert_float_to_float16(onnx.load(str(source)), keep_io_types=True), str(out))


def dynamic(source: Path, out: Path, **options: Any) -> None:
    quantize_dynamic(str(source), str(out), weight_type=QuantType.QInt8, **options)


def static(source: Path, out: Path) -> None:
    prepared = out.with_name("prepared.onnx")
    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared), str(out), Texts(), quant_format=QuantFormat.QDQ, per_channel=True, weight_type=QuantType.QInt8,
        op_types_to_quantize=["MatMul", "Gemm"],
    )  # fmt: skip


def smoothed(source: Path, out: Path) -> None:
    texts = nncf.Dataset([feed(seed) for seed in range(8)])
    made = nncf.quantize(onnx.load(str(source)), texts, model_type=nncf.ModelType.TRANSFORMER, subset_size=8)
    onnx.save(made, str(out))


def steps(checkpoint: Path) -> dict[str, Step]:
    """What makes each file, of the file ``script-17``."""
    load = transformers.BertModel.from_pretrained
    eager, model = (
        Rows(load(checkpoint, add_pooling_layer=False, attn_implementation=how)).eval() for how in ("eager", "sdpa")
    )
    return {
        **{f"script-{opset}": script(model, opset) for opset in (17, 14, 20)},
        "script-11, eager": script(eager, 11),
        "script-17-fixed": script(model, 17, fixed=True),
        **{f"dynamo-{opset}": dynamo(model, opset) for opset in (18, 23)},
        "fused by onnxruntime.transformers": fused,
        "optimised by a session": session,
        "f16": halved,
        "onnxruntime dynamic": dynamic,
        "onnxruntime dynamic, channels": lambda source, out: dynamic(source, out, per_channel=True),
        "onnxruntime static QDQ": static,
        "nncf": smoothed,
    }


def answers(artifact: Path) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(1)
    batch = encast.Batch.of([random.integers(1000, 20000, length).tolist() for length in LENGTHS])
    with encast.load(artifact, threads=1) as engine:
        return np.asarray(engine.runnable.run("last_hidden_state", batch), np.float64)


def compare(file: Path, checkpoint: Path, wanted: np.ndarray[Any, Any], work: Path) -> str:
    folder = work / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(file, folder / "model.onnx")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (checkpoint / name).exists():
            shutil.copy(checkpoint / name, folder)
    try:
        artifact = encast.compile(folder, work / "file.encast", dtype="f32", task="features", verify=True)
    except EncastError as error:
        return f"refused: {error} | | |"
    found = answers(artifact)
    cosines = (found * wanted).sum(1) / np.sqrt((found**2).sum(1) * (wanted**2).sum(1))
    distance = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    verified = json.loads((artifact / "card.json").read_text())["verified"]
    limit = "none" if verified["limit"] is None else f"{verified['limit']:.2g}"
    return f"{distance:.2g} | {cosines.min():.6f} | {verified['relative']:.2g} | {limit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("files", type=Path, nargs="*")
    options = parser.parse_args()
    checkpoint, files = options.checkpoint.resolve(), [file.resolve() for file in options.files]
    print("| file | difference | lowest cosine | from its runtime | limit |\n| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        os.chdir(work)  # where tools leave files behind
        own = encast.compile(checkpoint, work / "own.encast", dtype="f32", task="features")
        wanted, first = answers(own), work / "0.onnx"
        for number, (name, step) in enumerate(steps(checkpoint).items()):
            made = work / f"{number}.onnx"
            try:
                with contextlib.redirect_stdout(sys.stderr):  # what the tools say
                    step(first, made)
            except Exception as error:  # of any of four tools: the others' rows are worth having
                print(f"| {name} | not made: {str(error).splitlines()[:1]} | | | |", flush=True)
                continue
            print(f"| {name} | {compare(made, checkpoint, wanted, work)} |", flush=True)
        for file in files:
            print(f"| {file.name} | {compare(file, checkpoint, wanted, work)} |", flush=True)


if __name__ == "__main__":
    main()
