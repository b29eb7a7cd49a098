"""KerasHub's weights under the names of the Hugging Face layout.

Keras numbers the layers of one class, and the weights of a layer: ``layers/transformer_encoder_1/_self_attention_layer/
query_dense/vars/0`` is the kernel of the second layer's queries. Kernels have the inputs first, and those of attention
have heads as a dimension of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import CheckpointError
from encast.importers.files import quote
from encast.importers.weights import DTYPES, StoredTensor

__all__ = ["FAMILIES", "PADDING_ROWS", "HubFamily", "backbone_tensors", "head_tensors", "split_task"]

PADDING_ROWS = 2
"""Rows of RoBERTa's positions up to the padding id 1, which transformers has and KerasHub leaves out."""

_LAYER = re.compile(r"layers/transformer_encoder(?:_([1-9]\d{0,3}))?/([a-z_]+(?:/[a-z_]+)?)/vars/([01])")
_PARTS = (
    "_self_attention_layer/query_dense",
    "_self_attention_layer/key_dense",
    "_self_attention_layer/value_dense",
    "_self_attention_layer/output_dense",
    "_self_attention_layer_norm",
    "_feedforward_intermediate_dense",
    "_feedforward_output_dense",
    "_feedforward_layer_norm",
)
_BERT_LAYER = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
)  # fmt: skip
_DISTILBERT_LAYER = (
    "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm", "ffn.lin1",
    "ffn.lin2", "output_layer_norm",
)  # fmt: skip
_TABLES = {
    "layers/token_and_position_embedding/token_embedding": "embeddings.word_embeddings",
    "layers/token_and_position_embedding/position_embedding": "embeddings.position_embeddings",
    "layers/layer_normalization": "embeddings.LayerNorm",
}
_CLASSIFIER = {"layers/dense": "classifier.dense", "layers/dense_1": "classifier.out_proj"}
_ELSEWHERE = ("optimizer/", "preprocessor/")
"""Of training, and of tokenizers: no forward reads them."""


@dataclass(frozen=True)
class HubFamily:
    """A backbone: ``layers`` and ``layer_parts`` (in the order of ``_PARTS``) are paths in the file → modules.

    ``heads``: task of encast → paths in ``task.weights.h5`` → modules; ``reasons``: tasks that are not read, and why.
    """

    model_type: str
    stem: str
    layer_path: str
    layer_parts: tuple[str, ...]
    layers: Mapping[str, str]
    heads: Mapping[str, Mapping[str, str]]
    reasons: Mapping[str, str]


_MASKED = "layers/masked_lm_head"
FAMILIES: Mapping[str, HubFamily] = {
    "Bert": HubFamily(
        "bert",
        "Bert",
        "encoder.layer",
        _BERT_LAYER,
        {
            "layers/reversible_embedding": "embeddings.word_embeddings",
            "layers/position_embedding": "embeddings.position_embeddings",
            "layers/embedding": "embeddings.token_type_embeddings",
            "layers/layer_normalization": "embeddings.LayerNorm",
            "layers/dense": "pooler.dense",
        },
        {"classify": {"layers/dense": "classifier"}},
        {"fill_mask": "its head computes GELU by erf and its layers by tanh, and encast's BERT has both alike"},
    ),
    "DistilBert": HubFamily(
        "distilbert",
        "DistilBert",
        "transformer.layer",
        _DISTILBERT_LAYER,
        _TABLES,
        {"classify": {"layers/dense": "pre_classifier", "layers/dense_1": "classifier"}},
        {"fill_mask": "the norm of its head has an epsilon of 1e-5 and its layers 1e-12, and encast's has both alike"},
    ),
    "Roberta": HubFamily(
        "roberta",
        "Roberta",
        "encoder.layer",
        _BERT_LAYER,
        _TABLES,
        {
            "classify": _CLASSIFIER,
            "fill_mask": {
                f"{_MASKED}/_intermediate_dense": "lm_head.dense",
                f"{_MASKED}/_intermediate_layer_norm": "lm_head.layer_norm",
                _MASKED: "lm_head",
            },
        },
        {},
    ),
}
"""By the name of the class without ``Backbone``."""


