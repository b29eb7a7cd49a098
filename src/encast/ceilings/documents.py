"""The files of what was measured: written whole, read without trust. Readers of fields raise ``ValueError``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from encast.errors import ResourceError
from encast.files import write_whole

__all__ = ["count", "date", "date_text", "number", "rate", "read_kept", "rows", "shown", "text", "write_kept"]

_MAX_BYTES = 1 << 20  # of a file; real ones have a few thousand
_MAX_RATE = 1e18  # operations or bytes a second
_DATE = "%Y-%m-%dT%H:%M:%SZ"

T = TypeVar("T")


def read_kept(path: Path, parse: Callable[[Mapping[str, Any]], T], whose: str) -> tuple[T | None, str | None]:
    """What ``parse`` makes of a file's JSON object, and else the problem with it; neither where there is no file.

    ``parse`` raises ``ValueError`` for what is not whole or not of ``whose``: "this machine".
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{path}: cannot be read ({error.strerror})"
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        document = json.loads(data)
        if not isinstance(document, dict):
            raise ValueError("it is no JSON object")
        return parse(document), None
    except (ValueError, RecursionError) as error:
        return None, f"{path}: holds no ceilings of {whose} ({error})"


def write_kept(path: Path, document: Mapping[str, Any]) -> Path:
    """Writes the file as a whole or not at all, and returns its path. Raises ``ResourceError``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise ResourceError(
            f"{path.parent}: the ceilings cannot be kept there ({error.strerror}); set ENCAST_CACHE_DIR to a folder "
            "that can be written"
        ) from None
    return path


def date_text(moment: datetime) -> str:
    return moment.astimezone(timezone.utc).strftime(_DATE)


def date(row: Mapping[str, Any], name: str) -> datetime:
    """In UTC."""
    try:
        return datetime.strptime(text(row, name), _DATE).replace(tzinfo=timezone.utc)
    except ValueError:
        raise ValueError(f"{name} is {shown(row.get(name))}, no date and time") from None


def rows(document: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = document.get(name)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ValueError(f"{name} is no list of objects")
    return found


def shown(value: object) -> str:
    whole = repr(value)
    return whole if len(whole) <= 40 else f"{whole[:40]}..."


def text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {shown(value)}, no text")
    return value


def count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {shown(value)}, no count")
    return value


def number(row: Mapping[str, Any], name: str) -> float:
    value: Any = row.get(name)
    try:
        found = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # a whole number beyond all floats
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name} is {shown(value)}, no number")
    return found


def rate(row: Mapping[str, Any], name: str) -> float:
    value = number(row, name)
    if not 1 <= value <= _MAX_RATE:  # ratios of two of them stay finite
        raise ValueError(f"{name} is {value}, no rate")
    return value
