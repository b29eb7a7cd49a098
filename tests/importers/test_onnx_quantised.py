"""Quantised exports: their integers are the artifact's, and their answers are near those of ONNX Runtime."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_files import QUANTISED, QuantisedExport, checkpoint_of, node_bytes, quantised_texts
from onnx_writer import HIDDEN, Steps, Writer
from test_onnx_reader import read

from encast import artifact
from encast.archs import build_graph
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch
from encast.cli.inspect import summary
from encast.cli.main import main
from encast.compile import compile
from encast.errors import EncastError, InputError
from encast.importers import open_checkpoint
from encast.importers.files import Folder
from encast.importers.onnx import dequantised
from encast.importers.onnx.model import read_model
from encast.passes import optimise
from encast.quant import QuantSpec

GOLDEN = Path(__file__).parent.parent / "golden" / "onnx_quantised"
Array = np.ndarray[Any, Any]


def case_of(name: str) -> QuantisedExport:
    return next(case for case in QUANTISED if case.name == name)


def folder_of(tmp_path: Path, case: QuantisedExport) -> Path:
    """The checkpoint's folder with the quantised export in the place of its weights."""
    folder = tmp_path / "model"
    checkpoint_of(case.case, folder)
    (folder / "model.safetensors").unlink()
    shutil.copy(GOLDEN / case.file, folder / "model.onnx")
    return folder


def answers(path: Path, head: str) -> Array:
    """The rows that an artifact gives for the texts whose answers are kept."""
    texts = quantised_texts()
    batch = Batch.of(texts, [[0] * len(text) for text in texts])
    output = "last_hidden_state" if head == "features" else "logits"
    runnable = CpuRunnable(artifact.open(path), threads=1, pin=False)
    try:
        select = np.arange(batch.tokens, dtype=np.int32) if head == "fill_mask" else None
        return runnable.run(output, batch, select).astype(np.float64)
    finally:
        runnable.close()


def cosines(a: Array, b: Array) -> Array:
    return np.asarray((a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)))


@pytest.mark.parametrize("case", QUANTISED, ids=[case.file for case in QUANTISED])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_answers_are_near_those_of_onnx_runtime(tmp_path: Path, case: QuantisedExport, dtype: str) -> None:
    """Within what int8 may lose (CONTRIBUTING.md): the roundings of rows are not the same."""
    path = compile(folder_of(tmp_path, case), tmp_path / "net.encast", dtype=dtype, strict=True)
    found = cosines(answers(path, case.case.head), np.load(GOLDEN / "answers.npz")[case.file].astype(np.float64))
    if case.name == "static-everything":
        # Scores of attention and the mask share a range there, so ONNX Runtime's answers are far from the model's own.
        checkpoint_of(case.case, tmp_path / "float")
        plain = compile(tmp_path / "float", tmp_path / "plain.encast", dtype="f32")
        found = cosines(answers(path, case.case.head), answers(plain, case.case.head))
    assert found.mean() > 0.995
    assert found.min() > 0.95


def stored(path: Path) -> dict[bytes, tuple[Array, Array]]:
    """Integers of the file's weights ``[out, in]`` less their zero points, and scales, by the integers' bytes."""
    model = read_model(Folder(path.parent), path.name)
    found = {}
    for name, tensor in model.initializers.items():
        if not name.endswith("_quantized") or tensor.array().ndim != 2:
            continue
        base = name.removesuffix("_quantized")
        zero, scale = (model.initializers[f"{base}_{what}"].array() for what in ("zero_point", "scale"))
        values = tensor.array().astype(np.int32) - zero.astype(np.int32)
        found[np.ascontiguousarray(values.T).tobytes()] = (values.T, np.broadcast_to(scale, values.shape[1:]))
    return found


