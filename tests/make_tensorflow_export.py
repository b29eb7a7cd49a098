"""Writes ``golden/tensorflow``, a SavedModel by TensorFlow itself (2.21) that tests read without TensorFlow.

Run with TensorFlow installed: ``python tests/make_tensorflow_export.py``. Its variables count 0, 1, 2, ... each.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import tensorflow as tf

SHAPES = {
    "bert/embeddings/word_embeddings": (5, 2),
    "bert/encoder/layer_0/intermediate/dense/kernel": (2, 3),
    "output_weights": (4, 2),
}


def main() -> None:
    folder = Path(__file__).parent / "golden" / "tensorflow"
    shutil.rmtree(folder, ignore_errors=True)
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        ids = v1.placeholder(tf.int32, [None, 8], "input_ids")
        words, inner, scores = (
            v1.get_variable(name, initializer=np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
            for name, shape in SHAPES.items()
        )
        v1.get_variable("global_step", initializer=np.int64(7))
        with v1.name_scope("bert/encoder/layer_0/intermediate/dense/"):
            x = tf.matmul(tf.gather(words, ids[:, 0]), inner)
            x *= 0.5 * (1.0 + tf.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * tf.pow(x, 3))))
        probabilities = tf.nn.softmax(tf.matmul(x[:, :2], scores, transpose_b=True))
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(folder), {"input_ids": ids}, {"probabilities": probabilities})


if __name__ == "__main__":
    main()
