"""Reading safetensors: values, dtypes, views, shards, and that nothing is read before it is asked for."""

from __future__ import annotations

import json
import mmap
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import safetensors_bytes
from safetensors.numpy import save_file

from encast.errors import CheckpointError
from encast.importers.files import Folder
from encast.importers.model_files import read_tensors
from encast.importers.weights import TensorSource

RNG = np.random.default_rng(7)


def open_bytes(folder: Path, data: bytes) -> TensorSource:
    (folder / "model.safetensors").write_bytes(data)
    return read_tensors(Folder(folder))


def rests_on_mapping(array: np.ndarray[Any, Any]) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap) or (isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap))


def test_values_of_every_dtype(tmp_path: Path) -> None:
    f32 = RNG.standard_normal((3, 5)).astype(np.float32)
    arrays = {"f32": f32, "f16": f32.astype(np.float16), "f64": f32.astype(np.float64) * np.pi, "ids": np.arange(7)}
    save_file({**arrays, "scalar": np.float32([2.5]).reshape(())}, tmp_path / "model.safetensors")
    tensors = read_tensors(Folder(tmp_path))
    assert sorted(tensors) == ["f16", "f32", "f64", "ids", "scalar"]
    assert len(tensors) == 5
    assert "f32" in tensors
    assert "absent" not in tensors
    assert tensors.shape("f16") == (3, 5)
    assert tensors.dtype("f16") == "F16"
    for name in ("f32", "f16", "f64"):
        np.testing.assert_array_equal(tensors.f32(name), arrays[name].astype(np.float32))
        assert tensors.f32(name).dtype == np.float32
    assert tensors.f32("scalar").shape == ()
    assert tensors.f32("scalar") == 2.5
    np.testing.assert_array_equal(tensors.i64("ids"), np.arange(7))


def test_bf16_is_the_upper_half_of_f32(tmp_path: Path) -> None:
    bits = np.array([0, 0x8000, 0x3F80, 0xC049, 0x0001, 0x7F7F], np.uint16)
    tensors = open_bytes(tmp_path, safetensors_bytes({"w": bits.reshape(2, 3)}))
    expected = (bits.astype(np.uint32) << 16).view(np.float32).reshape(2, 3)
    np.testing.assert_array_equal(tensors.f32("w").view(np.uint32), expected.view(np.uint32))


def test_aligned_f32_is_a_read_only_view_of_the_file(tmp_path: Path) -> None:
    tensors = open_bytes(tmp_path, safetensors_bytes({"w": np.ones((4, 4), np.float32)}))
    array = tensors.f32("w")
    assert rests_on_mapping(array)
    assert not array.flags.writeable


def test_misaligned_f32_is_copied(tmp_path: Path) -> None:
    data = safetensors_bytes({"w": np.arange(4, dtype=np.float32)}, pad=1)
    length = struct.unpack("<Q", data[:8])[0]
    gap = b" " * ((1 - length) % 4)
    data = struct.pack("<Q", length + len(gap)) + data[8 : 8 + length] + gap + data[8 + length :]
    array = open_bytes(tmp_path, data).f32("w")
    assert not rests_on_mapping(array)
    assert array.flags.aligned
    np.testing.assert_array_equal(array, [0, 1, 2, 3])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_non_finite_values_are_named(tmp_path: Path, value: float, dtype: Any) -> None:
    array = np.zeros((3, 4), dtype)
    array[1, 2] = value
    tensors = open_bytes(tmp_path, safetensors_bytes({"layer.0.weight": array}))
    with pytest.raises(CheckpointError, match=rf"'layer\.0\.weight' holds {value} at index \[1, 2\].*not a finite"):
        tensors.f32("layer.0.weight")


def test_non_finite_bf16_and_late_values(tmp_path: Path) -> None:
    bits = np.zeros(3_000_001, np.uint16)
    bits[3_000_000] = 0x7FC0
    tensors = open_bytes(tmp_path, safetensors_bytes({"w": bits}))
    with pytest.raises(CheckpointError, match=r"holds nan at index \[3000000\]"):
        tensors.f32("w")


