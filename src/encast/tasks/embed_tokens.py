"""Embeddings of tokens for late interaction, as ColBERT has them: a vector for every token, compared by ``max_sim``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from encast.batch import Int32
from encast.errors import InputError
from encast.ir.meta import TokenForm
from encast.tasks.session import F32, Run, Session, Steps, need_finite
from encast.tasks.texts import check_texts
from encast.tasks.tokenize import Encoding, OnLong, Tokenizer, TooLongError

__all__ = ["Kind", "TokenVectors", "embed_tokens", "max_sim"]

Kind = Literal["query", "document"]


@dataclass(frozen=True, eq=False)
class TokenVectors:
    """``vectors: f32[tokens, dim]``, each of length 1; ``token_ids: i32[tokens]``: the token of each."""

    token_ids: Int32
    vectors: F32


def embed_tokens(
    session: Session,
    texts: object,
    *,
    kind: Kind = "document",
    on_long: OnLong = "truncate",
    prompt_name: str | None = None,
) -> Steps[list[TokenVectors]]:
    """The vectors of every text, in the order of its tokens, special ones included (ColBERT, arXiv 2004.12832).

    ``kind``: whether the texts are queries or documents. Each kind has a marker after its first token and a length,
    special tokens and marker included, to which texts are cut; queries may be filled up to it with mask tokens, which
    have vectors too, and documents have none of the tokens that the checkpoint says to skip. ``prompt_name``: see
    ``Session.prompt``.

    Raises ``InputError``, also for vectors that are not finite, and with ``on_long="error"`` ``TooLongError`` for a
    text that is longer than its kind may be.
    """
    session.need("embed_tokens", "embed_tokens")
    if kind not in ("query", "document"):
        raise InputError(f"kind is {kind!r}; 'query' and 'document' are known")
    if on_long not in ("truncate", "error"):
        raise InputError(f"on_long is {on_long!r}; 'truncate' and 'error' are known")
    form = session.token_form
    assert form is not None  # session_of has seen to it
    prompt = session.prompt(prompt_name)
    rows: list[list[int]] = []
    for first, group in session.groups([prompt + text for text in check_texts(texts)]):
        for index, encoding in enumerate(session.tokenizer.encode(group, first=first), first):
            rows.append(_ids(session.tokenizer, form, kind, encoding, on_long, index))
    skip = np.array(form.skip if kind == "document" else (), np.int32)
    found: list[TokenVectors] = []
    for piece in session.id_pieces(rows):
        vectors = need_finite((yield Run("token_embedding", piece)))
        ends = piece.batch.cu_seqlens[1:-1]
        for ids, part in zip(np.split(piece.batch.token_ids, ends), np.split(vectors, ends), strict=True):
            kept = ~np.isin(ids, skip)
            kept[0] &= not form.drop_first
            found.append(TokenVectors(ids[kept], part[kept]))
    return found


def max_sim(query: F32, document: F32) -> float:
    """The score of a document ``f32[m, dim]`` for a query ``f32[n, dim]``, more is better.

    The sum over the query's vectors of the largest dot product with one of the document's (MaxSim, arXiv 2004.12832).
    In float64 by NumPy's own loops, as ``similarities``. Raises ``InputError`` for arrays of other shapes, and for a
    document without vectors.
    """
    if query.ndim != 2 or document.ndim != 2 or query.shape[1] != document.shape[1] or not len(document):
        raise InputError(
            f"query has the shape {list(query.shape)} and document {list(document.shape)}; [n, dim] and [m, dim] with "
            "m at least 1 are needed"
        )
    vectors = document.astype(np.float64)
    return float(sum((vectors * one).sum(axis=1).max() for one in query.astype(np.float64)))


def _ids(
    tokenizer: Tokenizer, form: TokenForm, kind: Kind, encoding: Encoding, on_long: OnLong, index: int
) -> list[int]:
    """The token ids of a text as the model reads them."""
    longest, side = tokenizer.max_length, tokenizer.truncation_side
    query = kind == "query"
    marker = form.query_marker if query else form.document_marker
    length = (form.query_length if query else form.document_length) or longest
    marks = [] if marker is None else [marker]
    room = length - len(marks)
    ids, beyond = encoding.ids, len(encoding.ids) - room
    if on_long == "error" and (beyond > 0 or encoding.overflowing):
        raise TooLongError(index, length)
    if beyond > 0:
        ids = _cut(ids, encoding.special_tokens_mask, beyond, side)
    ids = [*ids[:1], *marks, *ids[1:]]
    if query and form.expansion is not None:
        ids += [form.expansion] * (length - len(ids))
    return ids


def _cut(ids: Sequence[int], special: Sequence[int], beyond: int, side: str) -> list[int]:
    """Without ``beyond`` tokens of the text, at its side; the special ones around it stay."""
    text = [place for place, added in enumerate(special) if not added]
    gone = {*(text[-beyond:] if side == "right" else text[:beyond])}
    return [token for place, token in enumerate(ids) if place not in gone]
