"""``tf_model.h5``, as TensorFlow's models of transformers (up to version 4) saved it, in the Hugging Face layout.

Keras puts weights below layers, by the names of variables: ``mlm___cls/tf_bert_for_masked_lm/mlm___cls/predictions/
transform/dense/kernel:0`` is ``cls.predictions.transform.dense.weight``. The rules are those of
``convert_tf_weight_name_to_pt_weight_name`` in transformers 4 (``modeling_tf_pytorch_utils.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import MappedFile, quote, shown
from encast.importers.hdf5_file import read_hdf5
from encast.importers.weights import StoredTensor, agreeing, transposed

__all__ = ["read_tf_model", "rename_tf", "tf_config"]

_LAST = {"kernel": "weight", "gamma": "weight", "embeddings": "weight", "beta": "bias"}
_ENCODERS = ("bert", "distilbert", "roberta", "electra", "mpnet", "albert", "deberta")
"""Under which name the models with a head have their encoder; a model without one has it too, and in PyTorch not."""
_COUNTING = ("roberta", "xlm-roberta", "camembert", "mpnet")
"""Whose positions are numbered from behind the padding's id, which is 1 in all of their code for TensorFlow."""
_PAD = 1
_PARTS = {"pos_proj": "pos_key_proj", "pos_q_proj": "pos_query_proj"}
"""Of a DeBERTa with ``share_att_key`` false, which transformers names in one way for TensorFlow and in another for
PyTorch."""


def read_tf_model(file: MappedFile) -> dict[str, StoredTensor]:
    """The tensors of a whole model, which stand at ``LAYER/MODEL/VARIABLE``; see ``rename_tf``.

    A variable that two layers use, such as the words of a masked-LM head, is stored for each. Raises
    ``CheckpointError`` where these differ in shape or, when the elements are asked for, in value.
    """
    variables: dict[str, StoredTensor] = {}
    for path, stored in read_hdf5(file).items():
        _, _, name = path.partition("/")
        _, _, variable = name.partition("/")
        if not variable:
            raise CheckpointError(
                f"{file.path}: {quote(path)} belongs to no layer of a model; transformers writes LAYER/MODEL/VARIABLE"
            )
        variables[variable] = _once(variables[variable], stored, variable) if variable in variables else stored
    return rename_tf(variables, str(file.path))


def rename_tf(variables: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """The variables under the names that transformers gives them in PyTorch, kernels transposed.

    Raises ``CheckpointError`` where two would get one name.
    """
    tensors: dict[str, StoredTensor] = {}
    for variable, stored in variables.items():
        name = _name(variable)
        if name in tensors:
            raise CheckpointError(f"{where}: two variables would be {quote(name)}, one of them {quote(variable)}")
        tensors[name] = transposed(stored) if re.search(r"(^|/)kernel(:\d+)?$", variable) else stored
    first = {name.partition(".")[0] for name in tensors}
    if len(first) == 1 and first < set(_ENCODERS):
        return {name.partition(".")[2]: stored for name, stored in tensors.items()}
    return tensors


def _name(variable: str) -> str:
    parts = re.sub(r":\d+$", "", variable).replace("_._", "/").split("/")
    parts = [part.rpartition("___")[2] for part in parts if part]
    parts = [_PARTS.get(part, part) for part in parts]
    return ".".join([*parts[:-1], _LAST.get(parts[-1], parts[-1])]) if parts else ""


def tf_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The config with what TensorFlow's models of transformers do whatever it says: decoders are tied to the words.

    Raises ``UnsupportedModelError`` for fields that these models leave out: the same weights have other answers in
    PyTorch, and which ones are meant cannot be told.
    """
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise UnsupportedModelError(
            f"{where}: position_embedding_type is {shown(kind)}, and TensorFlow's models of transformers leave it out; "
            "weights of PyTorch are needed"
        )
    pad = config.get("pad_token_id", _PAD)
    if config.get("model_type") in _COUNTING and pad != _PAD:
        raise UnsupportedModelError(
            f"{where}: pad_token_id is {shown(pad)}, and TensorFlow's models of transformers count positions "
            f"from {_PAD} whatever it is; weights of PyTorch are needed"
        )
    return config if config.get("tie_word_embeddings", True) else {**config, "tie_word_embeddings": True}


def _once(one: StoredTensor, other: StoredTensor, name: str) -> StoredTensor:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        raise CheckpointError(
            f"{one.where}: variable {quote(name)} is stored for two layers, as {one.dtype}{list(one.shape)} and as "
            f"{other.dtype}{list(other.shape)}; the file is damaged"
        )
    complaint = (
        f"variable {quote(name)} is stored for two layers with other values, so it is not clear which count; save the "
        "model anew"
    )
    return agreeing(one, other, complaint)
