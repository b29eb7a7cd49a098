"""Writers of GluonNLP's files for tests: MXNet's list of arrays byte by byte, and models of the Hugging Face layout
under the names that GluonNLP gives their parameters."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import make_checkpoint
from safetensors.numpy import load_file, save_file

__all__ = [
    "V1",
    "V2",
    "V3",
    "array_bytes",
    "encoder_shapes",
    "pair",
    "params_bytes",
    "small_bert",
    "sparse_file",
    "tiny_model",
    "to_gluon",
    "vocabulary",
    "without_rows",
    "write_gluon",
]

Arrays = Mapping[str, np.ndarray[Any, Any]]

V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_FLAGS = {"f4": 0, "f8": 1, "f2": 2, "u1": 3, "i4": 4, "i1": 5, "i8": 6, "b1": 7, "u2": 12}


def array_bytes(
    array: np.ndarray[Any, Any] | None = None,
    *,
    magic: int | None = V2,
    storage: int = 0,
    shape: Sequence[int] | None = None,
    rank: int | None = None,
    flag: int | None = None,
    data: bytes | None = None,
) -> bytes:
    """One array; None for ``magic`` is the oldest form. What is given takes the place of the array's; u2 is BF16."""
    array = np.zeros(2, np.float32) if array is None else array
    shape = array.shape if shape is None else shape
    rank = len(shape) if rank is None else rank
    flag = _FLAGS[array.dtype.str[1:]] if flag is None else flag
    out = b""
    if magic is not None:
        out += struct.pack("<I", magic)
    if magic in (V2, V3):
        out += struct.pack("<i", storage)
    out += struct.pack("<i", rank) + struct.pack(f"<{len(shape)}{'I' if magic is None else 'q'}", *shape)
    return out + struct.pack("<iii", 1, 0, flag) + (np.ascontiguousarray(array).tobytes() if data is None else data)


def params_bytes(
    arrays: Arrays | Sequence[bytes], names: Sequence[str | bytes] | None = None, *, magic: int | None = V2
) -> bytes:
    """A file of named arrays; or of ready arrays with ``names``."""
    if isinstance(arrays, Mapping):
        names = list(arrays)
        arrays = [array_bytes(array, magic=magic) for array in arrays.values()]
    out = struct.pack("<QQQ", 0x112, 0, len(arrays)) + b"".join(arrays) + struct.pack("<Q", len(names or ()))
    for name in names or ():
        raw = name if isinstance(name, bytes) else name.encode()
        out += struct.pack("<Q", len(raw)) + raw
    return out


def vocabulary(tokens: Sequence[str], **special: str | None) -> bytes:
    """``Vocab.to_json`` of GluonNLP 0.9 and 0.10; ``special``: ``unknown_token`` and the others."""
    unknown = special.pop("unknown_token", "[UNK]")
    return json.dumps(
        {
            "idx_to_token": list(tokens),
            "token_to_idx": {token: index for index, token in enumerate(tokens)},
            "reserved_tokens": [token for token in special.values() if token],
            "unknown_token": unknown,
            "identifiers_to_tokens": special,
        }
    ).encode()


# Hugging Face name -> GluonNLP's by attributes, by classes of 0.9 and 0.10, and by classes before. OWNER is the model
# within a classifier ("bert."), MODEL the name of its class.
_CELL = "OWNERencoder.transformer_cells.{0}."
_NEW, _OLD = "bertencoder0_transformer{0}_", "bertencoder3_transformer{0}_"
_FFN, _OLD_FFN = _NEW + "positionwiseffn0_", _OLD + "bertpositionwiseffn0_"
_LAYER = {
    **{
        f"attention.self.{role}": (
            f"{_CELL}attention_cell.proj_{role}.",
            f"{_NEW}dotproductselfattentioncell0_{role}_",
            f"{_OLD}multiheadattentioncell0_{role}_",
        )
        for role in ("query", "key", "value")
    },
    "attention.output.dense": (_CELL + "proj.", _NEW + "proj_", _OLD + "proj_"),
    "attention.output.LayerNorm": (_CELL + "layer_norm.", _NEW + "layernorm0_", _OLD + "bertlayernorm0_"),
    "intermediate.dense": (_CELL + "ffn.ffn_1.", _FFN + "ffn_1_", _OLD_FFN + "ffn_1_"),
    "output.dense": (_CELL + "ffn.ffn_2.", _FFN + "ffn_2_", _OLD_FFN + "ffn_2_"),
    "output.LayerNorm": (_CELL + "ffn.layer_norm.", _FFN + "layernorm0_", _OLD_FFN + "bertlayernorm0_"),
}
_DISTIL = {
    "attention.q_lin": "attention.self.query",
    "attention.k_lin": "attention.self.key",
    "attention.v_lin": "attention.self.value",
    "attention.out_lin": "attention.output.dense",
    "sa_layer_norm": "attention.output.LayerNorm",
    "ffn.lin1": "intermediate.dense",
    "ffn.lin2": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}
