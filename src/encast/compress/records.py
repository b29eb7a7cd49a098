"""JSON files of a run that say themselves whether they, and files beside them, are as they were written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encast.errors import InputError
from encast.files import write_whole
from encast.jobs.layout import written
from encast.jobs.sealed import seal, unseal

__all__ = ["STAGE", "read_record", "read_stage", "write_record", "write_stage"]

STAGE = "compress.json"


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Raises ``OSError``."""
    write_whole(path, json.dumps(json.loads(seal(content)), indent=2) + "\n")


def read_record(path: Path, remedy: str) -> dict[str, Any]:
    """What ``write_record`` wrote; raises ``InputError`` that says what to do, ``remedy``, where it is damaged."""
    try:
        return unseal(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error, remedy) from None


def write_stage(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes ``compress.json``, with the SHA-256 of all other files of the folder. Raises ``OSError``."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / STAGE)
    files = {path.relative_to(folder).as_posix(): written(path).sha256 for path in paths}
    write_record(folder / STAGE, {**content, "files": files})


def read_stage(folder: Path) -> dict[str, Any]:
    """What ``write_stage`` was given; raises ``InputError`` where a file is not as it was then. Others may be there."""
    remedy = f"remove the folder {folder}, and --resume makes it anew"
    record = read_record(folder / STAGE, remedy)
    for name, digest in record.pop("files").items():
        try:
            if written(folder / name).sha256 != digest:
                raise ValueError("its SHA-256 is not what was written")
        except (OSError, ValueError) as error:
            raise _damaged(folder / name, error, remedy) from None
    return record


def _damaged(path: Path, error: Exception, remedy: str) -> InputError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InputError(f"{path} is damaged ({reason}); {remedy}")
