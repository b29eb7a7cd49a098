"""Sparse embeddings: weights of the tokens of the vocabulary, as SPLADE has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass

import numpy as np

from encast.batch import Int32
from encast.errors import InputError
from encast.tasks.embed import check_ids
from encast.tasks.pooling import wants_windows
from encast.tasks.session import F32, Piece, Runs, Session, Steps, need_count, need_finite
from encast.tasks.texts import check_texts
from encast.tasks.tokenize import OnLong

__all__ = ["SparseVector", "embed_sparse", "embed_sparse_ids", "largest_weights", "most_dims", "need_few"]

# A row spans the whole vocabulary (1 MB for 250,000 tokens), so what a task asks for at once is bounded by rows as
# well; and a server's front takes the logarithms of a run between two requests.
_RUN_ROWS = 32

_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class SparseVector:
    """``indices: i32[n]``, rising: tokens of the vocabulary; ``values: f32[n]``: their weights, all above 0."""

    indices: Int32
    values: F32


def embed_sparse(
    session: Session,
    texts: object,
    *,
    on_long: OnLong = "truncate",
    stride: int | None = None,
    prompt_name: str | None = None,
    max_active_dims: int | None = None,
    most_weights: int | None = None,
) -> Steps[list[SparseVector]]:
    """One vector a text: ``log(1 + max(0, w))`` of the largest masked-LM logit ``w`` that a token of the vocabulary has
    at any token of the text, special ones included (SPLADE-max, arXiv 2109.10086). Where the checkpoint says
    ``log1p_relu`` the logarithm is taken twice (arXiv 2504.14839). BGE-M3 (arXiv 2402.03216) weighs the tokens of a
    text itself: each has its largest weight in it, special ones but the mask have none, and there is no logarithm.

    ``on_long="windows"``: of a text that is longer than the model reads, each token of the vocabulary has its largest
    weight in any of the windows, see ``cut_windows``; the weights are a maximum over a text's tokens as it is.
    ``max_active_dims``: only so many of the largest weights of a text, of equals those with the smaller index; by
    default as the checkpoint says, else all. The logarithms are NumPy's, in float64, rounded to f32.

    Raises ``InputError``, also for logits that are not finite, and where all texts together have more than
    ``most_weights``.
    """
    session.need("embed_sparse", "embed_sparse")
    windowed = wants_windows(on_long, stride)
    most = most_dims(session, max_active_dims)
    prompt = session.prompt(prompt_name)
    rows = [prompt + text for text in check_texts(texts)]
    if windowed:
        windows = session.windows(rows, stride=stride, prompt=prompt, weight=_weight(session))
        return (yield from _of_windows(session, windows, most, most_weights))
    pieces = session.stream(rows, on_long=on_long, weight=_weight(session))
    return (yield from _vectors(session, pieces, most, most_weights))


def embed_sparse_ids(
    session: Session,
    rows: Sequence[Sequence[int]],
    *,
    max_active_dims: int | None = None,
    most_weights: int | None = None,
) -> Steps[list[SparseVector]]:
    """Like ``embed_sparse``, of lists of token ids that are taken as they are; see ``check_ids``."""
    session.need("embed_sparse", "embed_sparse")
    most = most_dims(session, max_active_dims)
    check_ids(session, rows)
    return (yield from _vectors(session, session.id_pieces(rows, weight=_weight(session)), most, most_weights))


def _weight(session: Session) -> Callable[[Sized], int]:
    least = -(-session.batch_tokens // _RUN_ROWS)
    return lambda row: max(len(row), least)


def most_dims(session: Session, max_active_dims: int | None) -> int | None:
    """The largest weights that a text keeps, None for all; raises ``InputError``."""
    if max_active_dims is None:
        return session.max_active_dims
    need_count("max_active_dims", max_active_dims, _INT32_MAX)
    return max_active_dims


def _vectors(
    session: Session, pieces: Iterable[Piece], most: int | None, most_weights: int | None
) -> Steps[list[SparseVector]]:
    found: list[SparseVector] = []
    weights = 0
    for run in Runs("sparse_embedding", pieces):
        rows, piece = need_finite((yield run)), run.piece
        if session.unweighted is None:
            made = [_vector(row, session.logarithms, most) for row in rows]
        else:
            ends = piece.batch.cu_seqlens[1:-1]
            texts = zip(np.split(piece.batch.token_ids, ends), np.split(rows[:, 0], ends), strict=True)
            made = [largest_weights(ids, values, session.unweighted, most) for ids, values in texts]
        found += made
        weights += sum(vector.indices.size for vector in made)
        need_few(weights, most_weights)
    return found


def need_few(weights: int, most_weights: int | None) -> None:
    """Raises ``InputError`` where texts have more than ``most_weights`` together."""
    if most_weights is not None and weights > most_weights:
        raise InputError(
            f"the texts have more than {most_weights} weights together; send fewer texts, or set max_active_dims "
            "to keep fewer of each"
        )


def _of_windows(
    session: Session, pieces: Iterable[Piece], most: int | None, most_weights: int | None
) -> Steps[list[SparseVector]]:
    found: list[SparseVector] = []
    weights = 0
    largest = np.zeros(session.meta.vocab, np.float32)
    for run in Runs("sparse_embedding", pieces):
        rows, piece = need_finite((yield run)), run.piece
        ends = piece.batch.cu_seqlens
        for at, window in enumerate(piece.windows):
            if session.unweighted is not None and window.is_first and window.is_last:
                tokens = slice(ends[at], ends[at + 1])
                found.append(largest_weights(piece.batch.token_ids[tokens], rows[tokens, 0], session.unweighted, most))
                weights += found[-1].indices.size
                need_few(weights, most_weights)
                continue
            if window.is_first:
                largest[:] = 0
            if session.unweighted is None:
                np.maximum(largest, rows[at], out=largest)
            else:
                tokens = slice(ends[at], ends[at + 1])
                np.maximum.at(largest, piece.batch.token_ids[tokens], rows[tokens, 0])
            if window.is_last:
                largest[list(session.unweighted or ())] = 0
                found.append(_vector(largest, 0 if session.unweighted is not None else session.logarithms, most))
                weights += found[-1].indices.size
                need_few(weights, most_weights)
    return found


def largest_weights(ids: Int32, values: F32, without: Sequence[int], most: int | None) -> SparseVector:
    """Of every token of a text the largest weight that it has in it, as BGE-M3 has them."""
    tokens, places = np.unique(ids, return_inverse=True)
    largest = np.zeros(len(tokens), np.float32)
    np.maximum.at(largest, places, values)
    largest[np.isin(tokens, without)] = 0
    kept = _vector(largest, 0, most)
    return SparseVector(tokens[kept.indices], kept.values)


def _vector(largest: F32, logarithms: int, most: int | None) -> SparseVector:
    indices = np.flatnonzero(largest)
    if most is not None and indices.size > most:
        # The logarithm keeps their order.
        kept = np.argsort(-largest[indices], kind="stable")[:most]
        indices = np.sort(indices[kept])
    values = largest[indices].astype(np.float64)
    for _ in range(logarithms):
        values = np.log1p(values)
    return SparseVector(indices.astype(np.int32), values.astype(np.float32))
