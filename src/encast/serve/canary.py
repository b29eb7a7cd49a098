"""The run whose right answer makes an engine ready: a few short texts, asked of every instance before any request."""

from __future__ import annotations

import numpy as np

from encast.serve.errors import RefusalError
from encast.tasks.session import F32, Run, Session

__all__ = ["canary_run", "cosine", "need_alike"]

_TEXTS = (
    "What is the capital of France?",
    "Paris is the capital and largest city of France, on the Seine.",
    "ok",
    "The kernel schedules threads over the cores of a machine, and a queue holds what waits for them.",
)

_LEAST_COSINE = {"f32": 0.9999, "bf16": 0.99, "int8": 0.99}


def canary_run(session: Session) -> Run:
    """The run to ask of every instance of a model: its head's output for texts of several lengths."""
    task = session.meta.task
    output = {"embed": "embedding", "features": "last_hidden_state"}.get(task, "logits")
    piece = next(session.stream(_TEXTS))
    # Of a masked-language model the head is wanted for single tokens: the first of every text.
    select = piece.batch.cu_seqlens[:-1].copy() if task == "fill_mask" else None
    return Run(output, piece, select)


def cosine(one: F32, other: F32) -> float:
    """Between all numbers of two answers; 0 where one is not finite or their sizes differ."""
    a, b = one.astype(np.float64).ravel(), other.astype(np.float64).ravel()
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 0.0
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths > 0 else float(np.array_equal(a, b))


def need_alike(answer: F32, reference: F32, dtype: str, name: str) -> None:
    """Raises ``RefusalError`` where the answer of the model ``name`` is not near that of the float64 reference.

    ``dtype``: of the products. The least cosine is 0.9999 for f32 and 0.99 for bf16 and int8.
    """
    least, found = _LEAST_COSINE[dtype], cosine(answer, reference)
    if not found >= least:
        raise RefusalError(
            "unavailable",
            f"{name}: the canary's answer has cosine {found:.6f} with the float64 reference, at least {least} is needed "
            "for {dtype}; the artifact or this processor's kernels are wrong, try `encast doctor`",
        )
