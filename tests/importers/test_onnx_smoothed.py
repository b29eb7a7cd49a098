"""SmoothQuant's numbers for the columns of rows go back into the weight that was divided by them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_files import CASES, checkpoint_of
from onnx_writer import HIDDEN, INNER, VOCAB, Writer

from encast.archs import build_graph
from encast.errors import EncastError
from encast.importers import open_checkpoint
from encast.importers.files import Folder
from encast.importers.onnx import reader
from encast.importers.onnx.model import read_model
from encast.ir import Graph
from encast.passes import optimise
from encast.quant import QuantSpec

GOLDEN = Path(__file__).parent.parent / "golden" / "onnx_quantised"
FILES = ["bert-features-torchscript-11-smooth-nncf.onnx", "bert-features-torchscript-11-smooth-onnxruntime.onnx"]
Array = np.ndarray[Any, Any]


def graph_of(path: Path) -> Graph:
    return build_graph(open_checkpoint(path))


def beside_its_config(folder: Path, file: str) -> Path:
    checkpoint_of(next(case for case in CASES if case.file == "bert-features-torchscript-11.onnx"), folder)
    (folder / "model.safetensors").unlink()
    shutil.copy(GOLDEN / file, folder / "model.onnx")
    return folder


def products_of(path: Path) -> list[Array]:
    """What the products with smoothed rows are of, ``[in, out]``: by the numbers of the file, in the order of nodes."""
    model = read_model(Folder(path.parent), path.name)
    tensors = {name: tensor.array() for name, tensor in model.initializers.items()}
    tensors |= {
        node.outputs[0]: node.attributes["value"].array() for node in model.nodes if node.op == "Constant"
        if "value" in node.attributes
    }  # fmt: skip
    rows: dict[str, Array] = {}
    weights: dict[str, Array] = {}
    found = []
    for node in model.nodes:
        given = [tensors.get(name) for name in node.inputs]
        if node.op == "Mul" and given[1] is not None and given[1].size in (32, 40):
            rows[node.outputs[0]] = given[1].reshape(-1)
        if node.op in ("QuantizeLinear", "DequantizeLinear") and node.inputs[0] in rows:
            rows[node.outputs[0]] = rows[node.inputs[0]]
        if node.op == "DequantizeLinear" and given[0] is not None and given[0].ndim == 2:
            assert given[1] is not None
            assert given[2] is not None
            weights[node.outputs[0]] = (given[0].astype(np.float32) - given[2]).astype(np.float32) * given[1]
        if node.op == "MatMul" and node.inputs[0] in rows:
            found.append(weights[node.inputs[1]] * rows[node.inputs[0]][:, None])
    return found


@pytest.mark.parametrize("file", FILES)
def test_weights_are_those_of_the_file_times_its_numbers(tmp_path: Path, file: str) -> None:
    graph = graph_of(beside_its_config(tmp_path / "model", file))
    wanted = products_of(GOLDEN / file)
    assert len(wanted) == 6
    held = [node.inputs[1] for node in graph.nodes if node.op == "linear"]
    for one in wanted:
        same = [name for name in held if np.array_equal(graph.constants[name].array, one.T)]
        assert len(same) == 1
        # The integers are not those of the whole weight any more.
        assert graph.constants[same[0]].integers is None


@pytest.mark.parametrize("file", FILES)
def test_ranges_of_scaled_rows_are_not_those_of_the_rows(tmp_path: Path, file: str) -> None:
    graph = graph_of(beside_its_config(tmp_path / "model", file))
    assert graph.fixed == {}
    _, report = optimise(graph, QuantSpec("int8"))
    assert report.kept
    assert all(kept == 0 for kept, _ in report.kept.values())


class Smoothed(Writer):
    """Every product has smoothed rows, as before they are quantised; ``change``: what is done otherwise."""

    def __init__(self, change: str = "", shape: tuple[int, ...] = (1, 1), *, gemm: bool = False) -> None:
        super().__init__(gemm=gemm)
        self.change, self.shape = change, shape
        self.plain: dict[str, Array] = {}
        self.shared = ""

    def linear(self, x: str, inner: int, size: int) -> str:
        weight, bias = self.weight(inner, size), self.weight(size)
        numbers = f"numbers of {weight}"
        self.plain[weight] = self.weights[weight]
        scales = 2.0 ** self.random.randint(-3, 4, inner)  # exact
        self.weights[weight] = (self.weights[weight] / scales[:, None]).astype(np.float32)
        self.weights[numbers] = scales.astype(np.float32).reshape(*self.shape, inner)
        if self.change == "infinite":
            self.weights[numbers][..., 3] = np.inf
        if self.change == "half of them":
            self.weights[numbers] = self.weights[numbers][..., : inner // 2]
        if self.change == "two scales" and inner == size == HIDDEN:
            weight, self.shared = self.shared or weight, self.shared or weight
        if self.change == "by position":
            self.weights[numbers] = np.linspace(0.5, 2.0, 5, dtype=np.float32)[:, None]
        rows = self.add("Mul", x, numbers)
        if self.change == "bent":
            rows = self.add("Tanh", rows)
        if self.change == "added":
            rows = self.add("Add", rows, x)
        if self.gemm:
            flat = self.add("Reshape", rows, self.shape_of_rows("rows", [-1, inner]))
            return self.add("Reshape", self.add("Gemm", flat, weight, bias), self.back(x, size))
        return self.add("Add", self.add("MatMul", rows, weight), bias)


@pytest.mark.parametrize("gemm", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_graph_is_that_without_them(tmp_path: Path, shape: tuple[int, ...], gemm: bool) -> None:
    writer = Smoothed(shape=shape, gemm=gemm)
    found, plain = graph_of(writer.write(tmp_path / "net.onnx")), graph_of(Writer().write(tmp_path / "plain.onnx"))
    assert str(found) == str(plain)
    held = [constant.array for constant in found.constants.values()]
    assert len(writer.plain) == 6
    for wanted in writer.plain.values():
        assert wanted.shape in ((HIDDEN, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN))
        assert any(np.array_equal(one.T, wanted) for one in held if one.shape == wanted.shape[::-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("infinite", r"'the/Mul/of/v\d+' \(Mul\) takes .*multiplied by finite f32 numbers"),
        ("half of them", r"'the/Mul/of/v\d+' \(Mul\) does not fit its inputs"),
        ("two scales", r"'the/MatMul/of/v\d+' \(MatMul\) takes .*read with the same scales each time"),
        ("by position", r"'the/Mul/of/v\d+' \(Mul\) takes"),
        ("bent", r"'the/Tanh/of/v\d+' \(Tanh\) takes rows times a number for each column"),
        ("added", r"'the/Add/of/v\d+' \(Add\) takes rows times a number for each column"),
    ],
)
def test_what_only_looks_similar_is_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(EncastError, match=message):
        graph_of(Smoothed(change).write(tmp_path / "net.onnx"))


def test_parts_of_a_weight_are_not_scaled_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_SPARE_BYTES", 0)
    writer = Writer()
    words = writer.add("Gather", writer.weight(VOCAB, HIDDEN), "input_ids")
    writer.weights |= {"numbers": np.linspace(1, 2, HIDDEN, dtype=np.float32), "all": np.array([HIDDEN])}
    scaled, weight = writer.add("Mul", words, "numbers"), writer.weight(HIDDEN, 64)
    products = []
    for end in range(64, 32, -1):
        writer.weights[f"end {end}"] = np.array([end])
        part = writer.add("Slice", weight, "first", f"end {end}", "second")
        products.append(writer.add("MatMul", scaled, part))
    with pytest.raises(EncastError, match="every weight is scaled once, and no part of it again"):
        graph_of(writer.finish(tmp_path / "net.onnx", outputs=(products[-1],)))


def test_scaled_rows_are_no_output(tmp_path: Path) -> None:
    writer = Writer()
    writer.weights["numbers"] = np.linspace(0.5, 2.0, HIDDEN, dtype=np.float32)
    scaled = writer.add("Mul", writer.encoder(), "numbers")
    with pytest.raises(
        EncastError, match=r"takes rows times a number for each column .*rows of the encoder are needed"
    ):
        graph_of(writer.finish(tmp_path / "net.onnx", outputs=(scaled,)))
