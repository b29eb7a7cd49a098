"""A dense layer of sentence-transformers, and the checks that the configs of its modules share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import Folder, quote
from encast.importers.model_files import read_tensors

__all__ = ["DenseModule", "check_fields", "check_names", "flag", "read_dense"]

_DENSE_ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.linear.Identity": "none",
}


@dataclass(frozen=True)
class DenseModule:
    """``activation(x @ weight.T + bias)`` on rows of embeddings; ``weight: f32[out, in]``, ``bias: f32[out]``."""

    weight: np.ndarray[Any, np.dtype[np.float32]]
    bias: np.ndarray[Any, np.dtype[np.float32]] | None
    activation: str


def flag(config: Mapping[str, Any], field: str, default: bool, where: str) -> bool:
    """A field that is true, false or, for the default, null or absent; raises ``CheckpointError``."""
    value = config.get(field, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {field} must be true or false")
    return value


def check_fields(config: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raises ``UnsupportedModelError`` for a field that is none of ``known``, unless it is null or false."""
    for name, value in config.items():
        if name not in known and value not in (None, False):
            raise UnsupportedModelError(f"{where}: the field {quote(name)} is not understood and may change results")


def check_names(folder: Folder, *, of: str = "sentence_embedding", optional: bool = False) -> dict[str, Any]:
    """The config of a module, checked to read and write the rows called ``of``."""
    if optional and not folder.has("config.json"):
        return {}
    where = str(folder.path("config.json"))
    config = folder.object("config.json")
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, of):
            raise UnsupportedModelError(f"{where}: {name} is {quote(config[name])}; {of} is supported")
    return config


def read_dense(
    folder: Folder, *, of: str = "sentence_embedding", default: str = "torch.nn.modules.activation.Tanh"
) -> DenseModule:
    """The module in a folder, on the rows called ``of``; ``default``: its activation where the config names none.

    Raises ``CheckpointError`` where config and weights do not fit together, ``UnsupportedModelError`` for an activation
    or a field that encast does not have.
    """
    where = str(folder.path("config.json"))
    config = check_names(folder, of=of)
    sizes = {"in_features", "out_features"}
    names = {"bias", "activation_function", "module_input_name", "module_output_name"}
    check_fields(config, {*sizes, *names}, where)
    activation = config.get("activation_function", default)
    if not isinstance(activation, str) or activation not in _DENSE_ACTIVATIONS:
        raise UnsupportedModelError(
            f"{where}: activation_function is {quote(activation)}; supported are {', '.join(_DENSE_ACTIVATIONS)}"
        )
    tensors = read_tensors(folder)
    has_bias = flag(config, "bias", True, where)
    expected = {"linear.weight", "linear.bias"} if has_bias else {"linear.weight"}
    for name in tensors:
        if name not in expected:
            raise CheckpointError(f"{folder.root}: tensor {quote(name)} is none of {', '.join(sorted(expected))}")
    weight = tensors.f32("linear.weight")
    bias = tensors.f32("linear.bias") if has_bias else None
    if weight.shape != (config.get("out_features"), config.get("in_features")):
        raise CheckpointError(
            f"{where}: linear.weight has shape {list(weight.shape)}, out_features and in_features say "
            f"[{config.get('out_features')}, {config.get('in_features')}]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise CheckpointError(f"{where}: linear.bias has shape {list(bias.shape)}, [{weight.shape[0]}] is needed")
    return DenseModule(weight, bias, _DENSE_ACTIVATIONS[activation])
