"""ONNX files byte by byte: a small encoder written in many ways, and files that lie."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_files import field_bytes, input_bytes, model_bytes, node_bytes, tensor_bytes

from encast.archs import build_graph
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.files import Folder
from encast.importers.onnx import Export, read_export

HIDDEN, HEADS, INNER, VOCAB, POSITIONS = 8, 2, 12, 30, 16
INPUTS = [input_bytes(name) for name in ("input_ids", "attention_mask", "token_type_ids")]

GELU = [
    ("Div", ["x", "root2"], "a", {}),
    ("Erf", ["a"], "b", {}),
    ("Add", ["b", "one"], "c", {}),
    ("Mul", ["x", "c"], "d", {}),
    ("Mul", ["d", "half"], "y", {}),
]
GELU_TANH = [
    ("Pow", ["x", "three"], "a", {}),
    ("Mul", ["a", "cubic"], "b", {}),
    ("Add", ["x", "b"], "c", {}),
    ("Mul", ["c", "root"], "d", {}),
    ("Tanh", ["d"], "e", {}),
    ("Add", ["one", "e"], "f", {}),
    ("Mul", ["half", "x"], "g", {}),
    ("Mul", ["g", "f"], "y", {}),
]
SILU = [("Sigmoid", ["x"], "a", {}), ("Mul", ["x", "a"], "y", {})]
NORM = [
    ("ReduceMean", ["x"], "m", {"axes": [-1]}),
    ("Sub", ["x", "m"], "c", {}),
    ("Mul", ["c", "c"], "p", {}),
    ("ReduceMean", ["p"], "v", {"axes": [-1]}),
    ("Add", ["v", "eps"], "e", {}),
    ("Sqrt", ["e"], "s", {}),
    ("Div", ["c", "s"], "d", {}),
    ("Mul", ["d", "GAMMA"], "g", {}),
    ("Add", ["g", "BETA"], "y", {}),
]
Steps = Sequence[tuple[str, list[str], str, dict[str, Any]]]


class Writer:
    """A BERT of one layer as ONNX nodes; tests change single parts of it."""

    def __init__(self, *, act: Steps = GELU, mask: str = "add", norm: Steps | None = None, gemm: bool = False) -> None:
        self.random = np.random.RandomState(0)
        self.nodes: list[bytes] = []
        self.weights: dict[str, np.ndarray[Any, Any]] = {}
        numbers = {"one": 1.0, "half": 0.5, "three": 3.0, "eps": 1e-12, "cubic": 0.044715}
        numbers |= {"root2": 2**0.5, "root": (2 / np.pi) ** 0.5, "low": -1e9, "dim": (HIDDEN / HEADS) ** 0.5}
        for name, value in numbers.items():
            self.weights[name] = np.array(value, np.float32)
        self.weights |= {"ids": np.arange(POSITIONS)[None], "heads": np.array([0, 0, HEADS, -1])}
        self.weights |= {"flat": np.array([0, 0, HIDDEN]), "first": np.array([0]), "second": np.array([1])}
        self.act, self.mask, self.norm, self.gemm = act, mask, norm, gemm
        self.count = 0

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        self.count += 1
        name = f"v{self.count}"
        self.nodes.append(node_bytes(op, inputs, [name], **attributes))
        return name

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = self.random.standard_normal(shape).astype(np.float32)
        return name

    def play(self, steps: Steps, x: str, **names: str) -> str:
        made = {"x": x, **names}
        for op, inputs, output, attributes in steps:
            made[output] = self.add(op, *(made.get(one, one) for one in inputs), **attributes)
        return made["y"]

    def linear(self, x: str, inner: int, size: int) -> str:
        weight, bias = self.weight(inner, size), self.weight(size)
        if self.gemm:
            flat = self.add("Reshape", x, self.shape_of_rows("rows", [-1, inner]))
            return self.add("Reshape", self.add("Gemm", flat, weight, bias), self.back(x, size))
        return self.add("Add", self.add("MatMul", x, weight), bias)

    def shape_of_rows(self, name: str, shape: list[int]) -> str:
        key = f"{name}{shape}"
        self.weights[key] = np.array(shape)
        return key

    def back(self, x: str, size: int) -> str:
        front = self.add("Slice", self.add("Shape", x), "first", self.shape_of_rows("two", [2]))
        return self.add("Concat", front, self.shape_of_rows("size", [size]), axis=0)

    def layer_norm(self, x: str) -> str:
        gamma, beta = self.weight(HIDDEN), self.weight(HIDDEN)
        if self.norm is not None:
            return self.play(self.norm, x, GAMMA=gamma, BETA=beta)
        return self.add("LayerNormalization", x, gamma, beta, epsilon=1e-12)

    def embeddings(self) -> str:
        length = self.add("Slice", self.add("Shape", "input_ids"), "second", self.shape_of_rows("end", [2]))
        positions = self.add("Slice", "ids", "first", length, "second")
        words = self.add("Gather", self.weight(VOCAB, HIDDEN), "input_ids")
        types = self.add("Gather", self.weight(2, HIDDEN), "token_type_ids")
        rows = self.add("Gather", self.weight(POSITIONS, HIDDEN), positions)
        return self.layer_norm(self.add("Add", self.add("Add", words, types), rows))

    def masked(self, scores: str) -> str:
        wide = self.add("Unsqueeze", "attention_mask", self.shape_of_rows("axes", [1, 2]))
        if self.mask == "where":
            padding = self.add("Equal", wide, "first")
            return self.add("Where", padding, "low", scores)
        real = self.add("Cast", wide, to=1)
        return self.add("Add", scores, self.add("Mul", self.add("Sub", "one", real), "low"))

    def attention(self, x: str) -> str:
        q, k, v = (self.add("Reshape", self.linear(x, HIDDEN, HIDDEN), "heads") for _ in range(3))
        q, v = (self.add("Transpose", one, perm=[0, 2, 1, 3]) for one in (q, v))
        scores = self.add("MatMul", q, self.add("Transpose", k, perm=[0, 2, 3, 1]))
        probs = self.add("Softmax", self.masked(self.add("Div", scores, "dim")), axis=-1)
        context = self.add("Transpose", self.add("MatMul", probs, v), perm=[0, 2, 1, 3])
        return self.linear(self.add("Reshape", context, "flat"), HIDDEN, HIDDEN)

    def encoder(self) -> str:
        x = self.embeddings()
        x = self.layer_norm(self.add("Add", self.attention(x), x))
        inner = self.play(self.act, self.linear(x, HIDDEN, INNER))
        return self.layer_norm(self.add("Add", self.linear(inner, INNER, HIDDEN), x))

    def write(self, path: Path, **options: Any) -> Path:
        self.nodes.append(node_bytes("Identity", [self.encoder()], ["out"]))
        return self.finish(path, **options)

    def finish(self, path: Path, **options: Any) -> Path:
        path.write_bytes(model_bytes(self.nodes, self.weights, INPUTS, **options))
        return path


def read(path: Path) -> Export:
    return read_export(Folder(path.parent), path.name)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "gelu"),
        ({"act": GELU_TANH}, "gelu_tanh"),
        ({"act": SILU}, "silu"),
        ({"act": [("Relu", ["x"], "y", {})]}, "relu"),
        ({"act": [("Tanh", ["x"], "y", {})]}, "tanh"),
        ({"act": [("Gelu", ["x"], "y", {})]}, "gelu"),
        ({"act": [("Gelu", ["x"], "y", {"approximate": "tanh"})]}, "gelu_tanh"),
        ({"mask": "where"}, "gelu"),
        ({"norm": NORM}, "gelu"),
        ({"gemm": True}, "gelu"),
    ],
)
def test_every_writing_is_one_graph(tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    graph = build_graph(open_checkpoint(Writer(**options).write(tmp_path / "net.onnx")))
    assert (graph.meta.arch, graph.meta.task, graph.meta.layers, graph.meta.heads) == ("bert", "features", 1, HEADS)
    assert [node.attrs["kind"] for node in graph.nodes if node.op == "activation"] == [kind]
    plain = build_graph(open_checkpoint(Writer().write(tmp_path / "plain.onnx")))
    for name, constant in plain.constants.items():
        assert np.array_equal(constant.array, graph.constants[name].array), name
    assert str(graph) == str(plain).replace("kind=gelu", f"kind={kind}")


def test_weights_may_lie_beside(tmp_path: Path) -> None:
    writer = Writer()
    plain = build_graph(open_checkpoint(writer.write(tmp_path / "plain.onnx")))
    (tmp_path / "apart").mkdir()
    data, tensors = b"", []
    for name, array in writer.weights.items():
        entries = {"location": "net.data", "offset": str(len(data)), "length": str(array.nbytes)}
        tensors.append(tensor_bytes(name, array, raw=None, extra=external(**entries)))
        data += array.tobytes() + bytes(-array.nbytes % 64)
    (tmp_path / "apart" / "net.data").write_bytes(data)
    (tmp_path / "apart" / "net.onnx").write_bytes(model_bytes(writer.nodes, tensors, INPUTS))
    checkpoint = open_checkpoint(tmp_path / "apart")
    found = build_graph(checkpoint)
    for name, constant in plain.constants.items():
        assert np.array_equal(constant.array, found.constants[name].array), name


def external(**entries: str) -> bytes:
    pairs = (field_bytes(1, key) + field_bytes(2, value) for key, value in entries.items())
    return b"".join(field_bytes(13, pair) for pair in pairs) + field_bytes(14, 1)


# Graphs that are read and refused


class Wrong(Writer):
    """``change``: a method's name and what it does instead."""

    def __init__(self, change: str, **options: Any) -> None:
        super().__init__(**options)
        self.change = change

    def masked(self, scores: str) -> str:
        if self.change == "small mask":
            self.weights["low"] = np.array(-5.0, np.float32)
        if self.change == "causal mask":
            length = self.add("Slice", self.add("Shape", "input_ids"), "second", self.shape_of_rows("end", [2]))
            square = self.add("ConstantOfShape", self.add("Concat", length, length, axis=0))
            self.weights["minus"] = np.array(-1e9, np.float32)
            above = self.add("Trilu", self.add("Sub", square, "one"), "second.scalar")
            self.weights["second.scalar"] = np.array(1)
            return super().masked(self.add("Add", scores, self.add("Mul", above, "low.positive")))
        if self.change == "bent scores":
            return super().masked(self.add("Tanh", scores))
        return super().masked(scores)

    def layer_norm(self, x: str) -> str:
        if self.change == "axis":
            return self.add("LayerNormalization", x, self.weight(HIDDEN), self.weight(HIDDEN), axis=1)
        return super().layer_norm(x)

    def attention(self, x: str) -> str:
        if self.change == "fixed":
            self.weights["heads"] = np.array([0, 5, HEADS, -1])
        if self.change == "mixed":
            self.weights["flat"] = np.array([0, HIDDEN, -1])
        return super().attention(x)


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (Wrong("small mask"), r"node 'the/Add/of/v\d+' \(Add\) takes a function of attention scores .*, ids, a mask"),
        (Wrong("bent scores"), "no activation that encast has"),
        (Wrong("axis"), "a layer norm goes over the columns"),
        (Wrong("fixed"), "does not fit its inputs"),
        (Wrong("mixed"), "does not fit its inputs|would mix tokens"),
        (Writer(act=[("Exp", ["x"], "y", {})]), "what comes in is no activation that encast has, which are"),
        (Writer(act=[("Celu", ["x"], "y", {})]), r"'Celu' is not read here; ops on rows are Add, Attention"),
        (Writer(norm=[*NORM[:4], ("Sqrt", ["v"], "s", {}), *NORM[6:]]), "its own variance plus a number above 0"),
        (Writer(norm=[*NORM[:7], ("Add", ["d", "BETA"], "y", {})]), "multiplies by gamma and then adds beta"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, writer: Writer, message: str) -> None:
    with pytest.raises(EncastError, match=message):
        read(writer.write(tmp_path / "net.onnx"))


