"""ONNX files that lack an input of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_files import input_bytes, model_bytes, node_bytes
from onnx_writer import INPUTS, Writer

from encast.archs import build_graph
from encast.errors import UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.files import Folder
from encast.importers.onnx import read_export


@pytest.mark.parametrize("shape", [("batch", "sequence"), (2, 12), ("batch", 12), (1, "sequence")])
@pytest.mark.parametrize("folded", [False, True])
def test_without_token_types_as_input_all_tokens_have_type_0(
    tmp_path: Path, shape: tuple[int | str, ...], folded: bool
) -> None:
    writer, plain = Writer(), Writer()
    plain.write(tmp_path / "plain.onnx")
    if folded and shape == (2, 12):
        writer.weights["token_type_ids"] = np.zeros(shape, np.int64)
    else:
        zeros = writer.add("ConstantOfShape", writer.add("Shape", "input_ids"), value=np.zeros(1, np.int64))
        writer.nodes.append(node_bytes("Identity", [zeros], ["token_type_ids"]))
    writer.nodes.append(node_bytes("Identity", [writer.encoder()], ["out"]))
    path = tmp_path / "net.onnx"
    inputs = [input_bytes(name, shape) for name in ("input_ids", "attention_mask")]
    path.write_bytes(model_bytes(writer.nodes, writer.weights, inputs))
    wanted = build_graph(open_checkpoint(tmp_path / "plain.onnx"))
    (tmp_path / "config.json").write_text('{"model_type": "bert", "type_vocab_size": 2}')
    found = build_graph(open_checkpoint(path))
    assert (found.meta.type_vocab, wanted.meta.type_vocab) == (1, 2)
    for name, constant in wanted.constants.items():
        array = constant.array[:1] if "token_type" in name else constant.array
        assert np.array_equal(array, found.constants[name].array), name


@pytest.mark.parametrize("shape", [("batch", "sequence"), (1, 12)])
def test_without_a_mask_as_input_no_token_is_padding(tmp_path: Path, shape: tuple[int | str, ...]) -> None:
    """Exporters put a mask of ones there, and add what it makes to the scores: 0 for all pairs."""
    writer = Writer()
    ones = writer.add("ConstantOfShape", writer.add("Shape", "input_ids"), value=np.ones(1, np.int64))
    writer.nodes.append(node_bytes("Identity", [ones], ["attention_mask"]))
    writer.nodes.append(node_bytes("Identity", [writer.encoder()], ["out"]))
    path = tmp_path / "net.onnx"
    inputs = [input_bytes(name, shape) for name in ("input_ids", "token_type_ids")]
    path.write_bytes(model_bytes(writer.nodes, writer.weights, inputs))
    Writer().write(tmp_path / "plain.onnx")
    found, plain = (read_export(Folder(tmp_path), name) for name in ("net.onnx", "plain.onnx"))
    assert [node.op for node in found.graph.nodes] == [node.op for node in plain.graph.nodes]


def test_a_mask_of_the_ids_is_refused(tmp_path: Path) -> None:
    """Padding may stand anywhere in such a text."""
    writer = Writer()
    real = writer.add("Not", writer.add("Equal", "input_ids", "pad"))
    writer.weights["pad"] = np.array(0)
    writer.nodes.append(node_bytes("Cast", [real], ["attention_mask"], to=7))
    writer.nodes.append(node_bytes("Identity", [writer.encoder()], ["out"]))
    path = tmp_path / "net.onnx"
    path.write_bytes(model_bytes(writer.nodes, writer.weights, [INPUTS[0], INPUTS[2]]))
    with pytest.raises(UnsupportedModelError, match="what is added to scores is a mask of padding"):
        read_export(Folder(tmp_path), "net.onnx")
