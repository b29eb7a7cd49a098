"""Writes ``golden/keras_hub``: small presets as KerasHub and KerasNLP save them, with the answers of their models.

Run in environments of their own: ``python tests/make_keras_hub_files.py`` with keras 3.15, keras-hub 0.32 and torch,
then the same with keras 3.3, keras-nlp 0.12 and tensorflow.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch" if importlib.util.find_spec("keras_hub") else "tensorflow"

import keras
import numpy as np

try:
    import keras_hub as library
except ImportError:
    import keras_nlp as library

NEW = library.__name__ == "keras_hub"

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
    return keras.ops.convert_to_numpy(outputs)


def save_classifier(folder: Path, model: Any, preprocessor: Any) -> None:
    """The preset and, in ``answers.npz``, ids and answers of ``TEXTS`` and ``PAIRS``."""
    model.save_to_preset(str(folder))
    answers = {}
    for of, given in (("texts", TEXTS), ("pairs", PAIRS)):
        if of == "texts":
            made = preprocessor(given)
        elif NEW:  # a call would take the two lists for one tensor
            made = preprocessor._call_python(given)
        else:
            made = preprocessor(tuple(np.array(texts) for texts in given))
        # Behind _call_python, DistilBERT would take the ids of segments for its mask.
        made = {name: keras.ops.convert_to_numpy(made[name]) for name in model.input}
        answers |= {f"{of}_ids": made["token_ids"], of: numbers(model(made))}
    np.savez_compressed(folder / "answers.npz", **answers)


def save_old(golden: Path) -> None:
    """A classifier of KerasNLP, which has the backbone in both files."""
    models = library.models
    tokenizer = models.BertTokenizer(vocabulary=WORDS, lowercase=True)
    backbone = models.BertBackbone(vocabulary_size=len(WORDS), **{**SIZES, "hidden_dim": 4})
    preprocessor = models.BertPreprocessor(tokenizer, sequence_length=20)
    model = models.BertClassifier(backbone, num_classes=3, preprocessor=preprocessor)
    fill(model.weights, np.random.default_rng(3))
    save_classifier(golden / "bert-classify-nlp", model, preprocessor)


def save_new(golden: Path) -> None:
    source = np.random.default_rng(1)
    models = library.models

    tokenizer = models.BertTokenizer(vocabulary=WORDS, lowercase=True)
    backbone = models.BertBackbone(vocabulary_size=len(WORDS), **SIZES)
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=20)
    model = models.BertTextClassifier(backbone, num_classes=3, preprocessor=preprocessor)
    fill(model.weights, source)
    save_classifier(golden / "bert-classify", model, preprocessor)

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

    # A head with two layers of the same class, over a backbone with several as well.
    tokenizer = models.DistilBertTokenizer(vocabulary=WORDS, lowercase=True, strip_accents=True)
    backbone = models.DistilBertBackbone(vocabulary_size=len(WORDS), **{**SIZES, "num_layers": 2, "hidden_dim": 4})
    preprocessor = models.DistilBertTextClassifierPreprocessor(tokenizer, sequence_length=20)
    model = models.DistilBertTextClassifier(backbone, num_classes=3, preprocessor=preprocessor)
    fill(model.weights, source)
    save_classifier(golden / "distilbert-classify", model, preprocessor)


def main() -> None:
    golden = Path(__file__).parent / "golden" / "keras_hub"
    for path in golden.glob("*"):
        if path.name.endswith("-nlp") is not NEW:
            shutil.rmtree(path)
    if NEW:
        save_new(golden)
    else:
        save_old(golden)
    for path in golden.glob("*/metadata.json"):  # has the date, and nothing reads it
        path.unlink()


if __name__ == "__main__":
    main()
