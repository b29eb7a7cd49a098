"""Reading ``pytorch_model.bin`` without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import safetensors_bytes, state_pickle, tensor_opcodes, torch_zip

from encast.importers.files import Folder
from encast.importers.model_files import read_tensors
from encast.importers.weights import TensorSource


def open_bytes(folder: Path, data: bytes) -> TensorSource:
    (folder / "pytorch_model.bin").write_bytes(data)
    return read_tensors(Folder(folder))


def test_values_of_every_dtype(tmp_path: Path) -> None:
    values = np.arange(6).reshape(2, 3) / 4
    arrays = {
        "f32": values.astype(np.float32),
        "f16": values.astype(np.float16),
        "f64": values,
        "bf16": (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "ids": np.arange(5),
        "scalar": np.float32([3]).reshape(()),
    }
    tensors = open_bytes(tmp_path, torch_zip(arrays))
    for name in ("f32", "f16", "f64", "bf16"):
        np.testing.assert_array_equal(tensors.f32(name), values)
    np.testing.assert_array_equal(tensors.i64("ids"), np.arange(5))
    assert tensors.f32("scalar") == 3
    assert tensors.dtype("bf16") == "BF16"


def test_strided_views_of_one_storage(tmp_path: Path) -> None:
    stored = np.arange(24, dtype=np.float32)
    pickle = state_pickle(
        {
            "transposed": tensor_opcodes("FloatStorage", "0", 24, 0, [4, 6], [1, 4]),
            "inner": tensor_opcodes("FloatStorage", "0", 24, 7, [2, 3], [6, 2]),
            "repeated": tensor_opcodes("FloatStorage", "0", 24, 5, [3], [0]),
            "single": tensor_opcodes("FloatStorage", "0", 24, 23, [1, 1], [2**62, 2**62]),
        }
    )
    tensors = open_bytes(tmp_path, torch_zip(pickle=pickle, storages={"0": stored.tobytes()}))
    np.testing.assert_array_equal(tensors.f32("transposed"), stored.reshape(6, 4).T)
    np.testing.assert_array_equal(tensors.f32("inner"), stored[7:19].reshape(2, 6)[:, ::2])
    np.testing.assert_array_equal(tensors.f32("repeated"), [5, 5, 5])
    np.testing.assert_array_equal(tensors.f32("single"), [[23]])
    assert tensors.f32("transposed").flags.c_contiguous


def test_parameters_memo_and_older_rebuild(tmp_path: Path) -> None:
    tensor = tensor_opcodes("FloatStorage", "0", 4, 0, [4], [1])
    parameter = b"ctorch._utils\n_rebuild_parameter\n(" + tensor + b"\x88ccollections\nOrderedDict\n)RtRq\x05"
    pickle = state_pickle({"parameter": parameter, "tied": b"h\x05"})
    tensors = open_bytes(tmp_path, torch_zip(pickle=pickle, storages={"0": np.arange(4, dtype="f4").tobytes()}))
    np.testing.assert_array_equal(tensors.f32("tied"), [0, 1, 2, 3])


@pytest.mark.parametrize("root", ["archive", "pytorch_model", "ä b"])
def test_root_names(tmp_path: Path, root: str) -> None:
    tensors = open_bytes(tmp_path, torch_zip({"w": np.ones(2, np.float32)}, root=root))
    np.testing.assert_array_equal(tensors.f32("w"), [1, 1])


def test_shards(tmp_path: Path) -> None:
    for index, name in enumerate("ab"):
        (tmp_path / f"part{index}.bin").write_bytes(torch_zip({name: np.full(2, index, np.float32)}))
    index_file = tmp_path / "pytorch_model.bin.index.json"
    index_file.write_text(json.dumps({"weight_map": {"a": "part0.bin", "b": "part1.bin"}}))
    tensors = read_tensors(Folder(tmp_path))
    np.testing.assert_array_equal(tensors.f32("b"), [1, 1])


def test_safetensors_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"w": np.zeros(2, np.float32)}))
    tensors = open_bytes(tmp_path, torch_zip({"w": np.ones(2, np.float32)}))
    np.testing.assert_array_equal(tensors.f32("w"), [0, 0])