@pytest.mark.parametrize("case", QUANTISED, ids=[case.file for case in QUANTISED])
def test_the_integers_of_the_file_are_those_of_the_products(tmp_path: Path, case: QuantisedExport) -> None:
    folder = folder_of(tmp_path, case)
    weights = list(stored(folder / "model.onnx").values())
    graph, report = optimise(build_graph(open_checkpoint(folder)), QuantSpec("int8"))
    narrow = [node for node in graph.nodes if node.op == "linear_int8"]
    assert set(report.kept) == {node.name for node in narrow}
    for node in narrow:
        values, scales = (graph.constants[name].array for name in node.inputs[1:3])
        parts = 3 if node.name.endswith("qkv") else 1
        kept = 0
        for part, (rows, scale) in enumerate(zip(np.split(values, parts), np.split(scales, parts), strict=True)):
            fits = [
                (theirs.min(axis=1) >= -128) & (theirs.max(axis=1) <= 127)
                for theirs, _ in weights
                if theirs.shape == rows.shape
            ]
            match = [
                (theirs, given, fit)
                for (theirs, given), fit in zip([w for w in weights if w[0].shape == rows.shape], fits, strict=True)
                if (theirs[fit] == rows[fit]).all() and fit.any()
            ]
            assert len(match) == 1, node.name
            theirs, given, fit = match[0]
            factor = 8**-0.5 if parts == 3 and part == 0 else 1.0  # that of the scores, in the queries
            assert np.allclose(scale[fit], given[fit] * factor, rtol=2e-7, atol=0.0)
            if factor == 1.0:
                assert (scale[fit] == given[fit]).all()
            # A row that s8 does not hold is rounded anew: half a step off at most.
            wide = given[~fit, None] * theirs[~fit] * factor
            assert (np.abs(scale[~fit, None] * rows[~fit] - wide) <= 0.501 * scale[~fit, None]).all()
            kept += int(fit.sum())
        assert report.kept[node.name] == (kept, len(values))
    whole = all(rows == of for rows, of in report.kept.values())
    assert whole == ("u8" not in case.name)


def test_the_card_and_the_summary_say_what_became_of_it(tmp_path: Path) -> None:
    said = {}
    for name in ("dynamic-u8", "static-products", "static-everything"):
        path = compile(folder_of(tmp_path / name, case_of(name)), tmp_path / f"{name}.encast")
        opened = artifact.open(path)
        said[name] = (opened.card["quantised"], list(summary(opened)))
    card, lines = said["dynamic-u8"]
    assert card["rows"] == "dynamic"
    assert card["ranges"] == {"stored": 0, "values": 4, "used": False}
    assert any(
        line.startswith("integers    the checkpoint's in ") and line.endswith("; the others rounded anew")
        for line in lines
    )
    card, lines = said["static-products"]
    assert (card["rows"], card["ranges"]) == ("static", {"stored": 4, "values": 4, "used": True})
    assert "integers    the checkpoint's in 4 of 4 int8 products" in lines
    assert any("activations fixed scales (the checkpoint's), with zero points" in line for line in lines)
    assert "ranges      the checkpoint fixes those of 4 of 4 values that products read, and all are used" in lines
    card, lines = said["static-everything"]
    assert f"left out    {card['left_out']} roundings of the checkpoint that no product with a weight reads" in lines
    checkpoint_of(case_of("dynamic-u8").case, tmp_path / "plain")
    opened = artifact.open(compile(tmp_path / "plain", tmp_path / "plain.encast"))
    assert "quantised" not in opened.card
    assert not any(line.startswith("integers") for line in summary(opened))


