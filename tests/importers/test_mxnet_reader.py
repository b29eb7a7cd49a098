"""Reading MXNet's ``.params`` without MXNet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gluon_files import V1, V2, V3, params_bytes

from encast.importers.files import MappedFile
from encast.importers.mxnet_file import read_params
from encast.importers.weights import TensorSource


def open_bytes(folder: Path, data: bytes) -> TensorSource:
    path = folder / "net.params"
    path.write_bytes(data)
    return TensorSource(read_params(MappedFile(path)), str(path))


@pytest.mark.parametrize("magic", [None, V1, V2, V3])
def test_values_of_every_dtype_and_version(tmp_path: Path, magic: int | None) -> None:
    values = np.arange(6).reshape(2, 3) / 4
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "f32": values.astype(np.float32),
        "f16": values.astype(np.float16),
        "f64": values,
        "bf16": (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "arg:ids": np.arange(5),
        "odd": np.ones(3, np.int8),  # what follows is not aligned
        "last": np.float32([[7]]),
    }
    tensors = open_bytes(tmp_path, params_bytes(arrays, magic=magic))
    assert list(tensors) == list(arrays)
    for name in ("f32", "f16", "f64", "bf16"):
        assert tensors.shape(name) == (2, 3)
        np.testing.assert_array_equal(tensors.f32(name), values)
    np.testing.assert_array_equal(tensors.i64("arg:ids"), np.arange(5))
    assert tensors.f32("last").flags.aligned
    np.testing.assert_array_equal(tensors.f32("last"), [[7]])


def test_values_are_read_from_the_mapping(tmp_path: Path) -> None:
    tensors = open_bytes(tmp_path, params_bytes({"w": np.ones((2, 2), np.float32)}))
    assert not tensors.stored("w").elements().flags.owndata


def test_bytes_of_a_file_that_mxnet_wrote(tmp_path: Path) -> None:
    """mxnet 1.9.1: nd.save(file, {"w": nd.array([[1, 2]])})."""
    data = bytes.fromhex(
        "120100000000000000000000000000000100000000000000c9fa93f90000000002000000010000000000000002000000"
        "000000000100000000000000000000000000803f000000400100000000000000010000000000000077"
    )
    assert params_bytes({"w": np.float32([[1, 2]])}) == data  # so what these tests write is what MXNet writes
    np.testing.assert_array_equal(open_bytes(tmp_path, data).f32("w"), [[1, 2]])
