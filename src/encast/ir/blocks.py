"""Weights whose zeros lie in blocks of four outputs x one input, stored without them.

``core/kernels/sparse/sparse.h`` has the contract. Of a weight ``s8[n, k]``:

    values   s8[groups, 16]   4 outputs x 4 inputs of a group, inputs innermost
    columns  u16[groups, 4]   which inputs they are
    starts   i32[blocks + 1]  the groups of block b are starts[b] to starts[b + 1]; blocks: n to whole panels, over 4

The columns of a block rise; where its last group has fewer than four, the last column is repeated with weights of zero.
A weight of zeros alone has one group that belongs to no block, since nothing is stored that is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from encast.errors import GraphError

__all__ = [
    "BLOCK_OUTPUTS",
    "GROUP_INPUTS",
    "MOST_INPUTS",
    "Shares",
    "block_count",
    "blocks_beside",
    "pack_blocks",
    "shares",
    "unpack_blocks",
]

Array = np.ndarray[Any, Any]

BLOCK_OUTPUTS, GROUP_INPUTS = 4, 4
MOST_INPUTS = 1 << 16
_PANEL = 64


def blocks_beside(operands: Sequence[str]) -> list[str]:
    """Values, columns and starts of a ``linear_int8`` that has its weight without zeros too; else nothing."""
    return [name for name in operands[4:] if name]


def block_count(outputs: int) -> int:
    """Blocks of a weight with so many outputs."""
    return -(-outputs // _PANEL) * _PANEL // BLOCK_OUTPUTS


class Shares(NamedTuple):
    """Of a weight ``s8[n, k]``: the blocks that are zero over all blocks, and the elements that ``pack_blocks`` would
    store over n * k. Groups are filled up, so both may be more than 1 together."""

    zero: float
    left: float


def shares(weight: Array) -> Shares:
    """Of ``weight: s8[n, k]``, n and k at least 1."""
    n, k = weight.shape
    used = np.logical_or.reduceat(weight != 0, np.arange(0, n, BLOCK_OUTPUTS), axis=0)
    groups = int((-(-used.sum(axis=1) // GROUP_INPUTS)).sum())
    return Shares(1 - float(used.mean()), groups * GROUP_INPUTS * BLOCK_OUTPUTS / int(n * k))


def pack_blocks(weight: Array) -> tuple[Array, Array, Array]:
    """``weight: s8[n, k]`` to (values, columns, starts). Raises ``GraphError`` beyond ``MOST_INPUTS`` inputs."""
    n, k = weight.shape
    if k > MOST_INPUTS:
        raise GraphError(f"a weight with {k} inputs cannot be stored in blocks; {MOST_INPUTS} are the most")
    blocks = block_count(n)
    padded = np.zeros((blocks * BLOCK_OUTPUTS, k), np.int8)
    padded[:n] = weight
    by_block = padded.reshape(blocks, BLOCK_OUTPUTS, k)
    block_of, column_of = np.nonzero(by_block.any(axis=1))  # in the order of blocks, columns rising
    counts = np.bincount(block_of, minlength=blocks)
    groups = -(-counts // GROUP_INPUTS)
    starts = np.concatenate([[0], np.cumsum(groups)])
    values = np.zeros((max(1, starts[-1]) * GROUP_INPUTS, BLOCK_OUTPUTS), np.int8)
    columns = np.zeros(max(1, starts[-1]) * GROUP_INPUTS, np.uint16)
    # Where each column of a block goes: behind those before it in the block, from the block's first group on.
    within = np.arange(len(block_of)) - (np.cumsum(counts) - counts)[block_of]
    place = starts[block_of] * GROUP_INPUTS + within
    values[place] = by_block[block_of, :, column_of]
    columns[place] = column_of
    for step in range(1, GROUP_INPUTS):  # the last group's rest
        short = counts % GROUP_INPUTS == step
        last = starts[:-1][short] * GROUP_INPUTS + counts[short] - 1
        for fill in range(1, GROUP_INPUTS - step + 1):
            columns[last + fill] = columns[last]
    by_output = values.reshape(-1, GROUP_INPUTS, BLOCK_OUTPUTS).swapaxes(1, 2)
    return (
        np.ascontiguousarray(by_output).reshape(-1, BLOCK_OUTPUTS * GROUP_INPUTS),
        columns.reshape(-1, GROUP_INPUTS),
        starts.astype(np.int32),
    )


def unpack_blocks(values: Array, columns: Array, starts: Array, shape: tuple[int, int]) -> Array:
    """The weight ``s8[n, k]`` again. Raises ``GraphError`` where the numbers are not those of such a weight."""
    n, k = shape
    blocks, groups = block_count(n), starts[1:].astype(np.int64) - starts[:-1]
    if len(starts) != blocks + 1 or starts[0] != 0 or (groups < 0).any() or starts[-1] > len(values):
        raise GraphError("the starts of a sparse weight do not rise from 0 to its groups")
    if int(columns[: starts[-1]].max(initial=0)) >= k:
        raise GraphError(f"a sparse weight has column {int(columns.max())}, and {k} inputs")
    block_of = np.repeat(np.arange(blocks), groups)
    weight = np.zeros((blocks, BLOCK_OUTPUTS, k), np.int8)
    own = values[: starts[-1]].reshape(-1, BLOCK_OUTPUTS, GROUP_INPUTS)
    for place in reversed(range(GROUP_INPUTS)):  # the first of repeated columns has the weight
        weight[block_of, :, columns[: starts[-1], place]] = own[:, :, place]
    weight = weight.reshape(-1, k)[:n]
    if not all(map(np.array_equal, pack_blocks(weight), (values, columns, starts))):
        raise GraphError("a sparse weight is not in the form of one: its columns do not rise, or repeat")
    return weight