@pytest.mark.parametrize("name", ["static-products", "static-u8", "static-everything"])
def test_fixed_ranges_are_the_file_s(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, case_of(name))
    model = read_model(Folder(folder), "model.onnx")
    ranges = set()
    for node in model.nodes:
        if node.op == "QuantizeLinear":
            scale, zero = (model.initializers[one].array().reshape(()) for one in node.inputs[1:3])
            ranges.add((float(scale), int(zero) - int(np.iinfo(zero.dtype).min)))
    plain = build_graph(open_checkpoint(folder))
    assert plain.fixed
    assert set(plain.fixed.values()) <= ranges
    opened = artifact.open(compile(folder, tmp_path / "net.encast"))
    made = {}
    for node in opened.graph.nodes:
        attrs = node.attrs.get("also", node.attrs)
        if "zero_point" in attrs and "scale" in attrs:
            made[node.outputs[0] if "also" in node.attrs else node.inputs[0]] = (attrs["scale"], attrs["zero_point"])
    assert len(made) == opened.card["quantised"]["ranges"]["values"]
    assert made.items() <= plain.fixed.items()


def test_who_asks_for_dynamic_activations_gets_them(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, case_of("static-products"))
    opened = artifact.open(compile(folder, tmp_path / "net.encast", quant=QuantSpec("int8")))
    assert not opened.card["quantised"]["ranges"]["used"]
    assert opened.card["quant"]["activations"] == "dynamic"
    line = next(line for line in summary(opened) if line.startswith("ranges"))
    assert line == "ranges      the checkpoint fixes those of 4 of 4 values that products read, which are not used"
    static = QuantSpec("int8", activations="static")
    assert artifact.open(compile(folder, tmp_path / "b.encast", quant=static)).card["quantised"]["ranges"]["used"]
    dynamic = folder_of(tmp_path / "other", case_of("dynamic-s8"))
    with pytest.raises(InputError, match="static activations need a calibration"):
        compile(dynamic, tmp_path / "c.encast", quant=static)


@pytest.mark.parametrize(
    ("options", "used"),
    [([], True), (["--keep", "*.output.dense=f32"], False), (["--dtype", "bf16"], False)],
)
def test_the_command_takes_fixed_ranges_where_nothing_is_said_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], used: bool
) -> None:
    folder, out = folder_of(tmp_path, case_of("static-products")), tmp_path / "net.encast"
    assert main(["compile", str(folder), "--out", str(out), *options]) == 0
    assert artifact.open(out).card["quantised"]["ranges"]["used"] == used
    assert ("fixed scales (the checkpoint's)" in capsys.readouterr().out) == used


# Node by node


