"""Blocks of a product leave so that its outputs change least, and the weights that stay make up for them.

Optimal Brain Surgeon (Hassibi and Stork, 1993), one product at a time, as in "Optimal Brain Compression" (Frantar and
Alistarh, 2022, arXiv:2208.11580): the error is the mean square difference of outputs on calibration rows. Here the
rows of a block share their order of removal, blocks leave some at a time, and the outputs to be met are those of the
model before any of its products was pruned, so that a product makes up for what those before it lost, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from encast.sparsity import Pattern

__all__ = ["Moments", "remove_blocks"]

Tensor = Any

_DAMP = 0.01
"""Of the mean of the moments' diagonal, added to it: inputs that hardly vary in the calibration rows stay solvable."""

_SHARE = 16
"""One of so many blocks that are left goes at a time, before the rest is adjusted and judged anew."""

_COMPACT = 0.75
"""Matrices are made smaller when no more than this share of their columns is left."""

_BATCH_BYTES = 64 << 20
"""Of the inverses that are worked on together."""


@dataclass(frozen=True)
class Moments:
    """Means over tokens, ``f32[inputs, inputs]``. ``own``: of ``x x^T``, x the inputs of a product in the model as it
    is; ``cross``: of ``r x^T``, r those of the same token in the reference."""

    own: Tensor
    cross: Tensor