_OTHERS = {
    "embeddings.word_embeddings": ("OWNERword_embed.0.", *2 * ("MODEL0_word_embed_embedding0_",)),
    "embeddings.token_type_embeddings": ("OWNERtoken_type_embed.0.", *2 * ("MODEL0_token_type_embed_embedding0_",)),
    "embeddings.position_embeddings": ("OWNERencoder.position_", *2 * ("bertencoder0_position_",)),
    "embeddings.LayerNorm": ("OWNERencoder.layer_norm.", "bertencoder0_layernorm0_", "bertencoder0_bertlayernorm0_"),
    "pooler.dense": ("OWNERpooler.", *2 * ("MODEL0_pooler_",)),
    "cls.predictions.transform.dense": ("OWNERdecoder.0.", *2 * ("MODEL0_dense0_",)),
    "cls.predictions.transform.LayerNorm": ("OWNERdecoder.2.", "MODEL0_layernorm0_", "MODEL0_bertlayernorm0_"),
    "cls.predictions": ("OWNERdecoder.3.", *2 * ("MODEL0_word_embed_embedding0_",)),
    "lm_head.dense": ("OWNERdecoder.0.", *2 * ("MODEL0_dense0_",)),
    "lm_head.layer_norm": ("OWNERdecoder.2.", "MODEL0_layernorm0_", "MODEL0_bertlayernorm0_"),
    "lm_head": ("OWNERdecoder.3.", *2 * ("MODEL0_word_embed_embedding0_",)),
    "qa_outputs": ("span_classifier.", *2 * ("bertforqa0_dense0_",)),
    "classifier.dense": ("classifier.1.", *2 * ("robertaclassifier0_dense0_",)),
    "classifier.out_proj": ("classifier.3.", *2 * ("robertaclassifier0_dense1_",)),
}
_CLASSIFIERS = {
    "classify": ("classifier.1.", *2 * ("bertclassifier0_dense0_",)),
    "tag": ("tag_classifier.", *2 * ("berttagger0_dense0_",)),
}
SCHEMES = ("attributes", "classes", "old classes", "export")


