"""ONNX files that take batches or texts of one size alone: what holds for other sizes is read, all else refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modern_writer import ModernWriter
from onnx_files import input_bytes, model_bytes, node_bytes
from onnx_writer import HEADS, HIDDEN, INPUTS, POSITIONS, VOCAB, Writer

from encast.archs import build_graph
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.ir import Graph

NAMES = ("input_ids", "attention_mask", "token_type_ids")
Size = int | str


class Fixed(Writer):
    """``size``: of its inputs, numbers where the file fixes them. ``change``: what is done otherwise."""

    def __init__(self, size: tuple[Size, Size], change: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.size, self.change = size, change
        if isinstance(size[1], int):
            front = [size[0] if isinstance(size[0], int) else -1, size[1]]
            self.weights["heads"] = np.array([*front, HEADS, HIDDEN // HEADS])
            self.weights["flat"] = np.array([*front, HIDDEN])

    def position_ids(self) -> str:
        if self.change == "input":
            return "position_ids"
        if self.change == "clipped":
            self.weights["most"] = np.array(POSITIONS - 3)
            return self.add("Min", super().position_ids(), "most")
        if not isinstance(self.size[1], int):
            return super().position_ids()
        ids = np.arange(self.size[1])
        changes = {"backwards": ids[::-1].copy(), "by two": ids // 2, "no positions": ids * 0}
        self.weights["ids"] = changes.get(self.change, ids)[None]
        return "ids"

    def embeddings(self) -> str:
        if not self.change.startswith("rows"):
            return super().embeddings()
        assert isinstance(self.size[1], int)
        words = self.add("Gather", self.weight(VOCAB, HIDDEN), self.word_ids())
        types = self.add("Gather", self.weight(2, HIDDEN), self.type_ids())
        if self.change.startswith("rows for types"):
            # What is left of the table in a file without token types: the row of type 0, for every position.
            types = self.weight(1, self.size[1], HIDDEN)
            self.weights[types][:] = self.weights[types][:, :1]
        if self.change == "rows for types of all":
            rows_of_all = self.add("Gather", self.weight(self.positions, HIDDEN), self.position_ids())
            return self.layer_norm(self.add("Add", self.add("Add", words, types), rows_of_all))
        table = self.weight(self.positions, HIDDEN)
        rows = self.weights[table][: self.size[1]]
        if self.change == "rows of types":
            rows = np.broadcast_to(rows[0], rows.shape).copy()
        if self.change == "rows by sequence":
            rows = np.stack([rows, rows[::-1]])
        self.weights[table] = rows if rows.ndim == 3 or self.change == "rows alone" else rows[None]
        x = self.add("Add", self.add("Add", words, types), table)
        return self.layer_norm(self.add("Add", table, x) if self.change == "rows twice" else x)

    def masked(self, scores: str) -> str:
        if self.change == "mask unread":
            return scores
        if self.change in ("window", "last key"):
            # In one array with padding, as exporters compute it in advance.
            assert isinstance(self.size[1], int)
            places = np.arange(self.size[1])
            seen = np.abs(places[:, None] - places) < 10 if self.change == "window" else places < places[-1]
            self.weights["more"] = np.where(seen, 0, -1e9).astype(np.float32)
            wide = self.add("Unsqueeze", "attention_mask", self.shape_of_rows("axes", [1, 2]))
            padding = self.add("Mul", self.add("Sub", "one", self.add("Cast", wide, to=1)), "low")
            return self.add("Add", scores, self.add("Add", padding, "more"))
        if self.change == "early padding":
            assert isinstance(self.size[1], int)
            self.weights["always"] = (np.arange(self.size[1]) < 9).astype(np.int64)
            real = self.add("Max", "attention_mask", "always")
            wide = self.add("Unsqueeze", real, self.shape_of_rows("axes", [1, 2]))
            padding = self.add("Mul", self.add("Sub", "one", self.add("Cast", wide, to=1)), "low")
            return self.add("Add", scores, padding)
        if self.change == "bias by head":
            places = np.arange(self.size[1])
            distances = np.abs(places[:, None] - places)
            self.weights["bias"] = (distances * np.arange(1, HEADS + 1)[:, None, None])[None].astype(np.float32)
            return super().masked(self.add("Add", scores, "bias"))
        if self.change == "no mask":
            assert isinstance(self.size[1], int)
            self.weights["mask"] = np.zeros((1, 1, 1, self.size[1]), np.float32)
            return self.add("Add", scores, "mask")
        if self.change == "window by length":
            places = np.arange(self.size[1])
            self.weights["distances"] = np.abs(places[:, None] - places).astype(np.float32)
            lengths = self.add("ReduceSum", self.add("Cast", "attention_mask", to=1), self.shape_of_rows("all", [1]))
            reach = self.add("Mul", self.add("ReduceMax", lengths, keepdims=0), "half")
            far = self.add("Mul", self.add("Cast", self.add("Greater", "distances", reach), to=1), "low")
            wide = self.add("Unsqueeze", "attention_mask", self.shape_of_rows("axes", [1, 2]))
            padding = self.add("Mul", self.add("Sub", "one", self.add("Cast", wide, to=1)), "low")
            return self.add("Add", scores, self.add("Add", padding, far))
        return super().masked(scores)

    def finish(self, path: Path, **options: Any) -> Path:
        inputs = [input_bytes(name, self.size) for name in NAMES]
        if self.change == "input":
            inputs.append(input_bytes("position_ids", (1, self.size[1])))
        path.write_bytes(model_bytes(self.nodes, self.weights, inputs, **options))
        return path


def graph_of(path: Path) -> Graph:
    return build_graph(open_checkpoint(path))


@pytest.mark.parametrize(
    "size", [(1, 12), (2, 12), ("b", 12), (1, "s"), (3, "s"), (8, 8), (2, 16), (1, 5), (4, HIDDEN)]
)
@pytest.mark.parametrize("gemm", [False, True])
def test_the_graph_is_that_of_any_size(tmp_path: Path, size: tuple[Size, Size], gemm: bool) -> None:
    plain = graph_of(Writer(gemm=gemm).write(tmp_path / "plain.onnx"))
    found = graph_of(Fixed(size, gemm=gemm).write(tmp_path / "fixed.onnx"))
    assert str(found) == str(plain)
    assert found.meta.max_len == POSITIONS
    for name, constant in plain.constants.items():
        assert np.array_equal(constant.array, found.constants[name].array), name


@pytest.mark.parametrize("size", [(1, 12), (2, 12), ("b", 12), (2, "s")])
def test_positions_may_be_an_input_with_one_row(tmp_path: Path, size: tuple[Size, Size]) -> None:
    plain = graph_of(Writer().write(tmp_path / "plain.onnx"))
    assert str(graph_of(Fixed(size, "input").write(tmp_path / "fixed.onnx"))) == str(plain)


@pytest.mark.parametrize("size", [(1, 12), (2, 12), ("b", 12)])
@pytest.mark.parametrize("change", ["rows", "rows alone"])
def test_rows_of_positions_are_a_table_that_ends(tmp_path: Path, size: tuple[Size, Size], change: str) -> None:
    """Exporters compute the rows of one length in advance; the others are not in the file."""
    writer = Fixed(size, change)
    path = writer.write(tmp_path / "net.onnx")
    graph = graph_of(path)
    assert graph.meta.max_len == 12
    table = graph.constants["embeddings.position_embeddings.weight"].array
    assert any(
        np.array_equal(table, array.reshape(-1, HIDDEN)) for array in writer.weights.values() if array.size == 96
    )
    for said, fits in ((12, True), (16, True), (512, True), (11, False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": said}))
        if fits:
            assert graph_of(path).meta.max_len == 12
        else:
            with pytest.raises(CheckpointError, match="max_position_embeddings is 11, the exported graph has 12"):
                graph_of(path)


@pytest.mark.parametrize("change", ["", "rows for types of all"])
def test_a_whole_table_must_be_that_of_the_config(tmp_path: Path, change: str) -> None:
    path = Fixed((1, 12), change).write(tmp_path / "net.onnx")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 512}))
    with pytest.raises(CheckpointError, match="max_position_embeddings is 512, the exported graph has 16"):
        graph_of(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("backwards", r"'the/Gather/of/v\d+' \(Gather\) takes .*; rows of a table are picked by token ids"),
        ("by two", r"'the/Gather/of/v\d+' \(Gather\) takes .*; rows of a table are picked by token ids"),
        ("no positions", "made without a table of positions"),
        ("bias by head", r"differ by head, as a bias by relative positions does .*: export it with dynamic axes"),
        ("no mask", r"'the/Add/of/v\d+' \(Add\) takes .*; what is added to scores is a mask of padding"),
        ("rows of types", "made without a table of positions"),
        ("rows by sequence", r"'the/Add/of/v\d+' \(Add\) takes .*are the same for all sequences"),
        ("rows twice", "the graph is none of"),
        ("window by length", "computes different things for two batches of texts of up to 12 tokens.*local_mask"),
        ("window", r"the graph is none of .*nearest to bert"),
        ("last key", r"'the/Add/of/v\d+' \(Add\) takes .*; what is added to scores is a mask of padding"),
        ("early padding", r"'the/Add/of/v\d+' \(Add\) takes .*; what is added to scores is a mask of padding"),
        ("mask unread", r"'the/Softmax/of/v\d+' \(Softmax\) takes .*the file has an attention mask"),
    ],
)
@pytest.mark.parametrize("size", [(2, 12), (1, 12)])
def test_what_only_looks_similar_is_refused(tmp_path: Path, size: tuple[int, int], change: str, message: str) -> None:
    if change == "rows by sequence" and size[0] == 1:
        pytest.skip("one sequence has no rows of another")
    with pytest.raises(EncastError, match=message):
        graph_of(Fixed(size, change).write(tmp_path / "net.onnx"))


@pytest.mark.parametrize("size", [(1, "s"), ("b", "s")])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("clipped", "rows of a table are picked by token ids"),
        ("mask unread", r"\(Softmax\) takes .*the file has an attention mask"),
    ],
)
def test_what_differs_late_in_a_text_or_without_padding(
    tmp_path: Path, size: tuple[Size, Size], change: str, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        graph_of(Fixed(size, change).write(tmp_path / "net.onnx"))


@pytest.mark.parametrize("size", [(2, 12), ("b", "s")])
def test_a_layer_without_a_mask_is_refused(tmp_path: Path, size: tuple[Size, Size]) -> None:
    class Second(Fixed):
        def encoder(self) -> str:
            x = super().encoder()
            self.change = "mask unread"
            return self.layer(x)

    with pytest.raises(UnsupportedModelError, match=r"\(Softmax\) takes .*padding is taken out of the scores of every"):
        graph_of(Second(size).write(tmp_path / "net.onnx"))


@pytest.mark.parametrize("size", [(2, 12), ("b", "s")])
def test_scores_are_read_with_and_without_their_mask(tmp_path: Path, size: tuple[Size, Size]) -> None:
    """One value of the graph stands for both."""

    class Twice(Fixed):
        def add(self, op: str, *inputs: str, **attributes: Any) -> str:
            if op == "Softmax":
                masked = super().add(op, *inputs, **attributes)
                mask = super().add("Mul", super().add(op, self.bare, **attributes), "half")
                return super().add("Add", masked, mask)
            return super().add(op, *inputs, **attributes)

        def masked(self, scores: str) -> str:
            self.bare = scores
            return super().masked(scores)

    with pytest.raises(UnsupportedModelError, match=r"\(Softmax\) takes .*padding is taken out of the scores of every"):
        graph_of(Twice(size).write(tmp_path / "net.onnx"))


ROUNDED = [("QuantizeLinear", "tenth", "zero"), ("DequantizeLinear", "tenth", "zero")]


@pytest.mark.parametrize("size", [(2, 24), ("b", 24)])
@pytest.mark.parametrize(
    ("change", "factor", "steps", "left"),
    [
        ("", 1e5, [("Div", "factor")], None),
        ("", 1e9, [("Div", "factor")], "-1"),
        ("", -1.0, [("Div", "factor")], r"1e\+09"),
        ("window", 1e9, [("Div", "factor")], "-1"),
        ("", 1e-6, [("Clip", "minus one", "one"), ("Div", "factor")], None),
        ("", 1e-6, [("Clip", "minus one", "one")], "-1"),
        ("", 1e-6, [("Max", "minus one")], "-1"),
        ("", 1.0, ROUNDED, r"-12\.8"),
        ("", 1.0, [("Neg",), *ROUNDED, ("Neg",)], r"-12\.7"),
    ],
)
def test_masked_scores_that_go_on(
    tmp_path: Path, size: tuple[Size, Size], change: str, factor: float, steps: list[tuple[str, ...]], left: str | None
) -> None:
    """What is done to scores after their mask of -1e9 is done to that."""

    class Further(Fixed):
        def masked(self, scores: str) -> str:
            numbers = {"factor": factor, "minus one": -1.0, "tenth": 0.1}
            self.weights |= {name: np.array(number, np.float32) for name, number in numbers.items()}
            self.weights["zero"] = np.array(128, np.uint8)
            x = super().masked(self.add("Mul", scores, "factor"))
            for op, *others in steps:
                x = self.add(op, x, *others)
            return x

    path = Further(size, change).write(tmp_path / "net.onnx")
    if left is None:
        graph_of(path)
    else:
        with pytest.raises(UnsupportedModelError, match=rf"\(Softmax\) .* reach softmax as {left}, not as -1000"):
            graph_of(path)


def test_sizes_whose_masks_would_not_fit(tmp_path: Path) -> None:
    writer = Fixed((65, 512))
    writer.positions = 512
    with pytest.raises(UnsupportedModelError, match=r"fixed sizes \[65, 512\]; up to 64 sequences of that length"):
        graph_of(writer.write(tmp_path / "net.onnx"))


@pytest.mark.parametrize("size", [(2, 12), (1, 12), ("b", 12)])
@pytest.mark.parametrize("how", ["mean", "by length", "masked by length"])
def test_a_mean_over_the_fixed_length_is_refused(tmp_path: Path, size: tuple[Size, Size], how: str) -> None:
    """It would be that of a text without padding alone."""
    writer = Fixed(size)
    x = writer.encoder()
    writer.weights |= {"length": np.array(12.0, np.float32), "lengths": np.array([[12.0]], np.float32)}
    tokens = writer.shape_of_rows("tokens", [1])
    if how == "mean":
        x = writer.add("ReduceMean", x, axes=[1], keepdims=0)
    else:
        if how == "masked by length":
            real = writer.add("Unsqueeze", "attention_mask", writer.shape_of_rows("last", [2]))
            x = writer.add("Mul", x, writer.add("Cast", real, to=1))
        x = writer.add("Div", writer.add("ReduceSum", x, tokens, keepdims=0), "lengths")
    writer.nodes.append(node_bytes("Identity", [x], ["out"]))
    reason = "divided by the number of tokens" if how == "masked by length" else "reductions are those of"
    with pytest.raises(UnsupportedModelError, match=rf"node 'the/\w+/of/v\d+' .*{reason}"):
        graph_of(writer.finish(tmp_path / "net.onnx"))


def test_token_ids_that_are_changed_are_refused(tmp_path: Path) -> None:
    class Changed(Fixed):
        def word_ids(self) -> str:
            self.weights |= {"0": np.array(0), "999": np.array(999)}
            return self.add("Clip", "input_ids", "0", "999")

    with pytest.raises(UnsupportedModelError, match="token ids are looked up in a table of words"):
        graph_of(Changed((1, 12)).write(tmp_path / "net.onnx"))


@pytest.mark.parametrize(("length", "fits"), [(12, True), (9, True), (8, True), (7, False), (6, False)])
def test_a_window_is_seen_in_texts_that_are_longer(tmp_path: Path, length: int, fits: bool) -> None:
    """Its layer sees 6 positions to each side."""

    class Short(ModernWriter):
        def finish(self, path: Path, **options: Any) -> Path:
            inputs = [input_bytes(name, (1, length)) for name in ("input_ids", "attention_mask")]
            path.write_bytes(model_bytes(self.nodes, self.weights, inputs, **options))
            return path

    path = Short().beside(tmp_path)
    if fits:
        assert [node.attrs["reach"] for node in graph_of(path).nodes if node.op == "local_mask"] == [6]
    else:
        with pytest.raises(UnsupportedModelError, match=r"has scale .* where that has local_mask with reach: 6"):
            graph_of(path)


def test_a_window_of_a_file_for_single_texts(tmp_path: Path) -> None:
    class Alone(ModernWriter):
        def finish(self, path: Path, **options: Any) -> Path:
            inputs = [input_bytes(name, (1, "s")) for name in ("input_ids", "attention_mask")]
            path.write_bytes(model_bytes(self.nodes, self.weights, inputs, **options))
            return path

    found = graph_of(Alone().beside(tmp_path))
    assert [node.attrs["reach"] for node in found.nodes if node.op == "local_mask"] == [6]


def test_inputs_may_leave_their_sizes_open_or_say_nothing(tmp_path: Path) -> None:
    """One input with sizes is enough: all have the same."""
    writer = Fixed((2, 12))
    writer.nodes.append(node_bytes("Identity", [writer.encoder()], ["out"]))
    path = tmp_path / "net.onnx"
    path.write_bytes(model_bytes(writer.nodes, writer.weights, [input_bytes("input_ids", (2, 12)), *INPUTS[1:]]))
    export = open_checkpoint(path).export
    assert export is not None
    assert (export.inputs.sequences, export.inputs.positions) == (2, 12)
