"""Rotary positions, windows, packed projections, gates and disentangled scores of ONNX files: each number counts."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modern_writer import CONFIG, ModernWriter
from onnx_files import CASES, checkpoint_of, field_bytes, node_bytes
from onnx_writer import HIDDEN, VOCAB

from encast.archs import build_graph
from encast.archs.comparison import Comparison, NoFitError
from encast.archs.modules import tensors_of
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.onnx.dequantised import Dequantised
from encast.importers.onnx.disentangled import Picked, added
from encast.importers.onnx.folding import fold
from encast.importers.onnx.model import OnnxNode
from encast.importers.onnx.reader import HANDLERS, Probe, Reader
from encast.importers.onnx.values import ARGUMENTS, Known, Seen
from encast.ir import Graph
from encast.ir.relative import distance_rows
from encast.ir.types import ValueType
from encast.passes import optimise
from encast.quant import QuantSpec

GOLDEN = Path(__file__).parent.parent / "golden" / "onnx"
MODERN, DEBERTA = "modernbert-tag-dynamo-18.onnx", "deberta-v2-classify-dynamo-18.onnx"


def graph_of(writer: ModernWriter, folder: Path, **changes: Any) -> Graph:
    return build_graph(open_checkpoint(writer.beside(folder, **changes)))


def exported(folder: Path, file: str, changed: dict[str, tuple[Any, Any]] | None = None, **config: Any) -> Path:
    """A kept export beside its config. ``changed``: by the name of an initializer, what it holds and what instead."""
    case = next(case for case in CASES if case.file == file)
    checkpoint_of(case, folder)
    (folder / "model.safetensors").unlink()
    data = (GOLDEN / file).read_bytes()
    for name, (old, new) in (changed or {}).items():
        found, instead = (field_bytes(8, name) + field_bytes(9, np.asarray(one).tobytes()) for one in (old, new))
        assert data.count(found) == 1, name
        data = data.replace(found, instead)
    (folder / "model.onnx").write_bytes(data)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    return folder


def f32(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values if len(values) > 1 else values[0], np.float32)


def frequencies(base: float) -> np.ndarray[Any, Any]:
    return (np.float32(1.0) / np.float32(base) ** (np.arange(0, 8, 2, dtype=np.float32) / 8)).astype(np.float32)


# ModernBERT, node by node


@pytest.mark.parametrize(
    "options",
    [{"cut": "gather"}, {"cut": "slice"}, {"cut": "heads"}, {"beta": 0.0}, {"heads": 1}],
    ids=lambda one: str(one),
)
def test_every_writing_is_one_graph(tmp_path: Path, options: dict[str, Any]) -> None:
    heads = {"num_attention_heads": options.get("heads", 2)}
    plain = graph_of(ModernWriter(heads=heads["num_attention_heads"]), tmp_path / "plain", **heads)
    found = graph_of(ModernWriter(**options), tmp_path / "other", **heads)
    assert str(found) == str(plain)
    for name, constant in plain.constants.items():
        assert np.array_equal(constant.array, found.constants[name].array), name
    assert plain.meta.max_len == CONFIG["max_position_embeddings"]


def test_parts_of_a_product_are_the_rows_of_its_weight(tmp_path: Path) -> None:
    writer = ModernWriter()
    path = writer.beside(tmp_path)
    graph = build_graph(open_checkpoint(path))
    packed = next(array for array in writer.weights.values() if array.shape == (8, 24)).T
    for place, part in enumerate(("query", "key", "value")):
        rows = graph.constants[f"layers.0.attn.Wqkv.weight[{part}]"].array
        assert np.array_equal(rows, packed[8 * place : 8 * place + 8]), part


def test_a_gate_in_the_second_half_comes_first(tmp_path: Path) -> None:
    plain, found = (
        graph_of(ModernWriter(swapped=swapped), tmp_path / str(swapped)).constants["layers.0.mlp.Wi.weight"].array
        for swapped in (False, True)
    )
    assert np.array_equal(found, np.concatenate(np.split(plain, 2)[::-1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bases": (1000.0, 100.1)}, r"rotary with .*theta: 100\.1, .* has rotary with .*theta: 100\.0"),
        ({"bases": (1000.1, 100.0)}, r"rotary with .*theta: 1000\.1, .* has rotary with .*theta: 1000\.0"),
        ({"reach": 7}, r"local_mask with reach: 7 .* has local_mask with reach: 6"),
        ({"reach": 600}, r"has scale .* where that has local_mask with reach: 6"),
        ({"scale": 0.5001}, r"scale with factor: 0\.5001.* has scale with factor: 0\.5 "),
        ({"beta": 0.5}, "the graph is none of modernbert"),
        ({"eps": 1e-6}, r"norm_eps is 1e-05, the exported graph has 1e-06"),
        ({"wrong": "frequency", "heads": 1}, r"\(Add\) takes .*rotary positions turn pair i .*these angles are others"),
        ({"wrong": "interleaved"}, "these angles are others"),
        ({"wrong": "amplitude"}, "these angles are others"),
        ({"wrong": "by head"}, r"\(Mul\) takes .*the same for every head"),
        ({"wrong": "crossed"}, r"\(Add\) takes .*are those of the same rows"),
        ({"wrong": "not negated"}, r"\(Concat\) takes .*the second half of each head's columns, negated"),
        ({"wrong": "halves"}, r"\(Concat\) takes .*the second half of each head's columns, negated"),
        ({"wrong": "head by head"}, r"\(Split\) takes rows times a weight"),
        ({"wrong": "head by head", "cut": "gather"}, r"\(Gather\) takes rows times a weight"),
        ({"wrong": "one-sided"}, r"\(Add\) takes .*or further away than a window reaches"),
    ],
    ids=lambda one: str(one) if isinstance(one, dict) else "",
)
def test_a_graph_of_another_model_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    changes = {"num_attention_heads": options.get("heads", 2)}
    with pytest.raises(EncastError, match=message):
        graph_of(ModernWriter(**options), tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"global_rope_theta": 1001.0},
        {"local_rope_theta": 101.0},
        {"local_attention": 14},
        {"global_attn_every_n_layers": 1},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"norm_bias": True, "attention_bias": True},
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_config_of_another_model_is_refused_or_harmless(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Biases that are not in the graph are zeros."""
    if "norm_bias" in changes:
        graph = graph_of(ModernWriter(), tmp_path, **changes)
        assert not graph.constants["layers.0.attn.Wo.bias"].array.any()
        return
    with pytest.raises(UnsupportedModelError, match="the graph is none of modernbert"):
        graph_of(ModernWriter(), tmp_path, **changes)


