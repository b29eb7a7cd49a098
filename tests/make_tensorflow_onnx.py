"""Writes tf2onnx's part of ``golden/onnx``: models of transformers for TensorFlow, and BERT as google-research has it.

Run with TensorFlow (2.15), transformers (4.46, the last ones that have such models), torch, onnx and tf2onnx (1.17):
``python tests/make_tensorflow_onnx.py [NAME ...]``. The weights are those of ``checkpoints.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf
import tf2onnx
import transformers
from bundle_files import variables_of
from onnx_files import CASES, Export, checkpoint_of
from safetensors.numpy import load_file, save_file
from shorten_onnx import shorten
from tensorflow_bert import save

__all__ = ["convert", "convert_saved"]

_CLASSES = {
    "features": "TFAutoModel",
    "classify": "TFAutoModelForSequenceClassification",
    "tag": "TFAutoModelForTokenClassification",
    "answer": "TFAutoModelForQuestionAnswering",
    "fill_mask": "TFAutoModelForMaskedLM",
}


def convert(case: Export, folder: Path, out: Path) -> None:
    """Converts transformers' model for TensorFlow, with the weights of the checkpoint in ``folder``."""
    weights = folder / "model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt"})  # which transformers asks for
    model = getattr(transformers, _CLASSES[case.head]).from_pretrained(folder, from_pt=True)
    names = ["input_ids", "attention_mask"]
    names += ["token_type_ids"] if getattr(model.config, "type_vocab_size", 0) > 1 else []
    signature = [{name: tf.TensorSpec(case.fixed, tf.int32, name=name) for name in names}]
    made = tf.function(lambda given: dict(model(given, training=False)))
    tf2onnx.convert.from_function(made, signature, opset=case.opset, output_path=str(out))
    shorten(out)


def convert_saved(case: Export, folder: Path, out: Path) -> None:
    """Converts a SavedModel of a graph that is computed as google-research/bert does it, from the same weights."""
    config = json.loads((folder / "config.json").read_text())
    outputs = {"features": ("sequence_output",), "classify": ("logits", "probabilities")}[case.head]
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch, "saved")
        save(variables_of(folder), config, saved, case.head, case.fixed, outputs=outputs)
        command = [sys.executable, "-m", "tf2onnx.convert", "--saved-model", str(saved), "--output", str(out)]
        subprocess.run([*command, "--opset", str(case.opset)], check=True)
    shorten(out)


def main(names: Sequence[str]) -> None:
    for case in CASES:
        if (names and case.file not in names) or case.by_torch:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint_of(case, Path(scratch, "model"))
            made = convert if case.exporter == "tf2onnx" else convert_saved
            made(case, Path(scratch, "model"), Path(__file__).parent / "golden" / "onnx" / case.file)


if __name__ == "__main__":
    main(sys.argv[1:])
