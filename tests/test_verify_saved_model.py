"""How an artifact is compared with a SavedModel in TensorFlow, whose place ``fake_runtime/tensorflow.py`` takes."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bundle_files import as_bundle, meta_graph, saved_model, variables_of, write_bundle
from checkpoints import make_checkpoint
from runtime_how import How

import encast.verify.apart
import encast.verify.compare
from encast import artifact
from encast.cli.main import main
from encast.compile import compile
from encast.errors import InputError, UnsupportedModelError

NAMES = ("input_ids", "input_mask", "segment_ids")


def saved(folder: Path, head: str = "classify", length: int = -1, **more: Any) -> Path:
    """``more``: ``inputs`` besides token ids, ``config``."""
    sizes: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 4, "vocab": 60, "tokenizer_json": False}
    checkpoint = make_checkpoint(folder / "checkpoint", "bert", head, **sizes)
    path = as_bundle(checkpoint, folder / "saved")
    write_bundle(path / "variables", variables_of(checkpoint), "variables")
    inputs = more.get("inputs", {name: [-1, length] for name in NAMES} | {"label_ids": [-1]})
    (path / "saved_model.pb").write_bytes(saved_model(meta_graph(["Erf"], inputs, more.get("outputs"))))
    config = json.loads((path / "bert_config.json").read_text()) | more.get("config", {})
    (path / "bert_config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    return path


def verified(path: Path) -> Any:
    return artifact.open(path).card.get("verified")


@pytest.mark.parametrize(
    ("head", "gives", "output", "of"),
    [
        ("classify", ["probabilities"], "log_softmax(logits)", "log(probabilities)"),
        ("classify", ["labels", "log_probs"], "log_softmax(logits)", "log_probs"),
        ("classify", ["probabilities", "logits"], "logits", "logits"),
        ("fill_mask", ["log_probs"], "log_softmax(logits)", "log_probs"),
        ("answer", ["start_logits", "end_logits"], "logits", "start_logits+end_logits"),
        ("features", ["sequence_output"], "last_hidden_state", "sequence_output"),
    ],
)
def test_the_card_says_which_output_is_how_far_apart(
    runtime: How, tmp_path: Path, head: str, gives: list[str], output: str, of: str
) -> None:
    runtime(outputs=gives)
    found = verified(compile(saved(tmp_path, head), tmp_path / "m.encast", dtype="f32", verify=True))
    assert (found["runtime"], found["output"], found["of"]) == ("tensorflow 9.9", output, of)
    assert 0 < found["relative"] < 1e-5
    assert found["limit"] == 3e-5


def test_other_tasks_are_compared_by_the_last_hidden_state(runtime: How, tmp_path: Path) -> None:
    runtime(outputs=["sequence_output"])
    path = compile(saved(tmp_path, "features"), tmp_path / "m.encast", dtype="f32", task="embed", verify=True)
    assert verified(path)["output"] == "last_hidden_state"


def test_several_labels_have_a_sigmoid_each(runtime: How, tmp_path: Path) -> None:
    runtime(outputs=["shares"])
    source = saved(tmp_path, config={"problem_type": "multi_label_classification"})
    found = verified(compile(source, tmp_path / "m.encast", dtype="f32", verify=True))
    assert (found["output"], found["of"]) == ("clip(logits)", "logit(shares)")
    assert found["relative"] < 1e-5
    config = json.loads((source / "bert_config.json").read_text())
    config.pop("problem_type")
    (source / "bert_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"'shares' by TensorFlow and logits of .* and problem_type there"):
        compile(source, tmp_path / "other.encast", dtype="f32", verify=True)
    assert not (tmp_path / "other.encast").exists()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(
    "config",
    [
        {"num_attention_heads": 2},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "relu"},
        {"hidden_act": "silu"},
        {"layer_norm_eps": 1e-3},
    ],
    ids=str,
)
def test_a_graph_that_is_not_what_its_config_says(
    runtime: How, tmp_path: Path, dtype: str, config: dict[str, Any]
) -> None:
    runtime(config=config)
    with pytest.raises(UnsupportedModelError, match="correct num_attention_heads, hidden_act"):
        compile(saved(tmp_path), tmp_path / "m.encast", dtype=dtype, verify=True)
    assert not (tmp_path / "m.encast").exists()


@pytest.mark.parametrize("size", [-11.0, 5.0])
def test_a_sigmoid_hides_no_error_of_large_logits(size: float) -> None:
    own = np.full((2, 3), size, np.float32)
    opened: Any = SimpleNamespace(
        graph=SimpleNamespace(meta=SimpleNamespace(task="classify", problem_type="multi_label"))
    )
    for error, agrees in ((1e-7, True), (1e-3, False)):
        theirs = (1 / (1 + np.exp(-(own.astype(np.float64) * (1 + error))))).astype(np.float32)
        (pair,) = encast.verify.compare._probabilities(opened, own, "shares", theirs)
        assert (pair.share < 3e-5) is agrees


@pytest.mark.parametrize("gives", ["probabilities", "log_probs"])
def test_probabilities_of_other_logits_are_refused(runtime: How, tmp_path: Path, gives: str) -> None:
    """They add up to 1 like the artifact's."""
    runtime(outputs=[gives], share=0.5)
    source = saved(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"log_softmax\(logits\) of the artifact differ by"):
        compile(source, tmp_path / "m.encast", dtype="f32", verify=True)
    assert not (tmp_path / "m.encast").exists()