class Quantised(Writer):
    """A BERT of one layer whose weights are integers, and ``numbers`` what they stand for; ``form``: how products are
    written, ``change``: what is wrong with the first of them."""

    def __init__(self, form: str = "dynamic", kind: str = "i1", change: str = "", *, channels: bool = True) -> None:
        super().__init__()
        self.form, self.kind, self.change, self.channels = form, np.dtype(kind), change, channels
        self.numbers: dict[str, Array] = {}

    def integers(self, inner: int, size: int) -> tuple[str, str, str]:
        """The names of integers ``[inner, size]``, of scales and of zero points that keep them within s8."""
        name = f"q{len(self.weights)}"
        info = np.iinfo(self.kind)
        zero = np.full(size if self.channels else 1, 0 if self.kind == np.int8 else 128, self.kind)
        scale = self.random.uniform(0.001, 0.02, zero.shape).astype(np.float32)
        values = self.random.randint(info.min, int(info.max) + 1, (inner, size)).astype(self.kind)
        values[0], values[1] = info.min, info.max  # -128 and 127 of each output
        if not self.channels:
            zero, scale = zero.reshape(()), scale.reshape(())
        self.weights |= {name: values, f"{name}.scale": scale, f"{name}.zero": zero}
        self.numbers[name] = scale * (values.astype(np.float32) - zero.astype(np.float32))
        return name, f"{name}.scale", f"{name}.zero"

    def linear(self, x: str, inner: int, size: int) -> str:
        weight, scale, zero = self.integers(inner, size)
        change, self.change = self.change, ""
        if self.form == "dynamic":
            product = self.dynamic(x, weight, scale, zero, change)
        else:
            self.weights |= {"step": np.array(0.05, np.float32), "middle": np.array(120, np.uint8)}
            narrow = self.add("QuantizeLinear", x, "step", "other" if change == "other zero" else "middle")
            self.weights["other"] = np.array(121, np.uint8)
            wide = self.add("DequantizeLinear", narrow, "step", "middle")
            if change == "float integers":
                self.weights[weight] = self.weights[weight].astype(np.float32)
            options = {"block_size": 4} if change == "blocks" else {"wide": 1} if change == "switch" else {"axis": 1}
            if change == "no axis":
                options = {"axis": 7}
            if change == "listed axis":
                options = {"axis": [1]}
            if self.form == "rounded":  # the file has the weight in f32, as NNCF leaves it
                del self.weights[weight]
                self.weights[f"{weight}.f32"] = self.numbers[weight]
                weight = self.add("QuantizeLinear", f"{weight}.f32", scale, zero, axis=1)
            if self.form == "turned":  # [outputs, inputs], as modules of torch have it
                self.weights[weight] = np.ascontiguousarray(self.weights[weight].T)
                options = {"axis": 0}
            weight = self.add("DequantizeLinear", weight, scale, zero, **options)
            if self.form == "turned":
                weight = self.add("Transpose", weight, perm=[1, 0])
            product = self.add("MatMul", wide, weight)
        return self.add("Add", product, self.weight(size))

    def dynamic(self, x: str, weight: str, scale: str, zero: str, change: str) -> str:
        self.count += 1
        names = [f"v{self.count}.{part}" for part in ("bytes", "scale", "zero")]
        self.nodes.append(node_bytes("DynamicQuantizeLinear", [x], names))
        if change == "no zero point of rows":
            names[2] = ""
        if change == "other rows":
            self.nodes.append(node_bytes("DynamicQuantizeLinear", [x], ["o.bytes", "o.scale", "o.zero"]))
            names[2] = "o.zero"
        if change == "other scale":
            self.nodes.append(node_bytes("DynamicQuantizeLinear", [x], ["o.bytes", "o.scale", "o.zero"]))
            names[1] = "o.scale"
        if change == "constant rows":
            self.weights["rows"] = np.zeros((2, 4, HIDDEN), np.uint8)
            names[0] = "rows"
        sums = self.add("MatMulInteger", names[0], weight, names[2], zero)
        if change == "turned sums":
            sums = self.add("Transpose", sums)
        if change == "sums":
            return self.add("Cast", sums, to=1)
        if change == "scale squared":
            for _ in range(60):
                names[1] = self.add("Mul", names[1], names[1])
        scales = self.add("Mul", scale, names[1])
        if change == "one scale":
            scales = names[1]
        if change == "scale twice":
            scales = self.add("Mul", scales, scale)
        if change == "added":
            return self.add("Add", self.add("Cast", sums, to=1), scales)
        return self.add("Mul", self.add("Cast", sums, to=1), scales)

    def embeddings(self) -> str:
        rows = []
        for size, ids in ((30, self.word_ids()), (2, self.type_ids()), (self.positions, self.position_ids())):
            channels, self.channels = self.channels, False
            table, scale, zero = self.integers(size, HIDDEN)
            self.channels = channels
            picked = self.add("Gather", table, ids)
            if size == 2:  # as a Transpose that ONNX Runtime quantises
                picked = self.add("Transpose", self.add("Transpose", picked, perm=[2, 0, 1]), perm=[1, 2, 0])
            rows.append(self.add("DequantizeLinear", picked, scale, zero))
        return self.layer_norm(self.add("Add", self.add("Add", rows[0], rows[1]), rows[2]))


