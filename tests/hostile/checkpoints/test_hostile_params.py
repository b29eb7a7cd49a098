"""Each way in which a file of MXNet's nd.save can lie ends in an error that says what is wrong, in little memory."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gluon_files import V1, V2, V3, array_bytes, params_bytes, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from encast.archs import build_graph
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.files import MappedFile
from encast.importers.gluon_names import parts_of
from encast.importers.mxnet_file import read_params
from encast.importers.weights import WEIGHT_DTYPES, TensorSource


def one(**changes: Any) -> bytes:
    return params_bytes([array_bytes(**changes)], ["w"])


def head(*numbers: int, data: bytes = b"") -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers) + data


W = array_bytes()

LYING: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "half a header": (head(0x112), "the header needs 16 bytes at byte 0, but 8 follow"),
    "another magic": (head(0x113, 0, 0, 0), "does not start with 0x112"),
    "big-endian": (struct.pack(">QQQQ", 0x112, 0, 0, 0), "does not start with 0x112"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "git lfs pull"),
    "2^64 - 1 arrays": (head(0x112, 0, 2**64 - 1, data=W), "says that 18446744073709551615 arrays follow"),
    "more arrays than bytes": (head(0x112, 0, 3, data=W), "says that 3 arrays follow, and 40 bytes do"),
    "too many arrays": (head(0x112, 0, 4097, data=bytes(4097 * 21)), "at most 4096 arrays are read"),
    "a magic that begins no array": (one(magic=0x12345678), "array 0 starts with 0x12345678, which begins no array"),
    "rank of 2^31 - 1": (one(rank=2**31 - 1), "says that it has 2147483647 dimensions, at most 32"),
    "rank of 33": (one(shape=[1] * 33), "says that it has 33 dimensions"),
    "rank of -1": (one(shape=[], rank=-1), r"has the shape \[\], and no values"),
    "rank of 0": (one(shape=[]), r"has the shape \[\], and no values"),
    "rank of 0 in the oldest form": (one(shape=[], magic=None), r"has the shape \[\], and no values"),
    "a size of 0": (one(shape=[2, 0]), r"has the shape \[2, 0\], and no values; it was saved before"),
    "a size of -1": (one(shape=[-1, 2]), r"has the shape \[-1, 2\], and no values"),
    "a scalar of version 3": (one(shape=[], magic=V3), r"has the shape \[\], which no parameter of a model has"),
    "a size of 0 in version 3": (one(shape=[2, 0], magic=V3), r"the shape \[2, 0\], which no parameter of a model has"),
    "a size of -1 in version 3": (one(shape=[2, -1], magic=V3), r"the shape \[2, -1\], and no values; it was saved"),
    "an unknown rank of version 3": (one(shape=[], rank=-1, magic=V3), r"has the shape \[\], and no values"),
    "two sizes of -1": (one(shape=[-1, -2]), "no values"),
    "a size of 2^60": (one(shape=[2**60]), "needs 4611686018427387904 bytes at byte 56, but"),
    "sizes of 2^60": (one(shape=[2**60] * 32), r"array 0, F32\[1152921504606846976, .*needs \d{500,} bytes"),
    "a product of 2^64 + 8 bytes": (one(shape=[2**31 + 1, 2**31]), "needs 18446744082299486208 bytes"),
    "oldest form, 2^32 - 1": (one(shape=[2**32 - 1], magic=None), "needs 17179869180 bytes"),
    "one value too many": (params_bytes([array_bytes(shape=[40])], ["w"]), "needs 160 bytes at byte 56, but 25 follow"),
    "no names": (params_bytes([W], []), "has 1 arrays and 0 names; it was saved from a list"),
    "fewer names": (params_bytes([W, W], ["w"]), "has 2 arrays and 1 names$"),
    "2^63 names": (head(0x112, 0, 1, data=W + head(2**63)), "says that 9223372036854775808 names follow"),
    "a name of 2^60 bytes": (head(0x112, 0, 1, data=W + head(1, 2**60)), "a name has 1152921504606846976 bytes"),
    "a name of 257 bytes": (params_bytes([W], ["w" * 257]), "a name has 257 bytes, at most 256 are read"),
    "a name longer than the file": (head(0x112, 0, 1, data=W + head(1, 9)), "a name needs 9 bytes at byte .*but 0"),
    "a name that is not UTF-8": (params_bytes([W], [b"\xff"]), "a name at byte .* is not UTF-8"),
    "a name twice": (params_bytes([W, W], ["w", "w"]), "two arrays are named 'w'"),
    "more behind the names": (params_bytes([W], ["w"]) + b"x", "1 bytes follow the last name"),
}

REFUSED: dict[str, tuple[bytes, str]] = {
    "row_sparse": (one(storage=1), r"array 0 is stored as row_sparse; .*tostype\('default'\)"),
    "csr": (one(storage=2), "stored as csr"),
    "an unknown storage": (one(storage=-1), "stored as storage type -1"),
    "sparse with another magic": (one(storage=1, magic=V3), "stored as row_sparse"),
    "an unknown dtype": (one(flag=13), r"dtype number 13; known are \{0: 'F32'"),
    "a negative dtype": (one(flag=-1), "dtype number -1"),
    "an archive of MXNet 2": (b"PK\x03\x04" + bytes(40), "a zip archive, as MXNet 2"),
}


@pytest.mark.parametrize("case", [*LYING, *REFUSED])
def test_lying_files(tmp_path: Path, case: str) -> None:
    data, message = {**LYING, **REFUSED}[case]
    path = tmp_path / "net.params"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError if case in LYING else UnsupportedModelError, match=message) as caught:
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 3000
    str(caught.value).encode()


def test_names_are_compared_until_three_are_unknown() -> None:
    """Each unknown name meets every rule, and a file may have thousands of long ones."""
    names = iter([f"encoder.transformer_cells.{'0' * 200}{index}" for index in range(10)])
    with pytest.raises(UnsupportedModelError, match="belong to no model of GluonNLP"):
        parts_of(names, "net.params")
    assert len(list(names)) == 7


def folder(path: Path) -> Path:
    (path / "config.json").write_text('{"num_attention_heads": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12}')
    return path / "net.params"


def test_every_truncation_of_a_model_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path)
    data = tiny_model()
    path.write_bytes(data)
    build_graph(open_checkpoint(path))
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


@pytest.mark.parametrize("magic", [None, V1, V2, V3])
def test_every_truncation_of_every_version_is_refused(tmp_path: Path, magic: int | None) -> None:
    path = tmp_path / "net.params"
    data = params_bytes({"a": np.ones((2, 3), np.float32), "b": np.ones(1, np.float16)}, magic=magic)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read_params(MappedFile(path))


def test_any_byte_of_a_model_may_be_wrong(tmp_path: Path) -> None:
    """Bytes of values, of devices and of sizes may change what the model is, never how the reader ends."""
    path = folder(tmp_path)
    data = tiny_model()
    for place in range(0, len(data), 3):  # names and sizes lie at all remainders
        path.write_bytes(data[:place] + bytes([data[place] ^ (0xFF if place % 2 else 0x01)]) + data[place + 1 :])
        with contextlib.suppress(EncastError):
            build_graph(open_checkpoint(path))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrays=st.lists(
        st.tuples(
            st.sampled_from([None, V1, V2, V3, 7]),
            st.lists(st.integers(-2, 5) | st.sampled_from([2**31, 2**60, 2**63 - 1]), max_size=4),
            st.integers(-1, 13),
            st.binary(max_size=64),
        ),
        max_size=4,
    ),
    names=st.lists(st.text(max_size=3), max_size=4),
)
def test_random_files(tmp_path: Path, arrays: list[Any], names: list[str]) -> None:
    parts = []
    for magic, shape, flag, data in arrays:
        small = [size % 2**32 for size in shape] if magic is None else shape
        parts.append(array_bytes(magic=magic, shape=small, flag=flag, data=data))
    path = tmp_path / "net.params"
    path.write_bytes(params_bytes(parts, [name.encode("utf-8", "replace") for name in names]))
    with contextlib.suppress(EncastError):
        tensors = TensorSource(read_params(MappedFile(path)), str(path))
        for name in tensors:
            if tensors.dtype(name) in WEIGHT_DTYPES:
                tensors.f32(name)
