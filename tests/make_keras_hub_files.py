"""Writes ``golden/keras_hub``: small presets as KerasHub saves them, with the answers of its models.

Run in an environment of its own (keras 3.15, keras-hub 0.32, torch): ``python tests/make_keras_hub_files.py``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras_hub
import numpy as np

SIZES = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 12, "max_sequence_length": 24}
TEXTS = ["the cat sat", "ab the, cat!", "caf\u00e9 THE \u4e2d Cat."]
PAIRS = (["the cat", "ab"], ["sat the", "cat. c"])
WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcef", "##a", "##b", "##f", "the", "cat", "sat", "\u00e9",
    "##\u00e9", *",.!", "\u4e2d",
]  # fmt: skip
MERGES = ["t h", "th e", "\u0120 the", "\u0120 c", "\u0120c a", "\u0120ca t"]


def byte_level() -> dict[str, int]:
    """RoBERTa's special tokens, a letter for each byte, and what the merges make."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in shown] + [chr(256 + index) for index in range(256 - len(shown))]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *letters, *(merge.replace(" ", "") for merge in MERGES), "<mask>"]
    return {token: index for index, token in enumerate(tokens)}


def fill(weights: Any, source: np.random.Generator) -> None:
    for weight in weights:
        if "float" in str(weight.dtype):
            weight.assign((source.standard_normal(weight.shape) * 0.5).astype("f4"))


def numbers(outputs: Any) -> Any:
    return outputs.detach().cpu().numpy()


def main() -> None:
    golden = Path(__file__).parent / "golden" / "keras_hub"
    shutil.rmtree(golden, ignore_errors=True)
    source = np.random.default_rng(1)
    models = keras_hub.models

    tokenizer = models.BertTokenizer(vocabulary=WORDS, lowercase=True)
    backbone = models.BertBackbone(vocabulary_size=len(WORDS), **SIZES)
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=20)
    model = models.BertTextClassifier(backbone, num_classes=3, preprocessor=preprocessor)
    fill(model.weights, source)
    folder = golden / "bert-classify"
    model.save_to_preset(str(folder))
    texts, pairs = preprocessor(TEXTS), preprocessor._call_python(PAIRS)
    np.savez_compressed(
        folder / "answers.npz",
        **{f"{of}_ids": numbers(given["token_ids"]) for of, given in (("texts", texts), ("pairs", pairs))},
        texts=numbers(model(texts)),
        pairs=numbers(model(pairs)),
    )

    vocabulary = byte_level()
    tokenizer = models.RobertaTokenizer(vocabulary=vocabulary, merges=MERGES)
    backbone = models.RobertaBackbone(vocabulary_size=len(vocabulary), **SIZES)
    preprocessor = models.RobertaMaskedLMPreprocessor(tokenizer, sequence_length=20)
    model = models.RobertaMaskedLM(backbone, preprocessor=preprocessor)
    fill(model.weights, source)
    folder = golden / "roberta-fill_mask"
    model.save_to_preset(str(folder))
    ids = source.integers(5, 40, (2, 9))
    given = {"token_ids": ids, "padding_mask": np.ones_like(ids), "mask_positions": np.array([range(9)] * 2)}
    np.savez_compressed(folder / "answers.npz", ids=ids, logits=numbers(model(given)))
    for path in golden.glob("*/metadata.json"):  # has the date, and nothing reads it
        path.unlink()


if __name__ == "__main__":
    main()
