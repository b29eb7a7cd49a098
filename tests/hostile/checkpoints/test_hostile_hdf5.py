"""Each way in which an HDF5 file can lie ends in an error that says what is wrong, in little memory and time."""

from __future__ import annotations

import io
import math
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras_files import GOLDEN

from encast.errors import CheckpointError, EncastError
from encast.importers import hdf5_bytes, open_checkpoint
from encast.importers.files import MappedFile
from encast.importers.hdf5_file import read_hdf5
from encast.importers.weights import TensorSource


def made(**options: str) -> bytes:
    """``g/d`` and ``g/e``, f32[3] each, and the empty group ``h``."""
    memory = io.BytesIO()
    with h5py.File(memory, "w", **options) as file:
        file["g/d"] = np.array([1, 2, 3], "f4")
        file["g/e"] = np.array([4, 5, 6], "f4")
        file.create_group("h")
    return memory.getvalue()


OLD, NEW = made(), made(libver="latest")
ROOT = struct.unpack_from("<Q", OLD, 64)[0]
"""The header of the root group; the addresses below are of the root's own structures, which follow it."""
TREE, HEAP, SNOD = (OLD.index(mark) for mark in (b"TREE", b"HEAP", b"SNOD"))
LAYOUT = OLD.index(struct.pack("<BBQQ", 3, 1, OLD.index(struct.pack("<3f", 1, 2, 3)), 12))
SPACE = OLD.index(struct.pack("<BBBxxxxxQQ", 1, 1, 1, 3, 3))
SYMBOLS = OLD.index(struct.pack("<HHB", 0x11, 16, 0), ROOT)
LINK = OLD.index(struct.pack("<Q", struct.unpack_from("<Q", OLD, SNOD + 16)[0]), SNOD)
"""The address in the root's first symbol, ``g``."""


def put(data: bytes, at: int, form: str, *numbers: int) -> bytes:
    packed = struct.pack("<" + form, *numbers)
    return data[:at] + packed + data[at + len(packed) :]


def read(folder: Path, data: bytes) -> TensorSource:
    path = folder / "a.h5"
    path.write_bytes(data)
    tensors = TensorSource(read_hdf5(MappedFile(path)), str(path))
    # No two share bytes, so together they have no more than the file.
    assert sum(tensors.f32(name).nbytes for name in tensors) <= len(data)
    return tensors


