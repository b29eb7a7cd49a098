"""Adapters of low rank (LoRA, Hu et al. 2021) that a checkpoint holds beside its weights, as jina-embeddings-v3 does.

Its code registers one parametrisation of torch on every linear layer and embedding: ``NAME.weight`` is stored as
``NAME.parametrizations.weight.original``, and ``lora_A`` and ``lora_B`` below ``NAME.parametrizations.weight.0`` have a
matrix for each of ``lora_adaptations``. The weight with an adapter is the original plus ``lora_alpha / lora_rank``
times the product of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from encast.errors import CheckpointError, InputError
from encast.importers.files import quote, shown
from encast.importers.sentence_modules import SentenceModules
from encast.importers.weights import StoredTensor, TensorSource

__all__ = ["NO_ADAPTER", "adapted_modules", "adapted_tensors", "adapters_of", "find_adapter"]

NO_ADAPTER = "none"
"""The name that stands for the weights without an adapter."""

_ORIGINAL = ".parametrizations.weight.original"
_FACTORS = (".parametrizations.weight.0.lora_A", ".parametrizations.weight.0.lora_B")
_ROWS = 4096
"""Of a table, that are added at a time: f64 takes twice the memory of the weight itself."""

_MOST_RANK = 1 << 16
_SHOWN = 8
"""Names in a message."""


def adapters_of(config: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The names of the adapters, none for other checkpoints; raises ``CheckpointError`` for a damaged list."""
    names = config.get("lora_adaptations") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise CheckpointError(f"{where}: lora_adaptations is {shown(names)}; a list of names is needed")
    if len(set(names)) != len(names) or NO_ADAPTER in names:
        raise CheckpointError(
            f"{where}: lora_adaptations has a name twice, or {NO_ADAPTER!r}, which stands for the weights alone"
        )
    return tuple(names)


def find_adapter(adapters: Sequence[str], adapter: str | None, where: str) -> int | None:
    """The place of ``adapter``, None for ``NO_ADAPTER``; raises ``InputError`` where none of that name is there."""
    if not adapters:
        raise InputError(
            f"adapter is {quote(adapter)}, and {where} names none (lora_adaptations, as jina-embeddings-v3 has them): "
            "leave it out; an adapter of PEFT is merged into the weights first (merge_and_unload)"
        )
    if adapter == NO_ADAPTER:
        return None
    if adapter in adapters:
        return adapters.index(adapter)
    more = f" and {len(adapters) - _SHOWN} more" if len(adapters) > _SHOWN else ""
    known = f"{', '.join(map(quote, adapters[:_SHOWN]))}{more}, or {NO_ADAPTER!r} for the weights alone"
    if adapter is None:
        raise InputError(
            f"{where}: lora_adaptations names adapters, of which one goes into the weights of an artifact: say "
            f"which with adapter (`encast compile --adapter`), {known}"
        )
    raise InputError(f"adapter is {quote(adapter)}; {where} has {known}")


def adapted_tensors(
    tensors: TensorSource, config: Mapping[str, Any], count: int, index: int | None, where: str
) -> TensorSource:
    """The tensors with adapter ``index`` of ``count`` in the weights, under the names of a checkpoint without any.

    A weight is made when it is asked for: what is stored, as f32, is summed in f64 and rounded to f32. Raises
    ``CheckpointError`` where factors are missing or of other shapes than the config and the weight say.
    """
    rank, scale = _rank_and_scale(config, where)
    adapted = [name.removesuffix(_ORIGINAL) for name in tensors if name.endswith(_ORIGINAL)]
    if not adapted:
        raise CheckpointError(
            f"{where}: lora_adaptations names {count} adapters, and no tensor ends in {quote(_ORIGINAL[1:])}: the "
            "weights are without them, or one was merged: remove the field"
        )
    found: dict[str, StoredTensor] = {}
    for name in adapted:
        if f"{name}.weight" in tensors:
            raise CheckpointError(f"{where}: {quote(name)} has a weight, and one below parametrizations; remove one")
        original, table = tensors.stored(name + _ORIGINAL), "embeddings." in name
        _check_factors(tensors, name, count, rank, table)
        found[f"{name}.weight"] = original
        if index is not None:
            made = partial(_adapted, tensors, name, index, scale, table)
            found[f"{name}.weight"] = StoredTensor("F32", original.shape, original.where, made)
    merged = {name + end for name in adapted for end in (_ORIGINAL, *_FACTORS)}
    return TensorSource({name: tensors.stored(name) for name in tensors if name not in merged} | found, where)


