"""Sentence embeddings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from encast.errors import InputError
from encast.ir.meta import GraphMeta
from encast.tasks.session import F32, Session
from encast.tasks.texts import check_texts
from encast.tasks.tokenize import OnLong

__all__ = ["embed", "similarity_of"]

_SIMILARITIES: dict[str, Callable[[F32, F32], F32]] = {
    "cosine": lambda a, b: _units(a) @ _units(b).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": lambda a, b: -np.linalg.norm(a[:, None] - b[None], axis=2),
    "manhattan": lambda a, b: -np.abs(a[:, None] - b[None]).sum(axis=2),
}


def similarity_of(meta: GraphMeta) -> Callable[[F32, F32], F32]:
    """``f32[n, dim], f32[m, dim] -> f32[n, m]``, higher is nearer: what the checkpoint names, else the cosine."""
    return _SIMILARITIES[meta.similarity or "cosine"]


def _units(vectors: F32) -> F32:
    units: F32 = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    return units


def embed(session: Session, texts: object, *, on_long: OnLong = "truncate", prompt_name: str | None = None) -> F32:
    """``f32[n, dim]``: one row a text, pooled and normalised as the checkpoint says; see ``Session.prompt``."""
    session.need("embed", "embed")
    prompt = session.prompt(prompt_name)
    rows = [prompt + text for text in check_texts(texts)]
    vectors = np.empty((len(rows), session.dim), np.float32)
    for piece in session.stream(rows, on_long=on_long):
        found = session.run("embedding", piece)
        if found.shape != (len(piece.encodings), session.dim):
            raise InputError(f"the model gives {found.shape[1]} numbers a text, its artifact promises {session.dim}")
        vectors[piece.first : piece.first + len(piece.encodings)] = found
    return vectors