def test_a_graph_without_positions_needs_a_config(tmp_path: Path) -> None:
    path = ModernWriter().write(tmp_path / "net.onnx")
    for text in (None, "{}"):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match=r"no table of positions.* put the model's config\.json"):
            build_graph(open_checkpoint(path))


class Quantised(ModernWriter):
    """Products with weights are those of integers, as ``quantize_dynamic`` writes them."""

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        if op != "MatMul" or inputs[1] not in self.weights:
            return super().add(op, *inputs, **attributes)
        name, weight = inputs[1], self.weights[inputs[1]]
        scale = np.abs(weight).max() / 120
        self.weights[name] = np.rint(weight / scale).astype(np.int8)
        self.weights |= {f"{name} scale": np.array(scale, np.float32), f"{name} zero": np.array(0, np.int8)}
        rows = [f"{name} {part}" for part in ("rows", "rows scale", "rows zero")]
        self.nodes.append(node_bytes("DynamicQuantizeLinear", inputs[:1], rows))
        sums = super().add("MatMulInteger", rows[0], name, rows[2], f"{name} zero")
        both = super().add("Mul", rows[1], f"{name} scale")
        return super().add("Mul", super().add("Cast", sums, to=1), both)


@pytest.mark.parametrize("swapped", [False, True])
def test_integers_of_packed_weights_are_those_of_the_products(tmp_path: Path, swapped: bool) -> None:
    writer = Quantised(swapped=swapped)
    graph = graph_of(writer, tmp_path)
    packed, gated = [
        array.T for array in writer.weights.values() if array.dtype == np.int8 and array.shape == (HIDDEN, 24)
    ][:2]
    held = {f"attn.Wqkv.weight[{part}]": packed[8 * i : 8 * i + 8] for i, part in enumerate(("query", "key", "value"))}
    held["mlp.Wi.weight"] = np.concatenate(np.split(gated, 2)[::-1]) if swapped else gated
    for name, values in held.items():
        integers = graph.constants[f"layers.0.{name}"].integers
        assert integers is not None
        assert np.array_equal(integers.values, values), name
    _, report = optimise(graph, QuantSpec("int8"))
    assert all(kept == of for kept, of in report.kept.values())


