"""Writes ``golden/keras``: small models of TensorFlow as transformers 4 saved them, and the names in such files.

Run in an environment of its own: ``pip install tensorflow-cpu==2.17.* tf-keras==2.17.* transformers==4.46.*``, then
``TF_USE_LEGACY_KERAS=1 python tests/make_keras_files.py``. The weights are those of ``checkpoints.py``.
``tf_names.json`` has, for every architecture and head, the path of each dataset and the tensor of the Hugging Face
layout that has its values, bit by bit, transposed or not; which one that is, is found by comparing them. What all heads
of an architecture have stands there once (``compact_names``).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf
import transformers
from checkpoints import Case, inputs_of
from keras_files import ARCHS, HEADS, SMALL, WHOLE, checkpoint_of, compact_names
from safetensors.numpy import load_file

_STEMS = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "electra": "Electra", "camembert": "Camembert"}
_STEMS |= {"bert": "Bert", "distilbert": "DistilBert", "mpnet": "MPNet", "albert": "Albert", "deberta-v2": "DebertaV2"}
_SUFFIXES = {
    "features": "Model", "classify": "ForSequenceClassification", "tag": "ForTokenClassification",
    "answer": "ForQuestionAnswering", "fill_mask": "ForMaskedLM",
}  # fmt: skip
_OUTPUTS = ("last_hidden_state", "logits", "start_logits", "end_logits")


def open_tf(folder: Path, arch: str, head: str) -> Any:
    return getattr(transformers, f"TF{_STEMS[arch]}{_SUFFIXES[head]}").from_pretrained(folder)


def names_of(file: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, str]:
    """Path of a dataset → the tensor with its values, "" for one that the checkpoint did not have."""
    names: dict[str, str] = {}

    def visit(path: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            values = item[()]
            same = [name for name, tensor in tensors.items() if np.array_equal(tensor.T, values)]
            same += [name for name, tensor in tensors.items() if tensor.ndim < 2 or name.endswith("embeddings.weight")
                     or "bias.weight" in name if np.array_equal(tensor, values)]  # fmt: skip
            assert len(set(same)) <= 1, (path, same)
            names[path] = same[0] if same else ""

    with h5py.File(file) as opened:
        opened.visititems(visit)
    return names


def answers(model: Any, case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """Of every sequence alone: ``OUTPUT-INDEX``."""
    inputs = inputs_of(case)
    found = {}
    for index, ids in enumerate(inputs.token_ids):
        given = {"input_ids": tf.constant([ids]), "attention_mask": tf.ones([1, len(ids)], tf.int32)}
        if inputs.token_type_ids is not None:
            given["token_type_ids"] = tf.constant([inputs.token_type_ids[index]])
        outputs = model(**given)
        found.update({f"{name}-{index}": np.asarray(outputs[name]) for name in _OUTPUTS if name in outputs})
    return found


def main() -> None:
    golden = Path(__file__).parent / "golden" / "keras"
    shutil.rmtree(golden, ignore_errors=True)
    golden.mkdir()
    table: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as made:
        for arch in ARCHS:
            for head in HEADS:
                folder = checkpoint_of(Path(made), arch, head, **SMALL)
                saved = folder / "saved"
                open_tf(folder, arch, head).save_pretrained(saved, safe_serialization=False)
                table[f"{arch}-{head}"] = names_of(saved / "tf_model.h5", load_file(folder / "model.safetensors"))
        (golden / "tf_names.json").write_text(json.dumps(compact_names(table), indent=1) + "\n")
        for name, (arch, head, options, shard_size) in WHOLE.items():
            folder = checkpoint_of(Path(made) / "whole", arch, head, **options)
            model = open_tf(folder, arch, head)
            model.config.name_or_path = ""  # the temporary folder
            model.save_pretrained(golden / name, safe_serialization=False, max_shard_size=shard_size)
            np.savez_compressed(golden / name / "answers.npz", **answers(model, Case(name, arch, head, options)))


if __name__ == "__main__":
    main()
