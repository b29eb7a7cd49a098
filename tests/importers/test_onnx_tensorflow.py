"""What tf2onnx makes of BERT in TensorFlow: norms by a shift, ids as rows with one 1, inputs of other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_files import input_bytes, model_bytes
from onnx_writer import HIDDEN, VOCAB, Writer
from test_onnx_fixed import Fixed

from encast.archs import build_graph
from encast.errors import EncastError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.ir import Graph

OURS = ("input_ids", "attention_mask", "token_type_ids")
GOLDEN = Path(__file__).parent.parent / "golden" / "onnx"


class Converted(Writer):
    """``change``: what is done otherwise than tf2onnx does it."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.weights |= {"tiny": np.array(1e-9, np.float32), "visible": np.array(1e-3, np.float32)}
        self.weights |= {"depth": np.array([2]), "zero one": np.array([0.0, 1.0], np.float32)}
        self.weights |= {"one zero": np.array([1.0, 0.0], np.float32), "zero two": np.array([0.0, 2.0], np.float32)}

    def layer_norm(self, x: str) -> str:
        """``x * (gamma / deviation) + (beta - mean * (gamma / deviation))``."""
        gamma, beta = self.weight(HIDDEN), self.weight(HIDDEN)
        mean = self.add("GlobalAveragePool", x)
        centred = self.add("Sub", x, mean)
        variance = self.add("GlobalAveragePool", self.add("Mul", centred, centred))
        moved = variance if self.change == "no epsilon" else self.add("Add", variance, "eps")
        inverse = self.add("Reciprocal", moved if self.change == "variance" else self.add("Sqrt", moved))
        scale = self.add("Mul", inverse, gamma)
        other = self.add("Mul", inverse, self.weight(HIDDEN)) if self.change == "two gammas" else scale
        shift = self.add("Mul", self.add("Neg", mean) if self.change == "negative mean" else mean, other)
        if self.change == "mean of others":
            shift = self.add("Mul", self.add("GlobalAveragePool", self.add("Add", x, x)), other)
        if self.change == "plus":
            offset = self.add("Add", beta, shift)
        else:
            pair = (shift, beta) if self.change == "the other way" else (beta, shift)
            offset = self.add("Sub", *pair)
        rows = self.add("Mul", centred if self.change == "centred" else x, scale)
        return self.add("Add", rows, offset)

    def embeddings(self) -> str:
        words = self.add("Gather", self.weight(VOCAB, HIDDEN), self.add("Reshape", self.word_ids(), self.flat_shape()))
        if self.change == "words":
            self.weights["many"] = np.array([VOCAB])
            hot = self.add("OneHot", self.add("Reshape", self.word_ids(), self.flat_shape()), "many", "zero one")
            words = self.add("MatMul", hot, self.weight(VOCAB, HIDDEN))
        values = self.change if self.change in ("one zero", "zero two") else "zero one"
        hot = self.add("OneHot", self.add("Reshape", self.type_ids(), self.flat_shape()), "depth", values)
        if self.change == "shifted types":
            hot = self.add("Sub", "one", hot)
        types = self.add("MatMul", hot, self.weight(2, HIDDEN))
        shape = self.add("Concat", self.add("Shape", "input_ids"), self.shape_of_rows("width", [HIDDEN]), axis=0)
        x = self.add("Add", self.add("Reshape", words, shape), self.add("Reshape", types, shape))
        return self.layer_norm(self.add("Add", x, self.positions_of()))

    def flat_shape(self) -> str:
        return self.shape_of_rows("all", [-1])

    def positions_of(self) -> str:
        """The first rows of the table."""
        table = self.weight(self.positions, HIDDEN)
        if self.change == "twice the positions":
            self.weights["two.0"] = np.array(2.0, np.float32)
            table = self.add("Mul", table, "two.0")
        length = self.add("Slice", self.add("Shape", "input_ids"), "second", self.shape_of_rows("end", [2]))
        start = "first"
        if self.change == "later positions":
            start, length = "second", self.add("Add", length, "second")
        rows = self.add("Slice", table, start, length, "first")
        return self.add("Unsqueeze", rows, self.shape_of_rows("front", [0]))

    def masked(self, scores: str) -> str:
        if self.change == "visible scores":
            return super().masked(self.add("Add", scores, "visible"))
        wide = self.add("Unsqueeze", "attention_mask", self.shape_of_rows("axes", [1, 2]))
        added = self.add("Mul", self.add("Sub", "one", self.add("Cast", wide, to=1)), "low")
        if self.change in ("tiny", "visible"):
            added = self.add("Add", self.change, added)
        return self.add("Add", scores, added)

    def finish(self, path: Path, **options: Any) -> Path:
        inputs = [input_bytes(name, kind=6) for name in OURS]
        path.write_bytes(model_bytes(self.nodes, self.weights, inputs, **options))
        return path


