"""ONNX files byte by byte: a small encoder written in many ways, and files that lie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_files import field_bytes, input_bytes, model_bytes, node_bytes, tensor_bytes
from onnx_writer import GELU, GELU_TANH, HEADS, HIDDEN, INPUTS, NORM, SILU, Writer

from encast.archs import build_graph
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.files import Folder
from encast.importers.onnx import Export, read_export
from encast.importers.onnx.folding import fold
from encast.importers.onnx.model import OnnxNode


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
        ({"act": [("CastLike", ["half", "x"], "k", {}), *GELU[:-1], ("Mul", ["d", "k"], "y", {})]}, "gelu"),
        ({"act": [*GELU[:2], ("CastLike", ["true", "x"], "k", {}), ("Add", ["b", "k"], "c", {}), *GELU[3:]]}, "gelu"),
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


class Reshaped(Writer):
    def word_ids(self) -> str:
        flat = self.add("Reshape", self.add("Cast", "input_ids", to=6), self.shape_of_rows("all", [-1]))
        return self.add("Reshape", flat, self.add("Shape", "input_ids"))


def test_ids_may_be_cast_and_reshaped(tmp_path: Path) -> None:
    found, plain = read(Reshaped().write(tmp_path / "a.onnx")), read(Writer().write(tmp_path / "b.onnx"))
    assert [node.op for node in found.graph.nodes] == [node.op for node in plain.graph.nodes]


def test_one_head_may_keep_its_axis(tmp_path: Path) -> None:
    writer = Writer()
    writer.weights["heads"] = np.array([0, 0, 1, -1])
    assert read(writer.write(tmp_path / "net.onnx")).outputs[0].kind == "rows"


def test_a_dropout_that_is_off_is_left_out(tmp_path: Path) -> None:
    writer = Writer(act=[("Relu", ["x"], "a", {}), ("Dropout", ["a", "half", "false"], "y", {})])
    assert read(writer.write(tmp_path / "net.onnx")).outputs[0].kind == "rows"


def pooled(writer: Writer) -> str:
    """The mean of the tokens' rows."""
    rows, tokens = writer.encoder(), writer.shape_of_rows("tokens", [1])
    real = writer.add("Cast", writer.add("Unsqueeze", "attention_mask", writer.shape_of_rows("last", [2])), to=1)
    total = writer.add("ReduceSum", writer.add("Mul", rows, real), tokens, keepdims=0)
    return writer.add("Div", total, writer.add("ReduceSum", real, tokens, keepdims=0))


