"""Last hidden states."""

from __future__ import annotations

import numpy as np

from encast.tasks.session import F32, Run, Session, Steps, need_finite
from encast.tasks.texts import check_texts
from encast.tasks.tokenize import OnLong

__all__ = ["hidden_states"]


def hidden_states(session: Session, texts: object, *, on_long: OnLong = "truncate") -> Steps[list[F32]]:
    """The last hidden state of every token, ``f32[len_i, hidden]`` a text; special tokens are among them.

    Raises ``InputError``, also for states that are not finite.
    """
    states: list[F32] = []
    for piece in session.stream(check_texts(texts), on_long=on_long):
        found = need_finite((yield Run("last_hidden_state", piece)))
        states += np.split(found, piece.batch.cu_seqlens[1:-1])
    return states
