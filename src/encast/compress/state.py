"""What a stage needs to go on after a kill as if nothing had happened, on the disk every few minutes."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from encast.errors import ResourceError
from encast.files import sync_folder, write_whole
from encast.jobs.layout import written
from encast.jobs.sealed import seal, unseal

__all__ = ["Saved", "StateFolder", "resumable"]

_KEPT = 2
_NAME = re.compile(r"step-([0-9]{9})\.json")


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """What the disk refuses, as a full one does, becomes a ``ResourceError`` that says how to go on."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
            reason = error.args[0][0][-1]  # of the first file that was not copied
        raise ResourceError(f"{folder} cannot be written ({reason}); make room and go on with --resume") from None


@dataclass(frozen=True)
class Saved:
    """A state that was read: tensors by name, and what else ``save`` was given."""

    tensors: dict[str, Any]
    facts: Any


class StateFolder:
    """States by step: ``step-N.safetensors`` and ``step-N.json``, which is written last and holds the SHA-256 of both.

    The last two are kept, so that one that a failing disk has damaged costs minutes and not the stage.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, step: int, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Raises ``ResourceError`` when the disk is full; states of before are still there then."""
        name = f"step-{step:09d}"
        file = self.path / f"{name}.safetensors"
        temporary = self.path / f".{name}.tmp"
        with resumable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                save_file({key: value.detach().contiguous() for key, value in tensors.items()}, temporary)
                digest = written(temporary).sha256
                with open(temporary, "rb") as saved:
                    os.fsync(saved.fileno())
                os.replace(temporary, file)
            finally:
                temporary.unlink(missing_ok=True)
            write_whole(self.path / f"{name}.json", seal({"tensors": digest, "facts": dict(facts)}))
            sync_folder(self.path)
        kept = {f"step-{one:09d}" for one in sorted(self._steps())[-_KEPT:]}
        for path in self.path.iterdir():  # older ones, and what killed saves have left
            if path.stem not in kept or path.suffix == ".tmp":
                path.unlink(missing_ok=True)

    def load(self, kind: type[Any] | None = None) -> Saved | None:
        """The last whole state, None when there is none yet; says on stderr which one is damaged. ``kind``: a dataclass
        that the facts become; a state with others counts as damaged.

        Raises ``ResourceError`` when there are states and all are damaged.
        """
        steps = sorted(self._steps(), reverse=True)
        for step in steps:
            try:
                content = unseal((self.path / f"step-{step:09d}.json").read_bytes())
                facts = content["facts"]
                if kind is not None:
                    if set(facts) != {one.name for one in fields(kind)}:
                        raise ValueError("its facts have other names")
                    facts = msgspec.convert(facts, kind)
                file = self.path / f"step-{step:09d}.safetensors"
                if written(file).sha256 != content["tensors"]:
                    raise ValueError("its SHA-256 is not what was written")
                return Saved(load_file(file), facts)
            except (OSError, ValueError, KeyError, RecursionError, SafetensorError) as error:
                print(f"encast: {self.path}: the state of step {step} is damaged ({error})", file=sys.stderr)
        if steps:
            raise ResourceError(f"{self.path}: no state is whole; remove this folder, and the stage begins anew")
        return None

    def _steps(self) -> list[int]:
        if not self.path.is_dir():
            return []
        return [int(match[1]) for name in os.listdir(self.path) if (match := _NAME.fullmatch(name))]
