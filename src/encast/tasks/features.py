"""Last hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from encast.tasks.embed import check_ids
from encast.tasks.session import F32, Piece, Runs, Session, Steps, need_finite
from encast.tasks.texts import check_texts
from encast.tasks.tokenize import OnLong

__all__ = ["hidden_states", "hidden_states_of_ids"]


def hidden_states(session: Session, texts: object, *, on_long: OnLong = "truncate") -> Steps[list[F32]]:
    """The last hidden state of every token, ``f32[len_i, hidden]`` a text; special tokens are among them.

    Raises ``InputError``, also for states that are not finite.
    """
    return (yield from _states(session.stream(check_texts(texts), on_long=on_long)))


def hidden_states_of_ids(session: Session, rows: Sequence[Sequence[int]]) -> Steps[list[F32]]:
    """Like ``hidden_states``, of lists of token ids that are taken as they are; see ``check_ids``."""
    check_ids(session, rows)
    return (yield from _states(session.id_pieces(rows)))


def _states(pieces: Iterable[Piece]) -> Steps[list[F32]]:
    states: list[F32] = []
    for run in Runs("last_hidden_state", pieces):
        found = need_finite((yield run))
        states += np.split(found, run.piece.batch.cu_seqlens[1:-1])
    return states
