"""What static int8 and moved outliers cost a sentence-embedding model: the second table in src/encast/quant/README.md.

    python benchmarks/quant_static.py CHECKPOINT PAIRS.tsv[.gz] TEXTS.tsv[.gz] [--outliers FACTOR]

CHECKPOINT is a folder; PAIRS an STS-B file of the GLUE benchmark; 256 texts of TEXTS, another such file, calibrate.
``--outliers`` first scales one value channel of every head in every layer up by that factor, and the columns that read
it down, which changes no f32 answer. Columns are those of quant_schemes.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import load_file, save_file

import encast
from encast.data.datasets import open_dataset
from encast.metrics.correlation import spearman
from encast.passes import move_outliers
from encast.quant import QuantSpec

Array = np.ndarray[Any, Any]


def with_outliers(source: Path, factor: float, folder: Path) -> Path:
    """A copy of a BERT checkpoint whose contexts have a channel a head that is ``factor`` times as large."""
    shutil.copytree(source, folder)
    heads = json.loads((folder / "config.json").read_text())["num_attention_heads"]
    tensors = dict(load_file(folder / "model.safetensors"))
    for name in [name for name in tensors if name.endswith("attention.self.value.weight")]:
        layer = name.removesuffix("self.value.weight")
        width = len(tensors[name]) // heads
        channels = np.arange(heads) * width + 5
        for changed in (name, f"{layer}self.value.bias"):
            tensors[changed] = tensors[changed].copy()
            tensors[changed][channels] *= factor
        dense = f"{layer}output.dense.weight"
        tensors[dense] = tensors[dense].copy()
        tensors[dense][:, channels] /= factor
    save_file(tensors, folder / "model.safetensors")
    return folder


def schemes() -> Iterator[tuple[str, QuantSpec, bool]]:
    """Name, spec, and whether norms take part in moving outliers."""
    for exponent in (None, 0.5):
        moved = "" if exponent is None else f", outliers moved ({exponent:g})"
        yield f"dynamic{moved}", QuantSpec(move_outliers=exponent), True
        for ranges in ("minmax", "percentile", "entropy"):
            yield (
                f"static {ranges}{moved}",
                QuantSpec(activations="static", ranges=ranges, move_outliers=exponent),
                True,
            )
    yield "dynamic, symmetric", QuantSpec(zero_point="never"), True
    yield "dynamic, symmetric, outliers moved (0.5)", QuantSpec(zero_point="never", move_outliers=0.5), True
    yield "dynamic, outliers of contexts alone moved (0.5)", QuantSpec(move_outliers=0.5), False
    for exponent in (0.25, 0.4, 0.6, 0.75):
        yield f"dynamic, outliers moved ({exponent:g})", QuantSpec(move_outliers=exponent), True
    for percentile in (99.9, 99.999):
        spec = QuantSpec(activations="static", percentile=percentile, move_outliers=0.5)
        yield f"static percentile {percentile:g}, outliers moved (0.5)", spec, True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("pairs")
    parser.add_argument("texts")
    parser.add_argument("--outliers", type=float, metavar="FACTOR")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        source = Path(options.checkpoint)
        if options.outliers is not None:
            source = with_outliers(source, options.outliers, Path(made) / "checkpoint")
        measure(source, options.pairs, options.texts)


def measure(source: Path, pairs_file: str, texts_file: str) -> None:
    rows = open_dataset(pairs_file).rows
    texts = sorted({text for row in rows for text in row.text})
    place = {text: index for index, text in enumerate(texts)}
    pairs = np.array([[place[text] for text in row.text] for row in rows])
    gold = np.array([row.gold for row in rows], np.float64)
    others = sorted({text for row in open_dataset(texts_file).rows for text in row.text} - set(texts))
    shown = others[:: max(1, len(others) // 256)][:256]

    def embed(spec: QuantSpec, norms: bool = True) -> Array:
        without = contextlib.nullcontext() if norms else mock.patch.object(move_outliers, "NORMS", ())
        with tempfile.TemporaryDirectory() as folder, without:
            seen = encast.calibrate(source, shown, quant=spec) if spec.needs_calibration else None
            path = encast.compile(source, Path(folder) / "m.encast", dtype=spec.dtype, quant=spec, calibration=seen)
            with encast.load(path) as engine:
                return engine.embed(texts).astype(np.float64)

    def correlation(vectors: Array) -> float:
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return 100 * spearman((unit[pairs[:, 0]] * unit[pairs[:, 1]]).sum(1), gold)

    wide = embed(QuantSpec("f32"))
    print(f"{len(texts)} sentences, {len(rows)} pairs; f32: Spearman {correlation(wide):.2f}\n")
    print("| scheme | mean cosine | worst | Spearman |\n| --- | --- | --- | --- |")
    for name, spec, norms in schemes():
        narrow = embed(spec, norms)
        cosine = (narrow * wide).sum(1) / np.linalg.norm(narrow, axis=1) / np.linalg.norm(wide, axis=1)
        change = correlation(narrow) - correlation(wide)
        print(f"| {name} | {cosine.mean():.5f} | {cosine.min():.5f} | {change:+.3f} |", flush=True)


if __name__ == "__main__":
    main()
