"""The run whose right answer makes an engine ready: a few short texts, asked of every instance before any request.

``python -m encast.serve.canary ARTIFACT`` writes the float64 reference's answer to standard output, as f32 bytes: a
process of its own, because the reference takes several times the memory of the model.
"""

from __future__ import annotations

import sys

import numpy as np

import encast.artifact as artifacts
from encast.engine import session_of
from encast.ir.meta import HEADS
from encast.tasks.embed_tokens import KINDS, token_rows
from encast.tasks.session import Run, Session

__all__ = ["LEAST_COSINE", "canary_run", "cosine", "least_cosine"]

LEAST_COSINE = {"f32": 0.9999, "f16": 0.999, "bf16": 0.99, "int8": 0.99, "f8": 0.98, "f16-acc16": 0.99}
"""Between an engine's answer and the reference's, by the dtype of the products."""


def least_cosine(dtype: str, card_dtype: str | None) -> float:
    """``LEAST_COSINE`` of an artifact's products where a card stores and multiplies values in ``card_dtype``."""
    return min(LEAST_COSINE[one] for one in (dtype, card_dtype) if one is not None)


_TEXTS = (
    "What is the capital of France?",
    "Paris is the capital and largest city of France, on the Seine.",
    "ok",
    "The kernel schedules threads over the cores of a machine, and a queue holds what waits for them.",
)


def canary_run(session: Session) -> Run:
    """The run to ask of every instance of a model: its head's output for texts of several lengths."""
    task = session.meta.task
    head = HEADS[task]
    output = head[0] if head else "last_hidden_state"
    if session.token_form is None:
        piece = next(session.stream(_TEXTS))
    else:
        rows = [row for kind in KINDS for row in token_rows(session.tokenizer, session.token_form, kind, _TEXTS)]
        piece = next(session.id_pieces(rows))
    # Of a masked-language model the head is wanted for single tokens: the first of every text.
    select = piece.batch.cu_seqlens[:-1].copy() if task == "fill_mask" else None
    return Run(output, piece, select)


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
    run = canary_run(session_of(opened))
    rows = Reference(opened.load_graph()).run(run.output, run.piece.batch, run.select)
    sys.stdout.buffer.write(np.ascontiguousarray(rows, np.float32).tobytes())


if __name__ == "__main__":
    main()
