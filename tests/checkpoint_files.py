"""Writers of checkpoint files for tests, byte by byte, so that tests can also write wrong ones."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "STORAGES",
    "pickle_text",
    "safetensors_bytes",
    "state_pickle",
    "tensor_opcodes",
    "torch_zip",
    "word_piece",
    "write_model",
    "write_modules",
]

STORAGES = {
    "f4": "FloatStorage",
    "f8": "DoubleStorage",
    "f2": "HalfStorage",
    "i8": "LongStorage",
    "u2": "BFloat16Storage",
}
_DTYPES = {"f4": "F32", "f8": "F64", "f2": "F16", "i8": "I64", "u2": "BF16"}


def safetensors_bytes(arrays: Mapping[str, np.ndarray[Any, Any]], *, pad: int = 8) -> bytes:
    """A file of the arrays; u2 arrays are stored as BF16 bits; ``pad`` aligns the data."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _DTYPES[array.dtype.str[1:]],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % pad)
    return struct.pack("<Q", len(text)) + text + data


# The pickle that torch.save makes of a state dict


def pickle_text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def _tuple(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"


def tensor_opcodes(
    storage: str,
    key: str,
    count: int,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    module: str = "torch",
) -> bytes:
    """Opcodes that leave a tensor on the stack."""
    persistent = b"(" + pickle_text("storage") + f"c{module}\n{storage}\n".encode() + pickle_text(key)
    persistent += pickle_text("cpu") + _integer(count) + b"tQ"
    arguments = (
        b"(" + persistent + _integer(offset) + _tuple(shape) + _tuple(strides) + b"\x89ccollections\nOrderedDict\n)Rt"
    )
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"


def state_pickle(entries: Mapping[str, bytes]) -> bytes:
    items = b"".join(pickle_text(name) + opcodes for name, opcodes in entries.items())
    return b"\x80\x02ccollections\nOrderedDict\n)Rq\x00(" + items + b"u}q\x01b."


def torch_zip(
    arrays: Mapping[str, np.ndarray[Any, Any]] | None = None,
    *,
    pickle: bytes | None = None,
    storages: Mapping[str, bytes] | None = None,
    root: str = "archive",
    compression: int = zipfile.ZIP_STORED,
    extra: Mapping[str, bytes] | None = None,
) -> bytes:
    """A ``torch.save`` archive of the arrays (row-major, one storage each), or of a given pickle and storages."""
    entries: dict[str, bytes] = {}
    data: dict[str, bytes] = dict(storages or {})
    for index, (name, array) in enumerate((arrays or {}).items()):
        strides = [stride // array.itemsize for stride in np.ascontiguousarray(array).strides]
        entries[name] = tensor_opcodes(
            STORAGES[array.dtype.str[1:]], str(index), array.size, 0, array.shape, strides if array.ndim else []
        )
        data[str(index)] = np.ascontiguousarray(array).tobytes()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr(f"{root}/data.pkl", state_pickle(entries) if pickle is None else pickle)
        for name, content in (extra or {"byteorder": b"little"}).items():
            archive.writestr(f"{root}/{name}", content)
        for key, content in data.items():
            archive.writestr(f"{root}/data/{key}", content)
    return out.getvalue()


# Folders


def word_piece(folder: Path, *, extra: Sequence[str] = ()) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "Hello", "##s", ",", *extra]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")


def write_model(folder: Path, arrays: Mapping[str, np.ndarray[Any, Any]] | None = None, **config: Any) -> Path:
    """config.json, model.safetensors and vocab.txt."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert", **config}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(arrays or {"weight": np.ones((2, 3), np.float32)}))
    word_piece(folder)
    return folder


def write_modules(folder: Path, modules: Sequence[tuple[str, str]], configs: Mapping[str, Any]) -> None:
    """modules.json of (type, path) and config.json of each module's folder."""
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    for path, config in configs.items():
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
