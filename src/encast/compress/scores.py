"""Which blocks of a weight matter: a score an element, whose mean over a block decides.

A score is a row of ``SCORES``: how it is kept up to date with every gradient, and read when blocks are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["SCORES", "Score"]

Tensor = Any

_MOMENTUM = 0.9


@dataclass(frozen=True)
class Score:
    """``update(score, weight, gradient)`` changes ``score`` in place, each step; None where the weight says it all.

    ``read(score, weight)``: the score of every element, the larger the longer it stays; None where outputs decide
    instead (``surgeon.py``).
    """

    update: Callable[[Tensor, Tensor, Tensor], None] | None
    read: Callable[[Tensor, Tensor], Tensor] | None

    @property
    def by_outputs(self) -> bool:
        return self.read is None


def _move(score: Tensor, weight: Tensor, gradient: Tensor) -> None:
    score.addcmul_(weight, gradient, value=-1.0)


def _snip(score: Tensor, weight: Tensor, gradient: Tensor) -> None:
    score.mul_(_MOMENTUM).add_((weight * gradient).abs_(), alpha=1.0 - _MOMENTUM)


SCORES: Mapping[str, Score] = {
    # Mean magnitude of a block: "Fast DistilBERT on CPUs" (Shen et al., 2022, arXiv:2211.07715).
    "magnitude": Score(None, lambda score, weight: weight.abs()),
    # The sum of -w dL/dw over the steps: weights that move away from zero. Sanh et al., 2020 (arXiv:2005.07683).
    "movement": Score(_move, lambda score, weight: score),
    # |w dL/dw| (SNIP, Lee et al., 2019, arXiv:1810.02340), averaged over steps with momentum 0.9.
    "snip-momentum": Score(_snip, lambda score, weight: score),
    # What outputs lose, and the weights that stay make up for it: Optimal Brain Surgeon, see obs.py.
    "obs": Score(None, None),
}
