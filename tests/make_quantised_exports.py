"""Writes ``golden/onnx_quantised``: exports of ``golden/onnx`` as ONNX Runtime quantises them, and its answers.

Run with onnx and onnxruntime (1.31): ``python tests/make_quantised_exports.py``. Tests read the files without either.
``python tests/make_quantised_exports.py smooth`` writes those with the channel scales of SmoothQuant, with NNCF (3.3)
where that is installed, and else with ONNX Runtime (1.18), whose SmoothQuant needs neural-compressor (2.6).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx_files import QUANTISED, QuantisedExport, quantised_texts
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

__all__ = ["quantise"]

GOLDEN = Path(__file__).parent / "golden"


class Texts(CalibrationDataReader):  # type: ignore[misc]
    """Some batches of random ids, with padding; ``alike``: all of one size, as neural-compressor wants them."""

    def __init__(self, names: list[str], *, alike: bool = False) -> None:
        random = np.random.RandomState(0)
        lengths = [np.array([12, 9]) if alike else random.randint(4, 13, 2) for _ in range(8)]
        self.whole = [feed([random.randint(5, 50, one).tolist() for one in pair], names) for pair in lengths]
        self.rewind()

    def rewind(self) -> None:
        self.batches = [*self.whole]

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        return self.batches.pop() if self.batches else None


def feed(ids: list[list[int]], names: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The inputs of ``names`` for texts of these ids."""
    longest = max(map(len, ids))
    padded = np.array([row + [0] * (longest - len(row)) for row in ids], np.int64)
    mask = np.array([[1] * len(row) + [0] * (longest - len(row)) for row in ids], np.int64)
    made = {"input_ids": padded, "attention_mask": mask, "token_type_ids": np.zeros_like(padded)}
    return {name: made[name] for name in names}


def quantise(case: QuantisedExport, out: Path) -> None:
    """Quantises the export of ``case`` into the file ``out``."""
    options = dict(case.options)
    for name in ("weight_type", "activation_type"):
        if name in options:
            options[name] = getattr(QuantType, options[name])
    source = str(GOLDEN / "onnx" / case.export)
    with tempfile.TemporaryDirectory() as scratch:
        if case.prepared:
            prepared = str(Path(scratch) / "prepared.onnx")
            with contextlib.chdir(scratch):  # where it leaves files behind
                quant_pre_process(source, prepared, skip_symbolic_shape=True)
            source = prepared
        if case.static:
            names = [one.name for one in onnx.load(source).graph.input]
            quantize_static(source, str(out), Texts(names), quant_format=QuantFormat.QDQ, **options)
        else:
            quantize_dynamic(source, str(out), **options)


def smooth(source: str, target: Path) -> None:
    """Writes an export that is quantised with fixed scales, and with numbers for the columns of rows."""
    names = [one.name for one in onnx.load(source).graph.input]
    if find_spec("nncf") is not None:
        nncf: Any = importlib.import_module("nncf")
        texts = nncf.Dataset(Texts(names, alike=True).batches)
        made = nncf.quantize(onnx.load(source), texts, model_type=nncf.ModelType.TRANSFORMER, subset_size=8)
        onnx.save(made, target / Path(source).name.replace(".onnx", "-smooth-nncf.onnx"))
        return
    out = target / Path(source).name.replace(".onnx", "-smooth-onnxruntime.onnx")
    options: dict[str, Any] = {"weight_type": QuantType.QInt8, "op_types_to_quantize": ["MatMul", "Gemm"]}
    extra = {"SmoothQuant": True, "SmoothQuantFolding": False}
    quantize_static(
        source, str(out), Texts(names, alike=True), quant_format=QuantFormat.QDQ, extra_options=extra, **options
    )


def main() -> None:
    target = GOLDEN / "onnx_quantised"
    target.mkdir(exist_ok=True)
    answers = {}
    for case in QUANTISED:
        path = target / case.file
        quantise(case, path)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        ids = quantised_texts()
        given = feed(ids, [one.name for one in session.get_inputs()])
        found = session.run(None, given)
        rows = np.stack(found, -1) if len(found) > 1 else found[0]
        if rows.shape[:2] == given["input_ids"].shape:
            rows = np.concatenate([row[: len(text)] for row, text in zip(rows, ids, strict=True)])
        answers[case.file] = rows.astype(np.float32)
    np.savez_compressed(target / "answers.npz", **answers)


if __name__ == "__main__":
    if sys.argv[1:] == ["smooth"]:
        smooth(str(GOLDEN / "onnx" / "bert-features-torchscript-11.onnx"), GOLDEN / "onnx_quantised")
    else:
        main()
