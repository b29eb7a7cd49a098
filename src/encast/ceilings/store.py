"""Ceilings as a JSON file in the user's cache directory. Nothing in such a file is trusted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import encast.knobs as knobs
from encast.ceilings.model import FORMAT, Ceilings, Fingerprint
from encast.errors import ResourceError
from encast.files import write_whole
from encast.machine import Machine

__all__ = ["Kept", "cache_dir", "find", "keep", "load", "to_json"]

_MAX_BYTES = 1 << 20  # of a file; real ones have a few thousand
_MAX_RATE = 1e18  # operations or bytes a second


@dataclass(frozen=True)
class Kept:
    """What the cache directory has for this machine: ``ceilings``, or the ``problem`` with what is there."""

    path: Path | None  # where the file is or would be; None when there is no directory for it
    ceilings: Ceilings | None = None
    problem: str | None = None


def cache_dir() -> Path:
    """``ENCAST_CACHE_DIR``, or ``encast`` below ``XDG_CACHE_HOME``, or ``~/.cache/encast``. It need not exist.

    Raises ``ResourceError`` when the user has no home directory, ``InputError`` on a knob's wrong value.
    """
    chosen = knobs.get("ENCAST_CACHE_DIR")
    if chosen is not None:
        return chosen
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the XDG base directory specification: relative ones are to be ignored
        return base / "encast"
    try:
        return Path.home() / ".cache" / "encast"
    except RuntimeError:
        raise ResourceError(
            "this user has no home directory to keep measurements in; set ENCAST_CACHE_DIR to a folder"
        ) from None


def load(machine: Machine | None = None) -> Ceilings | None:
    """The ceilings that are kept for this machine; None where there are none that can be used (``find`` says why)."""
    return find(machine).ceilings


def find(machine: Machine | None = None) -> Kept:
    """Looks for this machine's ceilings. Files that are damaged, old or of another machine are a ``problem``.

    Raises ``ResourceError`` when ``ENCAST_ISA`` names no level that this machine has, and ``InputError`` as
    ``cache_dir`` does.
    """
    here = Fingerprint.here(machine)
    try:
        path = cache_dir() / f"ceilings-{here.digest}.json"
    except ResourceError as error:
        return Kept(None, problem=str(error))
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return Kept(path)
    except OSError as error:
        return Kept(path, problem=f"{path}: cannot be read ({error.strerror})")
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        return Kept(path, _parse(json.loads(data), here))
    except (ValueError, RecursionError) as error:
        return Kept(path, problem=f"{path}: holds no ceilings of this machine ({error})")


def keep(ceilings: Ceilings) -> Path:
    """Writes the file as a whole or not at all, and returns its path.

    Raises ``ResourceError`` when the directory cannot be made or written, or the user has no home.
    """
    folder = cache_dir()
    path = folder / f"ceilings-{ceilings.fingerprint.digest}.json"
    text = json.dumps(to_json(ceilings), indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise ResourceError(
            f"{folder}: the ceilings cannot be kept there ({error.strerror}); set ENCAST_CACHE_DIR to a folder that "
            "can be written"
        ) from None
    return path


def to_json(ceilings: Ceilings) -> dict[str, Any]:
    """The document of the file: plain JSON, units in the names."""
    return {
        "format": FORMAT,
        "fingerprint": asdict(ceilings.fingerprint),
        "measured_utc": ceilings.measured.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "instruction_peaks": [
            {"dtype": dtype, "isa": isa, "threads": threads, "operations_per_second": rate}
            for (dtype, isa, threads), rate in ceilings.ops_per_second.items()
        ],
        "read_bandwidths": [
            {"level": level, "threads": threads, "bytes_per_second": rate}
            for (level, threads), rate in ceilings.bandwidth.items()
        ],
        "handoff_nanoseconds": ceilings.handoff_ns,
        "doubts": list(ceilings.doubts),
    }


def _parse(document: Any, here: Fingerprint) -> Ceilings:
    """Raises ``ValueError`` with what is wrong, unless the document is whole and of this machine."""
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    if document.get("format") != FORMAT:
        raise ValueError(f"its format is {_shown(document.get('format'))}, and this version reads {FORMAT}")
    if document.get("fingerprint") != json.loads(json.dumps(asdict(here))):
        raise ValueError("its fingerprint is another machine's")
    peaks = {
        (_text(row, "dtype"), _text(row, "isa"), _count(row, "threads")): _rate(row, "operations_per_second")
        for row in _rows(document, "instruction_peaks")
    }
    reads = {
        (_text(row, "level"), _count(row, "threads")): _rate(row, "bytes_per_second")
        for row in _rows(document, "read_bandwidths")
    }
    # So that no look-up of the levels and dtypes that this machine has can fail later.
    counts = {1, here.threads}
    levels = ["memory", *(cache.name for cache in here.caches)]
    if set(reads) != {(level, count) for level in levels for count in counts}:
        raise ValueError(f"read_bandwidths is not about {', '.join(levels)} with {sorted(counts)} threads")
    kinds = {(dtype, isa) for dtype, isa, _ in peaks}
    if set(peaks) != {(dtype, isa, count) for dtype, isa in kinds for count in counts}:
        raise ValueError(f"instruction_peaks lacks a count of {sorted(counts)} threads")
    if {dtype for dtype, _ in kinds} != {"f32", "bf16", "int8"} or not {isa for _, isa in kinds} <= {*here.isa_levels}:
        raise ValueError("instruction_peaks is not about f32, bf16 and int8 at this machine's levels")
    try:
        measured = datetime.strptime(_text(document, "measured_utc"), "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        raise ValueError(f"measured_utc is {_shown(document.get('measured_utc'))}, no date and time") from None
    doubts = document.get("doubts")
    if not isinstance(doubts, list) or not all(isinstance(doubt, str) for doubt in doubts):
        raise ValueError("doubts is no list of sentences")
    handoff = _number(document, "handoff_nanoseconds")
    if handoff < 0:
        raise ValueError(f"handoff_nanoseconds is {handoff}")
    return Ceilings(here, measured.replace(tzinfo=timezone.utc), peaks, reads, handoff, tuple(doubts))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _rows(document: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = document.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{name} is no list of objects")
    return rows


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_shown(value)}, no text")
    return value


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {_shown(value)}, no count")
    return value


def _number(row: Mapping[str, Any], name: str) -> float:
    value: Any = row.get(name)
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {_shown(value)}, no number")
    return number


def _rate(row: Mapping[str, Any], name: str) -> float:
    value = _number(row, name)
    if not 1 <= value <= _MAX_RATE:  # ratios of two of them stay finite
        raise ValueError(f"{name} is {value}, no rate")
    return value
