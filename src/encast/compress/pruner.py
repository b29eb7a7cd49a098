"""Keeps the zeros of a model while it trains: makes them by a schedule, and holds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from encast.compress.recipe import Prune
from encast.compress.schedules import sparsity
from encast.compress.scores import SCORES
from encast.compress.surgeon import Surgeon
from encast.sparsity import Pattern

__all__ = ["Lock", "Pruner"]

Tensor = Any


class Lock:
    """Elements that are zero stay zero: they are set to zero anew after every step of the optimiser.

    ``weights``: tensors ``[outputs, inputs]`` by name. Those with zeros are held, unless ``hold`` is false.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, hold: bool = True) -> None:
        self.masks: dict[str, Tensor] = {}
        self._weights = dict(weights)
        for name, weight in weights.items() if hold else ():
            stays = weight.detach() != 0
            if not bool(stays.all()):
                self.masks[name] = stays

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def before_step(self) -> None:
        """To be called with this step's gradients, before the optimiser uses them."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def after_step(self, step: int, steps: int) -> None:
        """To be called when the optimiser has changed the weights in step ``step`` of ``steps``, counted from 0."""
        self._apply()

    def _apply(self) -> None:
        for name, stays in self.masks.items():
            self._weights[name].mul_(stays)

    def finish(self) -> None:
        """To be called after the last step."""

    def state(self) -> dict[str, Tensor]:
        """What ``restore`` needs to go on as if nothing had happened."""
        return {f"mask.{name}": stays.to(torch.uint8) for name, stays in self.masks.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        masks = {name.removeprefix("mask."): stays for name, stays in state.items() if name.startswith("mask.")}
        self.masks = {name: stays.to(self._weights[name].device).bool() for name, stays in masks.items()}

    def done(self, step: int, steps: int) -> bool:
        """Whether the pattern after step ``step`` is the final one, so that an evaluation counts."""
        return True


@dataclass(frozen=True)
class _Blocks:
    """Sums over the blocks of one weight; those at the edges may be smaller."""

    pattern: Pattern
    shape: tuple[int, int]

    @property
    def counts(self) -> tuple[int, int]:
        """Block rows and block columns."""
        return -(-self.shape[0] // self.pattern.outputs), -(-self.shape[1] // self.pattern.inputs)

    def means(self, values: Tensor) -> Tensor:
        """``f32[block rows, block columns]``: the mean of every block."""
        high, wide = self.pattern.outputs, self.pattern.inputs
        rows, columns = self.shape
        padded = torch.nn.functional.pad(values, (0, -columns % wide, 0, -rows % high))
        sums = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide).sum((1, 3))
        heights = torch.full((sums.shape[0], 1), float(high))
        heights[-1] = rows - (sums.shape[0] - 1) * high
        widths = torch.full((1, sums.shape[1]), float(wide))
        widths[0, -1] = columns - (sums.shape[1] - 1) * wide
        return sums / (heights * widths).to(sums.device)

    def spread(self, blocks: Tensor) -> Tensor:
        """A value of every block to that of each of its elements."""
        rows, columns = self.shape
        spread = blocks.repeat_interleave(self.pattern.outputs, 0)[:rows]
        return spread.repeat_interleave(self.pattern.inputs, 1)[:, :columns]


class Pruner(Lock):
    """A ``Lock`` whose zeros grow in the weights ``chosen`` (default: all).

    A block that is zero stays so; of equal scores the first block goes first. ``surgeon`` is needed for the score
    that outputs give; there only whole blocks are held, and zeros within others may be filled.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        stage: Prune,
        chosen: Collection[str] | None = None,
        surgeon: Surgeon | None = None,
    ) -> None:
        super().__init__(weights, hold=stage.lock)
        weights = {name: weight for name, weight in weights.items() if chosen is None or name in chosen}
        self._stage = stage
        self._score = SCORES[stage.score]
        self._surgeon = surgeon
        self._pattern = pattern = Pattern.parse(stage.pattern)
        self._blocks = {name: _Blocks(pattern, tuple(weight.shape)) for name, weight in weights.items()}
        self._scores = {name: torch.zeros_like(weight) for name, weight in weights.items() if self._score.update}
        self._reached = 0.0

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def before_step(self) -> None:
        if self._score.update is not None:
            for name, score in self._scores.items():
                gradient = self._weights[name].grad
                if gradient is not None:  # not every loss reaches every weight
                    self._score.update(score, self._weights[name], gradient)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def after_step(self, step: int, steps: int) -> None:
        self._apply()
        wanted = self._wanted(step, steps)
        if wanted > self._reached and ((step + 1) % self._stage.every == 0 or wanted >= self._stage.sparsity):
            self._choose(wanted)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def finish(self) -> None:
        """Makes the zeros that no step has made: a stage may have none."""
        if self._reached < self._stage.sparsity:
            self._choose(self._stage.sparsity)

    def done(self, step: int, steps: int) -> bool:
        return self._wanted(step, steps) >= self._stage.sparsity

    def _wanted(self, step: int, steps: int) -> float:
        stage = self._stage
        return sparsity(
            stage.schedule, (step + 1) / steps,
            initial=stage.initial, final=stage.sparsity, begin=stage.begin, end=stage.end,
        )  # fmt: skip

    def _choose(self, wanted: float) -> None:
        """Sets the masks so that the share ``wanted`` of the blocks is zero, those that are zero already among them."""
        alive = {
            name: blocks.means(self.masks[name].float()) > 0
            if name in self.masks
            else torch.ones(blocks.counts, dtype=torch.bool, device=self._weights[name].device)
            for name, blocks in self._blocks.items()
        }
        if self._score.by_outputs:
            assert self._surgeon is not None
            stays = self._surgeon(alive, wanted, self._pattern)
            self.masks |= {name: self._blocks[name].spread(part) for name, part in stays.items()}
        else:
            for name, part in self._highest(alive, wanted).items():
                spread = self._blocks[name].spread(part)
                self.masks[name] = spread & self.masks[name] if name in self.masks else spread
        self._reached = wanted
        self._apply()

    def _highest(self, alive: Mapping[str, Tensor], wanted: float) -> dict[str, Tensor]:
        """Which blocks stay: those with the highest mean score, of a weight or of all."""
        assert self._score.read is not None
        scores = {}
        for name, blocks in self._blocks.items():
            means = blocks.means(self._score.read(self._scores.get(name), self._weights[name]))
            scores[name] = means.masked_fill(~alive[name], -torch.inf)
        chosen = {}
        for names in [list(scores)] if self._stage.scope == "global" else [[name] for name in scores]:
            flat = torch.cat([scores[name].flatten() for name in names])
            gone = int(wanted * flat.numel() + 0.5)
            stays = torch.ones_like(flat, dtype=torch.bool)
            stays[torch.argsort(flat, stable=True)[:gone]] = False
            for name, part in zip(names, stays.split([scores[name].numel() for name in names]), strict=True):
                chosen[name] = part.reshape(scores[name].shape)
        return chosen

    def state(self) -> dict[str, Tensor]:
        scores = {f"score.{name}": score for name, score in self._scores.items()}
        return {**super().state(), **scores, "reached": torch.tensor(self._reached, dtype=torch.float64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._reached = float(state["reached"])
        for name, score in self._scores.items():
            score.copy_(state[f"score.{name}"])
