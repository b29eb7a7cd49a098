"""``pytorch_model.bin``: the zip archive that ``torch.save`` writes since version 1.6.

``ROOT/data.pkl`` is a pickled dict of tensors whose elements lie in the entries ``ROOT/data/KEY``.
The pickle is read by ``state_pickle`` (nothing is executed), the elements are memory-mapped.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from encast.errors import CheckpointError
from encast.importers.files import MappedFile, quote, refuse_pointer
from encast.importers.state_pickle import StorageRef, TensorRef, read_state_pickle
from encast.importers.weights import DTYPES, StoredTensor
from encast.importers.zip_directory import ZipEntry, read_zip_directory

__all__ = ["read_torch_file"]


def _convert(path: Path) -> str:
    """What to do about a file that is not read."""
    if path.name == "pytorch_model.bin":
        return (
            "convert it where torch is installed: "
            'python -c "import torch, safetensors.torch as s; s.save_file({k: v.contiguous().clone() for k, v in '
            "torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')\""
        )
    return (
        'save it anew where torch is installed: python -c "import torch; torch.save(torch.load('
        f"'{path.name}', weights_only=True, map_location='cpu'), '{path.name}')\""
    )


def read_torch_file(file: MappedFile) -> dict[str, StoredTensor]:
    """The tensors of a file, validated against the archive; raises ``CheckpointError``."""
    where = str(file.path)
    refuse_pointer(file.bytes[:32], where)
    if file.bytes[:4] != b"PK\x03\x04":
        raise CheckpointError(
            f"{where}: not a zip archive; files of torch before 1.6 are pickles that would have to be executed, "
            f"so {_convert(file.path)}"
        )
    entries = read_zip_directory(file)
    root = _root(entries, where)
    order = entries.get(f"{root}/byteorder")
    if order is not None and file.bytes[order.offset : order.offset + min(order.size, 16)] != b"little":
        raise CheckpointError(f"{where}: not stored as little-endian, which alone is read; {_convert(file.path)}")
    pickle = entries[f"{root}/data.pkl"]
    state = read_state_pickle(file.bytes[pickle.offset : pickle.offset + pickle.size], where)
    if not isinstance(state, dict):
        raise CheckpointError(f"{where}: holds a {type(state).__name__}; a dict from names to tensors is needed")
    tensors: dict[str, StoredTensor] = {}
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, TensorRef):
            raise CheckpointError(
                f"{where}: the entry {quote(name)} is a {type(value).__name__} and no tensor; this looks like a "
                "training checkpoint, so save model.state_dict() alone"
            )
        tensors[name] = _stored(name, value, file, entries, root)
    return tensors


def _root(entries: dict[str, ZipEntry], where: str) -> str:
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise CheckpointError(f"{where}: a zip archive, but not one of torch.save (it has {len(pickles)} data.pkl)")
    return pickles[0][: -len("/data.pkl")]


def _stored(name: str, tensor: TensorRef, file: MappedFile, entries: dict[str, ZipEntry], root: str) -> StoredTensor:
    storage = tensor.storage
    which = f"{file.path}: tensor {quote(name)}"
    entry = entries.get(f"{root}/data/{storage.key}")
    if entry is None:
        raise CheckpointError(f"{which}: the archive lacks its storage {quote(storage.key)}; the file is damaged")
    if entry.size != storage.count * DTYPES[storage.dtype].itemsize:
        raise CheckpointError(
            f"{which}: its storage has {entry.size} bytes, {storage.count} elements of {storage.dtype} need "
            f"{storage.count * DTYPES[storage.dtype].itemsize}"
        )
    count = math.prod(tensor.shape)
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    # More elements than the storage has would let a stride of 0 claim any amount of memory.
    if count > storage.count or (count > 0 and last >= storage.count) or math.prod(filter(None, tensor.shape)) >= 2**63:
        raise CheckpointError(
            f"{which}: shape {list(tensor.shape)} with strides {list(tensor.strides)} from element {tensor.offset} "
            f"does not fit its storage of {storage.count}"
        )
    return StoredTensor(storage.dtype, tensor.shape, str(file.path), partial(_elements, file, entry, storage, tensor))


def _elements(file: MappedFile, entry: ZipEntry, storage: StorageRef, tensor: TensorRef) -> np.ndarray[Any, Any]:
    dtype = DTYPES[storage.dtype]
    if math.prod(tensor.shape) == 0:
        return np.empty(tensor.shape, dtype)
    flat = file.elements(dtype, entry.offset, storage.count)[tensor.offset :]
    # The stride of a dimension of size 1 is never used and may be anything, so it is not passed on.
    strides = [
        stride * dtype.itemsize if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    ]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)
