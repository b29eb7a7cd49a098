"""EuroBERT's exports: norms by the root mean square, and keys and values that several heads share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modern_writer import ModernWriter
from onnx_writer import HIDDEN, INNER, SILU, VOCAB

from encast.archs import build_graph
from encast.archs.modules import tensors_of
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.onnx.dequantised import Dequantised
from encast.importers.onnx.grouped import repeated
from encast.importers.onnx.reader import Probe, Reader
from encast.importers.onnx.values import Axes, Known, Seen, arrange, labels
from encast.ir import Graph

CONFIG = {
    "model_type": "eurobert",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": INNER,
    "max_position_embeddings": 40,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}


class SharedWriter(ModernWriter):
    """A EuroBERT of one layer whose two heads share keys and values; ``change``: what is done otherwise."""

    def __init__(self, change: str = "", groups: int = 1) -> None:
        super().__init__()
        self.act, self.change, self.groups = SILU, change, groups
        self.weights |= {"two.0": np.array(2.0, np.float32), "eps": np.array(1e-5, np.float32)}

    def layer_norm(self, x: str) -> str:
        gamma = self.weight(HIDDEN)
        squared = self.add("Pow", x, "three" if self.change == "cubes" else "two.0")
        if self.change == "squares of others":
            squared = self.add("Pow", self.add("MatMul", x, self.weight(HIDDEN, HIDDEN)), "two.0")
        square = self.add("ReduceSum" if self.change == "sum" else "ReduceMean", squared, self.numbers(-1), keepdims=1)
        if self.change != "no epsilon":
            square = self.add("Add", square, "eps")
        root = square if self.change == "no root" else self.add("Sqrt", square)
        whole = self.add("Mul", x, self.add("Reciprocal", root))
        if self.change == "beta":
            return self.add("Add", self.add("Mul", gamma, whole), self.weight(HIDDEN))
        return self.add("Mul", gamma, whole)

    def packed(self, x: str) -> list[str]:
        made = []
        for groups in (2, self.groups, self.groups):
            product = self.add("MatMul", x, self.weight(HIDDEN, groups * self.size))
            shaped = self.add("Reshape", product, self.numbers(0, 0, groups, self.size))
            made.append(self.add("Transpose", shaped, perm=[0, 2, 1, 3]))
        return made

    def copies(self, x: str) -> str:
        if self.groups == 2:
            return x
        times = 3 if self.change == "three times" else 2
        wide = self.add("Expand", self.add("Unsqueeze", x, self.numbers(2)), self.numbers(1, 1, times, 1, 1))
        return self.add("Reshape", wide, self.numbers(0, 2, -1, self.size))

    def modern_attention(self, x: str, base: float, reach: int | None) -> str:
        q, k, v = self.packed(x)
        q, k, v = self.turned(q, base, k), self.copies(self.turned(k, base, q)), self.copies(v)
        if self.change == "bent":
            k = self.copies(self.add("Tanh", self.turned(self.packed(x)[1], base, q)))
        scores = self.add("Mul", self.add("MatMul", q, self.add("Transpose", k, perm=[0, 1, 3, 2])), "scale")
        probs = self.add("Softmax", self.add("Add", scores, self.hidden(None)), axis=-1)
        context = self.add("Transpose", self.add("MatMul", probs, v), perm=[0, 2, 1, 3])
        return self.add("MatMul", self.add("Reshape", context, "flat"), self.weight(HIDDEN, HIDDEN))

    def feed_forward(self, x: str) -> str:
        gate, up = (self.add("MatMul", x, self.weight(HIDDEN, INNER)) for _ in range(2))
        inner = self.add("Mul", self.play(self.act, gate), up)
        return self.add("MatMul", inner, self.weight(INNER, HIDDEN))

    def encoder(self) -> str:
        x = self.add("Gather", self.weight(VOCAB, HIDDEN), "input_ids")
        x = self.add("Add", x, self.modern_attention(self.layer_norm(x), 1000.0, None))
        return self.layer_norm(self.add("Add", x, self.feed_forward(self.layer_norm(x))))

    def graph(self, folder: Path, **changes: Any) -> Graph:
        return build_graph(open_checkpoint(self.beside(folder, **{**CONFIG, **changes})))


@pytest.mark.parametrize("groups", [1, 2])
def test_each_head_has_its_copy_of_what_heads_share(tmp_path: Path, groups: int) -> None:
    writer = SharedWriter(groups=groups)
    graph = writer.graph(tmp_path, num_key_value_heads=groups)
    for part in ("k_proj", "v_proj"):
        name = f"layers.0.self_attn.{part}.weight"
        found = graph.constants[name if groups == 2 else f"{name}[repeated]"].array
        first = found[: HIDDEN // 2]
        assert np.array_equal(found[HIDDEN // 2 :], first) == (groups == 1)
        assert any(
            np.array_equal(one.T, first if groups == 1 else found)
            for one in writer.weights.values()
            if one.shape == (HIDDEN, groups * HIDDEN // 2)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cubes", r"\(ReduceMean\) takes a function of a row .*no activation that encast has"),
        ("squares of others", r"\(Mul\) takes .*own mean square plus a number"),
        ("sum", r"\(Mul\) takes a row for every token \[3, 5, 8\], a function of the sum of squares of rows"),
        ("no epsilon", r"\(Mul\) takes .*own mean square plus a number"),
        ("no root", r"\(Mul\) takes .*own mean square plus a number"),
        ("beta", r"\(Add\) takes rows over the root of their mean square .*, a constant \[8\]"),
        ("three times", r"\(Reshape\) does not fit its inputs .*cannot take the shape \[0, 2, -1, 4\]"),
        ("bent", r"\(Expand\) takes .*rows are not repeated"),
    ],
)
def test_what_only_looks_similar_is_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(EncastError, match=message):
        SharedWriter(change).graph(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, the exported graph has 1e-05"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', the exported graph has 'silu'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1001.0}}, "rotary with .*theta: 1000.0"),
        ({"num_attention_heads": 4}, "num_attention_heads is 4, the exported graph has 2"),
        ({"model_type": "modernbert"}, "hidden_activation is .gelu., the exported graph has .silu."),
    ],
)
def test_config_must_be_what_the_graph_computes(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EncastError, match=message):
        SharedWriter().graph(tmp_path, **changes)


def test_heads_that_share_nothing_contradict_the_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"other rows for each head, config\.json 1 num_key_value_heads for 2"):
        SharedWriter(groups=2).graph(tmp_path, num_key_value_heads=1)


def rows_of(reader: Reader, weight: np.ndarray[Any, Any]) -> str:
    words = reader.constant(Known(np.ones((30, 3), np.float32), True), np.ones((30, 3), np.float32))
    x = reader.emit("embedding", "token_ids", words)
    reader.constant(Known(np.ones((40, 3), np.float32), True), np.ones((40, 3), np.float32))  # room for copies
    return reader.emit("linear", x, reader.constant(Known(weight, True), weight), "", activation="none")


HEADS: Axes = ((("b", 3),), (("h", 2),), (), (("s", 5),), (("d", 4),))


def test_groups_are_repeated_one_by_one() -> None:
    reader = Reader("", 17, Probe.make(3, 5), Dequantised(0))
    weight = np.arange(24, dtype=np.float32).reshape(8, 3)
    value = rows_of(reader, weight)
    found = repeated(reader, Seen("rows", value, HEADS), 2, 3)
    assert found is not None
    node = reader.graph.producer(found.value)
    assert node is not None
    made = reader.graph.constants[node.inputs[1]].array
    assert np.array_equal(made, np.concatenate([weight[:4]] * 3 + [weight[4:]] * 3))
    axes = arrange(found.axes, (3, 6, 5, 4))
    assert axes is not None
    assert labels(axes) == "b,h,s,d"
    # The axes of groups and heads stay apart until they are put together in their order.
    turned = (found.axes[0], found.axes[2], found.axes[1], *found.axes[3:])
    assert labels(arrange(turned, (3, 6, 5, 4)) or ()) != "b,h,s,d"


@pytest.mark.parametrize(
    ("axes", "place", "times"),
    [(HEADS, 2, 1), (HEADS, 2, 65), (HEADS, 1, 2), (HEADS[:2] + HEADS[3:], 2, 2), ((HEADS[0], HEADS[3], (), HEADS[1],
     HEADS[4]), 2, 2), ((HEADS[0], (), HEADS[1], HEADS[3], HEADS[4]), 1, 2)],
)  # fmt: skip
def test_other_axes_are_not_repeated(axes: Axes, place: int, times: int) -> None:
    reader = Reader("", 17, Probe.make(3, 5), Dequantised(0))
    value = rows_of(reader, np.ones((8, 3), np.float32))
    assert repeated(reader, Seen("rows", value, axes), place, times) is None


def test_rows_of_no_product_are_not_repeated() -> None:
    reader = Reader("", 17, Probe.make(3, 5), Dequantised(0))
    words = reader.constant(Known(np.ones((30, 8), np.float32), True), np.ones((30, 8), np.float32))
    assert repeated(reader, Seen("rows", reader.emit("embedding", "token_ids", words), HEADS), 2, 3) is None


def test_copies_have_a_limit() -> None:
    reader = Reader("", 17, Probe.make(3, 5), Dequantised(0))
    value = rows_of(reader, np.ones((8, 3), np.float32))
    with pytest.raises(UnsupportedModelError, match="no larger than all other weights"):
        repeated(reader, Seen("rows", value, HEADS), 2, 60)


def test_copies_are_taken_apart_again() -> None:
    weight = np.arange(24, dtype=np.float32).reshape(8, 3)
    wide = np.repeat(weight.reshape(2, 4, 3), 3, axis=0).reshape(24, 3)
    assert np.array_equal(tensors_of({"k.weight[repeated]": wide}, 2, 6)["k.weight"], weight)
    wide[5] += 1
    with pytest.raises(CheckpointError, match=r"'k\.weight' of the exported graph has other rows for each head"):
        tensors_of({"k.weight[repeated]": wide}, 2, 6)


@pytest.mark.parametrize("change", ["axis", "gamma", "", "no gamma"])
def test_the_op_of_opset_23_is_such_a_norm(tmp_path: Path, change: str) -> None:
    class Whole(SharedWriter):
        def layer_norm(self, x: str) -> str:
            inputs = [x, self.weight(HIDDEN - (change == "gamma"))][: 1 + (change != "no gamma")]
            return self.add("RMSNormalization", *inputs, epsilon=1e-5, axis=1 if change == "axis" else -1)

    if change:
        with pytest.raises(EncastError, match=r"\(RMSNormalization\) takes .*goes over the columns and has gamma"):
            Whole().graph(tmp_path)
    else:
        assert [node.attrs["eps"] for node in Whole().graph(tmp_path).nodes if node.op == "rms_norm"] == [1e-5] * 3
