"""Writers of TensorFlow's files for tests, from the formats' definitions, so that tests can also write wrong ones.

Formats: ``tensorflow/core/lib/io/table_builder.cc``, ``tensorflow/core/protobuf/tensor_bundle.proto``,
``saved_model.proto`` and ``meta_graph.proto``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

__all__ = [
    "as_bundle",
    "block",
    "ended",
    "entry_bytes",
    "field",
    "google_name",
    "header_bytes",
    "masked_crc",
    "meta_graph",
    "number",
    "saved_model",
    "sealed",
    "table",
    "variables_of",
    "varint",
    "write_bundle",
]

Array = np.ndarray[Any, Any]

_DTYPES = {"f4": 1, "f8": 2, "i4": 3, "i8": 9, "u2": 14, "f2": 19}  # u2: the bits of bfloat16


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """CRC-32C, byte by byte, masked as LevelDB stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# Protocol buffers


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def number(field_number: int, value: int) -> bytes:
    """A varint field."""
    return varint(field_number << 3) + varint(value)


def field(field_number: int, value: bytes | str) -> bytes:
    """A field of bytes, text or a message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(field_number << 3 | 2) + varint(len(data)) + data


def _shape(dims: Iterable[int]) -> bytes:
    return b"".join(field(2, number(1, size & 2**64 - 1)) for size in dims)


def header_bytes(shards: int = 1, endian: int = 0, min_consumer: int = 0) -> bytes:
    """``BundleHeaderProto``; zeros are left out, as proto3 does."""
    version = number(1, 1) + (number(2, min_consumer) if min_consumer else b"")
    return number(1, shards) + (number(2, endian) if endian else b"") + field(3, version)


def entry_bytes(
    dtype: int = 1, shape: Sequence[int] = (2,), shard: int = 0, offset: int = 0, size: int = 8, crc: int = 0
) -> bytes:
    """``BundleEntryProto``."""
    out = number(1, dtype) + field(2, _shape(shape))
    out += (number(3, shard) if shard else b"") + (number(4, offset) if offset else b"")
    return out + number(5, size) + varint(6 << 3 | 5) + struct.pack("<I", crc)


# Tables


def block(entries: Iterable[tuple[bytes, bytes]], interval: int = 16) -> bytes:
    """A block without its trailer: keys share their beginnings, but every ``interval``-th is whole."""
    out, restarts, last = b"", [], b""
    for index, (key, value) in enumerate(entries):
        shared = 0
        if index % interval == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    return out + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def table(entries: Mapping[bytes, bytes], *, block_size: int = 4096, interval: int = 16, kind: int = 0) -> bytes:
    """A table of the entries, sorted, in blocks of about ``block_size`` bytes; ``kind``: their byte of compression."""
    blocks: list[list[tuple[bytes, bytes]]] = []
    filled = block_size
    for key in sorted(entries):
        if filled >= block_size:
            blocks.append([])
            filled = 0
        blocks[-1].append((key, entries[key]))
        filled += len(key) + len(entries[key]) + 3
    out, handles = b"", []
    for part in blocks:
        handles.append((part[-1][0], varint(len(out)) + varint(len(block(part, interval)))))
        out += sealed(block(part, interval), kind)
    return ended(out, handles)


def sealed(data: bytes, kind: int = 0) -> bytes:
    """A block with its trailer."""
    return data + bytes([kind]) + struct.pack("<I", masked_crc(data + bytes([kind])))


def ended(blocks: bytes, handles: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A table of sealed blocks, with the index block that ``handles`` say and the footer."""
    empty, index = block([]), block(handles, 1)
    footer = varint(len(blocks)) + varint(len(empty))
    out = blocks + sealed(empty)
    footer += varint(len(out)) + varint(len(index))
    return out + sealed(index) + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


# Checkpoints


