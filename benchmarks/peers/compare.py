"""Comparing encast with one peer: export, check the outputs, time by turns, print the table."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peers import prepare
from peers.limits import Limit, weights_bandwidth
from peers.models import MODELS, Model, Shape
from peers.rounds import by_placement, run_rounds
from peers.table import Row, header
from peers.worker import Worker

__all__ = ["Bars", "Peer", "check_cosine", "main", "mean_cosine", "peak_probe", "write_json"]

Bars = Mapping[tuple[str, str, Shape], tuple[float | None, float | None]]

LEAST_COSINE = {"f32": 0.999999, "bf16": 0.9995, "int8": 0.97}
"""Mean cosine of a token's state to PyTorch's in f32, below which a backend is not timed."""


@dataclass(frozen=True)
class Peer:
    """``export(model, dtype, args)`` gives the arguments of the peer's ``Worker``, made below ``args.work``."""

    title: str
    export: Callable[[Model, str, argparse.Namespace], dict[str, Any]]
    dtypes: tuple[str, ...]


def mean_cosine(rows: Any, reference: Any) -> float:
    a, b = rows.astype(np.float64), reference.astype(np.float64)
    return float(np.mean((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)))


def check_cosine(
    worker: Worker, what: str, name: str, expected: Any, least: float, **request: Any
) -> tuple[str, float]:
    """Prepares the worker: what it chose, and its output's mean cosine to ``expected``; leaves when that is too low."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.npy"
        choice = worker.ask(**request)
        worker.ask(do="save", file=file)
        rows = np.load(file)
    agreement = mean_cosine(rows, expected)
    widest = float(np.abs(rows - expected).max() / np.abs(expected).max())
    print(
        f"{what}: {name} ({choice}) has mean cosine {agreement:.6f} to PyTorch's f32, "
        f"largest difference {widest:.1e} of the largest value",
        file=sys.stderr,
        flush=True,
    )
    if not agreement >= least:
        raise SystemExit(f"{what}: {name} must reach {least} to be timed")
    return choice, agreement


def peak_probe(dtype: str, threads: int) -> Callable[[float], float]:
    from encast import _core

    return lambda seconds: _core.peak_ops_per_second(dtype, threads, seconds)


def compare(model: Model, dtype: str, peer: Peer, bars: Bars, args: argparse.Namespace) -> list[Row]:
    theirs_options = peer.export(model, dtype, args)
    ours_path = prepare.encast_artifact(model, args.work, dtype)
    shapes: Sequence[Shape] = args.shapes or model.shapes
    expected = {shape: prepare.reference(model, args.work, shape) for shape in shapes}
    if args.prepare:
        return []
    bandwidth, weights_from = weights_bandwidth(model, dtype, args.threads)
    rows = []
    with (
        Worker(backend="encast", model=model.name, path=ours_path, threads=args.threads) as ours,
        Worker(model=model.name, threads=args.threads, **theirs_options) as theirs,
    ):
        for shape in shapes:
            workload = f"{model.name} {dtype} {shape[0]}x{shape[1]}"
            (_, our_cosine), (choice, their_cosine) = (
                check_cosine(worker, workload, name, expected[shape], LEAST_COSINE[dtype], do="shape", shape=shape)
                for worker, name in ((ours, "encast"), (theirs, peer.title))
            )
            rounds = run_rounds(ours.burst, theirs.burst, peak_probe(dtype, args.threads), args.seconds)
            facts = {
                "peer": peer.title,
                "peer_choice": choice,
                "weights_from": weights_from,
                "mean_cosine_to_f32": {"encast": our_cosine, "peer": their_cosine},
            }
            limit = Limit(model, dtype, [shape[1]] * shape[0], bandwidth)
            for place, found in by_placement(rounds):
                rows.append(
                    Row(workload, place, found, limit, bars.get((model.name, dtype, shape), (None, None)), facts)
                )
                print(rows[-1].markdown(), flush=True)
    return rows


def main(description: str | None, peer: Peer, bars: Bars, models: Sequence[str]) -> None:
    """The command line of a comparison; without --dtypes, the dtypes of the rows in ``bars``, or all of the peer."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(models))
    parser.add_argument("--dtypes", nargs="+", choices=peer.dtypes)
    parser.add_argument(
        "--shapes", nargs="+", type=_shape, metavar="BxL", help="default: the model's, see peers/models.py"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of a row (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each backend (default: %(default)s)")
    prepare.add_options(parser)
    args = parser.parse_args()
    rows: list[Row] = []
    print(header(peer.title), flush=True)
    for name in args.models:
        listed = [dtype for dtype in peer.dtypes if any(key[:2] == (name, dtype) for key in bars)]
        for dtype in args.dtypes or listed or peer.dtypes:
            rows += compare(MODELS[name], dtype, peer, bars, args)
    write_json(args.json, rows)


def write_json(file: Path | None, rows: Sequence[Row]) -> None:
    if file:
        file.write_text(json.dumps([row.json() for row in rows], indent=1) + "\n")


def _shape(text: str) -> Shape:
    batch, _, length = text.partition("x")
    return int(batch), int(length)
