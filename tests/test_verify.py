"""When an artifact is compared with the runtime of its file, and what becomes of a difference."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from onnx_files import CASES, checkpoint_of
from runtime_how import How

import encast.verify.apart
import encast.verify.compare
from encast import artifact
from encast.cli.main import main
from encast.compile import compile
from encast.errors import InputError, ResourceError, UnsupportedModelError
from encast.verify import NotComparedError

GOLDEN = Path(__file__).parent / "golden" / "onnx"
FILE, TAGGER = "bert-features-torchscript-11.onnx", "bert-tag-dynamo-20.onnx"


def export_of(folder: Path, file: str = FILE) -> Path:
    checkpoint_of(next(case for case in CASES if case.file == file), folder)
    (folder / "model.safetensors").unlink()
    shutil.copy(GOLDEN / file, folder / "model.onnx")
    return folder


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return export_of(tmp_path / "export")


def verified(path: Path) -> Any:
    return artifact.open(path).card.get("verified")


@pytest.mark.parametrize("task", ["features", "embed"])
@pytest.mark.parametrize("others", [["attention_mask"], [], ["attention_mask", "position_ids"]])
def test_the_card_says_how_far_the_answers_are_apart(
    runtime: How, export: Path, tmp_path: Path, task: str, others: list[str]
) -> None:
    """A file without a mask is not given padding; positions are given once where it takes one row of them."""
    runtime(inputs=["input_ids", "token_type_ids", *others])
    found = verified(compile(export, tmp_path / "m.encast", dtype="f32", task=task))
    # A pooler's output has the shape of an embedding, and is none.
    assert (found["output"], found["of"]) == ("last_hidden_state", "last_hidden_state")
    assert 0 < found["relative"] < 1e-5
    assert found["limit"] == 3e-5
    assert found["cosine"] == 1.0
    assert found["tokens"] > 40
    assert found["narrow"] is None


@pytest.mark.parametrize(
    ("file", "size", "tokens"),
    [
        ("bert-features-torchscript-17-1x12.onnx", [1, 12], 12 + 3 + 12 + 8 + 12),
        ("bert-embed-dynamo-18-3x8.onnx", [3, 8], 8 + 3 + 8 + 8 + 8),
    ],
)
def test_texts_are_padded_to_a_fixed_size(
    runtime: How, tmp_path: Path, file: str, size: list[int], tokens: int
) -> None:
    """Five texts in batches of 1, or in one of 3 and one that is filled."""
    runtime(size=size)
    found = verified(compile(export_of(tmp_path / "fixed", file), tmp_path / "m.encast", dtype="f32"))
    assert found["tokens"] == tokens
    assert 0 < found["relative"] < 1e-5


def test_without_a_mask_texts_are_as_long_as_a_fixed_size(runtime: How, export: Path, tmp_path: Path) -> None:
    opened = artifact.open(compile(export, tmp_path / "m.encast", verify=False))
    lengths = [len(one) for one in encast.verify.compare._sequences(opened, 9, padded=False)]
    assert set(lengths) == {9}
    with pytest.raises(NotComparedError, match="takes texts of 30 tokens alone, the artifact 24"):
        encast.verify.compare._sequences(opened, 30, padded=False)


def test_a_difference_is_on_the_card_and_in_inspect(
    runtime: How, export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime(share=2e-5)
    path = compile(export, tmp_path / "m.encast", dtype="f32")
    assert verified(path)["relative"] == pytest.approx(2e-5, rel=0.05)
    assert main(["inspect", str(path)]) == 0
    assert "but for 2.0e-05 of its size" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_a_narrow_artifact_is_compared_with_f32(
    runtime: How, export: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = compile(export, tmp_path / "m.encast", dtype=dtype)
    found = verified(path)
    assert 0 < found["relative"] < 1e-5
    assert (found["narrow"]["dtype"], found["narrow"]["output"]) == (dtype, "last_hidden_state")
    assert 1e-4 < found["narrow"]["relative"] < 0.1
    assert 0.99 < found["narrow"]["cosine"] < 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["export", "m.encast"]
    assert main(["inspect", str(path)]) == 0
    assert f"; {dtype} is f32 but for " in capsys.readouterr().out


def test_without_room_for_an_f32_artifact(
    runtime: How, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = artifact.write

    def full(out: Path, *rest: Any, **options: Any) -> Path:
        if Path(out).name == "f32":
            raise ResourceError(f"the artifact {out} cannot be written")
        return write(out, *rest, **options)

    monkeypatch.setattr(artifact, "write", full)
    assert "there is no room in" in verified(compile(export, tmp_path / "m.encast"))["skipped"]
    with pytest.raises(NotComparedError, match="there is no room in"):
        compile(export, tmp_path / "m.encast", verify=True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["export", "m.encast"]


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_weights_that_amplify_rounding_may_make_more_of_it(
    runtime: How, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The limit is eight times what a last bit of all weights moves."""
    monkeypatch.setitem(encast.verify.compare.LIMITS, "f32", 1e-7)
    runtime(share=1e-6)
    found = verified(compile(export, tmp_path / "m.encast", dtype=dtype))
    assert 1e-7 < found["relative"] < found["limit"] < 1e-5
    runtime(share=2e-5)
    with pytest.raises(UnsupportedModelError, match=r"where [0-9.]+e-06 is allowed"):
        compile(export, tmp_path / "m.encast", dtype=dtype)


