"""The heads that BGE-M3 (arXiv 2402.03216) has beside its encoder: weights of tokens, and embeddings of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

from encast.errors import CheckpointError
from encast.importers.dense_module import DenseModule
from encast.importers.files import Folder, quote
from encast.importers.tokenizer_build import guarded
from encast.importers.torch_file import read_torch_file
from encast.importers.weights import TensorSource

__all__ = ["M3_FILES", "M3Heads", "read_m3_heads", "unweighted_tokens"]

M3_FILES = _SPARSE, _TOKENS = "sparse_linear.pt", "colbert_linear.pt"
"""Beside the weights."""


@dataclass(frozen=True)
class M3Heads:
    """Linear layers on the last hidden state of every token: ``weigh`` gives its weight, ``embed`` its embedding."""

    weigh: DenseModule
    embed: DenseModule


def read_m3_heads(folder: Folder) -> M3Heads | None:
    """Of the two files beside the weights, None where there is none of them.

    Raises ``CheckpointError`` where one is missing, damaged or no linear layer.
    """
    missing = [name for name in (_SPARSE, _TOKENS) if not folder.has(name)]
    if len(missing) == 2:
        return None
    if missing:
        raise CheckpointError(f"{folder.path(missing[0])} is missing; BGE-M3 has {_SPARSE} and {_TOKENS}")
    heads = M3Heads(_linear(folder, _SPARSE), _linear(folder, _TOKENS))
    if heads.weigh.weight.shape[0] != 1:
        raise CheckpointError(
            f"{folder.path(_SPARSE)}: weight has shape {list(heads.weigh.weight.shape)}; one row is needed"
        )
    return heads


def _linear(folder: Folder, name: str) -> DenseModule:
    where = str(folder.path(name))
    tensors = TensorSource(read_torch_file(folder.map(name)), where)
    for found in tensors:
        if found not in ("weight", "bias"):
            raise CheckpointError(f"{where}: tensor {quote(found)} is none of weight, bias")
    weight, bias = tensors.f32("weight"), tensors.f32("bias")
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise CheckpointError(
            f"{where}: weight has shape {list(weight.shape)}, bias {list(bias.shape)}; [out, in] and [out] are needed"
        )
    return DenseModule(weight, bias, "none")


def unweighted_tokens(tokenizer_json: str, special: Mapping[str, str], where: str) -> tuple[int, ...]:
    """The special tokens that have no weight, rising: first, last, padding and unknown one."""
    with guarded(where):
        tokenizer = Tokenizer.from_str(tokenizer_json)
    ids = (tokenizer.token_to_id(special[role]) for role in ("cls", "eos", "pad", "unk") if role in special)
    return tuple(sorted({token for token in ids if token is not None}))
