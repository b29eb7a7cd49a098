"""HDF5, the container of Keras weights: the part of the format that h5py writes by default, without libhdf5.

The file is a tree of groups whose leaves are datasets ("HDF5 File Format Specification Version 3.0"). Opening walks the
tree and checks every address and size; elements are memory-mapped. Links lead to each object once and no two datasets
share bytes, with each other or with the structures that were read, so there is no cycle, and a small file stays small.
"""

from __future__ import annotations

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import MappedFile, quote, refuse_pointer
from encast.importers.hdf5_bytes import Hdf5Bytes
from encast.importers.hdf5_datasets import Dataset, is_dataset, read_dataset
from encast.importers.hdf5_groups import is_group, read_links
from encast.importers.hdf5_objects import read_messages
from encast.importers.weights import StoredTensor

__all__ = ["read_hdf5"]

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MOST_LEVELS = 32
_LONGEST_PATH = 1_024
"""In bytes. The longest of TensorFlow's names has 131."""
_MOST_OBJECTS = 50_000
"""Groups and datasets. BERT with 12 layers has 560."""
_MOST_DATASETS = 10_000


def read_hdf5(file: MappedFile) -> dict[str, StoredTensor]:
    """Path, such as ``layers/dense/vars/0`` → tensor, for every dataset of the file.

    Raises ``CheckpointError`` for what is damaged or contradicts itself, and ``UnsupportedModelError`` for what the
    format allows and Keras does not write: compression, chunks, links to other places, strings.
    """
    refuse_pointer(file.bytes[:32], str(file.path))
    data = Hdf5Bytes(file)
    root = _root(data)
    datasets: dict[str, Dataset] = {}
    seen = {root}
    waiting: list[tuple[tuple[str, ...], int]] = [((), root)]
    while waiting:
        names, address = waiting.pop()
        path = "/".join(names)
        what = quote(path) if names else "the root group"
        messages = read_messages(data, address, what)
        if is_dataset(messages):
            if len(datasets) == _MOST_DATASETS:
                data.fail(f"it has more than {_MOST_DATASETS} datasets, which no model needs")
            datasets[path] = read_dataset(data, messages, what)
            continue
        if not is_group(messages):
            raise UnsupportedModelError(
                f"{data.where}: {what} is neither a group nor a dataset (a named type, perhaps), and Keras writes no "
                "others; save the weights anew"
            )
        if len(names) == _MOST_LEVELS:
            data.fail(f"{what} has more than {_MOST_LEVELS} groups around it")
        children = read_links(data, messages, what)
        for name, child in reversed(children.items()):
            if child in seen:
                raise CheckpointError(
                    f"{data.where}: {quote('/'.join((*names, name)))} is an object that has another name too; links "
                    "that lead to one place twice, or in a circle, are not followed, and Keras writes none"
                )
            if len("/".join((*names, name)).encode()) > _LONGEST_PATH:
                data.fail(f"the path {quote('/'.join((*names, name)))} has more than {_LONGEST_PATH} bytes")
            if len(seen) == _MOST_OBJECTS:
                data.fail(f"it has more than {_MOST_OBJECTS} groups and datasets, which no model needs")
            seen.add(child)
            waiting.append(((*names, name), child))
    _check_apart(data, datasets)
    return {path: dataset.tensor for path, dataset in datasets.items()}


def _root(data: Hdf5Bytes) -> int:
    """The address of the root group, by the superblock (II.A)."""
    where = data.where
    if data.file.bytes[:8] != _SIGNATURE:
        raise CheckpointError(f"{where}: does not begin as HDF5 does, so it is no file of Keras's weights")
    (version,) = data.numbers("8xB", 0, "the superblock")
    if version == 0:
        widths = data.numbers("13xBB", 0, "the superblock")
        base, end, root = data.numbers("24xQ8xQ8x8xQ", 0, "the superblock")
    elif version in (2, 3):
        widths = data.numbers("9xBB", 0, "the superblock")
        base, end, root = data.numbers("12xQ8xQQ", 0, "the superblock")
    else:
        raise UnsupportedModelError(f"{where}: its superblock has version {version}; 0, 2 and 3 are read")
    if widths != (8, 8):
        raise UnsupportedModelError(f"{where}: addresses and sizes have {widths} bytes; 8 and 8 are read")
    if base != 0:
        raise UnsupportedModelError(f"{where}: its data begin at byte {base}, behind a user block; 0 is read")
    if end > data.file.size:
        raise CheckpointError(
            f"{where}: says that it has {end} bytes, and has {data.file.size}; it is truncated, so fetch it again"
        )
    return root


def _check_apart(data: Hdf5Bytes, datasets: dict[str, Dataset]) -> None:
    reached, previous = 0, ""
    for path, dataset in sorted(datasets.items(), key=lambda item: (item[1].begin, item[1].end)):
        if dataset.begin < reached and dataset.begin < dataset.end:
            data.fail(f"the bytes of {quote(previous)} and {quote(path)} overlap")
        if dataset.end > reached:
            reached, previous = dataset.end, path
    inside = data.taken([(dataset.begin, dataset.end) for dataset in datasets.values()])
    for path, is_inside in zip(datasets, inside, strict=True):
        if is_inside:
            data.fail(f"the elements of {quote(path)} lie where the file says what it consists of")
