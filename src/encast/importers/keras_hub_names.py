"""KerasHub's weights under the names of the Hugging Face layout.

Keras numbers the layers of one class, and the weights of a layer: ``layers/transformer_encoder_1/_self_attention_layer/
query_dense/vars/0`` is the kernel of the second layer's queries. Kernels have the inputs first, and those of attention
have heads as a dimension of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import quote
from encast.importers.weights import DTYPES, WEIGHT_DTYPES, StoredTensor, agreeing, changed

__all__ = ["FAMILIES", "PADDING_ROWS", "HubFamily", "backbone_tensors", "head_tensors", "same_backbone", "split_task"]

PADDING_ROWS = 2
"""Rows of RoBERTa's positions up to the padding id 1, which transformers has and KerasHub leaves out."""

Sizes = Mapping[str, int]
"""The settings of ``config.json`` and ``task.json`` that are sizes."""

_HEAD = "hidden_dim/num_heads"
"""The size of a head, beside the names of settings."""


@dataclass(frozen=True)
class Layer:
    """A layer's weights, by the names of their sizes.

    ``vars/0`` has the sizes ``inputs`` and then ``outputs``, ``vars/1`` has ``outputs``; what they are called is
    ``names``. ``kernel``: whether the first one is a kernel, which becomes ``[outputs, inputs]``.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    names: tuple[str, ...] = ("weight", "bias")
    kernel: bool = True


def _table(rows: str) -> Layer:
    return Layer((rows,), ("hidden_dim",), ("weight",), kernel=False)


_NORM = Layer((), ("hidden_dim",), kernel=False)
_SQUARE = Layer(("hidden_dim",), ("hidden_dim",))
_CLASSES = Layer(("hidden_dim",), ("num_classes",))
_INTO_HEADS = Layer(("hidden_dim",), ("num_heads", _HEAD))

_LAYER = re.compile(r"layers/transformer_encoder(?:_([1-9]\d{0,3}))?/([a-z_]+(?:/[a-z_]+)?)/vars/(\d)")
_PARTS = {
    "_self_attention_layer/query_dense": _INTO_HEADS,
    "_self_attention_layer/key_dense": _INTO_HEADS,
    "_self_attention_layer/value_dense": _INTO_HEADS,
    "_self_attention_layer/output_dense": Layer(("num_heads", _HEAD), ("hidden_dim",)),
    "_self_attention_layer_norm": _NORM,
    "_feedforward_intermediate_dense": Layer(("hidden_dim",), ("intermediate_dim",)),
    "_feedforward_output_dense": Layer(("intermediate_dim",), ("hidden_dim",)),
    "_feedforward_layer_norm": _NORM,
}
_BERT_LAYER = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
)  # fmt: skip
_DISTILBERT_LAYER = (
    "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm", "ffn.lin1",
    "ffn.lin2", "output_layer_norm",
)  # fmt: skip
_EMBEDDINGS = {
    "layers/token_and_position_embedding/token_embedding": ("embeddings.word_embeddings", _table("vocabulary_size")),
    "layers/token_and_position_embedding/position_embedding": (
        "embeddings.position_embeddings",
        _table("max_sequence_length"),
    ),
    "layers/layer_normalization": ("embeddings.LayerNorm", _NORM),
}
_ELSEWHERE = ("optimizer/", "preprocessor/")
"""Of training, and of tokenizers: no forward reads them."""


@dataclass(frozen=True)
class HubFamily:
    """A backbone: ``layers`` are paths in the file → modules, ``layer_parts`` modules in the order of ``_PARTS``.

    ``heads``: task of encast → paths in ``task.weights.h5`` → modules; ``reasons``: tasks that are not read, and why.
    """

    model_type: str
    stem: str
    layer_path: str
    layer_parts: tuple[str, ...]
    layers: Mapping[str, tuple[str, Layer]]
    heads: Mapping[str, Mapping[str, tuple[str, Layer]]]
    reasons: Mapping[str, str]


FAMILIES: Mapping[str, HubFamily] = {
    "Bert": HubFamily(
        "bert",
        "Bert",
        "encoder.layer",
        _BERT_LAYER,
        {
            "layers/reversible_embedding": ("embeddings.word_embeddings", _table("vocabulary_size")),
            "layers/position_embedding": ("embeddings.position_embeddings", _table("max_sequence_length")),
            "layers/embedding": ("embeddings.token_type_embeddings", _table("num_segments")),
            "layers/layer_normalization": ("embeddings.LayerNorm", _NORM),
            "layers/dense": ("pooler.dense", _SQUARE),
        },
        {"classify": {"layers/dense": ("classifier", _CLASSES)}},
        {"fill_mask": "its head computes GELU by erf and its layers by tanh, and encast's BERT has both alike"},
    ),
    "DistilBert": HubFamily(
        "distilbert",
        "DistilBert",
        "transformer.layer",
        _DISTILBERT_LAYER,
        _EMBEDDINGS,
        {"classify": {"layers/dense": ("pre_classifier", _SQUARE), "layers/dense_1": ("classifier", _CLASSES)}},
        {"fill_mask": "the norm of its head has an epsilon of 1e-5 and its layers 1e-12, and encast's has both alike"},
    ),
    "Roberta": HubFamily(
        "roberta",
        "Roberta",
        "encoder.layer",
        _BERT_LAYER,
        _EMBEDDINGS,
        {
            "classify": {
                "layers/dense": ("classifier.dense", _SQUARE),
                "layers/dense_1": ("classifier.out_proj", _CLASSES),
            },
            "fill_mask": {
                "layers/masked_lm_head/_intermediate_dense": ("lm_head.dense", _SQUARE),
                "layers/masked_lm_head/_intermediate_layer_norm": ("lm_head.layer_norm", _NORM),
                "layers/masked_lm_head": ("lm_head", Layer((), ("vocabulary_size",), ("bias",), kernel=False)),
            },
        },
        {},
    ),
}
"""By the name of the class without ``Backbone``."""


def backbone_tensors(
    family: HubFamily, stored: Mapping[str, StoredTensor], sizes: Sizes, where: str
) -> dict[str, StoredTensor]:
    """The tensors of ``model.weights.h5``, of floating-point numbers, under the names of the Hugging Face layout and in
    its shapes: ``[outputs, inputs]`` for every product.

    Raises ``CheckpointError`` for paths that the backbone does not have and for shapes that do not follow from its
    ``sizes``, and ``UnsupportedModelError`` for quantised weights.
    """
    sizes = {**sizes, _HEAD: sizes["hidden_dim"] // sizes["num_heads"]}
    parts = dict(zip(_PARTS, family.layer_parts, strict=True))
    tensors: dict[str, StoredTensor] = {}
    for path, tensor in _used(stored).items():
        match = _LAYER.fullmatch(path)
        if match is not None and match[2] in parts:
            place = f"{family.layer_path}.{match[1] or 0}.{parts[match[2]]}", _PARTS[match[2]]
            _put(tensors, place, path, tensor, sizes, where)
        else:
            _put(tensors, _named(family.layers, path), path, tensor, sizes, where)
    name = "embeddings.position_embeddings.weight"
    if family.model_type == "roberta" and name in tensors:
        tensors[name] = _with_rows_before(tensors[name], PADDING_ROWS)
        shape = (1, sizes["hidden_dim"])
        types = StoredTensor("F32", shape, where, lambda: np.zeros(shape, np.float32))
        tensors["embeddings.token_type_embeddings.weight"] = types
    return tensors


def split_task(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The tensors of ``task.weights.h5`` that are of the backbone, by their paths in ``model.weights.h5``, and those of
    the head; as they are stored. KerasHub leaves the backbone to ``model.weights.h5``, KerasNLP has it in both.
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


def same_backbone(
    stored: Mapping[str, StoredTensor], nested: Mapping[str, StoredTensor], nested_where: str
) -> dict[str, StoredTensor]:
    """The tensors of ``model.weights.h5``, compared with those of the same paths in ``task.weights.h5``.

    Raises ``CheckpointError`` where these have another shape or dtype, or are of no such path; elements are compared
    when they are asked for. Some versions load one file last, some the other.
    """
    found = dict(stored)
    for path, other in _used(nested).items():
        one = stored.get(path)
        if one is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            has = "does not have it" if one is None else f"has {one.dtype}{list(one.shape)}"
            raise CheckpointError(
                f"{nested_where}: the backbone's {quote(path)} is {other.dtype}{list(other.shape)}, and "
                f"model.weights.h5 {has}; the files are of different models, so save the preset anew"
            )
        complaint = (
            f"{quote(path)} has other values than in {nested_where}, and which of them is loaded depends on the "
            "version of KerasHub or KerasNLP; save the preset anew"
        )
        found[path] = agreeing(one, other, complaint)
    return found


def head_tensors(
    names: Mapping[str, tuple[str, Layer]], stored: Mapping[str, StoredTensor], sizes: Sizes, where: str
) -> dict[str, StoredTensor]:
    """The tensors of ``task.weights.h5``, whose layers are ``names``; as ``backbone_tensors`` in all else."""
    tensors: dict[str, StoredTensor] = {}
    for path, tensor in _used(stored).items():
        _put(tensors, _named(names, path), path, tensor, sizes, where)
    return tensors


def _used(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    return {path: tensor for path, tensor in stored.items() if not path.startswith(_ELSEWHERE)}


def _named(names: Mapping[str, tuple[str, Layer]], path: str) -> tuple[str, Layer] | None:
    return names.get(path.rpartition("/vars/")[0])


def _put(
    tensors: dict[str, StoredTensor],
    place: tuple[str, Layer] | None,
    path: str,
    tensor: StoredTensor,
    sizes: Sizes,
    where: str,
) -> None:
    number = path.rpartition("/vars/")[2]
    if tensor.dtype not in WEIGHT_DTYPES:
        raise UnsupportedModelError(
            f"{where}: {quote(path)} is stored as {tensor.dtype}; {', '.join(WEIGHT_DTYPES)} are read. If "
            "quantize() was called, save the preset before it"
        )
    if place is None or number not in map(str, range(len(place[1].names))):
        raise CheckpointError(
            f"{where}: {quote(path)}, {tensor.dtype}{list(tensor.shape)}, has no place in the model; the file is of "
            "another class, or of a version of KerasHub with other layers, than the config says"
        )
    module, layer = place
    names = layer.outputs if number == "1" else layer.inputs + layer.outputs
    shape = tuple(sizes[name] for name in names)
    if tensor.shape != shape:
        raise CheckpointError(
            f"{where}: {quote(path)} has the shape {list(tensor.shape)}, and by the settings it has "
            f"[{', '.join(names)}] = {list(shape)}; weights and settings are of different models"
        )
    kernel = layer.kernel and number == "0"
    flat = math.prod(sizes[name] for name in layer.inputs), math.prod(sizes[name] for name in layer.outputs)
    name = f"{module}.{layer.names[int(number)]}"
    if kernel:
        tensors[name] = changed(tensor, flat[::-1], lambda array: array.reshape(flat).T)
    elif number == "1":
        tensors[name] = changed(tensor, flat[1:], lambda array: array.reshape(flat[1]))
    else:
        tensors[name] = tensor


def _with_rows_before(table: StoredTensor, rows: int) -> StoredTensor:
    """The table behind rows of zeros."""

    def longer(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([np.zeros((rows, *table.shape[1:]), DTYPES[table.dtype]), array])

    return changed(table, (table.shape[0] + rows, *table.shape[1:]), longer)