LYING: dict[str, tuple[bytes, str]] = {
    "another signature": (b"\x89HDG" + OLD[4:], "does not begin as HDF5 does"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "git lfs pull"),
    "superblock of version 1": (put(OLD, 8, "B", 1), "superblock has version 1; 0, 2 and 3 are read"),
    "addresses of 4 bytes": (put(OLD, 13, "B", 4), r"addresses and sizes have \(4, 8\) bytes"),
    "data behind a base": (put(OLD, 24, "Q", 512), "data begin at byte 512"),
    "an end behind the end": (put(OLD, 40, "Q", 2**40), "says that it has 1099511627776 bytes, and has"),
    "a root at 2^64 - 1": (put(OLD, 64, "Q", 2**64 - 1), "the header of the root group is said to be nowhere"),
    "a root at 2^64 - 2": (put(OLD, 64, "Q", 2**64 - 2), "would end at byte 18446744073709551618"),
    "a root that is data": (put(OLD, 64, "Q", SNOD), "has version 83 at byte"),
    "a header of 4 GB": (put(OLD, SYMBOLS + 2, "H", 65535), "a message of .* has 65535 bytes"),
    "a header without messages": (put(OLD, ROOT + 2, "H", 0), "the root group is neither a group nor a dataset"),
    "another tree": (put(OLD, TREE, "I", 0), "there is no B-tree of the root group, which begins with TREE"),
    "a tree of chunks": (put(OLD, TREE + 4, "B", 1), "a node of kind 1 and level 0"),
    "a tree of 255 levels": (put(OLD, TREE + 5, "B", 255), "a node of kind 0 and level 255"),
    "a tree that is its own branch": (
        put(put(OLD, TREE + 5, "B", 1), TREE + 32, "Q", TREE), "a node of kind 0 and level 1"),
    "more branches than bytes": (put(OLD, TREE + 6, "H", 65535), "the B-tree of the root group would end at byte"),
    "another heap": (put(OLD, HEAP, "I", 0), "there is no heap of the names in the root group"),
    "a heap of 2^62 bytes": (put(OLD, HEAP + 8, "Q", 2**62), "the heap of the names in the root group would end at"),
    "a heap elsewhere": (put(OLD, HEAP + 24, "Q", 2**64 - 1), "the heap of the names in the root group would end at"),
    "a name behind the heap": (put(OLD, SNOD + 8, "Q", 2**63), "a name in the root group lies outside of its heap"),
    "a name without letters": (put(OLD, SNOD + 8, "Q", 0), "has a link named ''"),
    "two links of one name": (
        put(OLD, SNOD + 48, "Q", struct.unpack_from("<Q", OLD, SNOD + 8)[0]), "has two links named 'g'"),
    "65535 symbols": (put(OLD, SNOD + 6, "H", 65535), "a table of 65535 symbols in the root group would end at byte"),
    "a group in itself": (put(OLD, LINK, "Q", ROOT), "'g' is an object that has another name too.* in a circle"),
    "a shape of 2^60": (put(OLD, SPACE + 8, "QQ", 2**60, 2**60), "has more elements than memory can hold"),
    "a shape of 2^40": (put(OLD, SPACE + 8, "QQ", 2**40, 2**40), r"F32\[1099511627776\], needs 4398046511104 bytes"),
    "a shape of 2^40 and as many bytes": (
        put(put(OLD, SPACE + 8, "QQ", 2**40, 2**40), LAYOUT + 10, "Q", 2**42), "'g/d' would end at byte"),
    "a rank of 255": (put(OLD, SPACE + 1, "B", 255), "'g/d' has 255 dimensions, more than are stored or than 32"),
    "a shape of version 9": (put(OLD, SPACE, "B", 9), r"the shape of 'g/d' has a form that is not known \(version 9"),
    "more bytes than the shape has": (put(OLD, LAYOUT + 10, "Q", 16), r"'g/d', F32\[3\], needs 12 bytes and has 16"),
    "no shape and bytes all the same": (put(OLD, SPACE + 8, "QQ", 0, 0), r"'g/d', F32\[0\], needs 0 bytes and has 12"),
    "elements behind the end": (put(OLD, LAYOUT + 2, "Q", len(OLD) - 11), "'g/d' would end at byte"),
    "elements at 2^64 - 2": (put(OLD, LAYOUT + 2, "Q", 2**64 - 2), "'g/d' would end at byte"),
    "two datasets in one place": (
        put(OLD, LAYOUT + 2, "Q", OLD.index(struct.pack("<3f", 4, 5, 6)) + 4), "the bytes of 'g/e' and 'g/d' overlap"),
    "a layout of version 1": (put(OLD, LAYOUT, "B", 1), "'g/d' is laid out in version 1, and 3 to 5 are read"),
    "a layout of no kind": (put(OLD, LAYOUT + 1, "B", 77), "'g/d' is stored in layout 77"),
    "a newer root at 2^64 - 1": (put(NEW, 36, "Q", 2**64 - 1), "the header of the root group is said to be nowhere"),
    "a newer header of version 3": (
        put(NEW, NEW.index(b"OHDR") + 4, "B", 3), "begins with OHDR and has version 3, where 2 is known"),
    "a newer header of 4 GB": (
        put(NEW, NEW.index(b"OHDR") + 5, "B", NEW[NEW.index(b"OHDR") + 5] | 3), "the header of the root group"),
}  # fmt: skip


@pytest.mark.parametrize("case", LYING)
def test_lying_files(tmp_path: Path, case: str) -> None:
    data, message = LYING[case]
    tracemalloc.start()
    try:
        with pytest.raises(EncastError, match=message) as caught:
            read(tmp_path, data)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert str(tmp_path / "a.h5") in str(caught.value)


@pytest.mark.parametrize("whole", [OLD, NEW], ids=["old", "new"])
def test_the_file_that_the_lies_are_made_of(tmp_path: Path, whole: bytes) -> None:
    tensors = read(tmp_path, whole)
    assert list(tensors) == ["g/d", "g/e"]
    np.testing.assert_array_equal(tensors.f32("g/e"), [4, 5, 6])


