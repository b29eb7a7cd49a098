"""Fuzzes the readers of checkpoint files; driver.py says how to run it."""

from __future__ import annotations

import importlib
import io
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from driver import Reader, main

from encast.archs import build_graph
from encast.importers.checkpoint import open_checkpoint
from encast.importers.files import MappedFile
from encast.importers.hdf5_file import read_hdf5
from encast.importers.meta_graph import read_saved_model
from encast.importers.mxnet_file import read_params
from encast.importers.safetensors_file import parse_header, read_safetensors
from encast.importers.sentencepiece_model import parse_sentencepiece
from encast.importers.state_pickle import read_state_pickle
from encast.importers.tensorflow_h5 import rename_tf
from encast.importers.torch_file import read_torch_file
from encast.importers.weights import WEIGHT_DTYPES, TensorSource

__all__ = ["READERS", "corpus"]

_SCRATCH = tempfile.TemporaryDirectory()


def _file(data: bytes, name: str) -> MappedFile:
    path = Path(_SCRATCH.name) / name
    path.write_bytes(data)
    return MappedFile(path)


def _touch(tensors: TensorSource) -> None:
    for name in tensors:
        if tensors.dtype(name) in WEIGHT_DTYPES:
            tensors.f32(name)


def _header(data: bytes) -> None:
    parse_header(data[2:], int.from_bytes(data[:2], "little"), "fuzz")


def _safetensors(data: bytes) -> None:
    _touch(TensorSource(read_safetensors(_file(data, "model.safetensors")), "fuzz"))


def _torch(data: bytes) -> None:
    _touch(TensorSource(read_torch_file(_file(data, "pytorch_model.bin")), "fuzz"))


def _params(data: bytes) -> None:
    _touch(TensorSource(read_params(_file(data, "net.params")), "fuzz"))


def _gluon(data: bytes) -> None:
    """config.json, vocabulary and weights, the former two each ended by a zero byte."""
    root = Path(_SCRATCH.name) / "gluon"
    root.mkdir(exist_ok=True)
    names = ("config.json", "net.vocab", "net.params")
    for name in names:
        (root / name).unlink(missing_ok=True)  # of the input before
    for name, content in zip(names, data.split(b"\0", 2), strict=False):
        (root / name).write_bytes(content)
    checkpoint = open_checkpoint(root / "net.params")
    build_graph(checkpoint)
    _ = checkpoint.tokenizer


