"""What int8 costs a sentence-embedding model, scheme by scheme: the table in src/encast/quant/README.md.

    python benchmarks/quant_schemes.py CHECKPOINT PAIRS.tsv[.gz]

CHECKPOINT is a folder or hub id, PAIRS an STS-B file of the GLUE benchmark. Every scheme is compiled and run by
the product itself. Columns: average and worst cosine of the embedding to that of f32, over all distinct sentences,
and the change of the Spearman correlation of cosine and gold score, in points of 100.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import encast
from encast.data.datasets import open_dataset
from encast.metrics.correlation import spearman
from encast.passes import set_precision
from encast.quant import QuantSpec

Array = np.ndarray[Any, Any]


def clipped_rows(weight: Array) -> tuple[Array, Array]:
    """As ``quant.rounding.quantize_rows``, with the scale of a row chosen among 21 for the least squared error."""
    widest = np.abs(weight).max(axis=1, keepdims=True) / 127
    best = np.full(widest.shape, np.inf)
    scale = widest.copy()
    for fraction in np.linspace(1.0, 0.6, 21, dtype=np.float32):
        candidate = widest * fraction
        error = ((np.clip(np.rint(weight / candidate), -127, 127) * candidate - weight) ** 2).sum(1, keepdims=True)
        scale = np.where(error < best, candidate, scale)
        best = np.minimum(error, best)
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8), scale[:, 0]


def schemes(layers: int) -> Iterator[tuple[str, QuantSpec, bool]]:
    """Name, spec, and whether weights are clipped."""
    yield "bf16", QuantSpec("bf16"), False
    for zero_point in ("never", "after_activation", "always"):
        yield f"int8, zero point {zero_point}", QuantSpec(zero_point=zero_point), False
        yield f"int8, zero point {zero_point}, weights clipped", QuantSpec(zero_point=zero_point), True
    for layer in range(layers):
        keep = ((f"*.layer.{layer}.*", "f32"),)
        yield f"int8, zero point always, layer {layer} f32", QuantSpec(keep=keep), False
    for part in ("attention.self.qkv", "attention.output.dense", "intermediate.dense", "[0-9].output.dense"):
        yield f"int8, zero point always, {part} f32", QuantSpec(keep=((f"*.{part}", "f32"),)), False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("pairs")
    options = parser.parse_args()
    rows = open_dataset(options.pairs).rows
    texts = sorted({text for row in rows for text in row.text})
    place = {text: index for index, text in enumerate(texts)}
    pairs = np.array([[place[text] for text in row.text] for row in rows])
    gold = np.array([row.gold for row in rows], np.float64)

    def embed(spec: QuantSpec, clip: bool) -> Array:
        rounding = mock.patch.object(set_precision, "quantize_rows", clipped_rows) if clip else contextlib.nullcontext()
        with tempfile.TemporaryDirectory() as folder, rounding:
            path = encast.compile(options.checkpoint, Path(folder) / "m.encast", dtype=spec.dtype, quant=spec)
            with encast.load(path) as engine:
                layers.append(engine.meta.layers)
                return engine.embed(texts).astype(np.float64)

    def correlation(vectors: Array) -> float:
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return 100 * spearman((unit[pairs[:, 0]] * unit[pairs[:, 1]]).sum(1), gold)

    layers: list[int] = []
    wide = embed(QuantSpec("f32"), False)
    print(f"{len(texts)} sentences, {len(rows)} pairs; f32: Spearman {correlation(wide):.2f}\n")
    print("| scheme | mean cosine | worst | Spearman |\n| --- | --- | --- | --- |")
    for name, spec, clip in schemes(layers[0]):
        narrow = embed(spec, clip)
        cosine = (narrow * wide).sum(1) / np.linalg.norm(narrow, axis=1) / np.linalg.norm(wide, axis=1)
        change = correlation(narrow) - correlation(wide)
        print(f"| {name} | {cosine.mean():.5f} | {cosine.min():.5f} | {change:+.3f} |", flush=True)


if __name__ == "__main__":
    main()