def test_texts_are_padded_to_a_fixed_length(runtime: How, tmp_path: Path) -> None:
    runtime(size=[5, 12])
    found = verified(compile(saved(tmp_path, length=12), tmp_path / "m.encast", dtype="f32", verify=True))
    assert found["tokens"] == 12 + 3 + 12 + 8 + 12
    assert 0 < found["relative"] < 1e-5


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"examples": [-1]}, r"no signature takes input_ids \(there is serving_default \(examples\)\)"),
        ({"input_ids": [-1, -1], "keep_prob": []}, "serving_default takes keep_prob, of which nobody says"),
        ({"input_ids": [-1, 0]}, "takes texts of 0 tokens"),
    ],
)
def test_signatures_that_are_not_fed(runtime: How, tmp_path: Path, inputs: dict[str, Any], reason: str) -> None:
    source = saved(tmp_path, inputs=inputs)
    assert "skipped" in verified(compile(source, tmp_path / "m.encast"))
    with pytest.raises(InputError, match=reason):
        compile(source, tmp_path / "m.encast", verify=True)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"raises": "Op type not registered\nMine"}, "RuntimeError: Op type not registered Mine"),
        ({"sleeps": 60}, "takes more than 0 s"),
        ({"signal": int(signal.SIGSEGV)}, "was ended by SIGSEGV"),
    ],
)
def test_a_model_that_fails_hangs_or_crashes(
    runtime: How,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    how: dict[str, Any],
    reason: str,
) -> None:
    runtime(**how, prints="spam of TensorFlow\n")
    if "sleeps" in how:
        monkeypatch.setattr(encast.verify.apart, "_SECONDS", 0.4)
    source = saved(tmp_path)
    with pytest.raises(InputError, match=r"saved: TensorFlow (cannot run it|takes more)") as failed:
        compile(source, tmp_path / "m.encast", verify=True)
    assert reason in str(failed.value)
    assert not (tmp_path / "m.encast").exists()
    said = capfd.readouterr()
    assert "spam" not in said.out + said.err


def test_what_it_prints_is_not_its_answer(runtime: How, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runtime(prints='{"version": "other", "names": []}\n')
    assert (
        main(["compile", str(saved(tmp_path)), "--out", str(tmp_path / "m.encast"), "--dtype", "f32", "--verify"]) == 0
    )
    assert verified(tmp_path / "m.encast")["runtime"] == "tensorflow 9.9"
    said = capfd.readouterr()
    assert "other" not in said.out + said.err
    assert "log_softmax(logits) is log(probabilities) of tensorflow 9.9 but for" in said.out


def test_modules_in_the_working_directory_are_not_run(
    runtime: How, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(tmp_path)
    for name in ("tensorflow", "numpy"):
        (source / f"{name}.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(source)
    # As Python has it in a session and with -c.
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert "relative" in verified(compile(".", tmp_path / "m.encast", dtype="f32", verify=True))
    assert not (source / "ran").exists()


def test_without_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("encast.errors.find_spec", "encast.verify.original.find_spec"):
        monkeypatch.setattr(place, lambda name: None)
    source = saved(tmp_path)
    assert verified(compile(source, tmp_path / "m.encast")) is None
    with pytest.raises(InputError, match=r"not installed: tensorflow; pip install 'encast\[verify-tensorflow\]'"):
        compile(source, tmp_path / "m.encast", verify=True)


def test_a_checkpoint_has_no_graph_to_run(runtime: How, tmp_path: Path) -> None:
    google = as_bundle(
        make_checkpoint(tmp_path / "checkpoint", "bert", "features", tokenizer_json=False), tmp_path / "g"
    )
    assert verified(compile(google, tmp_path / "m.encast")) is None
    with pytest.raises(InputError, match="this is neither: it has no graph to run"):
        compile(google, tmp_path / "m.encast", verify=True)
