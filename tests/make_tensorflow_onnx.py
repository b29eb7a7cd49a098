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
from typing import Any

import numpy as np
import tensorflow as tf
import tf2onnx
import transformers
from onnx_files import CASES, Export, checkpoint_of
from safetensors.numpy import load_file, save_file
from shorten_onnx import shorten

__all__ = ["convert", "convert_saved"]

_CLASSES = {
    "features": "TFAutoModel",
    "classify": "TFAutoModelForSequenceClassification",
    "tag": "TFAutoModelForTokenClassification",
    "answer": "TFAutoModelForQuestionAnswering",
    "fill_mask": "TFAutoModelForMaskedLM",
}
v1 = tf.compat.v1


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
    weights = {name.removeprefix("bert."): array for name, array in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        saved = f"{scratch}/saved"
        with tf.Graph().as_default(), v1.Session() as session:
            inputs, outputs = Bert(weights, config).build(case)
            session.run(v1.global_variables_initializer())
            v1.saved_model.simple_save(session, saved, inputs, outputs)
        command = [sys.executable, "-m", "tf2onnx.convert", "--saved-model", saved, "--output", str(out)]
        subprocess.run([*command, "--opset", str(case.opset)], check=True)
    shorten(out)


class Bert:
    """Rows of all texts one below the other, types as rows of zeros with one 1, positions cut from their table."""

    def __init__(self, weights: dict[str, np.ndarray[Any, Any]], config: dict[str, Any]) -> None:
        self.weights, self.config = weights, config
        self.hidden, self.heads = config["hidden_size"], config["num_attention_heads"]

    def variable(self, name: str, *, turned: bool = False) -> Any:
        array = self.weights[name]
        return v1.get_variable(name.replace(".", "/"), initializer=array.T.copy() if turned else array)

    def dense(self, x: Any, name: str) -> Any:
        product = tf.matmul(x, self.variable(f"{name}.weight", turned=True))
        return tf.nn.bias_add(product, self.variable(f"{name}.bias"))

    def norm(self, x: Any, name: str) -> Any:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        beta, gamma = self.variable(f"{name}.bias"), self.variable(f"{name}.weight")
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-12)

    def gelu(self, x: Any) -> Any:
        if self.config["hidden_act"] == "gelu_new":
            return x * (0.5 * (1.0 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * tf.pow(x, 3)))))
        return x * (0.5 * (1.0 + tf.math.erf(x / tf.sqrt(2.0))))

    def attention(self, x: Any, adder: Any, batch: Any, length: Any, name: str) -> Any:
        def split(part: str) -> Any:
            shape = [batch, length, self.heads, self.hidden // self.heads]
            return tf.transpose(tf.reshape(self.dense(x, f"{name}.self.{part}"), shape), [0, 2, 1, 3])

        scores = tf.matmul(split("query"), split("key"), transpose_b=True)
        scores = tf.multiply(scores, 1.0 / np.sqrt(self.hidden / self.heads)) + adder
        context = tf.transpose(tf.matmul(tf.nn.softmax(scores), split("value")), [0, 2, 1, 3])
        return self.dense(tf.reshape(context, [batch * length, self.hidden]), f"{name}.output.dense")

    def build(self, case: Export) -> tuple[dict[str, Any], dict[str, Any]]:
        names = ("input_ids", "input_mask", "segment_ids")
        inputs = {name: v1.placeholder(tf.int32, case.fixed, name) for name in names}
        ids, mask, types = inputs.values()
        batch, length = (size or tf.shape(ids)[axis] for axis, size in enumerate(case.fixed))
        table = self.variable("embeddings.token_type_embeddings.weight")
        words = tf.gather(self.variable("embeddings.word_embeddings.weight"), tf.reshape(ids, [-1]))
        x = tf.reshape(words, [batch, length, self.hidden])
        kinds = tf.matmul(tf.one_hot(tf.reshape(types, [-1]), depth=table.shape[0]), table)
        x += tf.reshape(kinds, [batch, length, self.hidden])
        positions = tf.slice(self.variable("embeddings.position_embeddings.weight"), [0, 0], [length, -1])
        x = self.norm(x + tf.reshape(positions, [1, length, self.hidden]), "embeddings.LayerNorm")
        real = tf.ones([batch, length, 1]) * tf.cast(tf.reshape(mask, [batch, 1, length]), tf.float32)
        adder = (1.0 - tf.expand_dims(real, 1)) * -10000.0
        x = tf.reshape(x, [-1, self.hidden])
        for layer in range(self.config["num_hidden_layers"]):
            name = f"encoder.layer.{layer}"
            attended = self.attention(x, adder, batch, length, f"{name}.attention")
            x = self.norm(attended + x, f"{name}.attention.output.LayerNorm")
            inner = self.gelu(self.dense(x, f"{name}.intermediate.dense"))
            x = self.norm(self.dense(inner, f"{name}.output.dense") + x, f"{name}.output.LayerNorm")
        rows = tf.reshape(x, [batch, length, self.hidden])
        if case.head != "classify":
            return inputs, {"sequence_output": rows}
        pooled = tf.tanh(self.dense(tf.squeeze(rows[:, 0:1, :], axis=1), "pooler.dense"))
        product = tf.matmul(pooled, self.variable("classifier.weight"), transpose_b=True)
        logits = tf.nn.bias_add(product, self.variable("classifier.bias"))
        return inputs, {"logits": logits, "probabilities": tf.nn.softmax(logits)}


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