def test_not_beyond_a_thousandth_and_not_without_room_to_measure_it(
    runtime: How, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime(share=9e-4)
    monkeypatch.setattr(encast.verify.compare, "_NOISE_TIMES", 1e9)
    assert verified(compile(export, tmp_path / "m.encast", dtype="f32"))["limit"] == 1e-3
    runtime(share=1.1e-3)
    with pytest.raises(UnsupportedModelError, match="where 3e-05 is allowed"):
        compile(export, tmp_path / "m.encast", dtype="f32")
    runtime(share=9e-4)
    write = artifact.write

    def full(out: Path, *rest: Any, **options: Any) -> Path:
        if Path(out).name == "shaken":
            raise ResourceError(f"the artifact {out} cannot be written")
        return write(out, *rest, **options)

    monkeypatch.setattr(artifact, "write", full)
    with pytest.raises(UnsupportedModelError, match="where 3e-05 is allowed"):
        compile(export, tmp_path / "m.encast", dtype="f32")


def answer_infinity(monkeypatch: pytest.MonkeyPatch, where: Callable[[artifact.Artifact], bool]) -> None:
    answers = encast.verify.compare._answers

    def infinite(opened: artifact.Artifact, batch: Any) -> Any:
        found = answers(opened, batch)
        return {name: one + np.inf for name, one in found.items()} if where(opened) else found

    monkeypatch.setattr(encast.verify.compare, "_answers", infinite)


def test_answers_of_moved_weights_that_are_not_finite_allow_nothing(
    runtime: How, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_infinity(monkeypatch, lambda opened: opened.path.name == "shaken")
    runtime(share=1e-4)
    with pytest.raises(UnsupportedModelError, match="where 3e-05 is allowed"):
        compile(export, tmp_path / "m.encast", dtype="f32")


def test_a_narrow_artifact_without_finite_answers_is_refused(
    runtime: How, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_infinity(monkeypatch, lambda opened: opened.card["dtype"] == "int8")
    with pytest.raises(UnsupportedModelError, match="compiled to int8 its answers to random tokens are not all finite"):
        compile(export, tmp_path / "m.encast", dtype="int8")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["export"]


def test_the_runtime_sees_little_of_the_environment(
    runtime: How, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    runtime(tells=True)
    said = verified(compile(export, tmp_path / "m.encast", dtype="f32"))["skipped"]
    assert "PATH" in said
    assert "SECRET" not in said


@pytest.mark.parametrize(
    ("dtype", "share"), [("f32", 1e-4), ("f32", float("nan")), ("int8", 1e-4), ("bf16", float("nan"))]
)
def test_other_answers_are_refused_and_nothing_is_replaced(
    runtime: How, export: Path, tmp_path: Path, dtype: str, share: float
) -> None:
    path = compile(export, tmp_path / "m.encast", dtype="f32", verify=False)
    before = (path / "card.json").read_bytes()
    assert verified(path) is None
    runtime(share=share)
    with pytest.raises(UnsupportedModelError, match=r"last_hidden_state of the artifact differ"):
        compile(export, path, dtype=dtype)
    assert (path / "card.json").read_bytes() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["export", "m.encast"]


def test_a_wrong_head_is_not_forgiven_for_its_encoder(runtime: How, tmp_path: Path) -> None:
    export = export_of(tmp_path / "tagger", TAGGER)
    runtime(share=1.0)
    with pytest.raises(UnsupportedModelError, match="logits of the artifact differ"):
        compile(export, tmp_path / "m.encast", dtype="f32")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"raises": "opset 99 is not known\nand more"}, "opset 99 is not known and more"),
        ({"sleeps": 60}, "more than 0 s"),
    ],
)
def test_a_file_that_the_runtime_cannot_run(
    runtime: How, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], reason: str
) -> None:
    runtime(**how)
    if "sleeps" in how:
        monkeypatch.setattr(encast.verify.apart, "_SECONDS", 0.4)
    begin = time.monotonic()
    path = compile(export, tmp_path / "m.encast")
    assert reason in verified(path)["skipped"]
    with pytest.raises(InputError, match=r"ONNX Runtime (cannot run it|takes more)"):
        compile(export, tmp_path / "m.encast", verify=True)
    assert time.monotonic() - begin < 40


def test_memory_of_the_process_is_bounded(
    runtime: How, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encast.verify.apart, "_MEMORY", 1 << 26)
    assert "cannot run it" in verified(compile(export, tmp_path / "m.encast"))["skipped"]


def test_what_has_no_runtime_of_its_own(runtime: How, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "bert", "features")
    assert verified(compile(checkpoint, tmp_path / "m.encast")) is None
    with pytest.raises(InputError, match="it has no graph to run"):
        compile(checkpoint, tmp_path / "m.encast", verify=True)


def test_without_the_runtime(export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("encast.errors.find_spec", "encast.verify.original.find_spec"):
        monkeypatch.setattr(place, lambda name: None)
    assert verified(compile(export, tmp_path / "m.encast")) is None
    with pytest.raises(InputError, match=r"not installed: onnxruntime; pip install 'encast\[verify\]'"):
        compile(export, tmp_path / "m.encast", verify=True)


def test_ids_are_those_of_plain_tokens(runtime: How, export: Path, tmp_path: Path) -> None:
    opened = artifact.open(compile(export, tmp_path / "m.encast", verify=False))
    special = {one["id"] for one in json.loads(opened.tokenizer_json)["added_tokens"] if one["special"]}
    assert special
    used = np.concatenate(encast.verify.compare._sequences(opened))
    assert not special & {*used.tolist()}
    assert used.min() >= 0
    assert used.max() < opened.graph.meta.vocab
