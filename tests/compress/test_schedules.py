"""Curves over a stage, and the order of its batches."""

from __future__ import annotations

import numpy as np
import pytest

from encast.compress.batches import epoch_batches, steps_of
from encast.compress.schedules import SPARSITIES, learning_rate, sparsity


@pytest.mark.parametrize("schedule", SPARSITIES)
def test_sparsity_rises_from_initial_to_final(schedule: str) -> None:
    values = [sparsity(schedule, done / 100, initial=0.2, final=0.9, begin=0.1, end=0.6) for done in range(101)]
    assert set(values[:10]) == {0.0}
    assert values[10] == (0.9 if schedule == "one-shot" else 0.2)
    assert set(values[60:]) == {0.9}
    assert values == sorted(values)


def test_cubic_is_that_of_zhu_and_gupta() -> None:
    for t in (0.0, 0.25, 0.5, 0.99):
        expected = 0.8 + (0.1 - 0.8) * (1 - t) ** 3
        assert sparsity("cubic", t, initial=0.1, final=0.8, begin=0.0, end=1.0) == pytest.approx(expected)


def test_learning_rate_rises_and_falls() -> None:
    values = [learning_rate("linear", step, 100, 0.1) for step in range(100)]
    assert values[0] > 0
    assert values[:10] == sorted(values[:10])
    assert values[10] == 1.0
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[-1] == pytest.approx(1 / 90)
    assert {learning_rate("constant", step, 10, 0.0) for step in range(10)} == {1.0}
    assert learning_rate("cosine", 5, 10, 0.0) == pytest.approx(0.5)


def test_steps_of_epochs_and_at_most() -> None:
    assert [steps_of(100, 16, epochs) for epochs in (0, 0.01, 1, 2.5)] == [0, 1, 7, 18]
    assert [steps_of(100, 16, 3, most) for most in (1, 20, 22, None)] == [1, 20, 21, 21]
    assert steps_of(100, 16, 0, 5) == 0


@pytest.mark.parametrize("rows", [1, 7, 64, 1000, 2049])
def test_batches_hold_every_row_once(rows: int) -> None:
    lengths = np.random.default_rng(rows).integers(3, 100, rows).astype(np.int32)
    batches = epoch_batches(lengths, 16, [3, 1])
    assert len(batches) == steps_of(rows, 16, 1)
    assert sorted(np.concatenate(batches).tolist()) == list(range(rows))
    assert max(map(len, batches)) <= 16
    again = epoch_batches(lengths, 16, [3, 1])
    assert all((a == b).all() for a, b in zip(batches, again, strict=True))


def test_batches_are_of_like_lengths_and_differ_between_epochs() -> None:
    lengths = np.random.default_rng(0).integers(4, 128, 4096).astype(np.int32)
    batches = epoch_batches(lengths, 32, [0, 0])
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    assert padded < 1.05 * lengths.sum()
    # Not from short to long: that would train on like rows for a while.
    means = np.array([lengths[batch].mean() for batch in batches])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3
    other = epoch_batches(lengths, 32, [0, 1])
    assert any((a != b).any() for a, b in zip(batches, other, strict=True))