def test_weights_may_not_be_joined_without_end(tmp_path: Path) -> None:
    """Each gate whose halves are exchanged makes a copy of a weight; a file may ask for as many as it has nodes."""

    class Endless(ModernWriter):
        def feed_forward(self, x: str) -> str:
            product = self.add("MatMul", x, self.weight(8, 24))
            parts = [
                self.add("Slice", product, self.numbers(a), self.numbers(a + 8), self.numbers(2)) for a in range(16)
            ]
            for one, other in itertools.permutations(parts, 2):
                x = self.add("Add", x, self.add("Mul", self.play(self.act, one), other))
            return x

    with pytest.raises(UnsupportedModelError, match="every weight is put beside others once"):
        graph_of(Endless(), tmp_path)


# Exports, one number changed


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("model.model.rotary_emb.full_attention_inv_freq", frequencies(1000.0), frequencies(1001.0), r"theta: 1001\.0"),
        ("model.model.rotary_emb.sliding_attention_inv_freq", frequencies(100.0), frequencies(99.0), r"theta: 99\.0"),
        ("val_49", np.int64(3), np.int64(4), "local_mask with reach: 4 .* has local_mask with reach: 3"),
        ("val_195", f32(8**-0.5), f32(0.36), r"scale with factor: 0\.36"),
        ("val_75", f32(np.finfo(np.float32).min), f32(-1.0), r"what is added to scores is a mask of padding"),
    ],
    ids=["global base", "local base", "window", "scale", "mask"],
)
def test_every_number_of_modernbert_counts(tmp_path: Path, name: str, old: Any, new: Any, message: str) -> None:
    build_graph(open_checkpoint(exported(tmp_path / "plain", MODERN)))
    with pytest.raises(UnsupportedModelError, match=message):
        build_graph(open_checkpoint(exported(tmp_path / "changed", MODERN, {name: (old, new)})))


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("log_1", f32(np.log(np.float32(23 / 4))), f32(np.log(np.float32(24 / 4))), "relative_scores of .* with rows"),
        ("val_128", np.int64(8), np.int64(7), "relative_scores of .* with rows"),
        ("val_131", np.int64(15), np.int64(14), "relative_scores of .* with rows"),
        ("sqrt", f32(24**0.5), f32(4.9), "have one arrangement and one scale|scale with factor"),
        ("val_153", f32(np.finfo(np.float32).min), f32(-1.0), "a mask of padding"),
    ],
    ids=["logarithm", "span", "last row", "scale", "mask"],
)
def test_every_number_of_deberta_counts(tmp_path: Path, name: str, old: Any, new: Any, message: str) -> None:
    build_graph(open_checkpoint(exported(tmp_path / "plain", DEBERTA)))
    with pytest.raises(UnsupportedModelError, match=message):
        build_graph(open_checkpoint(exported(tmp_path / "changed", DEBERTA, {name: (old, new)})))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_relative_positions": 25},
        {"position_buckets": 10},
        {"pos_att_type": "c2p"},
        {"norm_rel_ebd": "none"},
        {"pooler_hidden_act": "tanh"},
        {"relative_attention": False},
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_config_of_another_deberta_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = exported(tmp_path / "model", DEBERTA, **changes)
    with pytest.raises((UnsupportedModelError, CheckpointError), match="graph is none of deberta-v2"):
        build_graph(open_checkpoint(folder))


def test_a_convolution_is_refused_by_its_node(tmp_path: Path) -> None:
    """v2-xlarge has one; its rows of padding would have to be zeros."""
    folder = exported(tmp_path / "model", DEBERTA, conv_kernel_size=3)
    with pytest.raises(UnsupportedModelError, match="where that has"):
        build_graph(open_checkpoint(folder))


# Rows by distance


