"""Random ids, padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from graphs import META

from encast.batch import Batch
from encast.errors import InputError
from encast.profile.workload import of_batches, of_lengths, padded

LIMITS = replace(META, max_len=64, vocab=30)


def test_random_ids() -> None:
    workload = of_lengths("w", [10, 20, 30, 40], LIMITS, 50, seed=1)
    assert [batch.cu_seqlens.tolist() for batch in workload.batches] == [[0, 10, 30], [0, 30], [0, 40]]
    assert (workload.tokens, workload.seqs) == (100, 4)
    ids = np.concatenate([batch.token_ids for batch in workload.batches])
    assert ids.min() >= 0
    assert ids.max() < 30
    again = of_lengths("w", [10, 20, 30, 40], LIMITS, 50, seed=1)
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(workload.batches, again.batches, strict=True))
    assert workload.selects()[0].tolist() == [0, 10]


@pytest.mark.parametrize(("lengths", "reason"), [([], "no sequence"), ([65], "65 tokens"), ([3, 0], "0 tokens")])
def test_lengths_the_model_does_not_take(lengths: list[int], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        of_lengths("w", lengths, LIMITS, 50, seed=1)


def test_no_text() -> None:
    with pytest.raises(InputError, match=r"texts\.txt holds no text"):
        of_batches("texts.txt", [])


def test_padding() -> None:
    batch = Batch.of([[1, 2, 3], [4]], [[0, 1, 1], [1]])
    (longer,) = padded(of_batches("w", [batch])).batches
    assert longer.token_ids.tolist() == [1, 2, 3, 4, 0, 0]
    assert longer.token_type_ids is not None
    assert longer.token_type_ids.tolist() == [0, 1, 1, 1, 0, 0]
    assert longer.cu_seqlens.tolist() == [0, 3, 6]
