"""Ops of com.microsoft, node by node: a small encoder in fused ops is the one in plain ops, and files that lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_files import field_bytes, input_bytes, model_bytes, node_bytes
from onnx_writer import HEADS, HIDDEN, INNER, INPUTS, POSITIONS, VOCAB, Writer

from encast.archs import build_graph
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.files import Folder
from encast.importers.onnx import read_export
from encast.ir import Graph

DOMAIN = "com.microsoft"


class Fused(Writer):
    """The encoder of ``Writer`` with the same weights.

    ``attention``: the op, or ``parts``; ``mask``: how it gets the mask; ``swapped``: residuals come before products.
    What an op has instead, by its name: ``changed``: attributes, None to leave one out; ``inputs``: arrays or values by
    place; ``outputs``: names behind the first one, for its first node.
    """

    def __init__(
        self,
        *,
        attention: str = "Attention",
        mask: str = "rows",
        changed: dict[str, dict[str, Any]] | None = None,
        inputs: dict[str, dict[int, Any]] | None = None,
        outputs: dict[str, list[str]] | None = None,
        swapped: bool = False,
    ) -> None:
        super().__init__(mask=mask)
        self.op, self.changed, self.inputs = attention, changed or {}, inputs or {}
        self.outputs = {"EmbedLayerNormalization": ["lengths"]} | (outputs or {})
        self.swapped = swapped

    def fused(self, op: str, *inputs: str, **attributes: Any) -> str:
        """A node of com.microsoft, with the changes that the test asks for."""
        attributes |= self.changed.get(op, {})
        given = list(inputs)
        for place, value in self.inputs.get(op, {}).items():
            given += [""] * (place + 1 - len(given))
            if isinstance(value, str):
                given[place] = value
            else:
                given[place] = f"changed {op} {place}"
                self.weights[given[place]] = value
        self.count += 1
        names = [f"v{self.count}", *self.outputs.pop(op, [])]
        kept = {name: value for name, value in attributes.items() if value is not None}
        self.nodes.append(node_bytes(op, given, names, DOMAIN, **kept))
        return names[0]

    def embeddings(self) -> str:
        tables = [self.weight(rows, HIDDEN) for rows in (VOCAB, 2, POSITIONS)]
        norm = [self.weight(HIDDEN), self.weight(HIDDEN)]
        ids = [self.add("Cast", name, to=6) for name in ("input_ids", "token_type_ids", "attention_mask")]
        words, types, positions = tables
        return self.fused("EmbedLayerNormalization", *ids[:2], words, positions, types, *norm, ids[2], epsilon=1e-12)

    def padding(self) -> str:
        if self.mask == "rows":
            return self.add("Cast", "attention_mask", to=6)
        if self.mask == "squares":
            square = self.add(
                "Expand", self.add("Unsqueeze", "attention_mask", self.numbers("one", [1])), self.square()
            )
            return self.add("Cast", square, to=6)
        lengths = self.add("ReduceSum", "attention_mask", self.numbers("one", [1]), keepdims=0)
        if self.mask == "lengths":
            return self.add("Cast", lengths, to=6)
        starts = self.add("Mul", lengths, self.numbers("zero", [0]))
        if self.mask == "ends and late starts":
            starts = self.add("Add", starts, self.numbers("one more", [1]))
        return self.add("Cast", self.add("Concat", lengths, starts, axis=0), to=6)

    def square(self) -> str:
        size = self.add("Shape", "input_ids")
        return self.add("Concat", size, self.add("Gather", size, self.numbers("last", [1])), axis=0)

    def numbers(self, name: str, numbers: list[int]) -> str:
        self.weights[f"numbers {name}"] = np.array(numbers)
        return f"numbers {name}"

    def pair(self, inner: int, size: int) -> tuple[str, str]:
        return self.weight(inner, size), self.weight(size)

    def attended(self, x: str) -> str:
        pairs = [self.pair(HIDDEN, HIDDEN) for _ in range(3)]
        bias = np.concatenate([self.weights[one] for _, one in pairs])
        self.weights["packed bias"] = bias
        if self.op == "Attention":
            self.weights["packed"] = np.concatenate([self.weights[one] for one, _ in pairs], axis=1)
            return self.fused("Attention", x, "packed", "packed bias", self.padding(), num_heads=HEADS)
        if self.op == "packed":
            width = HIDDEN // HEADS
            parts = [self.weights[one].reshape(-1, HEADS, width) for pair in zip(*pairs, strict=True) for one in pair]
            self.weights["packed"] = np.stack(parts[:3], axis=2).reshape(HIDDEN, 3 * HIDDEN)
            self.weights["packed bias"] = np.stack(parts[3:], axis=2).reshape(3 * HIDDEN)
            rows = self.add("Add", self.add("MatMul", x, "packed"), "packed bias")
            shaped = self.add("Reshape", rows, self.numbers("packed", [0, 0, HEADS, 3, width]))
            return self.fused("MultiHeadAttention", shaped, "", "", "", self.padding(), num_heads=HEADS)
        sides = [self.add("MatMul", x, weight) for weight, _ in pairs]
        if self.op == "MultiHeadAttention":
            return self.fused("MultiHeadAttention", *sides, "packed bias", self.padding(), num_heads=HEADS)
        turned = [
            self.add("Transpose", self.add("Reshape", self.add("Add", one, name), "heads"), perm=[0, 2, 1, 3])
            for one, (_, name) in zip(sides, pairs, strict=True)
        ]
        alpha = float((HIDDEN / HEADS) ** -0.5)
        scores = self.fused("FusedMatMul", turned[0], turned[1], alpha=alpha, transB=1)
        wide = self.add("Unsqueeze", "attention_mask", self.numbers("axes", [1, 2]))
        low = self.add("Mul", self.add("Sub", "one", self.add("Cast", wide, to=1)), "low")
        probs = self.fused("BiasSoftmax", scores, low, axis=3, is_inner_broadcast=1)
        context = self.add("Transpose", self.add("MatMul", probs, turned[2]), perm=[0, 2, 1, 3])
        return self.add("Reshape", context, "flat")

    def summed(self, x: str, inner: int, skip: str) -> str:
        weight, bias = self.pair(inner, HIDDEN)
        norm = self.weight(HIDDEN), self.weight(HIDDEN)
        sides = [self.add("MatMul", x, weight), skip]
        return self.fused("SkipLayerNormalization", *(sides[::-1] if self.swapped else sides), *norm, bias)

    def layer(self, x: str) -> str:
        x = self.summed(self.attended(x), HIDDEN, x)
        weight, bias = self.pair(HIDDEN, INNER)
        inner = self.fused("BiasGelu", self.add("MatMul", x, weight), bias)
        return self.summed(inner, INNER, x)


def graph_of(path: Path) -> Graph:
    return build_graph(open_checkpoint(path))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"swapped": True},
        {"mask": "squares"},
        {"mask": "lengths"},
        {"mask": "ends and starts"},
        {"attention": "MultiHeadAttention"},
        {"attention": "MultiHeadAttention", "mask": "lengths"},
        {"attention": "packed"},
        {"attention": "parts"},
        {"changed": {"Attention": {"scale": float((HIDDEN / HEADS) ** -0.5), "unidirectional": 0}}},
        {"changed": {"Attention": {"mask_filter_value": -3.4e38, "qkv_hidden_sizes": [HIDDEN] * 3}}},
        {"changed": {"EmbedLayerNormalization": {"epsilon": None}}},
        {"outputs": {"EmbedLayerNormalization": ["lengths", "sum"], "SkipLayerNormalization": ["", "", ""]}},
    ],
)
def test_fused_ops_are_the_graph_of_their_parts(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, fused = graph_of(Writer().write(tmp_path / "a.onnx")), graph_of(Fused(**options).write(tmp_path / "b.onnx"))
    assert str(fused) == str(plain)
    for name, constant in plain.constants.items():
        assert np.array_equal(constant.array, fused.constants[name].array), name


def test_lengths_of_the_embedding_are_a_mask(tmp_path: Path) -> None:
    writer = Fused(inputs={"Attention": {3: "lengths"}})
    assert str(graph_of(writer.write(tmp_path / "a.onnx"))) == str(graph_of(Writer().write(tmp_path / "b.onnx")))


@pytest.mark.parametrize("op", ["SkipLayerNormalization", "EmbedLayerNormalization"])
def test_the_sum_before_a_norm_is_an_output(tmp_path: Path, op: str) -> None:
    place = 3 if op == "SkipLayerNormalization" else 2
    writer = Fused(outputs={op: ["", "", "sum"][-place:]})
    writer.encoder()
    norms = [node for node in writer.nodes if f"the/{op}/of".encode() in node]
    last = writer.nodes[: writer.nodes.index(norms[-1] if place == 2 else norms[0]) + 1]
    path = tmp_path / "net.onnx"
    path.write_bytes(model_bytes(last, writer.weights, INPUTS, ("sum",)))
    made = read_export(Folder(tmp_path), path.name)
    node = made.graph.producer(made.outputs[0].value)
    assert node is not None
    assert node.op == "add"


ACTIVATIONS = [
    ("Gelu", {}, "gelu"),
    ("FastGelu", {}, "gelu_tanh"),
    ("QuickGelu", {"alpha": 1.0}, "silu"),
    ("Relu", None, "relu"),
    ("Tanh", None, "tanh"),
]


class Activated(Writer):
    """With an activation of com.microsoft; ``given`` None: as the end of the FusedGemm before it."""

    def __init__(self, op: str, given: dict[str, Any] | None) -> None:
        super().__init__(gemm=given is None)
        self.one, self.given = op, given
        self.operands: tuple[str, ...] = ()

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        made = super().add(op, *inputs, **attributes)
        if op == "Gemm":
            self.operands = (*inputs, made)
        return made

    def play(self, steps: Any, x: str, **names: str) -> str:
        if self.given is not None:
            return self.add(self.one, x, domain=DOMAIN, **self.given)
        *operands, made = self.operands
        place = self.nodes.index(node_bytes("Gemm", operands, [made]))
        self.nodes[place] = node_bytes("FusedGemm", operands, [made], DOMAIN, activation=self.one)
        return x


@pytest.mark.parametrize(("op", "given", "kind"), ACTIVATIONS)
def test_activations(tmp_path: Path, op: str, given: dict[str, Any] | None, kind: str) -> None:
    graph = graph_of(Activated(op, given).write(tmp_path / "net.onnx"))
    assert [node.attrs["kind"] for node in graph.nodes if node.op == "activation"] == [kind]


# What is refused

WIDE = np.ones((HIDDEN, 3 * HIDDEN), np.float32)


@pytest.mark.parametrize(
    ("op", "what", "key", "value", "message"),
    [
        ("Attention", "changed", "unidirectional", 1,
         r"node 'the/Attention/of/v\d+' \(Attention\) .*'unidirectional' is '1'; 0 is read"),
        ("Attention", "changed", "do_rotary", 1, "its attribute 'do_rotary' is '1'; 0 is read"),
        ("Attention", "changed", "past_present_share_buffer", 1, "'past_present_share_buffer' is '1'"),
        ("Attention", "changed", "softcap", 2.0, r"\(Attention\) .*; its attribute 'softcap' is not understood"),
        ("Attention", "changed", "num_heads", 3, "'num_heads' is 3, which does not divide 8 columns"),
        ("Attention", "changed", "num_heads", 0, "'num_heads' is a number above 0"),
        ("Attention", "changed", "num_heads", -2, "'num_heads' is a number above 0"),
        ("Attention", "changed", "num_heads", "2", "'num_heads' is a number above 0"),
        ("Attention", "changed", "num_heads", None, "'num_heads' is a number above 0"),
        ("Attention", "changed", "qkv_hidden_sizes", [8, 8, 4], r"is '\[8, 8, 4\]'; \[8, 8, 8\] is read: all three"),
        ("Attention", "changed", "mask_filter_value", -5.0, "what is added to scores is a mask of padding"),
        ("Attention", "changed", "mask_filter_value", 5.0, "'mask_filter_value' is '5.0'; a low number"),
        ("Attention", "changed", "scale", "x", r"\(Attention\) does not fit its inputs"),
        ("Attention", "inputs", 0, WIDE, "its input is made of the encoder's rows"),
        ("Attention", "inputs", 1, WIDE[:, :-1], r"its weights are \[8, 3 x hidden\], .* not \[8, 23\]"),
        ("Attention", "inputs", 1, WIDE[1:], r"not \[7, 24\]"),
        ("Attention", "inputs", 1, WIDE[0], r"not \[24\]"),
        ("Attention", "inputs", 1, "", "not nothing"),
        ("Attention", "inputs", 1, WIDE.astype(np.int64), "weights must be numbers in floating"),
        ("Attention", "inputs", 2, WIDE[0, :-1], r"its bias has 24 numbers, not \[23\]"),
        ("Attention", "inputs", 3, np.ones(7, np.int32), r"its mask has shape \[7\] for 3 texts of 5 tokens"),
        ("Attention", "inputs", 3, np.ones((1, 1, 9, 9), np.int32), r"its mask has shape \[1, 1, 9, 9\]"),
        ("Attention", "inputs", 3, np.ones(3, np.float32), "its mask is integers"),
        ("Attention", "inputs", 3, "token_type_ids", "what is added to scores is a mask of padding"),
        ("Attention", "inputs", 4, WIDE, "its input 'past' is not read"),
        ("Attention", "inputs", 5, WIDE, "does not fit its inputs|what is added to scores is a mask"),
        ("Attention", "inputs", 7, WIDE, "it has 8 inputs; those of the op are input, weights"),
        ("Attention", "outputs", 0, "present", r"\(Attention\) .*; its output 1 is not read"),
        ("MultiHeadAttention", "changed", "unidirectional", 1, "'unidirectional' is '1'; 0 is read"),
        ("MultiHeadAttention", "changed", "num_heads", 5, "does not divide 8"),
        ("MultiHeadAttention", "inputs", 1, "", "query, key and value are rows of the encoder, each an input"),
        ("MultiHeadAttention", "inputs", 3, WIDE[0, :8], r"its bias has 24 numbers for rows of 8, not \[8\]"),
        ("MultiHeadAttention", "inputs", 6, WIDE, "its input 'past_key' is not read"),
        ("FusedMatMul", "changed", "transBatchA", 1, r"'transBatchA' is '1'; 0 is read"),
        ("FusedMatMul", "changed", "transA", 1, r"\(FusedMatMul\) .*queries are"),
        ("FusedMatMul", "inputs", 1, "", "it takes two values"),
        ("BiasSoftmax", "changed", "axis", None, "softmax goes over the keys, the last axis"),
        ("BiasSoftmax", "changed", "is_inner_broadcast", 0, "'is_inner_broadcast' is 0, so"),
        ("BiasSoftmax", "inputs", 1, "", "of scores and a bias"),
        ("EmbedLayerNormalization", "inputs", 0, "", "its input_ids are integers"),
        ("EmbedLayerNormalization", "inputs", 1, "", "both, segment_ids and segment_embedding, or none"),
        ("EmbedLayerNormalization", "inputs", 2, WIDE[0], r"its word_embedding is a table \[rows, columns\]"),
        ("EmbedLayerNormalization", "inputs", 3, WIDE, "does not fit its inputs|Add takes rows and rows"),
        ("EmbedLayerNormalization", "inputs", 5, WIDE, r"\(EmbedLayerNormalization\) .*has gamma, and beta or none"),
        ("EmbedLayerNormalization", "inputs", 7, np.ones((3, 4)), "its mask is .batch, sequence., not"),
        ("EmbedLayerNormalization", "inputs", 8, np.zeros((1, 5), np.int64), "its position_ids are integers"),
        ("EmbedLayerNormalization", "changed", "mask_index_type", 2, "'mask_index_type' is '2'; 0 or 1 is read"),
        ("SkipLayerNormalization", "inputs", 0, WIDE, "its input is made of the encoder's rows"),
        ("SkipLayerNormalization", "inputs", 2, "", "has gamma, and beta or none"),
        ("SkipLayerNormalization", "inputs", 4, WIDE[0], r"one number for each of 8 columns, not \[24\]"),
        ("SkipLayerNormalization", "outputs", 0, "mean", "its output 1 is not read"),
        ("BiasGelu", "inputs", 1, "", "it has a bias"),
        ("BiasGelu", "inputs", 1, WIDE[0], r"its bias has one number for each of 12 columns, not \[24\]"),
        ("BiasGelu", "changed", "approximate", "tanh", "its attribute 'approximate' is not understood"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(
    tmp_path: Path, op: str, what: str, key: Any, value: Any, message: str
) -> None:
    attention = {"MultiHeadAttention": op, "FusedMatMul": "parts", "BiasSoftmax": "parts"}.get(op, "Attention")
    change: Any = [value] if what == "outputs" else {key: value}
    writer = Fused(attention=attention, **{what: {op: change}})
    with pytest.raises(EncastError, match=message):
        read_export(Folder(tmp_path), writer.write(tmp_path / "net.onnx").name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"inputs": {"MultiHeadAttention": {3: WIDE[0]}}},
            r"are \[batch, sequence, 2, 3, columns\], without key, value",
        ),
        ({"changed": {"MultiHeadAttention": {"num_heads": 4}}}, r"are \[batch, sequence, 4, 3, columns\]"),
        ({"inputs": {"MultiHeadAttention": {0: "v1"}}}, "query, key and value are rows of the encoder, each an input"),
    ],
)
def test_packed_rows_that_lie(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    writer = Fused(attention="packed", **change)
    with pytest.raises(EncastError, match=message):
        read_export(Folder(tmp_path), writer.write(tmp_path / "net.onnx").name)


def test_another_scale_is_another_model(tmp_path: Path) -> None:
    path = Fused(changed={"Attention": {"scale": 0.4}}).write(tmp_path / "net.onnx")
    with pytest.raises(UnsupportedModelError, match=r"the graph is none of .*scale with factor: 0\.4"):
        graph_of(path)


def test_a_mask_that_hides_the_first_tokens_is_refused(tmp_path: Path) -> None:
    path = Fused(mask="ends and late starts").write(tmp_path / "net.onnx")
    with pytest.raises(UnsupportedModelError, match="what is added to scores is a mask of padding"):
        read_export(Folder(tmp_path), path.name)


@pytest.mark.parametrize("products", [0, 2])
def test_a_bias_needs_one_product_without_one(tmp_path: Path, products: int) -> None:
    writer = Fused()
    x = writer.embeddings()
    sides = [writer.add("MatMul", x, writer.weight(HIDDEN, HIDDEN)) if products else x for _ in range(2)]
    writer.fused("SkipLayerNormalization", *sides, *(writer.weight(HIDDEN) for _ in range(3)))
    path = tmp_path / "net.onnx"
    path.write_bytes(model_bytes(writer.nodes, writer.weights, INPUTS, (f"v{writer.count}",)))
    with pytest.raises(UnsupportedModelError, match="the one side that is a product without a bias"):
        read_export(Folder(tmp_path), path.name)


ROWS = node_bytes("Gather", ["w", "input_ids"], ["x"])


@pytest.mark.parametrize(
    ("op", "attributes", "message"),
    [
        (
            "SkipSimplifiedLayerNormalization",
            {},
            r"\(SkipSimplifiedLayerNormalization\) of 'com\.microsoft' is not read; of its ops, Attention",
        ),
        ("QuickGelu", {}, "no activation that encast has"),
        ("QuickGelu", {"alpha": "x"}, "does not fit its inputs"),
        ("FusedGemm", {"activation": "LeakyRelu"}, "its activation is 'LeakyRelu'; Relu, Sigmoid, Tanh are read"),
        ("FusedGemm", {}, "its activation is ''"),
    ],
)
def test_other_ops(tmp_path: Path, op: str, attributes: dict[str, Any], message: str) -> None:
    path = tmp_path / "net.onnx"
    nodes = [ROWS, node_bytes(op, ["x"], ["out"], DOMAIN, **attributes)]
    path.write_bytes(model_bytes(nodes, {"w": np.ones((3, 2), np.float32)}, [input_bytes("input_ids")]))
    with pytest.raises(EncastError, match=message):
        read_export(Folder(tmp_path), path.name)


def test_a_norm_without_a_mean_is_no_op_of_onnx(tmp_path: Path) -> None:
    op = "SimplifiedLayerNormalization"
    path = tmp_path / "net.onnx"
    weights = {"w": np.ones((3, 2), np.float32), "g": np.ones(2, np.float32)}
    path.write_bytes(model_bytes([ROWS, node_bytes(op, ["x", "g"], ["out"])], weights, [input_bytes("input_ids")]))
    with pytest.raises(UnsupportedModelError, match=f"{op!r} is not read here"):
        read_export(Folder(tmp_path), path.name)


def test_another_version_of_the_ops_is_refused(tmp_path: Path) -> None:
    path = Fused().write(tmp_path / "net.onnx")
    path.write_bytes(path.read_bytes() + field_bytes(8, field_bytes(1, DOMAIN) + field_bytes(2, 2)))
    with pytest.raises(UnsupportedModelError, match=r"the ops of 'com\.microsoft' are those of version 2; 1 is read"):
        read_export(Folder(tmp_path), path.name)


def test_a_function_of_that_name_is_no_op(tmp_path: Path) -> None:
    path = Fused().write(tmp_path / "net.onnx")
    path.write_bytes(path.read_bytes() + field_bytes(25, field_bytes(1, "BiasGelu") + field_bytes(10, DOMAIN)))
    with pytest.raises(UnsupportedModelError, match="is a function of the file"):
        read_export(Folder(tmp_path), path.name)


def test_damage_is_an_error_at_every_byte(tmp_path: Path) -> None:
    path = Fused().write(tmp_path / "net.onnx")
    whole = path.read_bytes()
    start = whole.index(b"EmbedLayerNormalization")
    random = np.random.RandomState(0)
    for place in random.choice(range(start, start + 3000), 100, replace=False):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        try:
            graph_of(path)
        except EncastError as error:
            assert isinstance(error, (CheckpointError, UnsupportedModelError))  # noqa: PT017
