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

_ALIKE = 0.1
"""Blocks that could make up for each other to this share of what they cost do not go together, if others can."""

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


@dataclass(frozen=True)
class _System:
    """The moments of the columns of some groups' own blocks.

    ``columns i64[groups, n]``: n of the group that has most; where another has fewer, further columns follow, for which
    ``valid bool[groups, n]`` is false and which are apart from all others. ``factor f32[groups, n, n]``: Cholesky's,
    lower.
    """

    columns: Tensor
    valid: Tensor
    factor: Tensor

    def solve(self, wanted: Tensor) -> Tensor:
        """Least squares for ``wanted f32[groups, high, inputs]``, times the moments: ``f32[groups, high, n]``."""
        target = wanted.gather(2, _rows(self.columns, wanted.shape[1])) * self.valid[:, None]
        return torch.cholesky_solve(target.transpose(1, 2), self.factor).transpose(1, 2) * self.valid[:, None]

    def expand(self, groups: int) -> _System:
        return _System(*(one.expand(groups, *one.shape[1:]) for one in (self.columns, self.valid, self.factor)))


def remove_blocks(
    weight: Tensor, moments: Moments, alive: Tensor, stay: int, pattern: Pattern
) -> tuple[Tensor, Tensor]:
    """The product that has ``stay`` blocks and outputs nearest to ``weight``'s on the reference's inputs.

    ``weight``: ``f32[outputs, inputs]``. ``alive``: ``bool[block rows, block columns]``, those that may stay. Returns
    the new weight, zero elsewhere, and its ``alive``. Raises ``torch.linalg.LinAlgError`` where the moments are those
    of no inputs, ``ValueError`` where they are not finite.
    """
    if not bool(moments.own.isfinite().all() and moments.cross.isfinite().all()):
        raise ValueError("inputs are not finite, or too large to be squared")
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
    # As long as all groups have the same blocks, which they have at first, one system is that of all.
    same = _system(own, alive[:1], wide) if bool((alive == alive[:1]).all()) else None
    inverse = None if same is None else torch.cholesky_inverse(same.factor)
    found = [_costs(groups[part], own, alive[part], wide, same, inverse) for part in parts]
    costs, turns = (torch.cat(one).flatten() for one in zip(*found, strict=True))
    order = torch.argsort(turns, stable=True)
    order = order[torch.argsort(costs[order], stable=True)]
    chosen = torch.zeros(alive.numel(), dtype=torch.bool, device=alive.device)
    chosen[order[len(order) - stay :]] = True
    chosen = chosen.reshape(alive.shape) & alive
    made = torch.zeros_like(groups)
    for part in parts:
        system = _system(own, chosen[part], wide)
        made[part].scatter_(2, _rows(system.columns, high), system.solve(groups[part]))
    return made.reshape(-1, own.shape[0])[:outputs, :inputs].contiguous(), chosen


def _system(own: Tensor, alive: Tensor, wide: int) -> _System:
    most = int(alive.sum(1).max())
    blocks = torch.argsort(alive.to(torch.uint8), dim=1, descending=True, stable=True)[:, :most]
    columns = _columns(blocks, wide)
    valid = alive.gather(1, blocks).repeat_interleave(wide, 1)
    matrices = own[columns[:, :, None], columns[:, None, :]] * (valid[:, :, None] & valid[:, None, :])
    matrices.diagonal(dim1=1, dim2=2).add_((~valid).to(own.dtype))
    return _System(columns, valid, torch.linalg.cholesky(matrices))


def _columns(blocks: Tensor, wide: int) -> Tensor:
    """``i64[groups, n * wide]``: the columns of the blocks."""
    return (blocks[:, :, None] * wide + torch.arange(wide, device=blocks.device)).flatten(1)


def _rows(columns: Tensor, count: int) -> Tensor:
    """An index for ``gather``: the same columns of ``count`` rows."""
    return columns[:, None].expand(-1, count, -1)


