"""A few short texts whose right answer makes an engine ready, and what the float64 reference says to them.

``python -m encast.serve.canary ARTIFACT`` writes the reference's answer to standard output, as f32 bytes: a process of
its own, because the reference takes several times the memory of the model.
"""

from __future__ import annotations

import sys

import numpy as np

import encast.artifact as artifacts
from encast.batch import Batch, Int32
from encast.ir import Graph

__all__ = ["LEAST_COSINE", "canary", "cosine"]

LEAST_COSINE = {"f32": 0.9999, "bf16": 0.99, "int8": 0.99}
"""Between an engine's answer and the reference's, by the dtype of the products."""

_LENGTHS = (3, 9, 16, 24)


def canary(graph: Graph) -> tuple[str, Batch, Int32 | None]:
    """What every instance of a model is asked: the output of its head for ids that any vocabulary has."""
    output = next(name for name in ("embedding", "logits", "last_hidden_state") if name in graph.outputs)
    lengths = [min(length, graph.meta.max_len) for length in _LENGTHS]
    batch = Batch.of(
        [[(7 * at + 3 + row) % graph.meta.vocab for at in range(length)] for row, length in enumerate(lengths)]
    )
    selected = graph.type_of(graph.outputs[output]).shape[0] == "selected"
    return output, batch, batch.cu_seqlens[:-1].copy() if selected else None


def cosine(one: bytes, other: bytes) -> float:
    """Between all numbers of two answers, f32 bytes; 0 where one is not finite or their sizes differ."""
    a, b = np.frombuffer(one, np.float32).astype(np.float64), np.frombuffer(other, np.float32).astype(np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 0.0
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths > 0 else float(np.array_equal(a, b))


def main() -> None:
    """Runs the reference."""
    from encast.backends.reference import Reference

    opened = artifacts.open(sys.argv[1])
    opened.verify()
    output, batch, select = canary(opened.graph)
    rows = Reference(opened.load_graph()).run(output, batch, select)
    sys.stdout.buffer.write(np.ascontiguousarray(rows, np.float32).tobytes())


if __name__ == "__main__":
    main()
