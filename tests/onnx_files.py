"""Writers of ONNX files for tests, message by message, and the exports that are kept in ``golden/onnx``."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import make_checkpoint
from safetensors.numpy import load_file, save_file

__all__ = [
    "CASES",
    "NEWER",
    "QUANTISED",
    "Export",
    "QuantisedExport",
    "checkpoint_of",
    "field_bytes",
    "input_bytes",
    "model_bytes",
    "node_bytes",
    "quantised_texts",
    "rounded",
    "tensor_bytes",
    "varint",
]

_KINDS = {"f4": 1, "u1": 2, "i1": 3, "u2": 4, "i2": 5, "i4": 6, "i8": 7, "b1": 9, "f2": 10, "f8": 11}


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field_bytes(number: int, value: int | bytes | str | float) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def tensor_bytes(name: str, array: np.ndarray[Any, Any], **changes: Any) -> bytes:
    """TensorProto; ``changes``: ``shape``, ``kind``, ``raw`` (None for none), ``extra`` bytes."""
    shape = changes.get("shape", array.shape)
    out = b"".join(field_bytes(1, dim) for dim in shape)
    out += field_bytes(2, changes.get("kind", _KINDS[array.dtype.str[1:]]))
    out += field_bytes(8, name)
    raw = changes.get("raw", np.ascontiguousarray(array).tobytes())
    return out + (field_bytes(9, raw) if raw is not None else b"") + changes.get("extra", b"")


def attribute_bytes(name: str, value: Any) -> bytes:
    out = field_bytes(1, name)
    if isinstance(value, float):
        return out + field_bytes(2, value) + field_bytes(20, 1)
    if isinstance(value, int):
        return out + field_bytes(3, value) + field_bytes(20, 2)
    if isinstance(value, str):
        return out + field_bytes(4, value) + field_bytes(20, 3)
    if isinstance(value, np.ndarray):
        return out + field_bytes(5, tensor_bytes("", value)) + field_bytes(20, 4)
    if isinstance(value, bytes):  # a graph
        return out + field_bytes(6, value) + field_bytes(20, 5)
    return out + b"".join(field_bytes(8, one) for one in value) + field_bytes(20, 7)


def node_bytes(op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> bytes:
    out = b"".join(field_bytes(1, name) for name in inputs) + b"".join(field_bytes(2, name) for name in outputs)
    out += field_bytes(3, f"the/{op}/of/{outputs[0]}") + field_bytes(4, op)
    out += b"".join(field_bytes(5, attribute_bytes(name, value)) for name, value in attributes.items())
    return out + field_bytes(7, domain)


def input_bytes(name: str, shape: Sequence[int | str] = ("batch", "sequence"), kind: int = 7) -> bytes:
    dims = b"".join(field_bytes(1, field_bytes(1 if isinstance(dim, int) else 2, dim)) for dim in shape)
    tensor = field_bytes(1, kind) + field_bytes(2, dims)
    return field_bytes(1, name) + field_bytes(2, field_bytes(1, tensor))


def model_bytes(
    nodes: Sequence[bytes],
    initializers: Mapping[str, np.ndarray[Any, Any]] | Sequence[bytes] = (),
    inputs: Sequence[bytes] = (),
    outputs: Sequence[str] = ("out",),
    *,
    opset: int = 17,
    extra: bytes = b"",
) -> bytes:
    """ModelProto; ``extra``: further fields of the graph."""
    if isinstance(initializers, Mapping):
        initializers = [tensor_bytes(name, array) for name, array in initializers.items()]
    graph = b"".join(field_bytes(1, node) for node in nodes) + field_bytes(2, "graph")
    graph += b"".join(field_bytes(5, tensor) for tensor in initializers)
    graph += b"".join(field_bytes(11, one) for one in inputs)
    graph += b"".join(field_bytes(12, field_bytes(1, name)) for name in outputs) + extra
    opsets = field_bytes(8, field_bytes(1, "") + field_bytes(2, opset))
    return field_bytes(1, 8) + field_bytes(2, "pytorch") + field_bytes(7, graph) + opsets


# Exports that are kept


@dataclass(frozen=True)
class Export:
    """``arch`` and ``head`` as ``make_checkpoint`` takes them; ``exporter`` is one of torch, ``torchscript`` or
    ``dynamo``, or ``tf2onnx`` of transformers' models for TensorFlow, or ``savedmodel``: tf2onnx of one as the code of
    google-research/bert makes it.

    ``dtype``: that of the model in torch. ``then``: what was done to its export, in order: ``transformers`` and
    ``heads`` are onnxruntime.transformers' optimiser, the latter with MultiHeadAttention; ``session`` is a session of
    ONNX Runtime that writes its graph; ``f16`` is the converter of onnxruntime and onnxconverter-common, which leaves
    inputs and outputs in f32. ``fixed``: how many sequences and positions the export takes, None for any number;
    ``cut``: whether it has rows in the place of the table of positions.
    """

    arch: str
    head: str
    opset: int
    exporter: str
    attention: str = "sdpa"
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "f32"
    then: tuple[str, ...] = ()
    fixed: tuple[int | None, int | None] = (None, None)
    cut: bool = False

    @property
    def by_torch(self) -> bool:
        return self.exporter in ("torchscript", "dynamo")

    @property
    def file(self) -> str:
        narrow = () if self.dtype == "f32" else (f"torch-{self.dtype}",)
        sizes = () if self.fixed == (None, None) else ("x".join(str(size or "any") for size in self.fixed),)
        return "-".join((self.arch, self.head, self.exporter, str(self.opset), *narrow, *sizes, *self.then)) + ".onnx"

    @property
    def numbers(self) -> str:
        """What the weights are rounded to: f32, f16 or bf16."""
        return "f16" if "f16" in self.then else self.dtype


NEWER = ("modernbert", "nomic_bert", "gte", "deberta-v2", "eurobert")
"""Architectures of which smaller exports say as much: nothing in them is one number for all heads or columns."""

_ALTERNATING = {"layers": 2, "config": {"global_attn_every_n_layers": 2}}
"""A layer that sees everything, then one with a window."""

_SHARED = {"layers": 2, "heads": 4, "config": {"num_key_value_heads": 2}}
"""Two heads share their keys and values."""

CASES = [
    Export("bert", "features", 11, "torchscript", "eager"),
    Export("bert", "features", 18, "dynamo"),
    Export("bert", "features", 23, "dynamo"),
    Export("bert", "classify", 14, "torchscript", options={"activation": "gelu_new"}),
    Export("bert", "tag", 20, "dynamo", "eager"),
    Export("bert", "embed", 17, "torchscript", options={"pooling": ("mean",), "normalize": True}),
    Export("bert", "fill_mask", 18, "dynamo", options={"tied": False}),
    Export("distilbert", "answer", 14, "torchscript"),
    Export("distilbert", "embed", 18, "dynamo", options={"pooling": ("max",), "dense": ((12, "Tanh"),)}),
    Export("roberta", "classify", 18, "dynamo"),
    Export("xlm-roberta", "tag", 17, "torchscript"),
    Export("mpnet", "features", 13, "torchscript", "eager"),
    Export("mpnet", "fill_mask", 18, "dynamo", "eager"),
    Export("electra", "classify", 17, "torchscript"),
    Export("albert", "features", 18, "dynamo", options={"layers": 4, "groups": 2}),
    Export("albert", "tag", 17, "torchscript", options={"inner_group": 2}),
    Export("albert", "fill_mask", 14, "torchscript", options={"layers": 2}),
    Export("bert", "features", 11, "torchscript", "eager", then=("transformers",)),
    Export("bert", "features", 11, "torchscript", "eager", then=("heads",)),
    Export("bert", "fill_mask", 14, "torchscript", options={"activation": "gelu_new"}, then=("transformers",)),
    Export("roberta", "classify", 18, "dynamo", then=("session",)),
    Export("mpnet", "features", 13, "torchscript", "eager", then=("session",)),
    Export("distilbert", "embed", 18, "dynamo", options={"pooling": ("max",), "dense": ((12, "Tanh"),)},
           then=("session",)),
    Export("bert", "features", 14, "torchscript", "eager", dtype="f16"),
    Export("bert", "features", 18, "dynamo", dtype="bf16"),
    Export("bert", "features", 11, "torchscript", "eager", then=("f16",)),
    Export("bert", "embed", 17, "torchscript", options={"pooling": ("mean",), "normalize": True}, then=("f16",)),
    Export("mpnet", "features", 13, "torchscript", "eager", then=("f16",)),
    Export("bert", "features", 11, "torchscript", "eager", then=("transformers", "f16")),
    Export("distilbert", "answer", 18, "dynamo", then=("transformers", "f16")),
    Export("electra", "classify", 17, "torchscript", then=("transformers", "f16")),
    Export("modernbert", "features", 14, "torchscript", "eager", options=_ALTERNATING),
    Export("modernbert", "embed", 18, "dynamo", options={**_ALTERNATING, "pooling": ("cls",), "normalize": True}),
    Export("modernbert", "classify", 17, "torchscript", options=_ALTERNATING),
    Export("modernbert", "tag", 18, "dynamo", "eager", options=_ALTERNATING),
    Export("modernbert", "fill_mask", 23, "dynamo", options=_ALTERNATING),
    Export("deberta-v2", "features", 13, "torchscript", "eager"),
    Export("deberta-v2", "classify", 18, "dynamo", "eager"),
    Export("deberta-v2", "fill_mask", 17, "torchscript", "eager"),
    Export("nomic_bert", "features", 17, "torchscript"),
    Export("gte", "classify", 17, "torchscript"),
    Export("nomic_bert", "embed", 18, "dynamo", "eager", options={"pooling": ("mean",), "normalize": True}),
    Export("eurobert", "features", 14, "torchscript", "eager", options=_SHARED),
    Export("eurobert", "fill_mask", 17, "torchscript", options={"config": {"num_key_value_heads": 1}}),
    Export("eurobert", "classify", 18, "dynamo", options=_SHARED),
    Export("eurobert", "tag", 18, "dynamo"),
    Export("eurobert", "features", 23, "dynamo", options=_SHARED),
    Export("eurobert", "features", 18, "dynamo", options=_SHARED, fixed=(1, 10)),
    Export("bert", "features", 17, "torchscript", fixed=(1, 12)),
    Export("bert", "embed", 18, "dynamo", options={"pooling": ("mean",), "normalize": True}, fixed=(3, 8), cut=True),
    Export("bert", "classify", 14, "torchscript", "eager", fixed=(None, 16)),
    Export("distilbert", "answer", 18, "dynamo", fixed=(1, 9), cut=True),
    Export("roberta", "classify", 17, "torchscript", fixed=(4, 8)),
    Export("bert", "tag", 18, "dynamo", fixed=(1, None)),
    Export("bert", "features", 14, "torchscript", fixed=(1, 10), then=("session",), cut=True),
    Export("modernbert", "features", 18, "dynamo", "eager", options=_ALTERNATING, fixed=(1, 10)),
    Export("bert", "features", 11, "tf2onnx"),
    Export("bert", "classify", 15, "tf2onnx", fixed=(None, 16), cut=True),
    Export("bert", "fill_mask", 15, "tf2onnx"),
    Export("distilbert", "answer", 15, "tf2onnx"),
    Export("roberta", "features", 15, "tf2onnx", fixed=(2, 8)),
    Export("mpnet", "features", 18, "tf2onnx"),
    Export("albert", "features", 15, "tf2onnx", options={"layers": 2}),
    Export("electra", "tag", 15, "tf2onnx", fixed=(1, None)),
    Export("bert", "features", 15, "savedmodel", options={"activation": "gelu_new"}),
    Export("bert", "classify", 13, "savedmodel", fixed=(None, 16), cut=True),
    Export("bert", "features", 15, "savedmodel", fixed=(1, 8), cut=True),
]  # fmt: skip


def checkpoint_of(export: Export, folder: Path) -> Path:
    """The checkpoint that an export was made of, written into ``folder``.

    Its weights are f32, rounded as the export's.
    """
    sizes: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 4, "inner": 40, "vocab": 60, "positions": 24}
    if export.arch in NEWER:
        sizes |= {"hidden": 16, "heads": 2, "inner": 20, "vocab": 40}
    make_checkpoint(folder, export.arch, export.head, **{**sizes, **export.options})
    for path in folder.glob("**/*.safetensors"):
        save_file({name: rounded(array, export.numbers) for name, array in load_file(path).items()}, path)
    return folder


def rounded(array: np.ndarray[Any, Any], numbers: str) -> np.ndarray[Any, Any]:
    """f32 with the numbers of f16 or bf16."""
    if numbers == "f16":
        return array.astype(np.float16).astype(np.float32)
    if numbers == "bf16":
        mantissa, exponent = np.frexp(array)
        return np.ldexp(np.rint(mantissa * 256.0), exponent - 8).astype(np.float32)
    return array


# Quantised exports that are kept


@dataclass(frozen=True)
class QuantisedExport:
    """``export``: a file of ``golden/onnx``; ``options``: of ONNX Runtime's ``quantize_dynamic``, or of
    ``quantize_static`` with pairs of QuantizeLinear and DequantizeLinear; ``prepared``: by ``quant_pre_process``."""

    export: str
    name: str
    options: Mapping[str, Any]
    static: bool = False
    prepared: bool = False

    @property
    def file(self) -> str:
        return self.export.replace(".onnx", f"-{self.name}.onnx")

    @property
    def case(self) -> Export:
        return next(case for case in CASES if case.file == self.export)


_PRODUCTS = ["MatMul", "Gemm"]
QUANTISED = [
    QuantisedExport("bert-features-torchscript-11.onnx", "dynamic-s8", {"weight_type": "QInt8"}),
    QuantisedExport("bert-classify-torchscript-14.onnx", "dynamic-u8", {"weight_type": "QUInt8"}),
    QuantisedExport(
        "mpnet-features-torchscript-13.onnx",
        "dynamic-channels",
        {"weight_type": "QInt8", "per_channel": True, "reduce_range": True},
    ),
    QuantisedExport(
        "distilbert-answer-torchscript-14.onnx",
        "dynamic-all-products",
        {"op_types_to_quantize": ["MatMul"], "extra_options": {"MatMulConstBOnly": False}},
    ),
    QuantisedExport(
        "bert-fill_mask-dynamo-18.onnx",
        "dynamic-prepared",
        {"weight_type": "QUInt8", "per_channel": True, "reduce_range": True},
        prepared=True,
    ),
    QuantisedExport(
        "bert-tag-dynamo-20.onnx",
        "static-products",
        {"op_types_to_quantize": _PRODUCTS, "per_channel": True, "activation_type": "QUInt8", "weight_type": "QInt8"},
        static=True,
    ),
    QuantisedExport(
        "electra-classify-torchscript-17.onnx",
        "static-u8",
        {"op_types_to_quantize": _PRODUCTS, "activation_type": "QUInt8", "weight_type": "QUInt8"},
        static=True,
    ),
    QuantisedExport(
        "bert-features-dynamo-18.onnx",
        "static-everything",
        {"activation_type": "QInt8", "weight_type": "QInt8"},
        static=True,
    ),
]


def quantised_texts() -> list[list[int]]:
    """The token ids whose answers by ONNX Runtime are kept beside the quantised exports."""
    random = np.random.RandomState(1)
    return [random.randint(5, 50, length).tolist() for length in (7, 12, 3, 20)]
