"""A checkpoint in, an ordinary checkpoint with zeros out."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encast.errors import InputError, ResourceError
from encast.files import sync_folder
from encast.importers import Checkpoint, open_checkpoint
from encast.importers.weights import DTYPES
from encast.sparsity.files import check_new_folder, contains, copy_files
from encast.sparsity.magnitude import check_sparsity, magnitude_mask
from encast.sparsity.pattern import Pattern
from encast.sparsity.products import product_rows

__all__ = ["PrunedWeight", "prune_checkpoint"]

_WEIGHTS = "model.safetensors"
Progress = Callable[[int, int], None]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PrunedWeight:
    """What became of a weight: its ``tensor`` in the file, and the share of zeros among its elements."""

    tensor: str
    shape: tuple[int, ...]
    zeros_before: float
    zeros_after: float


def prune_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    pattern: Pattern,
    sparsity: float,
    keep: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[PrunedWeight]:
    """Writes a copy of the checkpoint ``source`` (a folder or a hub id) whose weights have zeros; returns which ones.

    Each product inside of the encoder layers loses the share ``sparsity`` of its blocks, by magnitude; embeddings,
    biases, norms, poolers and heads stay. ``keep``: patterns (as a shell matches file names) of tensors that stay as
    well. Every other tensor is the same bits, dtypes too; all are in one ``model.safetensors``. Other files of weights
    beside it, by their suffix, and folders of exports are left out; all other files are copied, links as what they
    lead to. ``progress(done, total)`` counts weights.

    Raises ``InputError`` for bad options, or if ``out`` exists; ``CheckpointError`` or ``UnsupportedModelError`` for a
    checkpoint that cannot be used; ``ResourceError`` when ``out`` cannot be written, of which then nothing stays.
    """
    check_sparsity(sparsity)
    target = check_new_folder(out)
    checkpoint = open_checkpoint(source)
    checkpoint.need_hugging_face("pruning")
    if contains(checkpoint.root, target):
        raise InputError(f"{target} lies in the checkpoint itself; choose a place outside of it")
    products = product_rows(checkpoint, keep)
    names = list(products)
    temporary = target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}"
    try:
        temporary.mkdir()
        copy_files(checkpoint, temporary, target)
        place = temporary / checkpoint.path.relative_to(checkpoint.root)
        pruned = list(_write_weights(checkpoint, products, pattern, sparsity, place / _WEIGHTS, progress))
        pruned.sort(key=lambda weight: names.index(weight.tensor))
        for folder, _, _ in os.walk(temporary):
            sync_folder(Path(folder))
        os.rename(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise InputError(f"{target} exists already; choose another name, or remove it") from None
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"the name of {target} is too long; choose a shorter one") from None
        raise ResourceError(
            f"the checkpoint {target} cannot be written: {error.strerror or error} "
            f"({shutil.disk_usage(target.parent).free >> 20} MiB are free there); free space or choose another folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return pruned


def _write_weights(
    checkpoint: Checkpoint,
    products: Mapping[str, Array | None],
    pattern: Pattern,
    sparsity: float,
    path: Path,
    progress: Progress | None,
) -> Iterator[PrunedWeight]:
    """All tensors, those of ``names`` pruned, as safetensors: its own package writes no bf16 without torch."""
    tensors = checkpoint.tensors
    # transformers asks for this word before it reads a file.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in tensors:
        stored = tensors.stored(name)
        begin, end = end, end + math.prod(stored.shape) * DTYPES[stored.dtype].itemsize
        header[name] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in tensors:
            elements = tensors.stored(name).elements()
            if name in products:
                weight = tensors.f32(name)
                stays = _mask(weight, pattern, sparsity, products[name])
                elements = np.where(stays, elements, elements.dtype.type(0))
                before, after = (float(np.mean(one == 0)) for one in (weight, np.where(stays, weight, 0)))
                yield PrunedWeight(name, weight.shape, before, after)
                done += 1
                if progress is not None:
                    progress(done, len(products))
            file.write(np.ascontiguousarray(elements).tobytes())
        file.flush()
        os.fsync(file.fileno())


def _mask(weight: Array, pattern: Pattern, sparsity: float, places: Array | None) -> Array:
    """``magnitude_mask`` of the rows in the order of ``places``, given back in that of ``weight``."""
    if places is None:
        return magnitude_mask(weight, pattern, sparsity)
    return magnitude_mask(weight[np.argsort(places)], pattern, sparsity)[places]
