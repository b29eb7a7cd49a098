"""Exports against ONNX Runtime: what encast makes of a graph answers as the graph does, padding included."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnxruntime = pytest.importorskip("onnxruntime", reason="compares with ONNX Runtime")

from bounds import allowed_difference, largest_excess  # noqa: E402
from onnx_files import CASES, NEWER, Export, checkpoint_of  # noqa: E402

from encast.archs import build_graph  # noqa: E402
from encast.batch import Batch  # noqa: E402
from encast.errors import UnsupportedModelError  # noqa: E402
from encast.importers import open_checkpoint  # noqa: E402

GOLDEN = Path(__file__).parent.parent / "golden" / "onnx"
EXACT = [case for case in CASES if case.numbers == "f32" and case.by_torch and case.fixed == (None, None)]
"""In f16 ONNX Runtime rounds between all steps, and bf16 it does not run. Files of one size, and those with inputs of
other names, are run by ``test_verify_onnx.py``."""
ALONE = [case for case in EXACT if case.arch in ("modernbert", "eurobert") and case.opset == 23]
"""ONNX Runtime's RotaryEmbedding takes no angles that several texts share."""
LENGTHS = (13, 1, 20, 6)
Array = np.ndarray[Any, Any]


def run_padded(path: Path, ids: list[list[int]], types: list[list[int]], pad: int) -> Array:
    """The first output's rows of all texts, one after the other (questions: start and end side by side)."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    longest = max(map(len, ids))
    feeds = {
        "input_ids": np.array([one + [pad] * (longest - len(one)) for one in ids]),
        "attention_mask": np.array([[1] * len(one) + [0] * (longest - len(one)) for one in ids]),
        "token_type_ids": np.array([one + [0] * (longest - len(one)) for one in types]),
    }
    answers = session.run(None, {one.name: feeds[one.name] for one in session.get_inputs()})
    found = np.stack(answers, -1) if len(answers) == 2 else answers[0]
    if found.ndim == 2:
        return np.asarray(found)
    return np.concatenate([rows[: len(one)] for rows, one in zip(found, ids, strict=True)])


@pytest.mark.parametrize("case", [case for case in EXACT if case not in ALONE], ids=lambda one: one.file)
def test_answers_are_those_of_onnx_runtime(case: Export, tmp_path: Path) -> None:
    # MPNet and RoBERTa pad with 1, and compute positions of it; texts have other ids.
    pad = 1 if "roberta" in case.arch or case.arch == "mpnet" else 0
    random = np.random.RandomState(7)
    ids = [random.randint(5, 35 if case.arch in NEWER else 55, length).tolist() for length in LENGTHS]
    types = [(np.arange(length) > length // 2).astype(int).tolist() for length in LENGTHS]
    checkpoint_of(case, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    shutil.copy(GOLDEN / case.file, tmp_path / "model" / "model.onnx")
    graph = build_graph(open_checkpoint(tmp_path / "model"))
    if "token_type_ids" not in graph.inputs or graph.meta.type_vocab < 2:
        types = [[0] * length for length in LENGTHS]
    batch = Batch.of(ids, types)
    select = np.arange(sum(LENGTHS), dtype=np.int32) if case.head == "fill_mask" else None
    output = {"features": "last_hidden_state", "embed": "embedding"}.get(case.head, "logits")
    exact, allowed = allowed_difference(graph, output, batch, select)
    found = run_padded(GOLDEN / case.file, ids, types, pad)
    assert found.shape == exact.shape
    assert largest_excess(found, exact, allowed) <= 1.0


@pytest.mark.parametrize("case", [one for one in CASES if one.exporter == "torchscript"][:2], ids=lambda one: one.file)
def test_the_exporter_still_writes_what_is_read(case: Export, tmp_path: Path) -> None:
    """The exports that are kept are of one version of torch; the one that is installed may write another form."""
    pytest.importorskip("torch", reason="exports with torch")
    pytest.importorskip("onnx", reason="exports with onnx")
    from make_onnx_exports import export

    folder = checkpoint_of(case, tmp_path / "checkpoint")
    export(case, folder, tmp_path / "model.onnx")
    wanted, found = build_graph(open_checkpoint(folder)), build_graph(open_checkpoint(tmp_path / "model.onnx"))
    assert str(found) == str(wanted)


@pytest.mark.parametrize("used", [True, False])
def test_padding_may_be_taken_out_with_the_bias(tmp_path: Path, used: bool) -> None:
    """T5's way: the mask is added to the bias. It must be that sum which is added to the scores."""
    onnx = pytest.importorskip("onnx", reason="changes a graph")
    case = next(case for case in CASES if case.file == "mpnet-features-torchscript-13.onnx")
    checkpoint_of(case, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    path = tmp_path / "model" / "model.onnx"
    shutil.copy(GOLDEN / case.file, path)
    plain = build_graph(open_checkpoint(path.parent))
    model = onnx.load(str(path))
    made = {name: node for node in model.graph.node for name in node.output}
    (softmax,) = (node for node in model.graph.node if node.op_type == "Softmax")
    masked = made[softmax.input[0]]
    biased = made[masked.input[0]]
    scores, bias = biased.input
    # The two sums change places: the bias and the mask, and then the scores and that.
    biased.input[:] = [bias, masked.input[1]]
    masked.input[:] = [scores, biased.output[0] if used else bias]
    nodes = [node for node in model.graph.node if node is not biased]
    nodes.insert(nodes.index(masked), biased)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, str(path))
    if used:
        assert str(build_graph(open_checkpoint(path.parent))) == str(plain)
    else:
        with pytest.raises(UnsupportedModelError, match=r"\(Softmax\) .*the file has an attention mask"):
            build_graph(open_checkpoint(path.parent))
