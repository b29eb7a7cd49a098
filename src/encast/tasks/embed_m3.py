"""BGE-M3's three embeddings of a text in one run of the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from encast.tasks.embed_sparse import SparseVector, largest_weights, most_dims, need_few
from encast.tasks.embed_tokens import TokenVectors, vectors_of
from encast.tasks.session import F32, Runs, Session, Steps, need_finite
from encast.tasks.texts import check_texts
from encast.tasks.tokenize import OnLong

__all__ = ["M3Embedding", "embed_m3"]


@dataclass(frozen=True, eq=False)
class M3Embedding:
    """What ``embed``, ``embed_sparse`` and ``embed_tokens`` say of a text. ``embedding: f32[dim]``."""

    embedding: F32
    sparse: SparseVector
    tokens: TokenVectors


def embed_m3(
    session: Session,
    texts: object,
    *,
    on_long: OnLong = "truncate",
    prompt_name: str | None = None,
    max_active_dims: int | None = None,
    most_weights: int | None = None,
) -> Steps[list[M3Embedding]]:
    """The embedding, the sparse embedding and the token vectors of every text, with the bits that ``embed``,
    ``embed_sparse`` and ``embed_tokens`` give apart (arXiv 2402.03216). Options are as there.

    A row of the run's answer is a token: its vector, its last hidden state scaled to length 1, its weight. The state of
    the first token is the embedding of the text. Raises ``InputError`` as those do.
    """
    session.need("embed_m3", "embed_m3")
    most = most_dims(session, max_active_dims)
    prompt = session.prompt(prompt_name)
    rows = [prompt + text for text in check_texts(texts)]
    assert session.token_form is not None  # session_of has seen to both
    assert session.unweighted is not None
    skip = np.array(session.token_form.skip, np.int32)
    found: list[M3Embedding] = []
    weights = 0
    for run in Runs("m3_embedding", session.stream(rows, on_long=on_long)):
        answer = need_finite((yield run))
        batch = run.piece.batch
        ends = batch.cu_seqlens[1:-1]
        for ids, part in zip(np.split(batch.token_ids, ends), np.split(answer, ends), strict=True):
            vectors, states, values = np.split(part, [part.shape[1] - session.dim - 1, part.shape[1] - 1], axis=1)
            sparse = largest_weights(ids, values[:, 0], session.unweighted, most)
            tokens = vectors_of(ids, vectors, skip, drop_first=session.token_form.drop_first)
            found.append(M3Embedding(states[0].copy(), sparse, tokens))  # a view would keep the whole answer
            weights += sparse.indices.size
            need_few(weights, most_weights)
    return found
