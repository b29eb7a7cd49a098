"""What a stage needs to go on after a kill as if nothing had happened, on the disk every few minutes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from encast.errors import ResourceError
from encast.files import sync_folder, write_whole

__all__ = ["Saved", "StateFolder"]

_KEPT = 2
_NAME = re.compile(r"step-([0-9]{9})\.json")


@dataclass(frozen=True)
class Saved:
    """A state that was read: tensors by name, and plain data."""

    tensors: dict[str, Any]
    facts: dict[str, Any]


class StateFolder:
    """States by step: ``step-N.safetensors`` and ``step-N.json``, which is written last and holds its SHA-256.

    The last two are kept, so that one that a failing disk has damaged costs minutes and not the stage.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, step: int, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Raises ``ResourceError`` when the disk is full; states of before are still there then."""
        name = f"step-{step:09d}"
        file = self.path / f"{name}.safetensors"
        temporary = self.path / f".{name}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            save_file({key: value.detach().contiguous() for key, value in tensors.items()}, temporary)
            with open(temporary, "rb") as written:
                digest = _sha(written)
                os.fsync(written.fileno())
            os.replace(temporary, file)
            write_whole(self.path / f"{name}.json", json.dumps({"sha256": digest, **facts}))
            sync_folder(self.path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ResourceError(
                f"{self.path}: the state of training cannot be saved ({reason}); make room and go on with --resume: "
                "nothing of before is lost"
            ) from None
        kept = {f"step-{one:09d}" for one in sorted(self._steps())[-_KEPT:]}
        for path in self.path.iterdir():  # older ones, and what killed saves have left
            if path.stem not in kept or path.suffix == ".tmp":
                path.unlink(missing_ok=True)

    def load(self) -> Saved | None:
        """The last whole state, None when there is none yet; says on stderr which one is damaged.

        Raises ``ResourceError`` when there are states and all are damaged.
        """
        steps = sorted(self._steps(), reverse=True)
        for step in steps:
            try:
                facts = json.loads((self.path / f"step-{step:09d}.json").read_text(encoding="utf-8"))
                file = self.path / f"step-{step:09d}.safetensors"
                with open(file, "rb") as written:
                    if _sha(written) != facts.pop("sha256"):
                        raise ValueError("its SHA-256 is not what was written")
                return Saved(load_file(file), facts)
            except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
                print(f"encast: {self.path}: the state of step {step} is damaged ({error})", file=sys.stderr)
        if steps:
            raise ResourceError(f"{self.path}: no state is whole; remove this folder, and the stage begins anew")
        return None

    def _steps(self) -> list[int]:
        if not self.path.is_dir():
            return []
        return [int(match[1]) for name in os.listdir(self.path) if (match := _NAME.fullmatch(name))]


def _sha(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 22):
        digest.update(block)
    return digest.hexdigest()
