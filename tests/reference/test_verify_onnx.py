"""``encast compile`` compares every export that is kept with ONNX Runtime itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime", reason="compares with ONNX Runtime")

from onnx_files import CASES, Export, checkpoint_of

from encast import artifact
from encast.compile import compile
from encast.errors import UnsupportedModelError
from encast.importers import open_checkpoint
from encast.verify import ONNX_RUNTIME, Original, verify

GOLDEN = Path(__file__).parent.parent / "golden" / "onnx"


def export_of(case: Export, folder: Path) -> Path:
    checkpoint_of(case, folder)
    (folder / "model.safetensors").unlink()
    shutil.copy(GOLDEN / case.file, folder / "model.onnx")
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda one: one.file)
def test_the_card_of_an_export(case: Export, tmp_path: Path) -> None:
    path = compile(export_of(case, tmp_path / "export"), tmp_path / "m.encast", dtype="f32")
    found = artifact.open(path).card["verified"]
    if "bf16" in case.file:  # ONNX Runtime has no bf16 on CPUs
        assert "NOT_IMPLEMENTED" in found["skipped"]
        return
    if (
        case.arch in ("modernbert", "eurobert") and case.opset == 23
    ):  # its RotaryEmbedding takes no angles that texts share
        assert "INVALID_ARGUMENT" in found["skipped"]
        return
    output = {"features": "last_hidden_state", "embed": "embedding"}.get(case.head, "logits")
    assert found["output"] == output
    export = open_checkpoint(tmp_path / "export").export
    exact = export is not None and export.arithmetic == "f32"  # in f16 it rounds between all steps, encast not
    assert found["relative"] < (1e-5 if exact else 0.1)
    assert found["cosine"] >= (1.0 if exact else 0.98)


def test_another_file_is_noticed(tmp_path: Path) -> None:
    """256 bytes of a weight are other ones."""
    cases = {case.file: case for case in CASES}
    mine, other = (cases[name] for name in ("bert-features-torchscript-11.onnx", "bert-features-dynamo-18.onnx"))
    path = compile(export_of(mine, tmp_path / "export"), tmp_path / "m.encast", dtype="f32", verify=False)
    changed = bytearray((GOLDEN / other.file).read_bytes())
    middle = len(changed) // 2
    changed[middle : middle + 256] = bytes(256)
    (tmp_path / "changed.onnx").write_bytes(changed)
    with pytest.raises(UnsupportedModelError, match="the graph was not understood"):
        verify(path, Original(ONNX_RUNTIME, tmp_path / "changed.onnx"))
