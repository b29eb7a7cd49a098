"""Masked language modelling: likely tokens for every mask of a text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from encast.batch import Int32
from encast.errors import InputError
from encast.tasks.classify import softmax
from encast.tasks.session import F32, Piece, Runs, Session, Steps, need_finite
from encast.tasks.texts import check_texts
from encast.tasks.tokenize import Encoding, OnLong, Tokenizer

__all__ = ["Candidate", "fill_mask"]

# Logits of a mask span the whole vocabulary (1 MB for 250,000 tokens), so a run is bounded by masks as well.
_RUN_MASKS = 128


@dataclass(frozen=True)
class Candidate:
    """A token that may stand in place of a mask; ``score`` is its probability over the vocabulary."""

    token: str
    token_id: int
    score: float


def fill_mask(
    session: Session, texts: object, *, top_k: int = 5, on_long: OnLong = "truncate"
) -> Steps[list[list[list[Candidate]]]]:
    """For every text, for every mask in it, the ``top_k`` likeliest tokens, best first.

    Raises ``InputError`` for a text without a mask (or whose masks were all cut off).
    """
    session.need("fill_mask", "fill_mask")
    mask = session.tokenizer.mask_token_id
    if mask is None:
        raise InputError("the tokenizer of this artifact has no mask token; fill_mask needs one")
    if top_k < 1:
        raise InputError(f"top_k is {top_k}; 1 or more is needed")
    rows = check_texts(texts)
    weight = max(1, session.batch_tokens // _RUN_MASKS)

    def weigh(encoding: Encoding) -> int:
        return max(len(encoding), weight * encoding.ids.count(mask))

    def masks(piece: Piece) -> Int32:
        counts = [encoding.ids.count(mask) for encoding in piece.encodings]
        if 0 in counts:
            raise InputError(
                f"texts[{piece.first + counts.index(0)}] has no {session.tokenizer.mask_token} within the first "
                f"{session.tokenizer.max_length} tokens; put one where a token is to be found"
            )
        return np.flatnonzero(piece.batch.token_ids == mask).astype(np.int32)

    found: list[list[list[Candidate]]] = []
    for run in Runs("logits", session.stream(rows, on_long=on_long, weight=weigh), masks):
        logits = need_finite((yield run))
        candidates = iter([_best(row, top_k, session.tokenizer) for row in logits])
        found += [[next(candidates) for _ in range(encoding.ids.count(mask))] for encoding in run.piece.encodings]
    return found


def _best(logits: F32, top_k: int, tokenizer: Tokenizer) -> list[Candidate]:
    scores = softmax(logits.astype(np.float64))
    keep = min(top_k, scores.size)
    least = np.partition(scores, scores.size - keep)[scores.size - keep]
    places = np.flatnonzero(scores >= least)
    places = places[np.argsort(-scores[places], kind="stable")][:keep]
    return [Candidate(tokenizer.token(at), at, float(scores[at])) for at in places.tolist()]
