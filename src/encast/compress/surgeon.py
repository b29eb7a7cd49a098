"""Prunes a model with ``obs.remove_blocks``, one product after the other, on the inputs that rows give them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from encast.compress.model import Model
from encast.compress.obs import Moments, remove_blocks
from encast.compress.recipe import Prune
from encast.errors import InputError
from encast.sparsity import Pattern

__all__ = ["Surgeon", "surgery_seconds"]

Tensor = Any
Batch = tuple[Tensor, Tensor, Tensor]
Progress = Callable[[int, int], None]


class Surgeon:
    """``batches()`` gives the rows as ``ids, types, mask`` of the model; some times more tokens than a product has
    inputs are needed. ``progress(done, total)`` counts products."""

    def __init__(self, model: Model, batches: Callable[[], Sequence[Batch]], progress: Progress) -> None:
        self._model, self._batches, self._progress = model, batches, progress

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def __call__(self, alive: Mapping[str, Tensor], sparsity: float, pattern: Pattern) -> dict[str, Tensor]:
        """Leaves every product the share ``1 - sparsity`` of its blocks, of those that are ``alive``; changes the
        model's weights. Returns what is alive then. Raises ``InputError`` where the model's numbers are not finite.
        """
        model = self._model
        training = model.module.training
        model.module.eval()
        reference = Model(copy.deepcopy(model.module), model.checkpoint, model.task)
        batches = self._batches()
        weights = model.parameters()
        chosen: dict[str, Tensor] = {}
        for names, calls in _groups(model, batches[0], alive):
            moments = _moments(model, reference, names[0], calls, batches)
            for name in names:
                stay = alive[name].numel() - int(sparsity * alive[name].numel() + 0.5)
                try:
                    made, chosen[name] = remove_blocks(
                        weights[name].detach().float(), moments, alive[name], stay, pattern
                    )
                except torch.linalg.LinAlgError:
                    raise InputError(
                        f"{name}: its inputs are not finite, or too large: training diverged; lower learning-rate"
                    ) from None
                weights[name].copy_(made)
                self._progress(len(chosen), len(alive))
        model.module.train(training)
        return chosen


def surgery_seconds(model: Model, names: Collection[str], stage: Prune) -> float:
    """How long ``Surgeon`` works on these products besides what their inputs cost, from a trial of each shape."""
    shapes = [tuple(model.parameters()[name].shape) for name in names]
    return sum(_trial(outputs, inputs, stage.pattern) for outputs, inputs in shapes)


@cache
def _trial(outputs: int, inputs: int, pattern: str) -> float:
    """Of one product, from a few of its rows and made inputs; how many zeros are made hardly matters."""
    parsed = Pattern.parse(pattern)
    groups = -(-outputs // parsed.outputs)
    tried = -(-groups // 64)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, inputs, generator=generator) for rows in (2 * inputs, tried * parsed.outputs))
    gram = x.T @ x / len(x)
    alive = torch.ones(tried, -(-inputs // parsed.inputs), dtype=torch.bool)
    began = time.perf_counter()
    remove_blocks(weight, Moments(gram, gram), alive, alive.numel() // 2, parsed)
    return (time.perf_counter() - began) * groups / tried


class _DoneError(Exception):
    """All inputs that were wanted have been seen."""


def _module(model: Model, name: str) -> Any:
    return model.module.get_submodule(name.removesuffix(".weight"))


def _groups(model: Model, batch: Batch, names: Collection[str]) -> list[tuple[list[str], int]]:
    """Products in the order in which they run, those with the same input together, and how often they run."""
    seen: dict[str, list[Tensor]] = {}
    hooks = [
        _module(model, name).register_forward_pre_hook(
            lambda module, given, name=name: seen.setdefault(name, []).append(given[0])
        )
        for name in names
    ]
    try:
        model(*batch)
    finally:
        for hook in hooks:
            hook.remove()
    # All inputs are still there, so that two at one place are the same.
    places = {name: [one.data_ptr() for one in inputs] for name, inputs in seen.items()}
    groups: list[tuple[list[str], int]] = []
    for name, own in places.items():
        if groups and places[groups[-1][0][0]] == own:
            groups[-1][0].append(name)
        else:
            groups.append(([name], len(own)))
    return groups


def _moments(model: Model, reference: Model, name: str, calls: int, batches: Sequence[Batch]) -> Moments:
    """Of the inputs of product ``name``, which a row passes ``calls`` times; padding does not count."""
    own = cross = torch.zeros(())
    tokens = 0
    for batch in batches:
        for x, other in zip(_inputs(model, name, calls, batch), _inputs(reference, name, calls, batch), strict=True):
            own, cross, tokens = own + x.T @ x, cross + other.T @ x, tokens + len(x)
    return Moments(own / tokens, cross / tokens)


def _inputs(model: Model, name: str, calls: int, batch: Batch) -> list[Tensor]:
    """``f32[tokens, inputs]`` of every call."""
    found: list[Tensor] = []
    mask = batch[2]

    def see(module: Any, given: tuple[Tensor, ...]) -> None:
        x = given[0].detach().float()
        found.append(x[mask] if x.shape[:2] == mask.shape else x.reshape(-1, x.shape[-1]))
        if len(found) == calls:
            raise _DoneError

    hook = _module(model, name).register_forward_pre_hook(see)
    try:
        model(*batch)
    except _DoneError:
        pass
    finally:
        hook.remove()
    return found