def remove_blocks(
    weight: Tensor, moments: Moments, alive: Tensor, stay: int, pattern: Pattern
) -> tuple[Tensor, Tensor]:
    """The product that has ``stay`` blocks and outputs nearest to ``weight``'s on the reference's inputs.

    ``weight``: ``f32[outputs, inputs]``. ``alive``: ``bool[block rows, block columns]``, those that may stay. Returns
    the new weight, zero elsewhere, and its ``alive``. Raises ``torch.linalg.LinAlgError`` where the moments are not
    finite.
    """
    high, wide = pattern.outputs, pattern.inputs
    outputs, inputs = weight.shape
    rest = (0, -inputs % wide, 0, -outputs % high)
    own = torch.nn.functional.pad(moments.own, (0, rest[1], 0, rest[1]))
    damp = _DAMP * moments.own.diagonal().mean().clamp_min(1e-12)
    own.diagonal().add_(damp)
    wanted = torch.nn.functional.pad(weight @ moments.cross + damp * weight, rest)
    groups = wanted.reshape(len(alive), high, -1)
    size = max(1, _BATCH_BYTES // (own.numel() * own.element_size()))
    parts = [slice(begin, begin + size) for begin in range(0, len(groups), size)]
    costs = torch.cat([_costs(groups[part], own, alive[part], wide) for part in parts])
    chosen = torch.zeros(alive.numel(), dtype=torch.bool, device=alive.device)
    chosen[torch.argsort(costs.flatten(), descending=True, stable=True)[:stay]] = True
    chosen = chosen.reshape(alive.shape) & alive
    made = torch.zeros_like(groups)
    for part in parts:
        columns, solved, _ = _solve(groups[part], own, chosen[part], wide)
        made[part].scatter_(2, columns[:, None].expand(-1, high, -1), solved)
    return made.reshape(-1, own.shape[0])[:outputs, :inputs].contiguous(), chosen


def _solve(wanted: Tensor, own: Tensor, alive: Tensor, wide: int) -> tuple[Tensor, Tensor, Tensor]:
    """Least squares in groups of rows, each on the columns of its own blocks: ``wanted f32[groups, high, inputs]``.

    Returns ``columns i64[groups, n]``, n of the group that has most; where another has fewer, further columns follow,
    whose weight is 0. Then the weights ``f32[groups, high, n]``, and the factor ``f32[groups, n, n]`` (Cholesky, lower)
    of the moments of the columns, in which those further ones are apart from all others.
    """
    if len(alive) > 1 and bool((alive == alive[:1]).all()):
        # All rows have the same columns, as at the beginning: one system is all there is to solve.
        columns, solved, factor = _solve(wanted.reshape(1, -1, wanted.shape[2]), own, alive[:1], wide)
        groups, high, _ = wanted.shape
        return columns.expand(groups, -1), solved.reshape(groups, high, -1), factor.expand(groups, -1, -1)
    most = int(alive.sum(1).max())
    blocks = torch.argsort(alive.to(torch.uint8), dim=1, descending=True, stable=True)[:, :most]
    columns = _columns(blocks, wide)
    valid = alive.gather(1, blocks).repeat_interleave(wide, 1)
    system = own[columns[:, :, None], columns[:, None, :]] * (valid[:, :, None] & valid[:, None, :])
    system.diagonal(dim1=1, dim2=2).add_((~valid).to(own.dtype))
    target = wanted.gather(2, columns[:, None].expand(-1, wanted.shape[1], -1)) * valid[:, None]
    factor = torch.linalg.cholesky(system)
    return columns, torch.cholesky_solve(target.transpose(1, 2), factor).transpose(1, 2) * valid[:, None], factor


def _columns(blocks: Tensor, wide: int) -> Tensor:
    """``i64[groups, n * wide]``: the columns of the blocks."""
    return (blocks[:, :, None] * wide + torch.arange(wide, device=blocks.device)).flatten(1)


def _costs(wanted: Tensor, own: Tensor, alive: Tensor, wide: int) -> Tensor:
    """``f32[groups, block columns]``: the error that each block adds when it leaves, in the order in which they leave
    their group. It rises along that order, so that none stays that left before another. Of those not alive: -inf.
    """
    groups, high, _ = wanted.shape
    columns, weight, factor = _solve(wanted, own, alive, wide)
    inverse = torch.cholesky_inverse(factor[:1] if factor.stride(0) == 0 else factor).repeat(
        groups if factor.stride(0) == 0 else 1, 1, 1
    )
    blocks = columns[:, ::wide] // wide
    costs = torch.full(alive.shape, -torch.inf, dtype=own.dtype, device=own.device)
    highest = torch.zeros(groups, 1, dtype=own.dtype, device=own.device)
    gone = torch.zeros_like(blocks, dtype=torch.bool)
    left = blocks.shape[1]
    while left:
        if left <= _COMPACT * blocks.shape[1]:
            stay = torch.argsort(gone.to(torch.uint8), dim=1, stable=True)[:, :left]
            columns = _columns(stay, wide)
            weight = weight.gather(2, columns[:, None].expand(-1, high, -1))
            inverse = torch.stack([one[keep][:, keep] for one, keep in zip(inverse, columns, strict=True)])
            blocks, gone = blocks.gather(1, stay), gone.gather(1, stay)
        count = blocks.shape[1]
        square = inverse.reshape(groups, count, wide, count, wide).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        square = torch.where(gone[:, :, None, None], torch.eye(wide, device=own.device), square)
        parts = weight.reshape(groups, high, count, wide).permute(0, 2, 3, 1)
        scores = (parts * torch.linalg.solve(square, parts)).sum((2, 3)).masked_fill_(gone, torch.inf)
        leaving = torch.argsort(scores, dim=1, stable=True)[:, : max(1, left // _SHARE)]
        added = torch.maximum(scores.gather(1, leaving), torch.nextafter(highest, highest + 1))
        highest = added[:, -1:]
        costs.scatter_(1, blocks.gather(1, leaving), added)
        out = _columns(leaving, wide)
        rows = inverse.gather(1, out[:, :, None].expand(-1, -1, inverse.shape[2]))
        share = torch.linalg.solve(rows.gather(2, out[:, None].expand(-1, out.shape[1], -1)), rows)
        weight.baddbmm_(weight.gather(2, out[:, None].expand(-1, high, -1)), share, alpha=-1.0)
        inverse.baddbmm_(rows.transpose(1, 2), share, alpha=-1.0)
        gone.scatter_(1, leaving, True)
        weight.scatter_(2, out[:, None].expand(-1, high, -1), 0.0)
        left -= leaving.shape[1]
    return costs.masked_fill_(~alive, -torch.inf)