@pytest.mark.parametrize("bent", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_a_pooling_without_an_activation(tmp_path: Path, bent: bool, normalised: bool) -> None:
    writer = Writer()
    x = pooled(writer)
    if bent:
        x = writer.add("Tanh", x)
    if normalised:
        x = writer.add("Div", x, writer.add("ReduceL2", x, axes=[-1]))
    writer.nodes.append(node_bytes("Identity", [x], ["out"]))
    checkpoint = open_checkpoint(writer.finish(tmp_path / "net.onnx"))
    if bent:
        with pytest.raises(UnsupportedModelError, match="the graph is none of"):
            build_graph(checkpoint)
    else:
        assert build_graph(checkpoint).meta.task == "embed"


def test_of_all_hidden_states_the_last_is_taken(tmp_path: Path) -> None:
    writer = Writer()
    start = writer.embeddings()
    first = writer.layer(start)
    values = {"start": start, "hidden": first, "out": writer.layer(first)}
    writer.nodes += [node_bytes("Identity", [value], [name]) for name, value in values.items()]
    path = writer.finish(tmp_path / "net.onnx", outputs=tuple(values))
    assert build_graph(open_checkpoint(path)).meta.layers == 2
    for layers in (2, 1):
        (tmp_path / "config.json").write_text(f'{{"model_type": "bert", "num_hidden_layers": {layers}}}')
        assert build_graph(open_checkpoint(path)).meta.layers == layers
    (tmp_path / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 3}')
    with pytest.raises(CheckpointError, match="num_hidden_layers is 3, the exported graph has 2"):
        build_graph(open_checkpoint(path))


def test_layers_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.archs.exported_facts.MOST_LAYERS", 1)
    writer = Writer()
    path = tmp_path / "net.onnx"
    writer.nodes.append(node_bytes("Identity", [writer.layer(writer.encoder())], ["out"]))
    with pytest.raises(UnsupportedModelError, match="made with 2 attentions; encoders have at most 1 layers"):
        build_graph(open_checkpoint(writer.finish(path)))


@pytest.mark.parametrize("location", ["net.data", "./net.data"])
def test_weights_may_lie_beside(tmp_path: Path, location: str) -> None:
    writer = Writer()
    plain = build_graph(open_checkpoint(writer.write(tmp_path / "plain.onnx")))
    (tmp_path / "apart").mkdir()
    data, tensors = b"", []
    for name, array in writer.weights.items():
        entries = {"location": location, "offset": str(len(data)), "length": str(array.nbytes)}
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
        if self.change == "clamped scores":
            return super().masked(self.add("Clip", scores, "minus ten", "ten"))
        if self.change == "symmetric scores":
            return super().masked(self.add("Max", scores, self.add("Transpose", scores, perm=[0, 1, 3, 2])))
        if self.change == "softmax of one":
            return self.add("Unsqueeze", super().masked(scores), self.shape_of_rows("behind", [-1]))
        return super().masked(scores)

    def word_ids(self) -> str:
        self.weights |= {"0": np.array(0), "5": np.array(5), "999": np.array(999)}
        if self.change == "small ids":
            return self.add("Where", self.add("Less", "input_ids", "5"), "5", "input_ids")
        if self.change == "clipped ids":
            return self.add("Clip", "input_ids", "0", "999")
        if self.change == "ids and types":
            return self.add("Max", "token_type_ids", "input_ids")
        return super().word_ids()

    def type_ids(self) -> str:
        return self.add("Clip", "token_type_ids", "0", "5") if self.change == "clipped types" else super().type_ids()

    def position_ids(self) -> str:
        if self.change == "far positions":
            self.positions = 400
            self.weights["350"] = np.array(350)
            return self.add("Min", super().position_ids(), "350")
        if self.change == "many positions":
            self.positions = 3000
        return super().position_ids()

    def encoder(self) -> str:
        if self.change == "wide output":
            return self.add("Unsqueeze", super().encoder(), self.shape_of_rows("second", [1]))
        return super().encoder()

    def layer_norm(self, x: str) -> str:
        if self.change == "axis":
            return self.add("LayerNormalization", x, self.weight(HIDDEN), self.weight(HIDDEN), axis=1)
        return super().layer_norm(x)

    def attention(self, x: str) -> str:
        if self.change == "fixed":
            self.weights["heads"] = np.array([0, 5, HEADS, -1])
        if self.change == "mixed":
            self.weights["flat"] = np.array([0, HIDDEN, -1])
        if self.change == "mixed texts":
            return self.add("Unsqueeze", super().attention(x), self.shape_of_rows("second", [1]))
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
        (Wrong("clamped scores"), "no activation that encast has"),
        (Wrong("symmetric scores"), "Max takes rows and rows"),
        (Wrong("softmax of one"), "softmax is that of attention scores"),
        (Wrong("mixed texts"), "Add takes rows and rows"),
        (Wrong("wide output"), r"an output is \[batch, sequence, columns\]"),
        (Wrong("small ids"), "token ids are looked up in a table of words"),
        (Wrong("clipped ids"), "token ids are looked up in a table of words"),
        (Wrong("ids and types"), "token ids are looked up in a table of words"),
        (Wrong("clipped types"), "rows of a table are picked by token ids"),
        (Wrong("far positions"), "rows of a table are picked by token ids"),
        (Wrong("many positions"), "the position table is for 3000 tokens; 5 to 2048 are read"),
        (Writer(act=[*GELU[:-1], ("Mul", ["d", "half"], "g", {}), ("Clip", ["g", "minus ten", "ten"], "y", {})]),
         "no activation that encast has"),
        (Writer(act=[("Relu", ["x"], "a", {}), ("Dropout", ["a", "half", "true"], "y", {})]), "a dropout does nothing"),
        (Writer(act=[("Relu", ["x"], "a", {}), ("Cast", ["a"], "y", {"to": 7})]), "stay numbers in floating point"),
        (Writer(norm=[("ReduceMean", ["x"], "m", {"axes": [5]}), *NORM[1:]]), "there is no axis 5 among 3"),
        (Writer(norm=[*NORM[:7], ("Add", ["d", "BETA"], "y", {})]), "multiplies by gamma and then adds beta"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(tmp_path: Path, writer: Writer, message: str) -> None:
    with pytest.raises(EncastError, match=message):
        read(writer.write(tmp_path / "net.onnx"))


def test_a_causal_mask_is_refused(tmp_path: Path) -> None:
    writer = Wrong("causal mask")
    writer.weights["low.positive"] = np.array(1e9, np.float32)
    with pytest.raises(UnsupportedModelError, match="what is added to scores is a mask of padding"):
        read(writer.write(tmp_path / "net.onnx"))


# Files that lie


def lone(tmp_path: Path, *nodes: bytes, **options: Any) -> Path:
    path = tmp_path / "net.onnx"
    options = {"inputs": INPUTS[:1], "initializers": {"w": np.ones((3, 2), np.float32)}} | options
    path.write_bytes(model_bytes(list(nodes), **options))
    return path


ROWS = node_bytes("Gather", ["w", "input_ids"], ["x"])
FLOATS = node_bytes("Cast", ["input_ids"], ["x"], to=1)
TALL, WIDE = node_bytes("Expand", ["w", "tall"], ["a"]), node_bytes("Expand", ["w", "wide"], ["b"])


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [
        ([], {}, "an output reads 'out', which nothing before it makes"),
        ([node_bytes("Add", ["a", "w"], ["out"])], {}, r"\(Add\) reads 'a', which nothing before it makes"),
        ([node_bytes("Identity", ["out"], ["out"])], {}, "reads 'out', which nothing before it makes; .* cycles"),
        ([node_bytes("Identity", ["w"], ["w"])], {}, "two nodes or inputs are named 'w'"),
        ([node_bytes("Identity", ["w"], ["a"])] * 2, {}, "two nodes or inputs are named 'a'"),
        ([node_bytes("Gelu", ["w"], ["out"], "com.example")], {}, "of 'com.example' is no op of ONNX itself"),
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
        ([node_bytes("Cast", ["w"], ["out"], to=[16])], {}, "does not fit its inputs"),
        ([node_bytes("Cast", ["w"], ["out"], to=17)], {}, "does not fit its inputs"),
        ([node_bytes("Concat", ["w", "w"], ["out"])], {}, "does not fit its inputs"),
        ([ROWS, node_bytes("Erf", ["", "x"], ["out"])], {}, "an elementwise function takes rows or scores first"),
        ([ROWS, node_bytes("Gelu", ["", "x"], ["out"])], {}, "an elementwise function takes rows or scores first"),
        ([ROWS, node_bytes("Where", ["", "x", "x"], ["out"])], {}, "a condition and two values are needed"),
        ([FLOATS, node_bytes("Equal", ["x", "w"], ["out"])], {"initializers": {"w": np.array(np.nan)}}, "rows of the"),
        ([FLOATS, node_bytes("Equal", ["x", "w"], ["out"])], {"initializers": {"w": np.array(np.inf)}}, "rows of the"),
        ([TALL, WIDE, node_bytes("Clip", ["a", "b"], ["out"])],
         {"initializers": {"w": np.ones(1), "tall": np.array([1 << 25, 1]), "wide": np.array([1, 1 << 25])}},
         "no encoder needs that"),
        ([node_bytes("GatherElements", ["w", "i"], ["out"], axis=1)],
         {"initializers": {"w": np.ones((3, 2)), "i": np.zeros((4, 2), np.int64)}}, "an index larger than the data"),
        ([node_bytes("GatherElements", ["w", "i"], ["out"], axis=1)],
         {"initializers": {"w": np.ones((3, 2)), "i": np.zeros(2, np.int64)}}, "does not fit its inputs"),
        ([], {"outputs": ("out",) * 257}, "more than 256 outputs"),
        ([], {"opset": 10}, "the ops are those of opset 10; 11 to 23 are read"),
        ([], {"opset": 24}, "opset 24"),
        ([], {"inputs": [input_bytes("x")]}, "has an input 'x'; the inputs of an encoder are input_ids"),
        ([], {"inputs": [input_bytes("input_ids", ("b", 4))]}, "have the fixed length 4; 5 to 2048 are read"),
        ([], {"inputs": [input_bytes("input_ids", ("b", 2049))]}, "have the fixed length 2049; 5 to 2048 are read"),
        ([], {"inputs": [input_bytes("input_ids", (1025, 8))]}, "have the fixed batch 1025; 1 to 1024 are read"),
        ([], {"inputs": [input_bytes("input_ids", (0, 8))]}, "have the fixed batch 0; 1 to 1024 are read"),
        ([], {"inputs": [input_bytes("input_ids", (2, 8)), input_bytes("attention_mask", ("b", 9))]},
         r"'attention_mask' has the shape \(None, 9\), an input before it 8 in the place of 9"),
        ([], {"inputs": [input_bytes("input_ids", kind=1)]}, "of data type 1"),
        ([], {"outputs": ()}, "holds 1 graphs with 0 outputs"),
        ([], {"extra": field_bytes(15, b"")}, "has sparse initializers"),
        ([], {"initializers": [tensor_bytes("w", np.ones(2, np.float32))] * 2}, "is there twice"),
    ],
)  # fmt: skip
def test_graphs_that_lie(tmp_path: Path, nodes: list[bytes], options: dict[str, Any], message: str) -> None:
    with pytest.raises(EncastError, match=message):
        read(lone(tmp_path, *nodes, **options))


def test_arrays_that_own_no_memory_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.importers.onnx.read._MOST_BYTES", 1000)
    nodes = [node_bytes("Tile", ["w", "n"], [name]) for name in ("a", "out")]
    with pytest.raises(CheckpointError, match="computes more than 1000 bytes"):
        read(lone(tmp_path, *nodes, initializers={"w": np.ones(1, np.float32), "n": np.array([150])}))


def test_what_is_computed_is_limited_where_no_output_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.importers.onnx.read._MOST_BYTES", 40_000)
    done: list[str] = []

    def noted(node: OnnxNode, *rest: Any) -> Any:
        done.append(node.op)
        return fold(node, *rest)

    monkeypatch.setattr("encast.importers.onnx.read.fold", noted)
    writer = Writer()
    writer.weights["n"] = np.array([5000])
    for _ in range(9):
        writer.add("Cos", writer.add("Expand", "one", "n"))
    with pytest.raises(CheckpointError, match=r"computes more than 40000 bytes of masks and sizes, by node .* \(Cos\)"):
        read(writer.write(tmp_path / "net.onnx"))
    assert done.count("Cos") == 3


def test_an_error_that_is_kept_holds_no_frames(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not fit its inputs") as caught:
        read(lone(tmp_path, node_bytes("Reshape", ["w", "w"], ["out"])))
    assert not {"_meaning", "fold"} & {one.name for one in caught.traceback}
    assert caught.value.__context__ is None


def test_numbers_one_by_one_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.importers.onnx.tensors._MOST_NUMBERS", 3)
    with pytest.raises(UnsupportedModelError, match="more than 3 numbers one by one"):
        read(lone(tmp_path, node_bytes("Squeeze", ["w"], ["out"], axes=[0] * 4)))


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "wanted"),
    [
        ("Split", [np.arange(7)], {"num_outputs": 3}, [[0, 1, 2], [3, 4, 5], [6]]),
        ("ReduceSum", [np.array([1, 2])], {"noop_with_empty_axes": 1}, [[1, 2]]),
        ("ReduceSum", [np.array([1, 2]), np.empty(0, np.int64)], {"keepdims": 0}, [3]),
        ("Mod", [np.array([-5]), np.array([3])], {"fmod": 1}, [[-2]]),
        ("Mod", [np.array([-5]), np.array([3])], {}, [[1]]),
        (
            "Cast",
            [np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -np.inf, 3.4e38], np.float32)],
            {"to": 16},
            [[1.0, 1 + 2**-6, 1 + 2**-7, -np.inf, np.inf]],
        ),
        ("GatherElements", [np.array([[1, 2], [3, 4]]), np.array([[1, 0, 1]])], {"axis": 1}, [[[2, 1, 2]]]),
    ],
)
def test_ops_on_numbers_are_those_of_onnx(op: str, inputs: list[Any], attributes: dict[str, Any], wanted: Any) -> None:
    node = OnnxNode(op, "", op, ["x"] * len(inputs), ["y"] * len(wanted), attributes)
    made = fold(node, inputs, 18)
    assert made is not None
    assert [one.tolist() for one in made] == wanted


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
        ({"raw": None, "extra": external(location="./..")}, "in the same folder"),
        ({"raw": None, "extra": external(location="./link")}, "a link out of the model's folder"),
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


def test_what_git_leaves_for_a_large_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match=r"net\.onnx: a git-lfs pointer, not the file; run `git lfs pull`"):
        read(path)


def test_no_onnx_file_at_all(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    for content in (b"nonsense", b"\x08\x08", b"PK\x03\x04" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"net\.onnx: (no ONNX file|holds 0 graphs)"):
            read(path)