def test_a_causal_mask_is_refused(tmp_path: Path) -> None:
    writer = Wrong("causal mask")
    writer.weights["low.positive"] = np.array(1e9, np.float32)
    with pytest.raises(UnsupportedModelError, match="what is added to scores is a mask of padding"):
        read(writer.write(tmp_path / "net.onnx"))


def test_an_encoder_without_token_types_as_input_is_refused(tmp_path: Path) -> None:
    writer = Writer()
    zeros = writer.add("Mul", "input_ids", "first")
    writer.nodes.append(node_bytes("Identity", [zeros], ["token_type_ids"]))
    writer.nodes.append(node_bytes("Identity", [writer.encoder()], ["out"]))
    path = tmp_path / "net.onnx"
    path.write_bytes(model_bytes(writer.nodes, writer.weights, INPUTS[:2]))
    with pytest.raises(UnsupportedModelError, match="exported without token_type_ids"):
        read(path)


# Files that lie


def lone(tmp_path: Path, *nodes: bytes, **options: Any) -> Path:
    path = tmp_path / "net.onnx"
    options = {"inputs": INPUTS[:1], "initializers": {"w": np.ones((3, 2), np.float32)}} | options
    path.write_bytes(model_bytes(list(nodes), **options))
    return path


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [
        ([], {}, "an output reads 'out', which nothing before it makes"),
        ([node_bytes("Add", ["a", "w"], ["out"])], {}, r"\(Add\) reads 'a', which nothing before it makes"),
        ([node_bytes("Identity", ["out"], ["out"])], {}, "reads 'out', which nothing before it makes; .* cycles"),
        ([node_bytes("Identity", ["w"], ["w"])], {}, "two nodes or inputs are named 'w'"),
        ([node_bytes("Identity", ["w"], ["a"])] * 2, {}, "two nodes or inputs are named 'a'"),
        ([node_bytes("Gelu", ["w"], ["out"], "com.microsoft")], {}, "of 'com.microsoft' is no op of ONNX itself"),
        ([node_bytes("If", ["w"], ["out"], then_branch=b"")], {}, "'If' is not read here"),
        ([node_bytes("Loop", ["w"], ["out"], body=b"\xff\xff")], {}, "'Loop' is not read here"),
        ([node_bytes("Expand", ["w", "big"], ["out"])],
         {"initializers": {"w": np.ones(1, np.float32), "big": np.array([10**9, 10**9])}}, "no encoder needs that"),
        ([node_bytes("ConstantOfShape", ["w"], ["out"])], {"initializers": {"w": np.array([1 << 40])}}, "needs that"),
        ([node_bytes("Tile", ["big", "big"], ["out"])], {"initializers": {"big": np.array([1 << 40])}}, "needs that"),
        ([node_bytes("Range", ["a", "b", "c"], ["out"])],
         {"initializers": {"a": np.array(0), "b": np.array(1 << 60), "c": np.array(1)}}, "no encoder"),
        ([node_bytes("Range", ["a", "a", "a"], ["out"])], {"initializers": {"a": np.array(0)}}, "does not fit"),
        ([node_bytes("Reshape", ["w", "w"], ["out"])], {}, "does not fit its inputs"),
        ([node_bytes("Concat", ["w", "w"], ["out"])], {}, "does not fit its inputs"),
        ([], {"opset": 10}, "the ops are those of opset 10; 11 to 23 are read"),
        ([], {"opset": 24}, "opset 24"),
        ([], {"inputs": [input_bytes("x")]}, "has an input 'x'; the inputs of an encoder are input_ids"),
        ([], {"inputs": [input_bytes("input_ids", (1, "s"))]}, r"fixed shape \(1, None\); export the model with"),
        ([], {"inputs": [input_bytes("input_ids", kind=1)]}, "of data type 1"),
        ([], {"outputs": ()}, "holds 1 graphs with 0 outputs"),
        ([], {"extra": field_bytes(15, b"")}, "has sparse initializers"),
        ([], {"initializers": [tensor_bytes("w", np.ones(2, np.float32))] * 2}, "is there twice"),
    ],
)  # fmt: skip
def test_graphs_that_lie(tmp_path: Path, nodes: list[bytes], options: dict[str, Any], message: str) -> None:
    with pytest.raises(EncastError, match=message):
        read(lone(tmp_path, *nodes, **options))


ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (2, 4)}, r"has 24 bytes; its shape \[2, 4\] and dtype float32 ask for 32"),
        ({"shape": (1 << 50, 1 << 50)}, "the file is damaged"),
        ({"shape": (-1, -6)}, "the file is damaged"),
        ({"shape": (1,) * 9}, "the file is damaged"),
        ({"kind": 17}, "has data type 17"),
        ({"kind": 8}, "has data type 8"),
        ({"raw": None}, "has 0 elements; its shape"),
        ({"raw": None, "extra": field_bytes(4, b"\0" * 24) + field_bytes(7, 1)}, "in several forms"),
        ({"raw": None, "extra": field_bytes(10, b"\0" * 48)}, "has elements of another type"),
        ({"extra": field_bytes(3, b"")}, "in segments"),
        ({"raw": None, "extra": external(location="/etc/passwd")}, "in the same folder"),
        ({"raw": None, "extra": external(location="../w")}, "in the same folder"),
        ({"raw": None, "extra": external(location="a/b")}, "in the same folder"),
        ({"raw": None, "extra": external(location="..")}, "in the same folder"),
        ({"raw": None, "extra": external(location="")}, "in the same folder"),
        ({"raw": None, "extra": external(location="absent")}, "which is not in"),
        ({"raw": None, "extra": external(location="link")}, "a link out of the model's folder"),
        ({"raw": None, "extra": external(location="data", offset="-1")}, "bytes -1 to 23"),
        ({"raw": None, "extra": external(location="data", offset="8")}, "do not belong together"),
        ({"raw": None, "extra": external(location="data", length="23")}, "do not belong together"),
        ({"raw": None, "extra": external(location="data", offset="x")}, "no numbers for its place"),
    ],
)
def test_tensors_that_lie(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "data").write_bytes(bytes(24))
    (folder / "link").symlink_to(outside)
    with pytest.raises(EncastError, match=message):
        read(lone(folder, initializers=[tensor_bytes("w", ONES, **changes)]))


def test_damage_is_an_error_at_every_byte(tmp_path: Path) -> None:
    path = Writer().write(tmp_path / "net.onnx")
    whole = path.read_bytes()
    random = np.random.RandomState(0)
    for place in random.choice(len(whole), 60, replace=False):
        for changed in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]):
            path.write_bytes(changed or b"\0")
            try:
                read(path)
            except EncastError as error:
                assert re.search(r"net\.onnx|node ", str(error))  # noqa: PT017


def test_no_onnx_file_at_all(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    for content in (b"nonsense", b"\x08\x08", b"PK\x03\x04" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"net\.onnx: (no ONNX file|holds 0 graphs)"):
            read(path)
