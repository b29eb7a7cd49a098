"""Reading HDF5 without libhdf5: what h5py writes is read as h5py reads it, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import MappedFile
from encast.importers.hdf5_file import read_hdf5
from encast.importers.weights import DTYPES

DATASETS: dict[str, np.ndarray[Any, Any]] = {
    "w": np.arange(6, dtype="f4").reshape(2, 3),
    "a/b/c/half": np.arange(4, dtype="f2"),
    "a/b/double": np.arange(8, dtype="f8").reshape(2, 2, 2),
    "a/scalar": np.array(7, "i8"),
    "a/none": np.empty((0, 3), "f4"),
    "flags": np.array([True, False]),
    **{f"integers/{kind}": np.arange(3, dtype=kind) for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")},
    "name \u00e9:0": np.ones(1, "f4"),
}


def written(path: Path, datasets: dict[str, np.ndarray[Any, Any]], **options: Any) -> MappedFile:
    with h5py.File(path, "w", **options) as file:
        for name, values in datasets.items():
            file[name] = values
        file.attrs["layer_names"] = [f"{name:>300}" for name in "abcdefgh"]
        file["w"].attrs["dtype"] = "float32"
    return MappedFile(path)


def check(file: MappedFile, datasets: dict[str, np.ndarray[Any, Any]]) -> None:
    found = read_hdf5(file)
    assert set(found) == set(datasets)
    for name, values in datasets.items():
        stored = found[name]
        assert stored.shape == values.shape
        assert DTYPES[stored.dtype].itemsize == values.dtype.itemsize
        assert stored.elements().tobytes() == values.tobytes()


@pytest.mark.parametrize("options", [{}, {"libver": "v108"}, {"libver": "latest"}, {"track_order": True}], ids=str)
def test_what_h5py_writes(tmp_path: Path, options: dict[str, Any]) -> None:
    check(written(tmp_path / "a.h5", DATASETS, **options), DATASETS)


def test_groups_with_many_links(tmp_path: Path) -> None:
    """Two levels of a B-tree, as of the layers of a deep model."""
    many = {f"layers/{number}/vars/0": np.full(1, number, "f4") for number in range(600)} | {"w": DATASETS["w"]}
    file = written(tmp_path / "a.h5", many)
    assert bytes(file.bytes[:]).count(b"SNOD") > 600 + 600 / 8
    check(file, many)


def test_elements_lie_in_the_mapped_file(tmp_path: Path) -> None:
    elements = read_hdf5(written(tmp_path / "a.h5", DATASETS))["w"].elements()
    assert not elements.flags.owndata
    assert not elements.flags.writeable


def test_bfloat16(tmp_path: Path) -> None:
    """h5py has no name for it, nor has NumPy: two bytes without a meaning."""
    bits = np.array([0x3F80, 0x4000], "u2")
    found = read_hdf5(written(tmp_path / "a.h5", {"w": bits.view("V2")}))["w"]
    assert found.dtype == "BF16"
    np.testing.assert_array_equal(found.elements(), bits)


def chunked(file: h5py.File, **options: Any) -> None:
    file.create_dataset("d", data=np.zeros((8, 8), "f4"), chunks=(4, 4), **options)


def compact(file: h5py.File) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    h5py.h5d.create(file.id, b"d", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((2,)), plist)


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((2,), "f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", (2,))
    file.create_virtual_dataset("d", layout)


def committed(file: h5py.File) -> None:
    file["t"] = np.dtype("f4")
    file.create_dataset("d", data=np.ones(2, "f4"), dtype=file["t"])


def many_links(file: h5py.File) -> None:
    group = file.create_group("d", track_order=True)
    for number in range(20):
        group[str(number)] = np.ones(1, "f4")


REFUSED: dict[str, tuple[Callable[[h5py.File], Any], str]] = {
    "chunks": (chunked, r"'d' is stored in chunks; it is read in one piece.*h5repack"),
    "gzip": (lambda file: chunked(file, compression="gzip"), "'d' is stored in chunks, with gzip"),
    "gzip and shuffle": (lambda file: chunked(file, compression="gzip", shuffle=True), "with shuffle and gzip"),
    "lzf": (lambda file: chunked(file, compression="lzf"), "with lzf"),
    "fletcher32": (lambda file: chunked(file, fletcher32=True), "with fletcher32"),
    "scale-offset": (lambda file: chunked(file, scaleoffset=2), "with scale-offset"),
    "compact": (compact, "'d' is stored compact, within the header"),
    "virtual": (virtual, "'d' is stored virtual, of other datasets"),
    "other files": (
        lambda file: file.create_dataset("d", (2,), "f4", external=[("/etc/passwd", 0, 8)]),
        "the elements of 'd' lie in other files, which are not opened",
    ),
    "a soft link": (lambda file: file.__setitem__("d", h5py.SoftLink("/w")), "'d' in the root group is a soft link"),
    "a link to a file": (
        lambda file: file.__setitem__("d", h5py.ExternalLink("/etc/passwd", "/w")),
        "'d' in the root group is a (soft )?link",
    ),
    "strings": (lambda file: file.__setitem__("d", ["a", "b"]), "'d' has values of any length"),
    "strings of one length": (lambda file: file.__setitem__("d", np.array([b"ab"])), "'d' has strings"),
    "records": (lambda file: file.__setitem__("d", np.zeros(2, "f4,i4")), "'d' has records"),
    "complex numbers": (lambda file: file.__setitem__("d", np.zeros(2, "c8")), "'d' has (records|complex numbers)"),
    "big-endian": (lambda file: file.__setitem__("d", np.zeros(2, ">f4")), "'d' is big-endian"),
    "long doubles": (
        lambda file: file.__setitem__("d", np.zeros(2, "g")),
        "'d' has floating-point numbers of 16 bytes",
    ),
    "opaque": (lambda file: file.__setitem__("d", np.zeros(2, "V3")), "'d' has 3 bytes without a meaning"),
    "no elements": (lambda file: file.__setitem__("d", h5py.Empty("f4")), "'d' has no elements"),
    "a named type": (committed, r"'t' is neither a group nor a dataset|stored apart, for several objects"),
    "an index of links": (many_links, r"the links of 'd' are in an index of the newer form"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_keras_does_not_write_is_refused_by_name(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        make(file)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read_hdf5(MappedFile(tmp_path / "a.h5"))
    assert str(tmp_path / "a.h5") in str(caught.value)


def test_what_was_never_written(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("d", (2, 3), "f4")
    with pytest.raises(CheckpointError, match=r"'d' has the shape \[2, 3\] and no elements, so it was never written"):
        read_hdf5(MappedFile(tmp_path / "a.h5"))


def test_two_names_of_one_object(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["d"] = np.ones(2, "f4")
        file["e"] = file["d"]
    with pytest.raises(CheckpointError, match=r"'[de]' is an object that has another name too"):
        read_hdf5(MappedFile(tmp_path / "a.h5"))


def test_a_user_block(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file["d"] = np.ones(2, "f4")
    with pytest.raises(CheckpointError, match="does not begin as HDF5 does"):
        read_hdf5(MappedFile(tmp_path / "a.h5"))