class Plain(Quantised):
    """The same in f32."""

    def linear(self, x: str, inner: int, size: int) -> str:
        name, _, _ = self.integers(inner, size)
        self.weights[f"{name}.f32"] = self.numbers[name]
        return self.add("Add", self.add("MatMul", x, f"{name}.f32"), self.weight(size))

    def embeddings(self) -> str:
        rows = []
        for size, ids in ((30, self.word_ids()), (2, self.type_ids()), (self.positions, self.position_ids())):
            channels, self.channels = self.channels, False
            name, _, _ = self.integers(size, HIDDEN)
            self.channels = channels
            self.weights[f"{name}.f32"] = self.numbers[name]
            rows.append(self.add("Gather", f"{name}.f32", ids))
        return self.layer_norm(self.add("Add", self.add("Add", rows[0], rows[1]), rows[2]))


@pytest.mark.parametrize("kind", ["i1", "u1"])
@pytest.mark.parametrize("form", ["dynamic", "pairs", "rounded", "turned"])
@pytest.mark.parametrize("channels", [True, False])
def test_integers_are_the_numbers_that_they_stand_for(tmp_path: Path, form: str, kind: str, channels: bool) -> None:
    (tmp_path / "a").mkdir()
    quantised = Quantised(form, kind, channels=channels).write(tmp_path / "a" / "net.onnx")
    plain = Plain(form, kind, channels=channels).write(tmp_path / "plain.onnx")
    found, wanted = (build_graph(open_checkpoint(path)) for path in (quantised, plain))
    assert str(found) == str(wanted)
    for name, constant in wanted.constants.items():
        assert constant.array.tobytes() == found.constants[name].array.tobytes(), name
        assert constant.integers is None
    spec = QuantSpec("int8", min_outputs=1)
    narrow, report = optimise(found, spec)
    assert {node.name: len(narrow.constants[node.inputs[1]].array) for node in narrow.nodes if "int8" in node.op} == {
        name: of for name, (rows, of) in report.kept.items() if rows == of
    }
    lows = [narrow.constants[node.inputs[1]].array.min() for node in narrow.nodes if node.op == "linear_int8"]
    assert lows == [-128] * 4  # a rounding anew ends at -127
    assert optimise(wanted, spec)[1].kept == {name: (0, of) for name, (_, of) in report.kept.items()}
    assert set(found.fixed.values()) == (set() if form == "dynamic" else {(float(np.float32(0.05)), 120)})


def test_a_scale_for_each_input_is_dequantised(tmp_path: Path) -> None:
    """Outputs have one scale in an int8 product, so such integers are not kept; the card counts them as rounded."""

    class Inputs(Quantised):
        def linear(self, x: str, inner: int, size: int) -> str:
            weight, _, _ = self.integers(size, inner)
            scale = self.random.uniform(0.001, 0.02, inner).astype(np.float32)
            values = np.ascontiguousarray(self.weights[weight].T)
            self.weights |= {weight: values, f"{weight}.scale": scale, f"{weight}.zero": np.zeros(inner, np.int8)}
            wide = self.add("DequantizeLinear", weight, f"{weight}.scale", f"{weight}.zero", axis=0)
            return self.add("Add", self.add("MatMul", x, wide), self.weight(size))

    export = read(Inputs().write(tmp_path / "net.onnx"))
    assert export.quantised == "unquantised"
    graph = build_graph(open_checkpoint(tmp_path / "net.onnx"))
    _, report = optimise(graph, QuantSpec("int8", min_outputs=1))
    assert [rows for rows, _ in report.kept.values()] == [0] * 4