def backbone_tensors(family: HubFamily, stored: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """The tensors of ``model.weights.h5``; raises ``CheckpointError`` for paths that the backbone does not have."""
    parts = dict(zip(_PARTS, family.layer_parts, strict=True))
    tensors: dict[str, StoredTensor] = {}
    for path, tensor in stored.items():
        match = _LAYER.fullmatch(path)
        if match is not None and match[2] in parts:
            module = f"{family.layer_path}.{match[1] or 0}.{parts[match[2]]}"
            _put(tensors, module, path, tensor, where)
        elif not path.startswith(_ELSEWHERE):
            _put_named(tensors, family.layers, path, tensor, where)
    name = "embeddings.position_embeddings.weight"
    if family.model_type == "roberta" and name in tensors:
        tensors[name] = _with_rows_before(tensors[name], PADDING_ROWS)
        types = "embeddings.token_type_embeddings.weight"
        shape = (1, *tensors[name].shape[1:])
        tensors[types] = StoredTensor("F32", shape, where, lambda: np.zeros(shape, np.float32))
    return tensors


def split_task(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The paths of ``task.weights.h5`` that are of the backbone, without what leads to it, and those of the head.

    KerasHub leaves the backbone to ``model.weights.h5``; KerasNLP has it in both files and loads this one.
    """
    backbone: dict[str, StoredTensor] = {}
    head: dict[str, StoredTensor] = {}
    for path, tensor in stored.items():
        match = re.fullmatch(r"layers/[a-z_]+_backbone/(.+)", path)
        if match is None:
            head[path] = tensor
        else:
            backbone[match[1]] = tensor
    return backbone, head


def head_tensors(names: Mapping[str, str], stored: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """The tensors of ``task.weights.h5``, whose modules are ``names``; raises ``CheckpointError`` for others."""
    tensors: dict[str, StoredTensor] = {}
    for path, tensor in stored.items():
        if path == f"{_MASKED}/vars/0" and _MASKED in names:
            tensors[f"{names[_MASKED]}.bias"] = tensor
        elif not path.startswith(_ELSEWHERE):
            _put_named(tensors, names, path, tensor, where)
    return tensors


def _put_named(
    tensors: dict[str, StoredTensor], names: Mapping[str, str], path: str, tensor: StoredTensor, where: str
) -> None:
    layer, _, number = path.rpartition("/vars/")
    if layer not in names or number not in ("0", "1"):
        raise CheckpointError(
            f"{where}: {quote(path)}, {tensor.dtype}{list(tensor.shape)}, has no place in the model; the file is of "
            "another class, or of a version of KerasHub with other layers, than the config says"
        )
    _put(tensors, names[layer], path, tensor, where)


def _put(tensors: dict[str, StoredTensor], module: str, path: str, tensor: StoredTensor, where: str) -> None:
    """A layer's first weight is its kernel, its table or its gamma, the second its bias or its beta."""
    if path.endswith("/0"):
        is_kernel = "embedding" not in path and len(tensor.shape) > 1
        tensors[f"{module}.weight"] = _kernel(tensor, path, where) if is_kernel else tensor
    else:
        tensors[f"{module}.bias"] = _reshaped(tensor, (math.prod(tensor.shape),))


def _kernel(tensor: StoredTensor, path: str, where: str) -> StoredTensor:
    if len(tensor.shape) not in (2, 3):
        raise CheckpointError(f"{where}: {quote(path)} has shape {list(tensor.shape)}; a kernel has two or three sizes")
    # Queries, keys and values make heads, and the output of attention joins them.
    inputs = tensor.shape[:-1] if "/output_dense/" in path else tensor.shape[:1]
    outputs = tensor.shape[len(inputs) :]
    flat = _reshaped(tensor, (math.prod(inputs), math.prod(outputs)))
    return StoredTensor(flat.dtype, flat.shape[::-1], flat.where, _Changed(flat.elements, np.transpose))


def _reshaped(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(
        tensor.dtype, shape, tensor.where, _Changed(tensor.elements, lambda array: array.reshape(shape))
    )


def _with_rows_before(table: StoredTensor, rows: int) -> StoredTensor:
    """The table behind rows of zeros."""
    before = np.zeros((rows, *table.shape[1:]), DTYPES[table.dtype])
    shape = (table.shape[0] + rows, *table.shape[1:]) if table.shape else ()
    return StoredTensor(
        table.dtype, shape, table.where, _Changed(table.elements, lambda array: np.concatenate([before, array]))
    )


@dataclass(frozen=True)
class _Changed:
    elements: Callable[[], np.ndarray[Any, Any]]
    change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]

    def __call__(self) -> np.ndarray[Any, Any]:
        return self.change(self.elements())
