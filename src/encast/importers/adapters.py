"""Adapters of low rank (LoRA, Hu et al. 2021) that a checkpoint holds beside its weights, as jina-embeddings-v3 does.

Its code registers one parametrisation of torch on every linear layer and embedding: ``NAME.weight`` is stored as
``NAME.parametrizations.weight.original``, and ``lora_A`` and ``lora_B`` below ``NAME.parametrizations.weight.0`` have a
matrix for each of ``lora_adaptations``. The weight with an adapter is the original plus ``lora_alpha / lora_rank``
times the product of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from encast.errors import CheckpointError, InputError
from encast.importers.files import quote, shown
from encast.importers.sentence_modules import SentenceModules
from encast.importers.weights import StoredTensor, TensorSource

__all__ = ["NO_ADAPTER", "adapted_modules", "adapted_tensors", "find_adapter"]

NO_ADAPTER = "none"
"""The name that stands for the weights without an adapter."""

_ORIGINAL = ".parametrizations.weight.original"
_FACTORS = (".parametrizations.weight.0.lora_A", ".parametrizations.weight.0.lora_B")
_ROWS = 4096
"""Of a table, that are added at a time: f64 takes twice the memory of the weight itself."""


def find_adapter(config: Mapping[str, Any], adapter: str, where: str) -> int | None:
    """The place of ``adapter`` among those of the config, None for ``NO_ADAPTER``.

    Raises ``InputError`` where there is none of that name, and ``CheckpointError`` for a damaged list.
    """
    names = config.get("lora_adaptations") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise CheckpointError(f"{where}: lora_adaptations is {shown(names)}; a list of names is needed")
    if len(set(names)) != len(names) or NO_ADAPTER in names:
        raise CheckpointError(
            f"{where}: lora_adaptations has a name twice, or {NO_ADAPTER!r}, which stands for the weights alone"
        )
    if not names:
        raise InputError(f"adapter is {adapter!r}, and {where} names no adapters (lora_adaptations); leave it out")
    if adapter != NO_ADAPTER and adapter not in names:
        raise InputError(f"adapter is {adapter!r}; {where} has {', '.join(names)}, and {NO_ADAPTER} stands for none")
    return None if adapter == NO_ADAPTER else names.index(adapter)


def adapted_tensors(tensors: TensorSource, config: Mapping[str, Any], index: int | None, where: str) -> TensorSource:
    """The tensors with adapter ``index`` in the weights, under the names of a checkpoint without adapters.

    A weight is made when it is asked for, in f64, and rounded to f32 once. Raises ``CheckpointError`` where factors are
    missing or of other shapes than the config and the weight say.
    """
    count = len(config["lora_adaptations"])
    scale = _scale(config, where)
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
        original = tensors.stored(name + _ORIGINAL)
        if index is None:
            found[f"{name}.weight"] = original
            continue
        table = "embeddings." in name
        _check_factors(tensors, name, count, config, table)
        made = partial(_adapted, tensors, name, index, scale, table)
        found[f"{name}.weight"] = StoredTensor("F32", original.shape, original.where, made)
    factors = {name + end for name in adapted for end in _FACTORS}
    others = {name: tensors.stored(name) for name in tensors if name not in factors and not name.endswith(_ORIGINAL)}
    return TensorSource(others | found, where)


def adapted_modules(
    modules: SentenceModules | None, config: Mapping[str, Any], adapter: str, where: str
) -> SentenceModules | None:
    """With the adapter's text (``task_instructions``) before each input, as its code puts it there."""
    if modules is None or adapter == NO_ADAPTER:
        return modules
    texts = config.get("task_instructions") or {}
    if not isinstance(texts, Mapping) or not all(isinstance(text, str) for text in texts.values()):
        raise CheckpointError(f"{where}: task_instructions must be an object from names of adapters to texts")
    prompts = {**texts, **modules.prompts}
    if adapter in texts and prompts[adapter] != texts[adapter]:
        raise CheckpointError(
            f"{where}: task_instructions has {quote(texts[adapter])} for {adapter}, config_sentence_transformers.json "
            f"{quote(prompts[adapter])}; make them alike"
        )
    if adapter not in prompts:
        return modules
    return replace(modules, prompts=prompts, default_prompt_name=adapter)


def _scale(config: Mapping[str, Any], where: str) -> float:
    """``lora_alpha / lora_rank``, with the defaults of the model's code."""
    rank, alpha = config.get("lora_rank", 4), config.get("lora_alpha", 1)
    if type(rank) is not int or rank < 1:
        raise CheckpointError(f"{where}: lora_rank is {shown(rank)}; an integer of at least 1 is needed")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) <= 1e6:
        raise CheckpointError(f"{where}: lora_alpha is {shown(alpha)}; a number of at most 1e6 is needed")
    return float(alpha) / rank


def _check_factors(tensors: TensorSource, name: str, count: int, config: Mapping[str, Any], table: bool) -> None:
    original, rank = tensors.stored(name + _ORIGINAL), config.get("lora_rank", 4)
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
        weight[part] += scale * (left[part] @ right)
    return weight
