"""Texts to embeddings with MiniLM int8, tokenisation and pooling included, against OpenVINO at its best batch size.

    python benchmarks/texts_to_embeddings.py --data FOLDER
    python benchmarks/texts_to_embeddings.py --sets queries --seconds 30

The texts are 1,024 paragraphs of SQuAD's dev set and the 3,610 questions of NQ-open's dev set. OpenVINO's batches are
sorted by length; their size, the precision hint, and whether batches run one after the other or beside each other are
what was fastest on an eighth of the texts. The choice is kept in the work folder until --choose asks for a new one.
The limit is arithmetic alone: no padding, tokenisation for nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from peers import data, openvino_export, prepare
from peers.compare import check_cosine, peak_probe, write_json
from peers.limits import Limit
from peers.models import MODELS
from peers.rounds import by_placement, run_rounds
from peers.table import Row, header
from peers.worker import Worker

MODEL = MODELS["minilm"]
BARS = {"squad": (1.8, 0.68), "queries": (1.5, 0.60)}
BATCHES = (8, 16, 32, 64)
HINTS = ("f32", "bf16")
MODES = ("latency", "throughput")
LEAST_COSINE = 0.98


def load_texts(name: str, folder: Path) -> list[str]:
    return data.squad_paragraphs(folder, "dev")[:1024] if name == "squad" else data.queries(folder)


def sample(texts: list[str], lengths: list[int]) -> list[str]:
    """Every eighth block of 64 of the texts sorted by length: whole batches at every size."""
    order = np.argsort(lengths, kind="stable")
    return [texts[index] for rank, index in enumerate(order) if rank // max(BATCHES) % 8 == 3]


def choose(theirs: Worker, texts: list[str], work: Path) -> dict[str, Any]:
    """The settings with the fastest of two passes over ``texts``, a pass each by turns."""
    file = work / "sample.json"
    file.write_text(json.dumps(texts))
    tried = [
        {"batch": batch, "hint": hint, "mode": mode} for mode, hint, batch in itertools.product(MODES, HINTS, BATCHES)
    ]
    seconds = [float("inf")] * len(tried)
    for _ in range(2):
        for index, settings in enumerate(tried):
            theirs.ask(do="texts", file=file, settings=settings)
            seconds[index] = min(seconds[index], theirs.burst(1))
    for settings, best in zip(tried, seconds, strict=True):
        print(f"OpenVINO, {settings}: {len(texts) / best:.0f} texts/s", flush=True)
    return tried[seconds.index(min(seconds))]


def compare(name: str, args: argparse.Namespace) -> list[Row]:
    texts = load_texts(name, args.data)
    lengths = prepare.token_counts(MODEL, args.work, texts)
    expected = prepare.reference_embeddings(MODEL, args.work, texts)
    calibration = prepare.calibration_ids(MODEL, args.work, args.data)
    theirs_path = openvino_export.export(MODEL, args.work, "int8", texts=calibration)
    ours_path = prepare.encast_artifact(MODEL, args.work, "int8", task="embed")
    if args.prepare:
        return []
    file, choice_file = (args.work / f"{name}.{stem}.json" for stem in ("texts", f"{theirs_path.stem}-choice"))
    file.write_text(json.dumps(texts))
    tokenizer = MODEL.checkpoint(args.work) / "tokenizer.json"
    rows = []
    with (
        Worker(backend="encast", model=MODEL.name, path=ours_path, threads=args.threads) as ours,
        Worker(
            backend="openvino",
            model=MODEL.name,
            path=theirs_path,
            threads=args.threads,
            hints=HINTS,
            tokenizer=tokenizer,
        ) as theirs,
    ):
        if args.choose or not choice_file.exists():
            choice_file.write_text(json.dumps(choose(theirs, sample(texts, lengths), args.work)))
        if args.choose:
            return []
        settings = json.loads(choice_file.read_text())
        print(f"{name}: {len(texts)} texts, {np.mean(lengths):.0f} tokens on average\n{header('OpenVINO')}", flush=True)
        cosines = [
            check_cosine(worker, name, title, expected, LEAST_COSINE, do="texts", file=file, settings=settings)
            for worker, title in ((ours, "encast"), (theirs, "OpenVINO"))
        ]
        peak = peak_probe("int8", args.threads)
        rounds = run_rounds(ours.once, theirs.once, peak, args.seconds, fewest=3, calls=1)
        facts = {
            "texts": len(texts),
            "tokens": int(np.sum(lengths)),
            "peer_choice": cosines[1][0],
            "mean_cosine_to_f32": {"encast": cosines[0][1], "peer": cosines[1][1]},
        }
        for place, found in by_placement(rounds):
            rows.append(Row(f"MiniLM int8, {name}", place, found, Limit(MODEL, "int8", lengths), BARS[name], facts))
            rate = {side: len(texts) / getattr(rows[-1], side).median * 1e3 for side in ("ours", "theirs")}
            print(f"{rows[-1].markdown()}\n{rate['ours']:.0f} against {rate['theirs']:.0f} texts/s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=list(BARS), default=list(BARS))
    parser.add_argument("--choose", action="store_true", help="choose OpenVINO's settings anew, and stop")
    parser.add_argument("--seconds", type=float, default=25.0, help="of a set (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    prepare.add_options(parser)
    args = parser.parse_args()
    rows: list[Row] = []
    for name in args.sets:
        rows += compare(name, args)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
