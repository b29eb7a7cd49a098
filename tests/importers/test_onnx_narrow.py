"""ONNX files in f16 and bf16: weights are the numbers that they stand for, and rounded numbers are known again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_files import field_bytes, input_bytes, model_bytes, node_bytes, tensor_bytes
from onnx_writer import GELU, GELU_TANH, NORM, Writer

from encast.archs import build_graph
from encast.archs.comparison import same_number
from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.files import Folder
from encast.importers.onnx import Export, read_export


def read(path: Path) -> Export:
    return read_export(Folder(path.parent), path.name)


def lone(tmp_path: Path, *nodes: bytes, **options: Any) -> Path:
    path = tmp_path / "net.onnx"
    path.write_bytes(model_bytes(list(nodes), inputs=[input_bytes("input_ids")], **options))
    return path


class Narrow(Writer):
    """All weights and numbers in f16; ``low``: what a mask adds or puts in the place of scores."""

    def __init__(self, low: float, **options: Any) -> None:
        super().__init__(**options)
        self.weights["low"] = np.array(low)

    def finish(self, path: Path, **options: Any) -> Path:
        for name, array in self.weights.items():
            if array.dtype.kind == "f":
                self.weights[name] = array.astype(np.float16)
        return super().finish(path, **options)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"low": -65504.0}, "gelu"),
        ({"low": -65504.0, "act": GELU_TANH}, "gelu_tanh"),
        ({"low": -np.inf, "mask": "where"}, "gelu"),
        ({"low": -1e4, "norm": [*NORM[:3], ("Cast", ["p"], "q", {"to": 10}), ("ReduceMean", ["q"], "v", {"axes": [-1]}),
                                *NORM[4:]]}, "gelu"),
    ],
)  # fmt: skip
def test_numbers_in_f16_are_those_they_stand_for(tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    writer = Narrow(**options)
    writer.weights["eps"] = np.array(1e-7)  # what converters make of 1e-12, which is 0 in f16
    (tmp_path / "config.json").write_text('{"model_type": "bert", "layer_norm_eps": 1e-12}')
    graph = build_graph(open_checkpoint(writer.write(tmp_path / "net.onnx")))
    plain = build_graph(open_checkpoint(Writer().write(tmp_path / "plain.onnx")))
    assert str(graph) == str(plain).replace("kind=gelu", f"kind={kind}")
    for name, constant in plain.constants.items():
        wanted = constant.array.astype(np.float16).astype(np.float32)
        assert np.array_equal(wanted, graph.constants[name].array), name


def test_numbers_in_f32_are_not_rounded(tmp_path: Path) -> None:
    writer = Writer()
    writer.weights["root2"] = np.array(np.float16(2**0.5), np.float32)
    with pytest.raises(UnsupportedModelError, match="no activation that encast has"):
        read(writer.write(tmp_path / "net.onnx"))


def test_a_cast_rounds_numbers_too(tmp_path: Path) -> None:
    act = [("Cast", ["root2"], "r", {"to": 10}), ("Div", ["x", "r"], "a", {}), *GELU[1:]]
    graph = build_graph(open_checkpoint(Writer(act=act).write(tmp_path / "net.onnx")))
    assert [node.attrs["kind"] for node in graph.nodes if node.op == "activation"] == ["gelu"]


@pytest.mark.parametrize("raw", [True, False])
def test_bf16_is_f32(tmp_path: Path, raw: bool) -> None:
    bits = np.array([0x3F80, 0xC040, 0x0001, 0x7F7F], np.uint16)
    data = b"".join(field_bytes(5, int(one)) for one in bits)
    tensor = tensor_bytes("w", bits, shape=(2, 2), kind=16, **({} if raw else {"raw": None, "extra": data}))
    nodes = [node_bytes("Gather", ["w", "input_ids"], ["out"])]
    graph = read(lone(tmp_path, *nodes, initializers=[tensor])).graph
    found = next(iter(graph.constants.values())).array
    assert found.tolist() == [[1.0, -3.0], [2.0**-133, float(np.float32(3.3895313892515355e38))]]


def test_a_cast_of_a_weight_counts_only_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.importers.onnx.read._MOST_BYTES", 1000)
    weights = {"w": np.ones((300, 2), np.float16)}
    nodes = [node_bytes("Cast", ["w"], [name], to=1) for name in ("a", "b")]
    rows = node_bytes("Gather", ["a", "input_ids"], ["out"])
    assert read(lone(tmp_path, nodes[0], rows, initializers=weights)).outputs[0].kind == "rows"
    with pytest.raises(CheckpointError, match="computes more than 1000 bytes"):
        read(lone(tmp_path, *nodes, initializers=weights, outputs=("b",)))


def test_numbers_that_no_node_reads_leave_no_room(tmp_path: Path) -> None:
    writer = Writer()
    writer.weights["unused"] = np.ones(3, np.float16)
    assert read(writer.write(tmp_path / "net.onnx")).rounding == 0.0


def test_what_f16_loses_bf16_keeps() -> None:
    assert same_number(1e-7, 1e-12, 2.0**-11)
    assert not same_number(1e-7, 1e-12, 2.0**-8)
    assert not same_number(1e-7, 1e-12, 0.0)


def test_casts_of_what_is_spread_count_as_made(tmp_path: Path) -> None:
    """A few numbers of the file must not become gigabytes."""
    nodes = []
    for index in range(9):
        nodes.append(node_bytes("Expand", ["one", "shape"], [f"wide{index}"]))
        nodes.append(node_bytes("Cast", [f"wide{index}"], [f"cast{index}"], to=11))
    weights = {"one": np.ones(1, np.float32), "shape": np.array([1 << 23])}
    path = lone(tmp_path, *nodes, initializers=weights, outputs=("cast8",))
    with pytest.raises(CheckpointError, match="computes more than"):
        read(path)
