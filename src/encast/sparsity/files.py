"""Copies all of a checkpoint but its weights."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from encast.errors import CheckpointError, InputError
from encast.importers import Checkpoint
from encast.importers.m3_heads import M3_FILES

__all__ = ["check_new_folder", "contains", "copy_files"]

_OTHER_WEIGHTS = (
    ".safetensors", ".bin", ".index.json", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ot", ".pt", ".pth", ".ckpt",
    ".gguf", ".tflite",
)  # fmt: skip
_EXPORTS = ("onnx", "openvino", "coreml", ".git", ".cache")
"""Beside the model: files and folders that hold it in other forms, which would be another model now, or its history."""


def check_new_folder(out: str | os.PathLike[str]) -> Path:
    """The absolute path of ``out``, where nothing is yet; raises ``InputError``."""
    target = Path(os.path.abspath(out))
    if "\0" in str(target):
        raise InputError(f"{str(target)!r} has a NUL in it; choose another name")
    if os.path.lexists(target):
        raise InputError(f"{target} exists already; choose another name, or remove it")
    if not target.parent.is_dir():
        raise InputError(f"the folder {target.parent} does not exist; make it, or choose another place")
    return target


def contains(folder: Path, path: Path) -> bool:
    """Whether ``path`` is the folder or lies in it, links resolved."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def copy_files(checkpoint: Checkpoint, out: Path, target: Path) -> None:
    """What lies in the checkpoint's folder to ``out``, which exists and becomes ``target``, but for files of weights
    (by their suffix) and folders of exports; links as what they lead to. Raises ``CheckpointError`` and ``OSError``.
    """
    _Copy(checkpoint, target).copy(checkpoint.root, out, ())


@dataclass(frozen=True)
class _Copy:
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
            elif not beside or entry.name in M3_FILES or not self._is_weights(entry.name):
                _copy_file(path, out / entry.name)

    def _is_weights(self, name: str) -> bool:
        return name.endswith(_OTHER_WEIGHTS) or name in self.read

    def _check_link(self, path: Path, above: tuple[str, ...]) -> None:
        """Refuses a link around the checkpoint, or around what is written: its copy would have no end."""
        if not path.is_symlink():
            return
        if os.path.realpath(path) in above or any(contains(path, one) for one in (self.checkpoint.root, self.target)):
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
