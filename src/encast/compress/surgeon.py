"""Prunes a model with ``obs.remove_blocks``, one product after the other, on the inputs that rows give them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from encast.compress.model import LAYER, Model
from encast.compress.obs import Moments, remove_blocks
from encast.errors import InputError
from encast.sparsity import Pattern

__all__ = ["Surgeon", "calibration_tokens", "surgery_seconds"]

Tensor = Any
Batch = tuple[Tensor, Tensor, Tensor]
Progress = Callable[[int, int], None]

_TOKENS = 8
"""Calibration tokens for each input of the widest product. With 1, 4 and 16 the error on other rows is 1.9, 1.1 and 1
times as large on made inputs."""

_TRIED = 4
"""Groups of outputs in a trial: the more of them it takes longer than with one is what each of the others takes."""


class Surgeon:
    """``batches(tokens)`` gives rows with about so many tokens as ``ids, types, mask`` of the model.
    ``progress(done, total)`` counts products."""

    def __init__(self, model: Model, batches: Callable[[int], Sequence[Batch]], progress: Progress) -> None:
        self._model, self._batches, self._progress = model, batches, progress

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def __call__(self, alive: Mapping[str, Tensor], sparsity: float, pattern: Pattern) -> dict[str, Tensor]:
        """Leaves every product the share ``1 - sparsity`` of its blocks, of those that are ``alive``; changes the
        model's weights. Returns what is alive then. Raises ``InputError`` where the model's numbers are not finite.
        """
        model = self._model
        training = model.module.training
        model.module.eval()
        batches = self._batches(calibration_tokens(model, alive))
        reference = Model(copy.deepcopy(model.module), model.checkpoint, model.task)
        pair = _Inputs(model, batches), _Inputs(reference, batches)
        chosen: dict[str, Tensor] = {}
        try:
            done = None
            for names, calls in _groups(model, batches[0], alive):
                layer = _layer(names[0])
                if done is not None and layer != done:
                    for inputs in pair:
                        inputs.skip(done)
                done = layer
                moments = _moments(*(inputs.of(names[0], calls) for inputs in pair))
                for name in names:
                    chosen[name] = self._prune(name, moments, alive[name], sparsity, pattern)
                    self._progress(len(chosen), len(alive))
        finally:
            for inputs in pair:
                inputs.restore()
            model.module.train(training)
        if unused := sorted(set(alive) - set(chosen)):
            raise InputError(f"{unused[0]}: no row of the training set reaches it; keep it dense with `keep`")
        return chosen

    def _prune(self, name: str, moments: Moments, alive: Tensor, sparsity: float, pattern: Pattern) -> Tensor:
        weight = self._model.parameters()[name]
        stay = alive.numel() - int(sparsity * alive.numel() + 0.5)
        try:
            made, chosen = remove_blocks(weight.detach().float(), moments, alive, stay, pattern)
        except (torch.linalg.LinAlgError, ValueError) as error:
            raise InputError(
                f"{name} cannot be pruned by its outputs: {str(error).splitlines()[0][:200]}; lower learning-rate "
                "where training diverged, or choose another score"
            ) from None
        weight.copy_(made)
        return chosen


def calibration_tokens(model: Model, names: Collection[str]) -> int:
    """Some times more than the widest product has inputs: with fewer the solution fits these rows and no others."""
    return _TOKENS * max((int(model.parameters()[name].shape[1]) for name in names), default=0)


def surgery_seconds(model: Model, names: Collection[str], pattern: str, tokens: int) -> float:
    """How long ``Surgeon`` works on these products besides running the model, from a trial of each shape."""
    return sum(_trial(*model.parameters()[name].shape, pattern, tokens, str(model.device)) for name in names)


@cache
def _trial(outputs: int, inputs: int, pattern: str, tokens: int, device: str) -> float:
    """Of one product, from a few of its rows and made inputs; how many zeros are made hardly matters."""
    parsed = Pattern.parse(pattern)
    groups = -(-outputs // parsed.outputs)
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(rows, inputs, generator=generator).to(device) for rows in (2 * inputs, _TRIED * parsed.outputs)
    )

    def squared() -> torch.Tensor:
        return x.T @ x / len(x)

    def removed(count: int) -> torch.Tensor:
        alive = torch.ones(count, -(-inputs // parsed.inputs), dtype=torch.bool, device=device)
        rows = weight[: count * parsed.outputs]
        made, _ = remove_blocks(rows, Moments(gram, gram), alive, alive.numel() // 2, parsed)
        return made

    gram = squared()
    removed(1)  # the first time of anything takes longer
    one, several = _seconds(partial(removed, 1)), _seconds(partial(removed, _TRIED))
    return 2 * _seconds(squared) * tokens / len(x) + one + max(0.0, several - one) / (_TRIED - 1) * (groups - 1)


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    began = time.perf_counter()
    float(work()[0, 0])  # a GPU is done with it then
    return time.perf_counter() - began


class _DoneError(Exception):
    """All inputs that were wanted have been seen."""


def _module(model: Model, name: str) -> Any:
    return model.module.get_submodule(name.removesuffix(".weight"))


def _layer(name: str) -> str | None:
    """The layer that a product is in; None where the layers share their weights."""
    found = LAYER.search(name)
    return None if found is None else name[: found.end()]


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
        model(*(one[:1] for one in batch))
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


def _moments(own: Iterable[Tensor], reference: Iterable[Tensor]) -> Moments:
    """Of the inputs of one product, ``f32[tokens, inputs]`` at a time."""
    square = cross = torch.zeros(())
    tokens = 0
    for x, other in zip(own, reference, strict=True):
        square, cross, tokens = square + x.T @ x, cross + other.T @ x, tokens + len(x)
    return Moments(square / tokens, cross / tokens)


class _Inputs:
    """Inputs of a model's products. Layers are pruned from the first to the last; one that is skipped gives what it
    gave when it last ran, which saves most of the work."""

    def __init__(self, model: Model, batches: Sequence[Batch]) -> None:
        self._model, self._batches = model, batches
        self._skipped: list[Any] = []
        self._kept: list[Any] = []
        self._at = 0

    def of(self, name: str, calls: int) -> Iterator[Tensor]:
        """``f32[tokens, inputs]`` of every batch and call of product ``name``, without padding; a row passes it
        ``calls`` times."""
        found: list[Tensor] = []

        def see(module: Any, given: tuple[Tensor, ...]) -> None:
            found.append(given[0].detach().float())
            if len(found) == calls:
                raise _DoneError

        for at, (_, _, mask) in enumerate(self._batches):
            found.clear()
            self._run(at, _module(self._model, name).register_forward_pre_hook(see))
            for x in found:
                yield x[mask] if x.shape[:2] == mask.shape else x.reshape(-1, x.shape[-1])

    def skip(self, layer: str) -> None:
        """To be called when the layer and those before it stay as they are."""
        kept: list[Any] = []

        def see(module: Any, given: Any, out: Any) -> None:
            kept.append(out)
            raise _DoneError

        module = self._model.module.get_submodule(layer)
        for at in range(len(self._batches)):
            self._run(at, module.register_forward_hook(see))
        self._kept = kept
        module.forward = lambda *_, **__: self._kept[self._at]
        self._skipped.append(module)

    def restore(self) -> None:
        """All layers run again."""
        for module in self._skipped:
            del module.forward
        self._skipped.clear()

    def _run(self, at: int, hook: Any) -> None:
        self._at = at
        try:
            self._model(*self._batches[at])
        except _DoneError:
            pass
        finally:
            hook.remove()
