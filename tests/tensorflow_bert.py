"""BERT as google-research/bert computes it, in a graph of TensorFlow 1 (``modeling.py``, ``run_classifier.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["Bert", "save"]

Array = np.ndarray[Any, Any]
v1 = tf.compat.v1
INPUTS = ("input_ids", "input_mask", "segment_ids")


class Bert:
    """Rows of all texts one below the other, types as rows of zeros with one 1, positions cut from their table.

    ``weights``: variables by google-research's names.
    """

    def __init__(self, weights: Mapping[str, Array], config: Mapping[str, Any]) -> None:
        self.weights, self.config = weights, config
        self.hidden, self.heads = config["hidden_size"], config["num_attention_heads"]

    def variable(self, name: str) -> Any:
        return v1.get_variable(name, self.weights[name].shape, initializer=tf.zeros_initializer)

    def dense(self, x: Any, name: str) -> Any:
        return tf.nn.bias_add(tf.matmul(x, self.variable(f"{name}/kernel")), self.variable(f"{name}/bias"))

    def norm(self, x: Any, name: str) -> Any:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        beta, gamma = self.variable(f"{name}/beta"), self.variable(f"{name}/gamma")
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-12)

    def gelu(self, x: Any) -> Any:
        if self.config["hidden_act"] == "gelu_new":
            return x * (0.5 * (1.0 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * tf.pow(x, 3)))))
        return x * (0.5 * (1.0 + tf.math.erf(x / tf.sqrt(2.0))))

    def attention(self, x: Any, adder: Any, batch: Any, length: Any, name: str) -> Any:
        def split(part: str) -> Any:
            shape = [batch, length, self.heads, self.hidden // self.heads]
            return tf.transpose(tf.reshape(self.dense(x, f"{name}/self/{part}"), shape), [0, 2, 1, 3])

        scores = tf.matmul(split("query"), split("key"), transpose_b=True)
        scores = tf.multiply(scores, 1.0 / np.sqrt(self.hidden / self.heads)) + adder
        context = tf.transpose(tf.matmul(tf.nn.softmax(scores), split("value")), [0, 2, 1, 3])
        return self.dense(tf.reshape(context, [batch * length, self.hidden]), f"{name}/output/dense")

    def build(self, head: str, fixed: Sequence[int | None]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs and outputs of the signature."""
        inputs = {name: v1.placeholder(tf.int32, fixed, name) for name in INPUTS}
        ids, mask, types = inputs.values()
        batch, length = (size or tf.shape(ids)[axis] for axis, size in enumerate(fixed))
        table = self.variable("bert/embeddings/token_type_embeddings")
        words_table = self.variable("bert/embeddings/word_embeddings")
        x = tf.reshape(tf.gather(words_table, tf.reshape(ids, [-1])), [batch, length, self.hidden])
        kinds = tf.matmul(tf.one_hot(tf.reshape(types, [-1]), depth=table.shape[0]), table)
        x += tf.reshape(kinds, [batch, length, self.hidden])
        positions = tf.slice(self.variable("bert/embeddings/position_embeddings"), [0, 0], [length, -1])
        x = self.norm(x + tf.reshape(positions, [1, length, self.hidden]), "bert/embeddings/LayerNorm")
        real = tf.ones([batch, length, 1]) * tf.cast(tf.reshape(mask, [batch, 1, length]), tf.float32)
        adder = (1.0 - tf.expand_dims(real, 1)) * -10000.0
        x = tf.reshape(x, [-1, self.hidden])
        for layer in range(self.config["num_hidden_layers"]):
            name = f"bert/encoder/layer_{layer}"
            x = self.norm(
                self.attention(x, adder, batch, length, f"{name}/attention") + x, f"{name}/attention/output/LayerNorm"
            )
            inner = self.dense(x, f"{name}/intermediate/dense")
            with v1.name_scope(f"{name}/intermediate/dense/"):  # where the reader looks for the form of GELU
                inner = self.gelu(inner)
            x = self.norm(self.dense(inner, f"{name}/output/dense") + x, f"{name}/output/LayerNorm")
        rows = tf.reshape(x, [batch, length, self.hidden])
        return inputs, getattr(self, f"_{head}")(inputs, rows, words_table, batch, length)

    def _features(self, inputs: dict[str, Any], rows: Any, *_: Any) -> dict[str, Any]:
        return {"sequence_output": rows, "pooled_output": self.pooled(rows)}

    def pooled(self, rows: Any) -> Any:
        return tf.tanh(self.dense(tf.squeeze(rows[:, 0:1, :], axis=1), "bert/pooler/dense"))

    def _classify(self, inputs: dict[str, Any], rows: Any, *_: Any) -> dict[str, Any]:
        """The labels of a batch count in its loss alone."""
        inputs["label_ids"] = v1.placeholder(tf.int32, [None], "label_ids")
        product = tf.matmul(self.pooled(rows), self.variable("output_weights"), transpose_b=True)
        logits = tf.nn.bias_add(product, self.variable("output_bias"))
        return {"logits": logits, "probabilities": tf.nn.softmax(logits)}

    def _tag(self, inputs: dict[str, Any], rows: Any, _: Any, batch: Any, length: Any) -> dict[str, Any]:
        inputs["label_ids"] = v1.placeholder(tf.int32, inputs["input_ids"].shape, "label_ids")
        weights = self.variable("output_weights")
        product = tf.matmul(tf.reshape(rows, [-1, self.hidden]), weights, transpose_b=True)
        logits = tf.reshape(tf.nn.bias_add(product, self.variable("output_bias")), [batch, length, weights.shape[0]])
        return {"probabilities": tf.nn.softmax(logits), "predictions": tf.argmax(logits, axis=-1)}

    def _answer(self, inputs: dict[str, Any], rows: Any, _: Any, batch: Any, length: Any) -> dict[str, Any]:
        inputs["unique_ids"] = v1.placeholder(tf.int32, [None], "unique_ids")
        weights = self.variable("cls/squad/output_weights")
        product = tf.matmul(tf.reshape(rows, [-1, self.hidden]), weights, transpose_b=True)
        logits = tf.reshape(tf.nn.bias_add(product, self.variable("cls/squad/output_bias")), [batch, length, 2])
        start, end = tf.unstack(tf.transpose(logits, [2, 0, 1]), axis=0)
        return {"unique_ids": tf.identity(inputs["unique_ids"]), "start_logits": start, "end_logits": end}

    def _fill_mask(self, inputs: dict[str, Any], rows: Any, words: Any, batch: Any, length: Any) -> dict[str, Any]:
        x = self.dense(tf.reshape(rows, [-1, self.hidden]), "cls/predictions/transform/dense")
        x = self.norm(self.gelu(x), "cls/predictions/transform/LayerNorm")
        logits = tf.nn.bias_add(tf.matmul(x, words, transpose_b=True), self.variable("cls/predictions/output_bias"))
        return {"log_probs": tf.nn.log_softmax(tf.reshape(logits, [batch, length, words.shape[0]]))}


def save(
    weights: Mapping[str, Array],
    config: Mapping[str, Any],
    folder: Path,
    head: str,
    fixed: Sequence[int | None] = (None, None),
    *,
    outputs: Sequence[str] = (),
) -> None:
    """Writes the SavedModel of the graph, as scripts of google-research/bert would, or with the three inputs that count
    and the ``outputs`` alone."""
    with tf.Graph().as_default(), v1.Session() as session:
        inputs, made = Bert(weights, config).build(head, fixed)
        if outputs:
            inputs = {name: inputs[name] for name in INPUTS}
        elif head == "classify":
            outputs = ("probabilities",)
        session.run(v1.global_variables_initializer())
        for variable in v1.global_variables():  # an initial value would be in the graph too
            variable.load(weights[variable.op.name], session)
        v1.saved_model.simple_save(session, str(folder), inputs, {name: made[name] for name in outputs or made})