def test_f64_beyond_f32_is_named(tmp_path: Path) -> None:
    tensors = open_bytes(tmp_path, safetensors_bytes({"w": np.array([1.0, -1e39])}))
    with pytest.raises(CheckpointError, match=r"holds -1e\+39 at index \[1\], which does not fit f32"):
        tensors.f32("w")


def test_integers_are_no_weights_and_weights_no_integers(tmp_path: Path) -> None:
    tensors = open_bytes(tmp_path, safetensors_bytes({"ids": np.arange(3), "w": np.ones(3, np.float32)}))
    with pytest.raises(CheckpointError, match="'ids' is stored as I64; weights must be one of F32, F16, BF16, F64"):
        tensors.f32("ids")
    with pytest.raises(CheckpointError, match="'w' is stored as F32; integers are needed"):
        tensors.i64("w")


def test_missing_tensor_names_similar_ones(tmp_path: Path) -> None:
    tensors = open_bytes(tmp_path, safetensors_bytes({"encoder.layer.0.weight": np.ones(1, np.float32)}))
    with pytest.raises(
        CheckpointError, match=r"no tensor is named 'encoder\.layer\.1\.weight'.*'encoder\.layer\.0\.weight'"
    ):
        tensors.shape("encoder.layer.1.weight")


def test_empty_tensors_and_empty_files_of_tensors(tmp_path: Path) -> None:
    tensors = open_bytes(
        tmp_path, safetensors_bytes({"none": np.ones((0, 3), np.float32), "w": np.ones(2, np.float32)})
    )
    assert tensors.f32("none").shape == (0, 3)
    assert len(open_bytes(tmp_path, safetensors_bytes({}))) == 0


def test_shards(tmp_path: Path) -> None:
    parts = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}
    for value, (shard, names) in enumerate(parts.items()):
        data = safetensors_bytes({name: np.full(3, value, np.float32) for name in names})
        (tmp_path / shard).write_bytes(data)
    weight_map = {name: shard for shard, names in parts.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    folder = Folder(tmp_path)
    tensors = read_tensors(folder)
    assert sorted(tensors) == ["a", "b", "c"]
    np.testing.assert_array_equal(tensors.f32("c"), np.ones(3))
    assert set(folder.ledger.digests()) == {"model.safetensors.index.json", *parts}


def test_links_are_followed(tmp_path: Path) -> None:
    blob = tmp_path / "blobs"
    blob.write_bytes(safetensors_bytes({"w": np.ones(2, np.float32)}))
    model = tmp_path / "snapshot"
    model.mkdir()
    (model / "model.safetensors").symlink_to("../blobs")
    np.testing.assert_array_equal(read_tensors(Folder(model)).f32("w"), [1, 1])


def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    elements = 1 << 32  # 16 GiB, all of it a hole of a sparse file
    header = {
        "small": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "big": {"dtype": "F32", "shape": [elements], "data_offsets": [8, 8 + 4 * elements]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        try:
            out.truncate(8 + len(text) + 8 + 4 * elements)
        except OSError as error:
            pytest.skip(f"no sparse files here: {error}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensors = read_tensors(Folder(tmp_path))
    assert tensors.shape("big") == (elements,)
    np.testing.assert_array_equal(tensors.f32("small"), [0, 0])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10, f"opening touched {grown} KiB"


def test_source_over_arrays_in_memory() -> None:
    array = np.ones((2, 2), np.float32)
    tensors = TensorSource.of({"w": array, "ids": np.arange(3)})
    np.testing.assert_array_equal(tensors.f32("w"), array)
    assert array.flags.writeable
    np.testing.assert_array_equal(tensors.i64("ids"), [0, 1, 2])
    with pytest.raises(CheckpointError, match="complex"):
        TensorSource.of({"w": np.ones(2, np.complex64)})
