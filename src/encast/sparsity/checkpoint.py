"""A checkpoint in, an ordinary checkpoint with zeros out."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from encast.archs import build_graph
from encast.errors import CheckpointError, InputError, ResourceError
from encast.files import sync_folder
from encast.importers import Checkpoint, open_checkpoint
from encast.importers.weights import DTYPES
from encast.sparsity.magnitude import check_sparsity, magnitude_mask
from encast.sparsity.pattern import Pattern

__all__ = ["PrunedWeight", "prune_checkpoint"]

_WEIGHTS = "model.safetensors"
_OTHER_WEIGHTS = (
    ".safetensors", ".bin", ".index.json", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ot", ".pt", ".pth", ".ckpt",
    ".gguf", ".tflite",
)  # fmt: skip
_EXPORTS = ("onnx", "openvino", "coreml", ".git", ".cache")
"""Beside the model: files and folders that hold it in other forms, which would be another model now, or its history."""

Progress = Callable[[int, int], None]


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
    target = _target(out)
    checkpoint = open_checkpoint(source)
    if _contains(checkpoint.root, target):
        raise InputError(f"{target} lies in the checkpoint itself; choose a place outside of it")
    names = _chosen(list(_products(checkpoint)), keep)
    temporary = target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}"
    try:
        temporary.mkdir()
        _Copy(checkpoint, target).copy(checkpoint.root, temporary, ())
        place = temporary / checkpoint.path.relative_to(checkpoint.root)
        pruned = list(_write_weights(checkpoint, names, pattern, sparsity, place / _WEIGHTS, progress))
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


def _target(out: str | os.PathLike[str]) -> Path:
    """The absolute path of ``out``, where nothing is yet; raises ``InputError``."""
    target = Path(os.path.abspath(out))
    if "\0" in str(target):
        raise InputError(f"{str(target)!r} has a NUL in it; choose another name")
    if os.path.lexists(target):
        raise InputError(f"{target} exists already; choose another name, or remove it")
    if not target.parent.is_dir():
        raise InputError(f"the folder {target.parent} does not exist; make it, or choose another place")
    return target


def _products(checkpoint: Checkpoint) -> Iterator[str]:
    """The tensors that are weights of products in the encoder layers, each once, in their order."""
    graph = build_graph(checkpoint)
    weights = dict.fromkeys(node.inputs[1] for node in graph.nodes if node.op == "linear" and node.layer >= 0)
    for weight in weights:
        # Constants have the checkpoint's names without the prefix of the encoder.
        found = [name for name in checkpoint.tensors if name == weight or name.endswith(f".{weight}")]
        if len(found) != 1:
            raise CheckpointError(
                f"{checkpoint.path}: {len(found)} tensors could be {weight!r}: {', '.join(found)}; save the model alone"
            )
        yield found[0]


def _chosen(names: list[str], keep: Sequence[str]) -> list[str]:
    """The names that match no pattern; raises ``InputError`` for a pattern that matches none."""
    unmatched = next((one for one in keep if not any(fnmatchcase(name, one) for name in names)), None)
    if unmatched is not None:
        raise InputError(f"the pattern {unmatched!r} in keep matches none of the {len(names)} weights, as {names[0]!r}")
    return [name for name in names if not any(fnmatchcase(name, one) for one in keep)]


def _contains(folder: Path, path: Path) -> bool:
    """Whether ``path`` is the folder or lies in it, links resolved."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


@dataclass(frozen=True)
class _Copy:
    """Copies all of a checkpoint but its weights."""

    checkpoint: Checkpoint
    target: Path

    @cached_property
    def read(self) -> frozenset[str]:
        """The names of the files that hold the tensors."""
        tensors = self.checkpoint.tensors
        return frozenset(Path(tensors.stored(name).where).name for name in tensors)

    def copy(self, folder: Path, out: Path, above: tuple[str, ...]) -> None:
        """What is in ``folder`` to ``out``, which exists. ``above``: the folders that lead here, links resolved."""
        here = os.path.realpath(folder)
        beside = here in (os.path.realpath(self.checkpoint.root), os.path.realpath(self.checkpoint.path))
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
        for entry in entries:
            path = folder / entry.name
            if entry.is_dir():
                if beside and entry.name in _EXPORTS:
                    continue
                self._check_link(path, (*above, here))
                (out / entry.name).mkdir()
                self.copy(path, out / entry.name, (*above, here))
            elif not (beside and (entry.name.endswith(_OTHER_WEIGHTS) or entry.name in self.read)):
                _copy_file(path, out / entry.name)

    def _check_link(self, path: Path, above: tuple[str, ...]) -> None:
        """Refuses a link around the checkpoint, or around what is written: its copy would have no end."""
        if not path.is_symlink():
            return
        if os.path.realpath(path) in above or any(_contains(path, one) for one in (self.checkpoint.root, self.target)):
            raise CheckpointError(
                f"{path} is a link to a folder that the checkpoint, or the place of the copy, lies in; remove it"
            )


def _copy_file(path: Path, out: Path) -> None:
    try:
        if not path.is_file():
            lost = path.is_symlink() and not path.exists()
            what = "a link to nothing; fetch the checkpoint again" if lost else "no file and no folder; remove it"
            raise CheckpointError(f"{path} is {what}")
        source = path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    with source, out.open("xb") as copy:
        shutil.copyfileobj(source, copy)
        copy.flush()
        os.fsync(copy.fileno())


def _write_weights(
    checkpoint: Checkpoint, names: list[str], pattern: Pattern, sparsity: float, path: Path, progress: Progress | None
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
    done, pruned = 0, set(names)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in tensors:
            elements = tensors.stored(name).elements()
            if name in pruned:
                weight = tensors.f32(name)
                stays = magnitude_mask(weight, pattern, sparsity)
                elements = np.where(stays, elements, elements.dtype.type(0))
                before, after = (float(np.mean(one == 0)) for one in (weight, np.where(stays, weight, 0)))
                yield PrunedWeight(name, weight.shape, before, after)
                done += 1
                if progress is not None:
                    progress(done, len(names))
            file.write(np.ascontiguousarray(elements).tobytes())
        file.flush()
        os.fsync(file.fileno())
