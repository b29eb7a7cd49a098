"""Embeddings of tokens for late interaction, as ColBERT has them: a vector for every token, compared by ``max_sim``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from encast.batch import Int32
from encast.errors import InputError
from encast.ir.meta import TokenForm
from encast.tasks.session import F32, Runs, Session, Steps, need_finite
from encast.tasks.texts import check_texts
from encast.tasks.tokenize import Encoding, OnLong, Tokenizer, TooLongError, need_on_long

__all__ = ["KINDS", "Kind", "TokenVectors", "embed_tokens", "max_sim", "max_sims", "token_rows", "vectors_of"]

Kind = Literal["query", "document"]
KINDS: tuple[Kind, ...] = ("query", "document")

_STEP_PRODUCTS = 1 << 29
"""Of numbers, that ``max_sims`` computes between two runs of the model: about half a second."""
_BLOCK = 1024
"""Vectors of a document that ``max_sim`` compares at a time; no score depends on it."""


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
    found: list[TokenVectors] = []
    rows = _checked_rows(session, texts, kind, on_long=on_long, prompt=session.prompt(prompt_name))
    yield from _each(session, rows, kind, found.append)
    return found


def token_rows(
    tokenizer: Tokenizer,
    form: TokenForm,
    kind: Kind,
    texts: Sequence[str],
    *,
    on_long: OnLong = "truncate",
    first: int = 0,
) -> list[list[int]]:
    """The token ids of every text as the model reads them: marked, cut and filled up.

    ``first``: the index of the first text in the caller's list, for messages. Raises as ``embed_tokens`` does.
    """
    encodings = tokenizer.encode([form.placeholder + text for text in texts], first=first)
    return [_ids(tokenizer, form, kind, encoding, on_long, index) for index, encoding in enumerate(encodings, first)]


def max_sims(
    session: Session,
    query: object,
    documents: object,
    *,
    on_long: OnLong = "truncate",
    most_products: int | None = None,
) -> Steps[list[float]]:
    """``max_sim`` of every document, each computed when its run is done and its vectors forgotten then.

    Raises as ``embed_tokens`` does, a ``TooLongError`` with the index in ``[query, *documents]``; ``InputError`` for a
    document that takes more than ``most_products`` products of numbers.
    """
    rows = _checked_rows(session, [query], "query", on_long=on_long, prompt=session.prompt(None))
    asked: list[TokenVectors] = []
    yield from _each(session, rows, "query", asked.append)
    vectors = asked[0].vectors
    rows = _checked_rows(session, documents, "document", on_long=on_long, prompt=session.prompt(None), first=1)
    for index, row in enumerate(rows):
        if most_products is not None and vectors.size * len(row) > most_products:
            raise InputError(
                f"documents[{index}] has {len(row)} tokens and the query {len(vectors)}, of {session.dim} numbers; "
                f"comparing them takes more than {most_products} products: shorten one of them"
            )
    scores: list[float] = []
    # What is computed between two runs cannot be stopped, so it is not to be much.
    tokens = min(session.batch_tokens, max(1, _STEP_PRODUCTS // max(1, vectors.size)))
    narrow = replace(session, batch_tokens=tokens)
    yield from _each(narrow, rows, "document", lambda one: scores.append(max_sim(vectors, one.vectors)))
    return scores


def max_sim(query: F32, document: F32) -> float:
    """The score of a document ``f32[m, dim]`` for a query ``f32[n, dim]``, more is better.

    The sum over the query's vectors of the largest dot product with one of the document's (MaxSim, arXiv 2004.12832).
    A document without vectors has the least score that vectors of length 1 can have, -n. In float64 by NumPy's own
    loops, as ``similarities``. Raises ``InputError`` for arrays of other shapes.
    """
    query, document = np.asarray(query), np.asarray(document)
    if query.ndim != 2 or document.ndim != 2 or query.shape[1] != document.shape[1]:
        raise InputError(
            f"query has the shape {list(query.shape)} and document {list(document.shape)}; [n, dim] and [m, dim] are "
            "needed"
        )
    asked = query.astype(np.float64)
    best = np.full(len(asked), -1.0 if len(document) == 0 else -np.inf)
    for begin in range(0, len(document), _BLOCK):
        block = document[begin : begin + _BLOCK].astype(np.float64)
        np.maximum(best, np.einsum("md,nd->nm", block, asked, optimize=False).max(axis=1), out=best)
    return float(best.sum())


def _checked_rows(
    session: Session, texts: object, kind: Kind, *, on_long: OnLong, prompt: str, first: int = 0
) -> list[list[int]]:
    """The token ids of every text. ``first``: the index of the first in the caller's list, for messages."""
    session.need("embed_tokens", "embed_tokens")
    if kind not in KINDS:
        raise InputError(f"kind is {kind!r}; 'query' and 'document' are known")
    need_on_long(on_long)
    form = session.token_form
    assert form is not None  # session_of has seen to it
    rows: list[list[int]] = []
    prompted = [prompt + text for text in check_texts(texts)]
    for begin, group in session.groups(prompted):
        part = prompted[begin : begin + len(group)]
        rows += token_rows(session.tokenizer, form, kind, part, on_long=on_long, first=first + begin)
    return rows


def _each(
    session: Session, rows: Sequence[Sequence[int]], kind: Kind, take: Callable[[TokenVectors], object]
) -> Steps[None]:
    """Gives the vectors of every row to ``take``, in order."""
    form = session.token_form
    assert form is not None
    skip = np.array(form.skip if kind == "document" else (), np.int32)
    for run in Runs("token_embedding", session.id_pieces(rows)):
        vectors = need_finite((yield run))
        batch = run.piece.batch
        ends = batch.cu_seqlens[1:-1]
        for ids, part in zip(np.split(batch.token_ids, ends), np.split(vectors, ends), strict=True):
            take(vectors_of(ids, part, skip, drop_first=form.drop_first))


def vectors_of(ids: Int32, vectors: F32, skip: Int32, *, drop_first: bool) -> TokenVectors:
    """Copies, of all tokens of a text, those that have a vector, see ``TokenForm``."""
    kept = ~np.isin(ids, skip)
    kept[0] &= not drop_first
    return TokenVectors(ids[kept], vectors[kept])


def _ids(
    tokenizer: Tokenizer, form: TokenForm, kind: Kind, encoding: Encoding, on_long: OnLong, index: int
) -> list[int]:
    """The token ids of a text as the model reads them."""
    longest, side = tokenizer.max_length, tokenizer.truncation_side
    query = kind == "query"
    marker = form.query_marker if query else form.document_marker
    length = (form.query_length if query else form.document_length) or longest
    inserted = int(marker is not None and not form.placeholder)
    ids, beyond = encoding.ids, len(encoding.ids) + inserted - length
    if on_long == "error" and (beyond > 0 or encoding.overflowing):
        raise TooLongError(index, length)
    if beyond > 0:
        ids = _cut(ids, encoding.special_tokens_mask, beyond, side)
    if marker is not None:
        ids = [*ids[:1], marker, *ids[2 - inserted :]]
    if query and form.expansion is not None:
        ids += [form.expansion] * (length - len(ids))
    return ids


def _cut(ids: Sequence[int], special: Sequence[int], beyond: int, side: str) -> list[int]:
    """Without ``beyond`` tokens of the text, at its side; the special ones around it stay."""
    text = [place for place, added in enumerate(special) if not added]
    gone = {*(text[-beyond:] if side == "right" else text[:beyond])}
    return [token for place, token in enumerate(ids) if place not in gone]