def graph_of(path: Path) -> Graph:
    return build_graph(open_checkpoint(path))


@pytest.mark.parametrize("change", ["", "tiny", "words"])
def test_the_graph_is_that_of_another_writing(tmp_path: Path, change: str) -> None:
    writer = Converted(change)
    found, plain = graph_of(writer.write(tmp_path / "net.onnx")), graph_of(Writer().write(tmp_path / "plain.onnx"))
    assert str(found) == str(plain)
    held = writer.weights.values()
    for name, constant in found.constants.items():
        made = constant.array
        if made.any():
            assert any(np.array_equal(made, one) or np.array_equal(made.T, one) for one in held), name


ADDED = r"\(Add\) takes a row for every token .*, ids, a mask or a shape \[{}, 5, 8\]; Add of a value and an array"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no epsilon", r"\(Mul\) takes .*own variance plus a number above 0"),
        ("variance", r"\(Mul\) takes .*own variance plus a number above 0"),
        ("two gammas", r"\(Add\) takes .*by the same gamma and deviation"),
        ("negative mean", r"\(Neg\) takes the mean of rows .*an elementwise function takes rows or scores"),
        ("mean of others", r"\(Mul\) takes .*own variance plus a number above 0"),
        ("plus", r"\(Add\) takes a constant \[8\], the mean of rows times gamma over their deviation"),
        ("the other way", r"\(Sub\) takes the mean of rows times gamma over their deviation"),
        ("centred", r"\(Mul\) takes rows less their mean .*rows of the encoder are needed"),
        ("one zero", ADDED.format(3)),
        ("zero two", ADDED.format(3)),
        ("shifted types", ADDED.format(3)),
        ("twice the positions", ADDED.format(1)),
        ("later positions", ADDED.format(1)),
        ("visible", r"\(Add\) takes .*what is added to scores is a mask of padding"),
        ("visible scores", "no activation that encast has"),
    ],
)
def test_what_only_looks_similar_is_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(EncastError, match=message):
        graph_of(Converted(change).write(tmp_path / "net.onnx"))


@pytest.mark.parametrize(
    "names",
    [("input_ids", "input_mask", "segment_ids"), ("input_word_ids", "input_mask", "input_type_ids"),
     ("input_ids:0", "input_mask:0", "segment_ids:0"), ("input_ids", "attention_mask", "segment_ids")],
)  # fmt: skip
def test_inputs_have_the_names_of_other_code_too(tmp_path: Path, names: tuple[str, ...]) -> None:
    export = open_checkpoint(renamed(tmp_path, names)).export
    assert export is not None
    assert dict(export.inputs.names) == dict(zip(names, OURS, strict=True))


def renamed(folder: Path, names: tuple[str, ...]) -> Path:
    class Renamed(Writer):
        def add(self, op: str, *inputs: str, **attributes: Any) -> str:
            known = dict(zip(OURS, names, strict=True))
            return super().add(op, *(known.get(one, one) for one in inputs), **attributes)

        def finish(self, path: Path, **options: Any) -> Path:
            path.write_bytes(model_bytes(self.nodes, self.weights, [input_bytes(one) for one in names], **options))
            return path

    return Renamed().write(folder / "net.onnx")