def _costs(
    wanted: Tensor, own: Tensor, alive: Tensor, wide: int, same: _System | None, inverse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``f32[groups, block columns]``: the error that each block adds when it leaves, or that one before it in its group
    has added if that was more; -inf for blocks that are not alive. And its turn to leave, ``i64``.

    ``same``: the system of every group, if it is the same one, and its ``inverse``.
    """
    groups, high, _ = wanted.shape
    system = _system(own, alive, wide) if same is None else same.expand(groups)
    weight = system.solve(wanted)
    inverse = torch.cholesky_inverse(system.factor) if inverse is None else inverse.repeat(groups, 1, 1)
    blocks = system.columns[:, ::wide] // wide
    costs = torch.full(alive.shape, -torch.inf, dtype=own.dtype, device=own.device)
    turns = torch.zeros(alive.shape, dtype=torch.long, device=own.device)
    highest = torch.full((groups, 1), -torch.inf, dtype=own.dtype, device=own.device)
    gone = torch.zeros_like(blocks, dtype=torch.bool)
    left = blocks.shape[1]
    while left:
        if left <= _COMPACT * blocks.shape[1]:
            stay = torch.argsort(gone.to(torch.uint8), dim=1, stable=True)[:, :left]
            columns = _columns(stay, wide)
            weight = weight.gather(2, _rows(columns, high))
            inverse = torch.stack([one[keep][:, keep] for one, keep in zip(inverse, columns, strict=True)])
            blocks, gone = blocks.gather(1, stay), gone.gather(1, stay)
        leaving, scores = _leaving(weight, inverse, gone, left, wide)
        added = torch.cummax(torch.cat([highest, scores], 1), 1).values
        highest = added[:, -1:]
        places = blocks.gather(1, leaving)
        costs.scatter_(1, places, added[:, 1:])
        turns.scatter_(1, places, torch.arange(-left, leaving.shape[1] - left, device=own.device).expand_as(places))
        out = _columns(leaving, wide)
        rows = inverse.gather(1, out[:, :, None].expand(-1, -1, inverse.shape[2]))
        share = torch.linalg.solve(rows.gather(2, _rows(out, out.shape[1])), rows)
        weight.baddbmm_(weight.gather(2, _rows(out, high)), share, alpha=-1.0)
        inverse.baddbmm_(rows.transpose(1, 2), share, alpha=-1.0)
        gone.scatter_(1, leaving, True)
        weight.scatter_(2, _rows(out, high), 0.0)
        left -= leaving.shape[1]
    return costs.masked_fill_(~alive, -torch.inf), turns


def _leaving(weight: Tensor, inverse: Tensor, gone: Tensor, left: int, wide: int) -> tuple[Tensor, Tensor]:
    """The blocks of each group that leave next, ``i64[groups, n]``, and what each adds to the error, rising.

    Two blocks that are alike each cost little only while the other is there: of such the later one waits.
    """
    groups, high, _ = weight.shape
    count = gone.shape[1]
    square = inverse.reshape(groups, count, wide, count, wide).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    square = torch.where(gone[:, :, None, None], torch.eye(wide, dtype=weight.dtype, device=weight.device), square)
    parts = weight.reshape(groups, high, count, wide).permute(0, 2, 3, 1)
    scores = (parts * torch.linalg.solve(square, parts)).sum((2, 3)).masked_fill_(gone, torch.inf)
    number = left // _SHARE
    pool = torch.argsort(scores, dim=1, stable=True)[:, : max(1, 2 * number)]
    if number:
        columns = _columns(pool, wide)
        among = inverse.gather(1, columns[:, :, None].expand(-1, -1, inverse.shape[2]))
        among = among.gather(2, _rows(columns, columns.shape[1]))
        scale = among.diagonal(dim1=1, dim2=2)
        alike = among.square() / (scale[:, :, None] * scale[:, None, :])
        alike = alike.reshape(groups, pool.shape[1], wide, pool.shape[1], wide).amax((2, 4)).tril(-1).amax(2) > _ALIKE
        pool = pool.gather(1, torch.argsort(alike.to(torch.uint8), dim=1, stable=True)[:, :number])
    scores = scores.gather(1, pool)
    order = torch.argsort(scores, dim=1, stable=True)
    return pool.gather(1, order), scores.gather(1, order)
