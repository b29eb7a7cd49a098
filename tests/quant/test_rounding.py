"""Rounding to bf16 and s8, against definitions that are slower and plainer."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encast.quant import rounding
from encast.quant.rounding import bf16_bits, bf16_values, quantize_rows


@given(st.integers(0, 2**32 - 1))
def test_bf16_is_the_nearest_with_ties_to_even(bits: int) -> None:
    x = np.array([bits], np.uint32).view(np.float32)
    got = int(bf16_bits(x)[0])
    if np.isnan(x[0]):
        assert np.isnan(bf16_values(np.array([got], np.uint16))[0])
        return
    if np.isinf(x[0]):
        assert got == bits >> 16
        return
    below, above = bits >> 16, (bits >> 16) + 1
    value = Fraction(float(x[0]))

    def exact(candidate: int) -> Fraction:
        number = np.array([candidate << 16], np.uint32).view(np.float32)[0]
        # The step past the largest bf16 counts as 2^128, as IEEE 754 rounding has it.
        return Fraction(float(number)) if np.isfinite(number) else Fraction(2) ** 128 * (-1 if candidate >> 15 else 1)

    down, up = abs(value - exact(below)), abs(value - exact(above))
    assert got == (below if down < up or (down == up and below % 2 == 0) else above)


def test_bf16_of_every_bf16_is_itself() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = bf16_values(bits)
    finite = ~np.isnan(values)
    assert (bf16_bits(values)[finite] == bits[finite]).all()


def test_blocks_are_seamless(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((37, 13)).astype(np.float32)
    bits, (values, scale) = bf16_bits(x), quantize_rows(x)
    monkeypatch.setattr(rounding, "BLOCK", 50)
    assert (bf16_bits(x) == bits).all()
    blocked, blocked_scale = quantize_rows(x)
    assert (blocked == values).all()
    assert (blocked_scale == scale).all()


def test_rows_use_the_whole_range() -> None:
    x = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    values, scale = quantize_rows(x)
    assert (np.abs(values).max(1) == 127).all()
    assert values.min() >= -127
    error = np.abs(values * scale[:, None].astype(np.float64) - x)
    assert (error <= 0.5 * scale[:, None] * (1 + 1e-6)).all()


def test_ties_go_to_even() -> None:
    row = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]], np.float32)
    assert quantize_rows(row)[0].tolist() == [[127, 0, 2, 2, 0, -2]]


def test_rows_of_nothing_become_zeros() -> None:
    x = np.zeros((3, 5), np.float32)
    x[1] = 1e-40
    x[2, 0] = -2.0
    values, scale = quantize_rows(x)
    assert scale[:2].tolist() == [0.0, 0.0]
    assert not values[:2].any()
    assert values[2].tolist() == [-127, 0, 0, 0, 0]


def test_the_largest_numbers_stay_finite() -> None:
    x = np.full((1, 4), np.finfo(np.float32).max)
    values, scale = quantize_rows(x)
    assert values.tolist() == [[127] * 4]
    assert np.isfinite(scale).all()


def test_inputs_are_not_written_to() -> None:
    x = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    x.flags.writeable = False
    quantize_rows(x)
    bf16_bits(x)
