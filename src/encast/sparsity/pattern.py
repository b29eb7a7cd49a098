"""Patterns of zeros: blocks of a weight ``[outputs, inputs]`` that are zero as a whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import InputError

__all__ = ["Pattern"]

Array = np.ndarray[Any, Any]

_LARGEST = 64
_FORM = re.compile(r"([0-9]{1,3})x([0-9]{1,3})")


@dataclass(frozen=True)
class Pattern:
    """Blocks of ``outputs`` x ``inputs`` elements, from element [0, 0] on; those at the edges may be smaller.

    4x1 is four outputs that share an input: what "Fast DistilBERT on CPUs" (Shen et al., 2022, arXiv:2211.07715) prunes
    for VNNI instructions. 1x4 is DeepSparse's. 1x1 is unstructured.
    """

    outputs: int
    inputs: int

    def __post_init__(self) -> None:
        if not (1 <= self.outputs <= _LARGEST and 1 <= self.inputs <= _LARGEST):
            raise InputError(
                f"the pattern is {self.outputs}x{self.inputs}; outputs and inputs of a block are 1 to {_LARGEST}"
            )

    @staticmethod
    def parse(text: str) -> Pattern:
        """``4x1``, ``1x4``, ...; ``unstructured`` is 1x1. Raises ``InputError``."""
        if text == "unstructured":
            return Pattern(1, 1)
        match = _FORM.fullmatch(text)
        if match is None:
            raise InputError(f"the pattern {text[:40]!r} is not OUTPUTSxINPUTS, as 4x1, nor unstructured")
        return Pattern(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.outputs}x{self.inputs}"

    def means(self, weight: Array) -> Array:
        """The mean magnitude of every block, ``f64[block rows, block columns]``."""
        magnitudes = np.abs(weight, dtype=np.float64)
        sums = np.add.reduceat(magnitudes, np.arange(0, weight.shape[0], self.outputs), axis=0)
        sums = np.add.reduceat(sums, np.arange(0, weight.shape[1], self.inputs), axis=1)
        high, wide = (
            _extents(size, block) for size, block in zip(weight.shape, (self.outputs, self.inputs), strict=True)
        )
        return np.asarray(sums / np.outer(high, wide))

    def spread(self, blocks: Array, shape: tuple[int, int]) -> Array:
        """A value of every block to that of each of its elements: an array of ``shape``."""
        return np.asarray(blocks.repeat(self.outputs, axis=0)[: shape[0]].repeat(self.inputs, axis=1)[:, : shape[1]])


def _extents(size: int, block: int) -> Array:
    """How many elements each block has along a dimension of ``size``."""
    return np.minimum(block, size - np.arange(0, size, block))