def _folder(data: bytes) -> None:
    """Text files of a folder, separated by zero bytes, beside a good model."""
    names = ("config.json", "modules.json", "1_Pooling/config.json", "tokenizer_config.json", "vocab.txt")
    root = Path(_SCRATCH.name) / "folder"
    (root / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (root / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    for name, content in zip(names, data.split(b"\0"), strict=False):
        (root / name).write_bytes(content)
    _ = open_checkpoint(root).tokenizer


def _bundle(data: bytes) -> None:
    """The one block of a checkpoint's index, which gets the checksum of its bytes; 64 bytes of data lie beside it."""
    files = _bundle_files()
    root = Path(_SCRATCH.name) / "bundle"
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text("{}")
    handle = files.varint(0) + files.varint(len(data))
    (root / "m.index").write_bytes(files.ended(files.sealed(data), [(b"z", handle)]))
    (root / "m.data-00000-of-00001").write_bytes(bytes(64))
    open_checkpoint(root)


def _saved_model(data: bytes) -> None:
    read_saved_model(_file(data, "saved_model.pb"))


def _onnx(data: bytes) -> None:
    root = Path(_SCRATCH.name) / "onnx"
    root.mkdir(exist_ok=True)
    (root / "net.onnx").write_bytes(data)
    build_graph(open_checkpoint(root / "net.onnx"))


def _onnx_beside(data: bytes) -> None:
    """config.json, ended by a zero byte, and the file."""
    root = Path(_SCRATCH.name) / "beside"
    root.mkdir(exist_ok=True)
    for name, content in zip(("config.json", "net.onnx"), data.partition(b"\0")[::2], strict=True):
        (root / name).write_bytes(content)
    build_graph(open_checkpoint(root / "net.onnx"))


def _adapters(data: bytes) -> None:
    """config.json, ended by a zero byte, and weights with adapters."""
    root = Path(_SCRATCH.name) / "adapters"
    root.mkdir(exist_ok=True)
    for name, content in zip(("config.json", "model.safetensors"), data.partition(b"\0")[::2], strict=True):
        (root / name).write_bytes(content)
    build_graph(open_checkpoint(root, adapter="text-matching"))


def _keras(data: bytes) -> None:
    _touch(TensorSource(rename_tf(read_hdf5(_file(data, "tf_model.h5")), "fuzz"), "fuzz"))


_PRESET = ("config.json", "task.json", "tokenizer.json", "preprocessor.json", "assets/tokenizer/vocabulary.txt")


def _preset(data: bytes) -> None:
    """Text files of a preset of KerasHub, separated by zero bytes, beside good weights."""
    root = Path(_SCRATCH.name) / "preset"
    golden = Path(__file__).parents[1] / "golden" / "keras_hub" / "bert-classify"
    (root / "assets" / "tokenizer").mkdir(parents=True, exist_ok=True)
    for name in ("model.weights.h5", "task.weights.h5"):
        (root / name).write_bytes((golden / name).read_bytes())
    for name in _PRESET:
        (root / name).unlink(missing_ok=True)  # of the input before
    for name, content in zip(_PRESET, data.split(b"\0"), strict=False):
        (root / name).write_bytes(content)
    checkpoint = open_checkpoint(root)
    build_graph(checkpoint)
    _ = checkpoint.tokenizer


def _bundle_files() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    return importlib.import_module("bundle_files")


READERS: tuple[Reader, ...] = (
    _header,
    _safetensors,
    _torch,
    lambda data: read_state_pickle(data, "fuzz"),
    lambda data: parse_sentencepiece(data, "fuzz"),
    _folder,
    _bundle,
    _saved_model,
    _params,
    _gluon,
    _onnx,
    _onnx_beside,
    _keras,
    _preset,
    _adapters,
)


def _beside(file: str) -> bytes:
    """A kept export with its config, as ``_onnx_beside`` reads it."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    files = importlib.import_module("onnx_files")
    case = next(case for case in files.CASES if case.file == file)
    config = files.checkpoint_of(case, Path(_SCRATCH.name) / case.arch) / "config.json"
    export = Path(__file__).parents[1] / "golden" / "onnx" / file
    return bytes([11]) + config.read_bytes() + b"\0" + export.read_bytes()


def _adapted() -> bytes:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    folder = importlib.import_module("adapter_files").make_adapted(Path(_SCRATCH.name) / "adapted", "features")
    return bytes([14]) + b"\0".join((folder / name).read_bytes() for name in ("config.json", "model.safetensors"))


def _hdf5(**options: str) -> bytes:
    import h5py
    import numpy as np

    memory = io.BytesIO()
    with h5py.File(memory, "w", **options) as file:
        file["bert/layer_._0/kernel:0"] = np.ones((2, 3), "f4")
        file["bert/layer_._0/bias:0"] = np.ones(3, "f2")
        file["classifier/step"] = np.array(7)
        file["bert"].attrs["weight_names"] = ["bert/layer_._0/kernel:0"]
    return memory.getvalue()


def corpus() -> dict[str, bytes]:
    """One good input for every reader."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import checkpoint_files as files
    import gluon_files as gluon
    import numpy as np

    arrays = {"w": np.ones((3, 2), "f4"), "h": np.ones(4, "f2"), "b": np.ones(2, "u2"), "i": np.arange(3)}
    safetensors = files.safetensors_bytes(arrays)
    length = int.from_bytes(safetensors[:8], "little")
    data_size = len(safetensors) - 8 - length
    state = files.state_pickle({"w": files.tensor_opcodes("FloatStorage", "0", 6, 0, [3, 2], [2, 1])})
    piece = b"\x0a\x09\x0a\x02ab\x15\x00\x00\x80\xbf"
    trie = struct.pack("<I", 1024) + bytes(1024) + b"\0"
    charsmap = b"\x12" + bytes([len(trie) & 0x7F | 0x80, len(trie) >> 7]) + trie
    normaliser = b"\x1a" + bytes([len(charsmap) & 0x7F | 0x80, len(charsmap) >> 7]) + charsmap
    folder = [
        b'{"architectures": ["BertModel"], "model_type": "bert"}',
        b'[{"type": "sentence_transformers.models.Transformer", "path": ""},'
        b' {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]',
        b'{"word_embedding_dimension": 3, "pooling_mode_mean_tokens": true}',
        b'{"do_lower_case": true, "model_max_length": 512, "mask_token": {"content": "[MASK]", "lstrip": true}}',
        b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n##s\n",
    ]
    bundles = _bundle_files()
    entries = [(b"", bundles.header_bytes()), (b"bert/a/kernel", bundles.entry_bytes(shape=(4, 4), size=64))]
    entries.append((b"bert/b/bias", bundles.entry_bytes(dtype=19, shape=(0,), size=0, offset=64)))
    golden = Path(__file__).parents[1] / "golden"
    shapes = {"input_ids": [-1, 8]}, {"probabilities": [-1, 3]}
    gluon_texts = (
        b'{"num_attention_heads": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12}',
        gluon.vocabulary(["[UNK]", "[CLS]", "[SEP]", "a"], cls_token="[CLS]", sep_token="[SEP]"),
    )
    quantised = "bert-tag-dynamo-20-static-products.onnx"
    return {
        "header": bytes([0]) + data_size.to_bytes(2, "little") + safetensors[8 : 8 + length],
        "safetensors": bytes([1]) + safetensors,
        "torch": bytes([2]) + files.torch_zip({"w": arrays["w"], "i": arrays["i"]}),
        "pickle": bytes([3]) + state,
        "sentencepiece": bytes([4]) + piece + piece + normaliser,
        "folder": bytes([5]) + b"\0".join(folder),
        "bundle": bytes([6]) + bundles.block(entries),
        "saved_model": bytes([7]) + bundles.saved_model(bundles.meta_graph(["Erf"], *shapes)),
        "params": bytes([8]) + gluon.params_bytes({"w": arrays["w"], "i": arrays["i"]}),
        "gluon": bytes([9]) + b"\0".join((*gluon_texts, gluon.tiny_model())),
        "onnx": bytes([10]) + (golden / "onnx" / "bert-features-dynamo-23.onnx").read_bytes(),
        "onnx_fused": bytes([10])
        + (golden / "onnx" / "bert-features-torchscript-11-transformers-f16.onnx").read_bytes(),
        "onnx_quantised": bytes([10]) + (golden / "onnx_quantised" / quantised).read_bytes(),
        "onnx_rotary": _beside("modernbert-features-torchscript-14.onnx"),
        "onnx_distances": _beside("deberta-v2-features-torchscript-13.onnx"),
        "keras": bytes([12]) + _hdf5(),
        "keras_latest": bytes([12]) + _hdf5(libver="latest"),
        "preset": bytes([13])
        + b"\0".join((golden / "keras_hub" / "bert-classify" / name).read_bytes() for name in _PRESET),
        "adapters": _adapted(),
    }


if __name__ == "__main__":
    main(READERS, corpus)