def to_gluon(tensors: Arrays, arch: str, head: str, scheme: str) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a checkpoint under the names that GluonNLP gives them; ``scheme``: one of ``SCHEMES``."""
    at = min(SCHEMES.index(scheme), 2) if scheme != "export" else 1
    table = {**_OTHERS, **({"classifier": _CLASSIFIERS[head]} if head in _CLASSIFIERS else {})}
    owner = {"tag": "bert_model.", "classify": f"{arch}.", "answer": "bert."}.get(head, "")
    made = {}
    for name, array in tensors.items():
        path, kind = name.removeprefix(f"{arch}.").rsplit(".", 1)
        if layer := re.fullmatch(r"(?:encoder|transformer)\.layer\.(\d+)\.(.*)", path):
            pattern = _LAYER[_DISTIL.get(layer[2], layer[2])][at].format(layer[1])
        else:
            pattern = table[path][at]
        if "norm" in path.lower():
            kind = {"weight": "gamma", "bias": "beta"}[kind]
        gluon = (pattern + kind).replace("OWNER", owner).replace("MODEL", f"{arch}model")
        made[f"arg:{gluon}" if scheme == "export" else gluon] = array
    if head == "fill_mask" and at == 0:
        made["decoder.3.weight"] = made["word_embed.0.weight"]
    return made


def tiny_model() -> bytes:
    """The file of a BERT of one layer and four columns, which with two heads in config.json becomes a graph."""
    cell, norms = "encoder.transformer_cells.0.", ("layer_norm", "ffn.layer_norm")
    shapes: dict[str, tuple[int, ...]] = {"word_embed.0.weight": (4, 4), "token_type_embed.0.weight": (2, 4)}
    shapes |= {"encoder.position_weight": (5, 4), "encoder.layer_norm.gamma": (4,), "encoder.layer_norm.beta": (4,)}
    for part, rows, columns in (
        ("attention_cell.proj_query", 4, 4),
        ("attention_cell.proj_key", 4, 4),
        ("attention_cell.proj_value", 4, 4),
        ("proj", 4, 4),
        ("ffn.ffn_1", 2, 4),
        ("ffn.ffn_2", 4, 2),
    ):
        shapes |= {f"{cell}{part}.weight": (rows, columns), f"{cell}{part}.bias": (rows,)}
    shapes |= {f"{cell}{norm}.{kind}": (4,) for norm in norms for kind in ("gamma", "beta")}
    return params_bytes({name: np.ones(shape, np.float32) for name, shape in shapes.items()})


def without_rows(folder: Path) -> None:
    """Makes a RoBERTa checkpoint one that GluonNLP can have: no token types, no rows of positions before the first."""
    tensors = load_file(folder / "model.safetensors")
    for name, array in tensors.items():
        if "token_type" in name:
            array[:] = 0
        if "position_embeddings" in name:
            array[:2] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_gluon(folder: Path, out: Path, arch: str, head: str, scheme: str = "attributes") -> Path:
    """The checkpoint in ``folder`` as ``out/net.params``, with vocabulary and what shapes do not tell."""
    out.mkdir()
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if arch == "roberta" and "position_embeddings" in name:
            tensors[name] = tensors[name][2:]
        elif arch == "roberta" and ("token_type" in name or "pooler" in name):
            del tensors[name]
    (out / "net.params").write_bytes(params_bytes(to_gluon(tensors, arch, head, scheme)))
    config = json.loads((folder / "config.json").read_text())
    names = ("model_type", "num_attention_heads", "hidden_act", "layer_norm_eps", "n_heads", "activation", "id2label")
    kept = {name: config[name] for name in names if name in config}
    if arch == "distilbert":
        kept["gluon_layer_norm_eps"] = 1e-12
    (out / "config.json").write_text(json.dumps(kept))
    if arch == "roberta":
        ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        text = vocabulary(
            list(ids),
            unknown_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            padding_token="<pad>",
            mask_token="<mask>",
        )
        (out / "merges.txt").write_bytes((folder / "merges.txt").read_bytes())
    else:
        tokens = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
        text = vocabulary(
            tokens, padding_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", bos_token=None
        )
    (out / "net.vocab").write_bytes(text)
    return out / "net.params"


def pair(folder: Path, arch: str, head: str, scheme: str = "attributes", **options: Any) -> tuple[Path, Path]:
    """A checkpoint in the Hugging Face layout and the same as GluonNLP's files."""
    hugging_face = make_checkpoint(folder / "net", arch, head, layers=2, hidden=32, tokenizer_json=False, **options)
    if arch == "roberta":
        without_rows(hugging_face)
    return hugging_face, write_gluon(hugging_face, folder / "gluon", arch, head, scheme)


def sparse_file(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A file of zeros that takes no room on the disk."""
    with path.open("wb") as file:
        file.write(struct.pack("<QQQ", 0x112, 0, len(shapes)))
        for shape in shapes.values():
            file.write(struct.pack(f"<Iii{len(shape)}qiii", V2, 0, len(shape), *shape, 1, 0, 0))
            file.seek(4 * int(np.prod(shape)), os.SEEK_CUR)
        file.write(struct.pack("<Q", len(shapes)))
        for name in shapes:
            file.write(struct.pack("<Q", len(name)) + name.encode())
    return path


def encoder_shapes(
    layers: int, hidden: int, inner: int, *, positions: int = 512, types: bool = True, words: int = 1000
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"word_embed.0.weight": (words, hidden)}
    if types:
        shapes["token_type_embed.0.weight"] = (2, hidden)
    shapes["encoder.position_weight"] = (positions, hidden)
    shapes |= dict.fromkeys(("encoder.layer_norm.gamma", "encoder.layer_norm.beta"), (hidden,))
    for layer in range(layers):
        at = f"encoder.transformer_cells.{layer}."
        for part, rows, columns in (
            *((f"attention_cell.proj_{role}", hidden, hidden) for role in ("query", "key", "value")),
            ("proj", hidden, hidden),
            ("ffn.ffn_1", inner, hidden),
            ("ffn.ffn_2", hidden, inner),
        ):
            shapes |= {f"{at}{part}.weight": (rows, columns), f"{at}{part}.bias": (rows,)}
        for part in ("layer_norm", "ffn.layer_norm"):
            shapes |= {f"{at}{part}.gamma": (hidden,), f"{at}{part}.beta": (hidden,)}
    return shapes


def small_bert(folder: Path, name: str = "net", words: int = 1000) -> Path:
    (folder / "config.json").write_text('{"num_attention_heads": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12}')
    return sparse_file(folder / f"{name}.params", encoder_shapes(1, 8, 16, words=words))