def test_an_input_of_another_name_is_refused_with_those_that_are_read(tmp_path: Path) -> None:
    for other in ("types", "input_ids:1", "mask"):
        with pytest.raises(
            UnsupportedModelError,
            match=rf"has an input '{other}'; .* are input_ids, attention_mask, .* or input_mask for attention_mask, "
            "segment_ids for token_type_ids",
        ):
            _ = open_checkpoint(renamed(tmp_path, ("input_ids", "attention_mask", other))).export
    with pytest.raises(UnsupportedModelError, match="'input_mask' is a second input for attention_mask"):
        _ = open_checkpoint(renamed(tmp_path, ("input_ids", "attention_mask", "input_mask"))).export


def test_a_mean_of_four_axes_is_no_norm(tmp_path: Path) -> None:
    writer = Writer()
    x = writer.add("Unsqueeze", writer.embeddings(), writer.shape_of_rows("front", [1]))
    pooled = writer.add("GlobalAveragePool", x)
    with pytest.raises(UnsupportedModelError, match="GlobalAveragePool is the mean over the last of three axes"):
        _ = open_checkpoint(writer.finish(tmp_path / "net.onnx", outputs=(pooled,))).export


def test_start_and_end_may_stand_in_the_order_of_their_names(tmp_path: Path) -> None:
    """``end_logits`` comes first in TensorFlow; where names do not say which is which, the order does."""
    data = (GOLDEN / "distilbert-answer-tf2onnx-15.onnx").read_bytes()
    path = tmp_path / "net.onnx"
    path.write_bytes(data)
    graph = graph_of(path)
    assert graph.meta.task == "answer"
    swapped = data.replace(b"end_logits", b"some_logits"[:10]).replace(b"start_logits", b"other_logits")
    path.write_bytes(swapped)
    with pytest.raises(UnsupportedModelError, match="are single columns"):
        graph_of(path)


def test_a_row_of_types_alone_is_a_table_of_one(tmp_path: Path) -> None:
    path = Fixed((2, 12), "rows for types").write(tmp_path / "net.onnx")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "type_vocab_size": 2}')
    for _ in range(2):
        graph = graph_of(path)
        assert (graph.meta.arch, graph.meta.type_vocab) == ("bert", 1)
        (tmp_path / "config.json").unlink(missing_ok=True)


def test_one_hot_rows_that_are_cut_elsewhere(tmp_path: Path) -> None:
    class Cut(Converted):
        def embeddings(self) -> str:
            words = self.add("Gather", self.weight(VOCAB, HIDDEN), self.word_ids())
            hot = self.add("OneHot", self.type_ids(), "depth", "zero one")
            rows = self.add("Reshape", hot, self.shape_of_rows("rows", [-1, 5]))
            types = self.add("MatMul", rows, self.weight(5, HIDDEN))
            shape = self.add("Concat", self.add("Shape", "input_ids"), self.shape_of_rows("width", [HIDDEN]), axis=0)
            x = self.add("Add", words, self.add("Reshape", types, shape))
            return self.layer_norm(self.add("Add", x, self.positions_of()))

    with pytest.raises(EncastError, match=r"\(Reshape\) does not fit its inputs of shapes \[\[6, 8\], \[3\]\]"):
        graph_of(Cut().write(tmp_path / "net.onnx"))


def test_one_hot_along_another_axis_is_refused(tmp_path: Path) -> None:
    class Across(Converted):
        def add(self, op: str, *inputs: str, **attributes: Any) -> str:
            return super().add(op, *inputs, **({"axis": 0} if op == "OneHot" else attributes))

    with pytest.raises(EncastError, match=r"\(MatMul\) does not fit its inputs of shapes \[\[2, 15\], \[2, 8\]\]"):
        graph_of(Across().write(tmp_path / "net.onnx"))