def write_bundle(
    folder: Path,
    arrays: Mapping[str, Array],
    prefix: str = "bert_model.ckpt",
    *,
    shards: int = 1,
    block_size: int = 4096,
) -> Path:
    """``PREFIX.index`` and its data files, variables dealt out in turns; returns the prefix's path."""
    folder.mkdir(parents=True, exist_ok=True)
    data = [b""] * shards
    entries = {b"": header_bytes(shards)}
    for index, (name, array) in enumerate(arrays.items()):
        raw, shard = np.ascontiguousarray(array).tobytes(), index % shards
        entries[name.encode()] = entry_bytes(
            _DTYPES[array.dtype.str[1:]], array.shape, shard, len(data[shard]), len(raw), masked_crc(raw)
        )
        data[shard] += raw
    (folder / f"{prefix}.index").write_bytes(table(entries, block_size=block_size))
    for shard, content in enumerate(data):
        (folder / f"{prefix}.data-{shard:05d}-of-{shards:05d}").write_bytes(content)
    return folder / prefix


def google_name(name: str, array: Array) -> tuple[str, Array]:
    """The variable that google-research/bert has for a tensor of transformers."""
    for head, scope in (
        ("classifier", ""),
        ("qa_outputs", "cls/squad/"),
        ("cls.seq_relationship", "cls/seq_relationship/"),
    ):
        if name.startswith(head + "."):
            return scope + ("output_weights" if name.endswith("weight") else "output_bias"), array
    if name == "cls.predictions.bias":
        return "cls/predictions/output_bias", array
    path, _, last = name.rpartition(".")
    path = path.replace("encoder.layer.", "encoder.layer_").replace(".", "/")
    if path.endswith("_embeddings"):
        return path, array
    if path.endswith("LayerNorm"):
        return f"{path}/{'gamma' if last == 'weight' else 'beta'}", array
    return (f"{path}/kernel", array.T) if last == "weight" else (f"{path}/bias", array)


def variables_of(checkpoint: Path) -> dict[str, Array]:
    """The variables that google-research/bert would have in place of the tensors of a folder for transformers."""
    tensors = load_file(checkpoint / "model.safetensors")
    if not any(name.startswith("bert.") for name in tensors):
        tensors = {f"bert.{name}": array for name, array in tensors.items()}
    return dict(google_name(name, array) for name, array in tensors.items() if name != "cls.predictions.decoder.bias")


def as_bundle(checkpoint: Path, folder: Path, prefix: str = "bert_model.ckpt", **options: Any) -> Path:
    """A folder as google-research/bert has it, of one for transformers: bert_config.json, vocab.txt, a checkpoint."""
    write_bundle(folder, variables_of(checkpoint), prefix, **options)
    config = json.loads((checkpoint / "config.json").read_text())
    for name in ("architectures", "model_type", "num_labels"):
        config.pop(name, None)
    (folder / "bert_config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_bytes((checkpoint / "vocab.txt").read_bytes())
    return folder


# Graphs


def meta_graph(
    ops: Sequence[str] = ("Erf",),
    inputs: Mapping[str, Sequence[int]] | None = None,
    outputs: Mapping[str, Sequence[int]] | None = None,
    tags: Sequence[str] = ("serve",),
) -> bytes:
    """``MetaGraphDef`` with tags, a graph that has ``ops`` in a layer and more elsewhere, and a signature; -1 is an
    unknown size."""
    inner = "bert/encoder/layer_0/intermediate/dense"
    elsewhere = {
        "bert/pooler/dense/Tanh": "Tanh",
        f"gradients/{inner}/Tanh_grad/Erf": "Erf",
        "PolynomialDecay/Pow": "Pow",
    }
    named = elsewhere | {f"{inner}/{op}_{index}": op for index, op in enumerate(ops)}
    nodes = [field(1, field(1, name) + field(2, op) + field(3, "input")) for name, op in named.items()]
    info = field(2, field(1, field(1, "Erf"))) + b"".join(field(4, tag) for tag in tags)
    tensors = [
        field(place, field(1, name) + field(2, field(1, f"{name}:0") + number(2, 1) + field(3, _shape(shape))))
        for place, shapes in ((1, inputs), (2, outputs))
        for name, shape in (shapes or {}).items()
    ]
    signature = field(1, "serving_default") + field(2, b"".join(tensors))
    return field(1, info) + field(2, b"".join(nodes)) + field(5, signature)


def saved_model(*graphs: bytes) -> bytes:
    return number(1, 1) + b"".join(field(2, graph) for graph in graphs)
