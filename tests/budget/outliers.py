"""Small classifiers of which some layers lose their answers in int8, and data sets of their own answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint
from safetensors.numpy import load_file, save_file

import encast
from encast.data.datasets import Dataset, Labelled

__all__ = ["checkpoint", "inject", "own_answers", "own_scores", "texts", "times_by_size"]

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "Bob", "from", "Paris", "unbelievable", "things"]


def checkpoint(folder: Path, head: str = "classify", guilty: Sequence[int] = (), **options: Any) -> Path:
    """A BERT of relu, with outliers before ``output.dense`` of the layers ``guilty``."""
    made = make_checkpoint(folder, "bert", head, activation="relu", seed=5, **options)
    for layer in guilty:
        inject(made, layer)
    return made


def inject(folder: Path, layer: int, scale: float = 2.0**12) -> None:
    """One inner channel is much larger, and is scaled down again by ``output.dense``: the function stays.

    Relu lets a factor above 0 through, and powers of two round nothing. In int8 the channel takes the whole range of a
    row, so that all others of it become 0 (Bondarenko et al., "Understanding and Overcoming the Challenges of Efficient
    Transformer Quantization", EMNLP 2021, section 4).
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    prefix = next(name for name in tensors if name.endswith(f"encoder.layer.{layer}.output.dense.weight"))
    prefix = prefix.removesuffix("output.dense.weight")
    channel = 7
    for part in ("weight", "bias"):
        tensors[f"{prefix}intermediate.dense.{part}"][channel] *= scale
    tensors[f"{prefix}output.dense.weight"][:, channel] /= scale
    save_file(tensors, path, metadata={"format": "pt"})


def times_by_size(artifacts: Sequence[Path], sample: Any, threads: int | None = None) -> list[list[float]]:
    """In place of ``race``: a run takes as long as the weights are large, so that more int8 is always faster."""
    return [[float((path / "weights.safetensors").stat().st_size)] for path in artifacts]


def texts(count: int) -> list[str]:
    source = random.Random(3)
    return [" ".join(source.choices(WORDS, k=source.randint(3, 16))) for _ in range(count)]


def own_scores(folder: Path, made: Path, count: int = 80) -> Dataset:
    """The f32 model's own cosines of ``count`` pairs of texts: a metric that hardly any error leaves alone."""
    rows = texts(2 * count)
    with encast.load(encast.compile(made, folder / "gold.encast", dtype="f32")) as engine:
        a, b = engine.embed(rows[::2]), engine.embed(rows[1::2])
    pairs = zip(rows[::2], rows[1::2], (a * b).sum(axis=1), strict=True)
    return Dataset("own/scores.tsv", "scores", [Labelled((one, two), float(score)) for one, two, score in pairs])


def own_answers(folder: Path, made: Path, count: int = 200) -> Dataset:
    """The f32 model's own classes of ``count`` texts."""
    rows = texts(count)
    with encast.load(encast.compile(made, folder / "gold.encast", dtype="f32")) as engine:
        answers = engine.classify(rows)
    return Dataset(
        "own/answers.tsv", "classes", [Labelled(text, str(one.label)) for text, one in zip(rows, answers, strict=True)]
    )
