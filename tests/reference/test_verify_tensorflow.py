"""``encast compile`` compares SavedModels with TensorFlow itself, which a test writes them with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="compares with TensorFlow")

import tensorflow as tf
from bundle_files import variables_of
from checkpoints import make_checkpoint
from tensorflow_bert import save

from encast import artifact
from encast.compile import compile
from encast.errors import UnsupportedModelError
from encast.importers import open_checkpoint
from encast.verify import TENSORFLOW, NotComparedError, Original, Takes, apart

v1 = tf.compat.v1
GOLDEN = Path(__file__).parent.parent / "golden" / "tensorflow"
MINILM = {"layers": 6, "hidden": 384, "heads": 12, "inner": 1536, "vocab": 30522, "positions": 512}
OUTPUTS = {
    "features": ("last_hidden_state", "sequence_output"),
    "classify": ("log_softmax(logits)", "log(probabilities)"),
    "tag": ("log_softmax(logits)", "log(probabilities)"),
    "answer": ("logits", "start_logits+end_logits"),
    "fill_mask": ("log_softmax(logits)", "log_probs"),
}


def saved(folder: Path, head: str, fixed: Sequence[int | None] = (None, None), **options: Any) -> Path:
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 120, "tokenizer_json": False}
    checkpoint = make_checkpoint(folder / "checkpoint", "bert", head, **{**sizes, **options})
    config = json.loads((checkpoint / "config.json").read_text())
    path = folder / "saved"
    save(variables_of(checkpoint), config, path, head, fixed)
    config["hidden_act"] = "gelu"
    for name in ("architectures", "model_type", "id2label", "label2id", "num_labels"):
        config.pop(name, None)
    (path / "assets").mkdir(exist_ok=True)
    (path / "assets" / "bert_config.json").write_text(json.dumps(config))
    shutil.copy(checkpoint / "vocab.txt", path / "assets")
    return path


def verified(path: Path) -> Any:
    return artifact.open(path).card["verified"]


@pytest.mark.parametrize("fixed", [(None, None), (None, 16), (2, 16)], ids=str)
@pytest.mark.parametrize("head", OUTPUTS)
def test_the_card_of_a_saved_model(tmp_path: Path, head: str, fixed: Sequence[int | None]) -> None:
    source = saved(tmp_path, head, fixed, activation="gelu_new" if fixed[0] else "gelu")
    found = verified(compile(source, tmp_path / "m.encast", dtype="f32", verify=True))
    assert (found["output"], found["of"]) == OUTPUTS[head]
    assert found["runtime"] == f"tensorflow {tf.__version__}"
    assert found["relative"] < 1e-5
    assert found["cosine"] == 1.0


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_a_model_of_minilm_s_size(tmp_path: Path, dtype: str) -> None:
    source = saved(tmp_path, "classify", (None, 128), **MINILM)
    found = verified(compile(source, tmp_path / "m.encast", dtype=dtype, verify=True))
    assert found["relative"] < 1e-5
    assert dtype == "f32" or found["narrow"]["relative"] < 0.1


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("other", [{"num_attention_heads": 2}, {"hidden_act": "gelu_new"}], ids=str)
def test_a_config_that_says_other_things_is_noticed(tmp_path: Path, other: dict[str, Any], dtype: str) -> None:
    source = saved(tmp_path, "classify")
    path = source / "assets" / "bert_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **other}))
    with pytest.raises(UnsupportedModelError, match=r"TensorFlow and log_softmax\(logits\) of the artifact differ"):
        compile(source, tmp_path / "m.encast", dtype=dtype, verify=True)
    assert not (tmp_path / "m.encast").exists()


def test_the_kept_one_is_no_whole_model(tmp_path: Path) -> None:
    """It is run all the same, and takes the ids alone."""
    source = shutil.copytree(GOLDEN, tmp_path / "export")
    (source / "bert_config.json").write_text('{"hidden_act": "gelu", "vocab_size": 5}')
    found = open_checkpoint(source).saved_model
    assert found is not None
    assert (found.signature, found.tags, found.inputs.positions) == ("serving_default", ("serve",), 8)
    takes = Takes(dict(found.inputs.names), None, found.inputs.positions, found.tags, found.signature)
    answers = apart.run_apart(Original(TENSORFLOW, source, takes), [[1] * 8, [2] * 8], [[0] * 8] * 2)
    assert answers.outputs["probabilities"].shape == (2, 4)


def test_a_graph_that_prints_and_never_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "loop"
    with tf.Graph().as_default(), v1.Session() as session:
        ids = v1.placeholder(tf.int32, [None, 8], "input_ids")

        def body(step: Any) -> Any:
            with tf.control_dependencies([tf.print("spam", step)]):
                return step * 1

        steps = tf.while_loop(lambda step: step >= 0, body, [tf.reduce_sum(ids)])[0]
        v1.get_variable("x", initializer=1.0)
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(path), {"input_ids": ids}, {"steps": steps})
    monkeypatch.setattr(apart, "_SECONDS", 20)
    takes = Takes({"input_ids": "input_ids"}, None, 8, ("serve",), "serving_default")
    with pytest.raises(NotComparedError, match="loop: TensorFlow takes more than 20 s for 8 tokens"):
        apart.run_apart(Original(TENSORFLOW, path, takes), [[1] * 8], [[0] * 8])
    said = capfd.readouterr()
    assert "spam" not in said.out + said.err
