"""Order documents by how well they fit a query."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from encast.errors import InputError
from encast.tasks.classify import score_rows
from encast.tasks.embed import embed, similarities
from encast.tasks.embed_tokens import max_sims
from encast.tasks.pooling import F64, Pooling, pool_windows, wants_windows
from encast.tasks.session import F32, Piece, Session, Steps
from encast.tasks.texts import Text, check_text, check_texts
from encast.tasks.tokenize import OnLong, need_on_long

__all__ = ["rerank"]


def rerank(
    session: Session,
    query: object,
    documents: object,
    *,
    on_long: OnLong = "truncate",
    stride: int | None = None,
    pooling: Pooling | None = None,
    most_products: int | None = None,
) -> Steps[list[tuple[int, float]]]:
    """What ``Engine.rerank`` says. ``most_products``: see ``max_sims``."""
    session.need("rerank", "classify", "embed", "embed_tokens")
    by_tokens = session.meta.can("embed_tokens") and not session.meta.can("embed")
    if by_tokens:
        need_on_long(on_long)
        for name, value in (("stride", stride), ("pooling", pooling)):
            if value is not None:
                raise InputError(f"{name} is {value!r}; rerank by embeddings of tokens has no windows: leave it out")
    windowed = wants_windows(on_long, stride, pooling)
    query = check_text(query, "query")
    rows = check_texts(documents, "documents")
    if not rows:
        return []
    if session.meta.can("embed"):
        vectors = yield from embed(session, [query, *rows], on_long=on_long, stride=stride, pooling=pooling)
        scores = similarities(session.meta.similarity, vectors[0], vectors[1:]).tolist()
    elif by_tokens:
        scores = yield from max_sims(session, query, rows, on_long=on_long, most_products=most_products)
    else:
        pairs: list[Text] = [(query, document) for document in rows]
        if windowed:
            logits = yield from _pooled(session.windows(pairs, stride=stride), pooling or "max")
        else:
            logits = yield from score_rows(session, pairs, on_long=on_long)
        if logits.shape[1] != 1:
            raise InputError(
                f"rerank needs a classifier with one label, this artifact has {logits.shape[1]}; use classify on "
                "(query, document) pairs and order by the label that means relevant"
            )
        scores = logits[:, 0].tolist()
    order = np.argsort(-np.array(scores), kind="stable")
    return [(int(index), float(scores[index])) for index in order]


def _pooled(windows: Iterable[Piece], pooling: Pooling) -> Steps[F32]:
    logits: list[F32] = []

    def take(_index: int, row: F32 | F64, _windows: int) -> None:
        logits.append(row.astype(np.float32))

    yield from pool_windows(windows, "logits", pooling, lambda row: row, take)
    return np.stack(logits)