def comparison(rows: np.ndarray[Any, Any], span: int, max_distance: int) -> Comparison:
    """Of a graph whose scores pick ``rows`` with one that has the rule."""

    def graph(rule: int) -> Graph:
        made = Graph()
        made.add_input("token_ids", ValueType("i32", ("tokens",)))
        made.add_constant("words", np.zeros((3, 4), np.float32))
        made.add_constant("table", np.zeros((2 * span, 4), np.float32))
        x = made.add("embedding", "token_ids", "words", name="x")
        scores = made.add("attention_scores", x, x, name="scores", heads=1)
        made.add("relative_scores", scores, x, "table", name="relative", of="query", max_distance=rule)
        return made

    return Comparison(graph(0), graph(max_distance), "the rule", 0.0, {"relative": rows})


@pytest.mark.parametrize(("span", "max_distance"), [(256, 512), (8, 24), (8, 0)])
def test_a_rule_is_told_from_its_rows(span: int, max_distance: int) -> None:
    distances = np.arange(-522, 523)
    rows = distance_rows(distances, span, max_distance)
    assert comparison(rows, span, max_distance).run("relative", "relative")
    for other in (max_distance - 1, max_distance + 1) if max_distance else (24,):
        with pytest.raises(NoFitError, match="relative_scores of query with rows"):
            comparison(rows, span, other).run("relative", "relative")
    for place in (0, 400, 522, 523, 530, 700):
        moved = rows.copy()
        moved[place] += 1 if rows[place] < 2 * span - 1 else -1
        with pytest.raises(NoFitError, match="relative_scores of query with rows"):
            comparison(moved, span, max_distance).run("relative", "relative")


def test_a_logarithm_may_move_what_is_at_a_border() -> None:
    """4 * (16 / 4) ** (3 / 3) is 16: of 17 distances the 16th is the last of its bucket, or the first of the next."""
    distances = np.arange(-30, 31)
    rows = distance_rows(distances, 8, 17)
    assert rows[distances == -16] == 1
    assert comparison(np.where(distances == -16, 0, rows), 8, 17).run("relative", "relative")
    for distance, row in ((-16, 2), (-15, 0), (-10, 1)):
        with pytest.raises(NoFitError):
            comparison(np.where(distances == distance, row, rows), 8, 17).run("relative", "relative")


def test_constants_are_put_together_again() -> None:
    random = np.random.RandomState(0)
    whole, first, second, swapped = (random.standard_normal(shape).astype(np.float32) for shape in ((6, 2),) * 4)
    found = tensors_of(
        {
            "q.weight[query]": whole[:2],
            "q.weight[key]": whole[2:4],
            "q.weight[value]": whole[4:],
            "a.weight+b.weight": np.concatenate([first, second]),
            "c.weight[swapped]": np.concatenate([swapped[3:], swapped[:3]]),
            "d.weight": first,
        }
    )
    wanted = {"q.weight": whole, "a.weight": first, "b.weight": second, "c.weight": swapped, "d.weight": first}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.array_equal(found[name], array), name
    with pytest.raises(UnsupportedModelError, match=r"'e\.weight' is padded"):
        tensors_of({"e.weight[padded]": first})


def test_the_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", MODERN)
    shutil.copy(GOLDEN / "nomic_bert-features-torchscript-17.onnx", folder / "model.onnx")
    with pytest.raises(EncastError, match=r"config\.json|graph is none of modernbert"):
        build_graph(open_checkpoint(folder))


# What only the parts show


def reader_of(op: str, **attributes: Any) -> Reader:
    reader = Reader("net.onnx", 17, Probe.make(2, 5, ()), Dequantised(0))
    reader.node = OnnxNode(op, "", "n", [], ["out"], attributes)
    return reader


def picked(reader: Reader, index: np.ndarray[Any, Any], factor: float = 1.0) -> Seen:
    """What an index of 5 positions picks, of queries."""
    axes = ((("b", 2), ("h", 2)), (("s", 5),), (("o", 5),))
    return Seen("picked", "", axes, factor * ARGUMENTS, Picked("x", "table", index))