def adapted_modules(
    modules: SentenceModules | None, config: Mapping[str, Any], adapters: Sequence[str], index: int | None, where: str
) -> SentenceModules | None:
    """With the adapter's text (``task_instructions``) before each input, where ``encode`` of the model's code puts it.

    Raises ``CheckpointError`` unless there is a text for each adapter, and the same as in the modules' prompts.
    """
    texts = config.get("task_instructions")
    if (
        not isinstance(texts, Mapping)
        or {*texts} != {*adapters}
        or not all(isinstance(one, str) for one in texts.values())
    ):
        raise CheckpointError(f"{where}: task_instructions must be an object with a text for each of lora_adaptations")
    if modules is None or index is None:
        return modules
    adapter = adapters[index]
    if (other := modules.prompts.get(adapter, texts[adapter])) != texts[adapter]:
        raise CheckpointError(
            f"{where}: task_instructions has {quote(texts[adapter])} for {quote(adapter)}, "
            f"config_sentence_transformers.json {quote(other)}; make them alike"
        )
    return replace(modules, prompts={**texts, **modules.prompts}, default_prompt_name=adapter)


def _rank_and_scale(config: Mapping[str, Any], where: str) -> tuple[int, float]:
    """``lora_rank``, and ``lora_alpha`` over it, with the defaults of the model's code."""
    rank, alpha = config.get("lora_rank", 4), config.get("lora_alpha", 1)
    if type(rank) is not int or not 1 <= rank <= _MOST_RANK:
        raise CheckpointError(f"{where}: lora_rank is {shown(rank)}; an integer from 1 to {_MOST_RANK} is needed")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) <= 1e6:
        raise CheckpointError(f"{where}: lora_alpha is {shown(alpha)}; a number of at most 1e6 is needed")
    return rank, float(alpha) / rank


def _check_factors(tensors: TensorSource, name: str, count: int, rank: int, table: bool) -> None:
    original = tensors.stored(name + _ORIGINAL)
    if len(original.shape) != 2:
        raise CheckpointError(f"{original.where}: {quote(name + _ORIGINAL)} has shape {list(original.shape)}, not two")
    rows, columns = original.shape
    # A table is read by rows and a weight applied from the left, and the code gives each its own order.
    wanted = ((count, rows, rank), (count, rank, columns)) if table else ((count, rank, columns), (count, rows, rank))
    for end, shape in zip(_FACTORS, wanted, strict=True):
        if (found := tensors.shape(name + end)) != shape:
            raise CheckpointError(
                f"{original.where}: tensor {quote(name + end)} has shape {list(found)}; {count} lora_adaptations of "
                f"lora_rank {rank} need {list(shape)}"
            )


def _adapted(tensors: TensorSource, name: str, index: int, scale: float, table: bool) -> np.ndarray[Any, Any]:
    first, second = (tensors.f32(name + end)[index].astype(np.float64) for end in _FACTORS)
    left, right = (first, second) if table else (second, first)
    weight: np.ndarray[Any, Any] = tensors.f32(name + _ORIGINAL).copy()
    for begin in range(0, len(weight), _ROWS):
        part = slice(begin, begin + _ROWS)
        with np.errstate(over="ignore"):  # what reads the weight says where it is not finite
            weight[part] += scale * (left[part] @ right)
    return weight