def test_a_product_that_reads_it_unrounded_has_no_fixed_range(tmp_path: Path) -> None:
    class Half(Quantised):
        def linear(self, x: str, inner: int, size: int) -> str:
            if inner == size:
                return super().linear(x, inner, size)
            return Writer.linear(self, x, inner, size)

    graph = build_graph(open_checkpoint(Half("pairs").write(tmp_path / "net.onnx")))
    assert len(graph.fixed) == 2
    assert not any("intermediate" in name or "output.LayerNorm" in name for name in graph.fixed)


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (Quantised(change="no zero point of rows"), r"\(MatMulInteger\) .* the scale and the zero point of the node"),
        (Quantised(change="other rows"), "rows in bytes come with the scale and the zero point of the node that made"),
        (Quantised(change="constant rows"), "has rows on its left that DynamicQuantizeLinear made"),
        (Quantised(change="other scale"), "are multiplied by the scales of both of its sides"),
        (Quantised(change="sums"), r"\(Add\) .* are multiplied by the scales of both of its sides"),
        (Quantised(change="one scale"), "are multiplied by the scales of both of its sides"),
        (Quantised(change="scale twice"), "are multiplied by the scales of both of its sides"),
        (Quantised(change="scale squared"), "are multiplied by the scales of both of its sides"),
        (Quantised(change="added"), "are multiplied by the scales of both of its sides"),
        (Quantised("pairs", change="other zero"), r"are dequantised as they were quantised, with .*121, 'uint8'"),
        (Quantised("pairs", change="float integers"), "takes integers of float32; s8, u8 and, for biases, i32"),
        (Quantised("pairs", change="blocks"), "'block_size' is '4'; a scale for all, or for each index of one axis"),
        (Quantised(change="turned sums"), "sums of integers and their scales stay as they are"),
        (Quantised("pairs", change="switch"), "'wide' is '1'; a scale for all"),
        (Quantised("pairs", change="no axis"), "there is no axis 7 among 2"),
        (Quantised("pairs", change="listed axis"), r"axis is '\[1\]'; a number is needed"),
    ],
)
def test_what_is_no_quantisation_is_named(tmp_path: Path, writer: Writer, message: str) -> None:
    with pytest.raises(EncastError, match=message):
        read(writer.write(tmp_path / "net.onnx"))


class Lying(Quantised):
    """``lie``: what the scale, the zero point or the integers of the first weight become."""

    def __init__(self, form: str, **lie: Any) -> None:
        super().__init__(form)
        self.lie = lie

    def linear(self, x: str, inner: int, size: int) -> str:
        before = len(self.weights)
        result = super().linear(x, inner, size)
        first = f"q{before}"
        for what, array in self.lie.items():
            self.weights[first if what == "values" else f"{first}.{what}"] = array
        self.lie = {}
        return result


EIGHT = np.full(HIDDEN, 0.01, np.float32)


@pytest.mark.parametrize("form", ["dynamic", "pairs"])
@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"scale": EIGHT[:5]}, r"the scale has shape \[5\]; one number, or 8, one for each index of axis 1 is needed"),
        ({"scale": EIGHT.reshape(1, -1)}, r"the scale has shape \[1, 8\]"),
        ({"scale": EIGHT * 0}, "the scale holds 0.0; finite f32 numbers other than 0 are needed"),
        ({"scale": EIGHT * np.float32(np.nan)}, "the scale holds nan"),
        ({"scale": EIGHT * np.float32(np.inf)}, "the scale holds inf"),
        ({"scale": EIGHT.astype(np.float64)}, "the scale is float64"),
        ({"scale": np.full(HIDDEN, 3e38, np.float32)}, "the scale makes numbers beyond f32"),
        ({"zero": np.zeros(HIDDEN, np.uint8)}, "the integers are int8, their zero point is uint8; both have one dtype"),
        ({"zero": np.zeros(7, np.int8)}, r"the scale has shape \[8\], the zero point \[7\]"),
    ],
)
def test_scales_and_zero_points_that_lie(tmp_path: Path, form: str, lie: dict[str, Any], message: str) -> None:
    """The error names the node."""
    with pytest.raises(EncastError, match=r"net\.onnx: node 'the/(Mul|DequantizeLinear)/of/v\d+' .*" + message):
        read(Lying(form, **lie).write(tmp_path / "net.onnx"))