def test_an_index_is_the_same_for_all_heads() -> None:
    reader = reader_of("GatherElements", axis=-1)
    axes = ((("b", 2), ("h", 2)), (("s", 5),), (("t", 6),))
    index = np.broadcast_to(np.arange(5) % 3, (4, 5, 5)).copy()
    for changed in (False, True):
        index[3, 2, 1] += int(changed)
        reader.inputs = [Seen("by position", "x", axes, None, "table"), Known(index, constant=False)]
        if changed:
            with pytest.raises(UnsupportedModelError, match="an index that is the same for every head and sequence"):
                HANDLERS["GatherElements"](reader)
        else:
            assert HANDLERS["GatherElements"](reader)[0].meaning.startswith("what a distance picks")


def test_a_row_depends_on_the_distance_alone() -> None:
    reader, places = reader_of("Add"), np.arange(5)
    index = places[:, None] - places + 5
    scores = Seen("scores", "scores", (*picked(reader, index).axes[:1], (("q", 5),), (("k", 5),)))
    for row, column in ((0, 0), (3, 0), (2, 3)):
        changed = index.copy()
        changed[row, column] += 1
        with pytest.raises(UnsupportedModelError, match="depends on the distance of query and key alone"):
            added(reader, scores, picked(reader, changed))


def test_scores_by_position_have_the_scale_of_those_by_content() -> None:
    reader, places = reader_of("Add"), np.arange(5)
    index = places[:, None] - places + 5
    axes = (*picked(reader, index).axes[:1], (("q", 5),), (("k", 5),))
    with pytest.raises(UnsupportedModelError, match="have one arrangement and one scale"):
        added(reader, Seen("scores", "scores", axes, 0.5 * ARGUMENTS), picked(reader, index, 0.51))


@pytest.mark.parametrize("op", ["Max", "Min", "Add", "Mul"])
def test_what_reads_two_tables_or_indices_is_no_curve_of_one(op: str) -> None:
    reader, places = reader_of(op), np.arange(5)
    axes = ((("b", 2), ("h", 2)), (("s", 5),), (("t", 6),))
    index = places[:, None] - places + 5
    for kind, one, other in (
        ("by position", Seen("by position", "x", axes, None, "one"), Seen("by position", "x", axes, None, "other")),
        ("picked", picked(reader, index), picked(reader, index + 1)),
    ):
        if (kind, op) == ("picked", "Add"):
            continue  # the sum of scores by keys and by queries
        reader.inputs = [one, one]
        assert HANDLERS[op](reader)[0].kind == kind
        reader.inputs = [one, other]
        with pytest.raises(UnsupportedModelError, match=f"{op} takes"):
            HANDLERS[op](reader)


class CutWindow(ModernWriter):
    """Its window is no wider than three quarters of the text."""

    def numbers(self, *values: int) -> str:
        if values != (6,):
            return super().numbers(*values)
        length = self.add("Gather", self.add("Shape", "input_ids"), "place", axis=0)
        cut = self.add("Div", self.add("Mul", length, super().numbers(3)), super().numbers(4))
        return self.add("Min", super().numbers(6), cut)


def test_a_window_that_goes_by_the_length_of_a_text_is_refused(tmp_path: Path) -> None:
    """Of 5 tokens it reaches 3, of many 6."""
    with pytest.raises(UnsupportedModelError, match="computes different things for texts of 5 and of 523 tokens"):
        graph_of(CutWindow(), tmp_path)


class NarrowTable(ModernWriter):
    """Its table of words is f16."""

    def weight(self, *shape: int) -> str:
        name = super().weight(*shape)
        if shape != (VOCAB, HIDDEN):
            return name
        self.weights[name] = self.weights[name].astype(np.float16)
        return self.add("Cast", name, to=1)


def test_angles_in_f32_are_read_to_f32_whatever_else_is_narrow(tmp_path: Path) -> None:
    graph_of(NarrowTable(), tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"theta: 998\.003"):
        graph_of(NarrowTable(wrong="frequency"), tmp_path)


def test_a_product_of_arrays_is_bounded_by_what_it_costs(tmp_path: Path) -> None:
    """One matrix may be spread over a million of them without memory of its own."""
    node = OnnxNode("MatMul", "", "n", [], ["out"], {})
    with pytest.raises(UnsupportedModelError, match="of more than"):
        fold(node, [np.ones((4096, 1), np.float32), np.broadcast_to(np.float32(1), (32768, 1, 1))], 17)
