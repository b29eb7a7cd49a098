"""Blocks of zeros, against loops that say the same in words."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from encast.errors import InputError
from encast.sparsity import Pattern, magnitude_mask

Array = np.ndarray[Any, Any]

PATTERNS = [Pattern(4, 1), Pattern(1, 4), Pattern(1, 1), Pattern(8, 1), Pattern(2, 3)]
SHAPES = [(4, 1), (1, 1), (8, 12), (3, 5), (17, 33), (64, 7)]


def blocks_of(shape: tuple[int, int], pattern: Pattern) -> list[tuple[slice, slice]]:
    rows, columns = (range(0, size, step) for size, step in zip(shape, (pattern.outputs, pattern.inputs), strict=True))
    return [(slice(r, r + pattern.outputs), slice(c, c + pattern.inputs)) for r, c in itertools.product(rows, columns)]


def weight_of(shape: tuple[int, int], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestBlocks:
    def test_the_smallest_whole_blocks_go(self, pattern: Pattern, shape: tuple[int, int]) -> None:
        weight, blocks = weight_of(shape), blocks_of(shape, pattern)
        for sparsity in (0.0, 0.3, 0.8, 1.0):
            stays = magnitude_mask(weight, pattern, sparsity)
            assert stays.shape == shape
            assert stays.dtype == bool
            assert all(stays[block].all() or not stays[block].any() for block in blocks)
            gone = [block for block in blocks if not stays[block].any()]
            assert len(gone) == int(sparsity * len(blocks) + 0.5)
            means = sorted(float(np.abs(weight[block]).mean(dtype=np.float64)) for block in blocks)
            found = sorted(float(np.abs(weight[block]).mean(dtype=np.float64)) for block in gone)
            np.testing.assert_allclose(found, means[: len(gone)], rtol=1e-12)


def test_a_block_at_the_edge_counts_by_its_mean() -> None:
    # The last block has one element, which is larger than the mean of the others, and smaller than their sum.
    weight = np.array([[1.0], [1.0], [1.0], [1.0], [2.0]], np.float32)
    assert magnitude_mask(weight, Pattern(4, 1), 0.5).ravel().tolist() == [False] * 4 + [True]


def test_of_equal_blocks_the_first_go() -> None:
    assert magnitude_mask(np.ones((1, 6), np.float32), Pattern(1, 1), 0.5).tolist() == [[False] * 3 + [True] * 3]


@pytest.mark.parametrize(
    ("text", "pattern"), [("4x1", (4, 1)), ("1x4", (1, 4)), ("64x64", (64, 64)), ("unstructured", (1, 1))]
)
def test_patterns_are_read(text: str, pattern: tuple[int, int]) -> None:
    assert Pattern.parse(text) == Pattern(*pattern)


@pytest.mark.parametrize(
    "text", ["", "4", "4x", "x1", "4x1x1", "0x1", "65x1", "1x999", "-4x1", "4 x 1", "4X1", "\u0664x1"]
)
def test_other_patterns_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"4x1|1 to 64"):
        Pattern.parse(text)


@pytest.mark.parametrize("sparsity", [-0.1, 1.01, 80.0, float("nan")])
def test_a_sparsity_is_a_share(sparsity: float) -> None:
    with pytest.raises(InputError, match=r"0\.8 is 80 %"):
        magnitude_mask(np.ones((4, 4), np.float32), Pattern(4, 1), sparsity)