def blocks(*messages: bytes) -> bytes:
    """A dataset's header of version 1 whose messages follow, and are led to from one another."""
    return struct.pack("<BBHII4x", 1, 0, len(messages), 1, sum(map(len, messages))) + b"".join(messages)


def test_a_header_that_goes_on_in_itself(tmp_path: Path) -> None:
    at = len(OLD)
    header = blocks(struct.pack("<HHB3xQQ", 0x10, 16, 0, at + 16, 24))
    with pytest.raises(CheckpointError, match=r"'g' goes on at byte \d+, which belongs to it already"):
        read(tmp_path, put(put(OLD + header, LINK, "Q", at), 40, "Q", at + len(header)))


def test_headers_that_go_on_elsewhere(tmp_path: Path) -> None:
    at = len(OLD)
    header = blocks(struct.pack("<HHB3xQQ", 0x10, 16, 0, 2**62, 2**63))
    with pytest.raises(CheckpointError, match="a block of the header of 'g' would end at byte"):
        read(tmp_path, put(put(OLD + header, LINK, "Q", at), 40, "Q", at + len(header)))


def chained(count: int) -> bytes:
    """A root group of the newer form whose header goes on in ``count`` blocks, each led to from the one before."""
    root = 48

    def link(at: int, size: int) -> bytes:
        return struct.pack("<BHBQQ", 0x10, 16, 0, at, size)

    data = bytearray(b"OHDR" + struct.pack("<BBI", 2, 2, 20))
    first, size = root + len(data) + 20, 28
    data += link(first, size)
    for number in range(1, count + 1):
        last = struct.pack("<BHB16x", 0, 16, 0)
        data += b"OCHK" + (last if number == count else link(first + number * size, size)) + bytes(4)
    return superblock(root, root + len(data)) + bytes(data)


def chained_old(count: int) -> bytes:
    """The same in the older form."""
    root = 48
    first = root + 16
    data = struct.pack("<BBHII4x", 1, 0, count + 1, 1, 24)
    data += b"".join(struct.pack("<HHB3xQQ", 0x10, 16, 0, first + 24 * (index + 1), 24) for index in range(count))
    data += bytes(64)
    return superblock(root, root + len(data)) + data


def superblock(root: int, end: int) -> bytes:
    return b"\x89HDF\r\n\x1a\n" + struct.pack("<BBBBQQQQI", 2, 8, 8, 0, 0, 2**64 - 1, end, root, 0)


@pytest.mark.parametrize("make", [chained, chained_old])
def test_headers_in_many_blocks(tmp_path: Path, make: Callable[[int], bytes]) -> None:
    """Each block is compared with those before it, so their number is bounded: 32,000 took 24 seconds."""
    with pytest.raises(EncastError, match="is neither a group nor a dataset"):
        read(tmp_path, make(200))
    whole = make(60_000)
    begin = time.process_time()
    with pytest.raises(CheckpointError, match="the header of the root group goes on in more than 256 blocks"):
        read(tmp_path, whole)
    assert time.process_time() - begin < 2


def test_long_paths(tmp_path: Path) -> None:
    """Names share the bytes of their heap and of the groups around them, and as paths they do not."""
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file["/".join(["g" * 100] * 10)] = np.ones(1, "f4")
    assert len(read(tmp_path, memory.getvalue())) == 1
    with h5py.File(memory, "w") as file:
        file["/".join(["g" * 101] * 10 + ["\u00e9" * 5])] = np.ones(1, "f4")
    with pytest.raises(CheckpointError, match=r"the path 'g{101}/g{18}'\.\.\. has more than 1024 bytes"):
        read(tmp_path, memory.getvalue())


@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [
        ("hdf5_file._MOST_DATASETS", 1, "it has more than 1 datasets, which no model needs"),
        ("hdf5_file._MOST_OBJECTS", 3, "it has more than 3 groups and datasets, which no model needs"),
        ("hdf5_groups._MOST_LINKS", 1, "the root group has more than 1 links, which no model needs"),
    ],
)
def test_numbers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, message: str
) -> None:
    monkeypatch.setattr(f"encast.importers.{limit}", most)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, OLD)