@pytest.mark.parametrize("form", ["dynamic", "pairs"])
def test_a_negative_scale_turns_the_signs(tmp_path: Path, form: str) -> None:
    """As NNCF's compress_weights writes them. The integers are not kept: of -128 there is no negative."""
    exports = [read(Lying(form, scale=scale).write(tmp_path / "net.onnx")) for scale in (EIGHT, -EIGHT)]
    plus, minus = (export.graph.constants for export in exports)
    changed = [name for name in plus if not np.array_equal(plus[name].array, minus[name].array)]
    assert len(changed) == 1
    np.testing.assert_array_equal(plus[changed[0]].array, -minus[changed[0]].array)
    writer = Quantised("pairs")
    path = writer.write(tmp_path / "net.onnx")
    writer.weights["step"] = -writer.weights["step"]
    with pytest.raises(EncastError, match=r"the scale holds -0\.05.*; finite f32 numbers above 0 are needed"):
        read(writer.finish(path))


def test_integers_of_another_width_are_refused(tmp_path: Path) -> None:
    wide = np.zeros((HIDDEN, HIDDEN), np.int16)
    with pytest.raises(EncastError, match="takes integers of int16; s8, u8 and, for biases, i32 are dequantised"):
        read(Lying("pairs", values=wide, zero=np.zeros(HIDDEN, np.int16)).write(tmp_path / "net.onnx"))
    with pytest.raises(EncastError, match="constant integers of 8 bits"):
        read(Lying("dynamic", values=wide).write(tmp_path / "net.onnx"))
    values, zero = np.zeros((HIDDEN, HIDDEN), np.int32), np.ones(HIDDEN, np.int32)
    with pytest.raises(EncastError, match="the zero point of integers of 32 bits is 0"):
        read(Lying("pairs", values=values, zero=zero).write(tmp_path / "net.onnx"))


def test_one_weight_with_many_scales_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.importers.onnx.dequantised._MOST_BYTES", 0)
    writer = Quantised("pairs")
    path = writer.write(tmp_path / "net.onnx")
    assert read(path).outputs
    table = next(name for name, array in writer.weights.items() if array.dtype == np.int8 and array.ndim == 2)
    for number in range(9):
        writer.weights[f"more{number}"] = np.array(1.0 + number, np.float32)
        writer.nodes.insert(0, node_bytes("DequantizeLinear", [table, f"more{number}"], [f"wide{number}"]))
    with pytest.raises(EncastError, match="the same integers are dequantised with many scales"):
        read(writer.finish(path))


def test_what_moves_rows_of_a_table_is_limited(tmp_path: Path) -> None:
    class Chain(Quantised):
        def word_ids(self) -> str:
            self.weights["table"] = np.zeros((30, HIDDEN), np.int8)
            rows = self.add("Gather", "table", "input_ids")
            for _ in range(9):
                rows = self.add("Identity", rows)
            return rows

    with pytest.raises(EncastError, match="are dequantised at most 8 nodes behind the look-up"):
        read(Chain().write(tmp_path / "net.onnx"))


def test_operators_on_integers_are_refused_by_name(tmp_path: Path) -> None:
    steps: Steps = [("QLinearAdd", ["x", "half"], "y", {})]
    with pytest.raises(EncastError, match=r"\(QLinearAdd\): operators on integers in one piece .* QuantFormat\.QDQ"):
        read(Writer(act=steps).write(tmp_path / "net.onnx"))


def test_damage_is_an_error_at_every_byte(tmp_path: Path) -> None:
    path = Quantised("pairs").write(tmp_path / "net.onnx")
    whole = path.read_bytes()
    random = np.random.RandomState(0)
    for place in random.choice(len(whole), 80, replace=False):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            read(path)
        except EncastError as error:
            assert "net.onnx" in str(error) or "node " in str(error)  # noqa: PT017


@pytest.mark.parametrize("form", ["dynamic", "pairs", "rounded", "turned"])
def test_weights_are_made_once_for_both_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """What they may take follows from the file, and two readings need no more than one."""
    monkeypatch.setattr(dequantised, "_MOST_BYTES", 4 * 64)  # biases, which stand for themselves
    assert read(Quantised(form).write(tmp_path / "net.onnx")).quantised
