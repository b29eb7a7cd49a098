"""Sentence embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from encast.errors import InputError
from encast.ir.meta import GraphMeta
from encast.tasks.pooling import F64, Pooling, pool_windows, wants_windows
from encast.tasks.session import F32, Piece, Runs, Session, Steps
from encast.tasks.texts import check_texts
from encast.tasks.tokenize import OnLong

__all__ = ["check_ids", "embed", "embed_ids", "normalized", "similarities", "similarity_of"]

_SIMILARITIES: dict[str, Callable[[F32, F32], F32]] = {
    "cosine": lambda a, b: _units(a) @ _units(b).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": lambda a, b: -np.linalg.norm(a[:, None] - b[None], axis=2),
    "manhattan": lambda a, b: -np.abs(a[:, None] - b[None]).sum(axis=2),
}


def similarity_of(meta: GraphMeta) -> Callable[[F32, F32], F32]:
    """``f32[n, dim], f32[m, dim] -> f32[n, m]``, higher is nearer: what the checkpoint names, else the cosine."""
    return _SIMILARITIES[meta.similarity or "cosine"]


def similarities(measure: str | None, one: F32, rows: F32) -> F32:
    """``f32[dim], f32[n, dim] -> f32[n]``, higher is nearer: by the checkpoint's ``measure``, else the cosine.

    In float64 by NumPy's own loops, and rounded once: BLAS sums in the order of the processor's kernels, and the last
    bit of a score would be the processor's.
    """
    a, b = one.astype(np.float64), rows.astype(np.float64)
    if measure == "euclidean":
        found = -np.sqrt(((a - b) ** 2).sum(axis=1))
    elif measure == "manhattan":
        found = -np.abs(a - b).sum(axis=1)
    else:
        found = (a * b).sum(axis=1)
        if measure != "dot":
            found /= np.maximum(np.sqrt((a * a).sum()), 1e-12) * np.maximum(np.sqrt((b * b).sum(axis=1)), 1e-12)
    scores: F32 = found.astype(np.float32)
    return scores


def _units(vectors: F32) -> F32:
    units: F32 = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    return units


def normalized(vectors: F32) -> F32:
    """``f32[n, dim]``: the rows scaled to length 1, in float64. Those that have it already, to the precision of
    f32, and those of zeros stay as they are.
    """
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    off = (np.abs(lengths - 1) > 1e-6) & (lengths > 0)
    if not off.any():
        return vectors
    scaled: F32 = vectors.copy()
    scaled[off] = vectors[off] / lengths[off, None]
    return scaled


def embed(
    session: Session,
    texts: object,
    *,
    on_long: OnLong = "truncate",
    stride: int | None = None,
    pooling: Pooling | None = None,
    prompt_name: str | None = None,
    truncate_dim: int | None = None,
) -> Steps[F32]:
    """``f32[n, dim]``: one row a text, pooled and normalised as the checkpoint says; see ``Session.prompt``.

    ``on_long="windows"``: a text that is longer than the model reads has the mean of its windows' vectors (by default,
    or their maximum), see ``cut_windows`` and ``pool_windows``; it is scaled to length 1 where the model normalises.
    ``truncate_dim``: only so many of the first numbers, of length 1 again where the model normalises. Raises
    ``InputError`` for more than there are.
    """
    session.need("embed", "embed")
    if truncate_dim is not None and not (type(truncate_dim) is int and 1 <= truncate_dim <= session.dim):
        raise InputError(
            f"truncate_dim is {truncate_dim!r}; this model gives {session.dim} numbers a text: give 1 to {session.dim}"
        )
    windowed = wants_windows(on_long, stride, pooling)
    prompt = session.prompt(prompt_name)
    rows = [prompt + text for text in check_texts(texts)]
    if windowed:
        pieces = session.windows(rows, stride=stride, prompt=prompt)
        vectors = yield from _pooled(session, len(rows), pieces, pooling or "mean")
    else:
        vectors = yield from _vectors(session, len(rows), session.stream(rows, on_long=on_long))
    if truncate_dim in (None, session.dim):
        return vectors
    short = np.ascontiguousarray(vectors[:, :truncate_dim])
    return normalized(short) if session.unit else short


def embed_ids(session: Session, rows: Sequence[Sequence[int]]) -> Steps[F32]:
    """``f32[n, dim]``: one row a list of token ids, which are taken as they are: no special tokens added, none cut off.

    Raises ``InputError`` as ``check_ids`` does; nothing has run then.
    """
    session.need("embed", "embed")
    check_ids(session, rows)
    return (yield from _vectors(session, len(rows), session.id_pieces(rows)))


def check_ids(session: Session, rows: Sequence[Sequence[int]]) -> None:
    """Raises ``InputError`` naming ``input[i]`` for a list that is empty or longer than ``max_length``, and for an id
    that the model does not embed.
    """
    longest, vocab = session.tokenizer.max_length, session.meta.vocab
    for index, ids in enumerate(rows):
        if not 1 <= len(ids) <= longest:
            raise InputError(f"input[{index}] has {len(ids)} token ids; give 1 to {longest}")
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise InputError(
                    f"input[{index}] holds {token!r}; token ids of this model are whole numbers from 0 to {vocab - 1}"
                )


def _vectors(session: Session, count: int, pieces: Iterable[Piece]) -> Steps[F32]:
    vectors = np.empty((count, session.dim), np.float32)
    for run in Runs("embedding", pieces):
        found = yield run
        _need_width(session, found.shape[1])
        vectors[run.piece.first : run.piece.first + run.piece.batch.seqs] = found
    return vectors


def _pooled(session: Session, count: int, windows: Iterable[Piece], pooling: Pooling) -> Steps[F32]:
    vectors = np.empty((count, session.dim), np.float32)

    def take(index: int, vector: F32 | F64, windows: int) -> None:
        _need_width(session, vector.size)
        if windows > 1 and session.unit:
            length = np.sqrt((vector * vector).sum())
            vector = vector / length if length > 0 else vector
        vectors[index] = vector

    yield from pool_windows(windows, "embedding", pooling, lambda row: row, take)
    return vectors


def _need_width(session: Session, width: int) -> None:
    if width != session.dim:
        raise InputError(f"the model gives {width} numbers a text, its artifact promises {session.dim}")