@pytest.mark.parametrize("at", ["ROOT", "TREE", "HEAP", "SNOD", "superblock"])
def test_elements_among_the_structures(tmp_path: Path, at: str) -> None:
    place = {"ROOT": ROOT, "TREE": TREE, "HEAP": HEAP, "SNOD": SNOD, "superblock": 20}[at]
    with pytest.raises(CheckpointError, match="the elements of 'g/d' lie where the file says what it consists of"):
        read(tmp_path, put(OLD, LAYOUT + 2, "Q", place))


def test_deep_nesting(tmp_path: Path) -> None:
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file["/".join("d" * 33)] = np.ones(1, "f4")
    with pytest.raises(CheckpointError, match="has more than 32 groups around it"):
        read(tmp_path, memory.getvalue())


def test_work_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5_bytes, "_MOST_READS", 20)
    with pytest.raises(CheckpointError, match="have more than 20 parts, which no model needs"):
        read(tmp_path, OLD)


def test_tables_of_symbols_that_are_shared_a_million_times(tmp_path: Path) -> None:
    """Trees of eight levels whose 500 branches are one and the same: 500 ^ 8 tables of symbols, all of them empty."""
    data = bytearray(OLD)
    at = len(data)
    below = at
    data += b"SNOD\1\0\0\0"
    for level in range(8):
        node = len(data)
        data += b"TREE" + struct.pack("<BBHQQQ", 0, level, 500, 2**64 - 1, 2**64 - 1, 0)
        data += struct.pack("<QQ", below, 0) * 500
        below = node
    with pytest.raises(CheckpointError, match="have more than 500000 parts"):
        read(tmp_path, put(put(bytes(data), 40, "Q", len(data)), SYMBOLS + 8, "Q", below))


# Damage at random


@pytest.mark.parametrize("whole", [OLD, NEW], ids=["old", "new"])
def test_every_truncation_is_refused(tmp_path: Path, whole: bytes) -> None:
    for size in range(1, len(whole), 7):
        with pytest.raises(CheckpointError):
            read(tmp_path, whole[:size])


@pytest.mark.parametrize("name", ["bert-classify/tf_model.h5", "albert-fill_mask/tf_model-00001-of-00002.h5"])
def test_truncations_of_what_keras_wrote(tmp_path: Path, name: str) -> None:
    whole = (GOLDEN / name).read_bytes()
    for size in range(1, len(whole), 50):
        with pytest.raises(CheckpointError, match=r"truncated|fetch it again|does not begin as HDF5"):
            read(tmp_path, whole[:size])
        # A file that claims to end where it was cut off is found out by what is missing, if anything is.
        if size >= 96:
            try:
                read(tmp_path, put(whole[:size], 40, "Q", size))
            except EncastError:
                continue
            assert size > len(whole) - 4096


@pytest.mark.parametrize("whole", [OLD, NEW], ids=["old", "new"])
def test_flipped_bits_are_refused_or_harmless(tmp_path: Path, whole: bytes) -> None:
    """Elements change, and nothing else but for a few names; a link of the newer form may vanish, whose header has a
    checksum that is not looked at. The model then lacks a tensor."""
    names = []
    for position in range(len(whole)):
        for bit in (position * 5 % 8, 7):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            try:
                tensors = read(tmp_path, bytes(data))
            except EncastError:
                continue
            names.append(tuple(tensors))
            assert len(tensors) == 2 or (whole is NEW and len(tensors) < 2)
            assert all(tensors.shape(name) == (3,) and tensors.dtype(name) == "F32" for name in tensors)
    assert len(names) > len(whole) / 3
    assert len(names) - names.count(("g/d", "g/e")) < 12


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(OLD) - 8), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6))
def test_random_changes(tmp_path: Path, changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(OLD)
    for at, content in changes:
        data[at : at + len(content)] = content
    try:
        tensors = read(tmp_path, bytes(data))
    except EncastError:
        return
    assert len(tensors) <= 2
    assert all(math.prod(tensors.shape(name)) == 3 and tensors.dtype(name) == "F32" for name in tensors)


def test_a_whole_folder_of_zeros(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "bert-classify" / "config.json", tmp_path)
    (tmp_path / "tf_model.h5").write_bytes(bytes(1 << 16))
    with pytest.raises(CheckpointError, match=r"tf_model\.h5: does not begin as HDF5 does"):
        open_checkpoint(tmp_path)
