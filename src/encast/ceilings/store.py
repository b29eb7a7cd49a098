"""Ceilings as a JSON file in the user's cache directory. Nothing in such a file is trusted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import encast.knobs as knobs
from encast.ceilings.documents import count, date, date_text, number, rate, read_kept, rows, shown, text, write_kept
from encast.ceilings.model import FORMAT, Ceilings, Fingerprint
from encast.errors import ResourceError
from encast.machine import Machine

__all__ = ["Kept", "cache_dir", "find", "keep", "load", "to_json"]


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
    return Kept(path, *read_kept(path, lambda document: _parse(document, here), "this machine"))


def keep(ceilings: Ceilings) -> Path:
    """Writes the file as a whole or not at all, and returns its path.

    Raises ``ResourceError`` when the directory cannot be made or written, or the user has no home.
    """
    return write_kept(cache_dir() / f"ceilings-{ceilings.fingerprint.digest}.json", to_json(ceilings))


def to_json(ceilings: Ceilings) -> dict[str, Any]:
    """The document of the file: plain JSON, units in the names."""
    return {
        "format": FORMAT,
        "fingerprint": asdict(ceilings.fingerprint),
        "measured_utc": date_text(ceilings.measured),
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


def _parse(document: Mapping[str, Any], here: Fingerprint) -> Ceilings:
    """Raises ``ValueError`` with what is wrong, unless the document is whole and of this machine."""
    if document.get("format") != FORMAT:
        raise ValueError(f"its format is {shown(document.get('format'))}, and this version reads {FORMAT}")
    if document.get("fingerprint") != json.loads(json.dumps(asdict(here))):
        raise ValueError("its fingerprint is another machine's")
    peaks = {
        (text(row, "dtype"), text(row, "isa"), count(row, "threads")): rate(row, "operations_per_second")
        for row in rows(document, "instruction_peaks")
    }
    reads = {
        (text(row, "level"), count(row, "threads")): rate(row, "bytes_per_second")
        for row in rows(document, "read_bandwidths")
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
    measured = date(document, "measured_utc")
    doubts = document.get("doubts")
    if not isinstance(doubts, list) or not all(isinstance(doubt, str) for doubt in doubts):
        raise ValueError("doubts is no list of sentences")
    handoff = number(document, "handoff_nanoseconds")
    if handoff < 0:
        raise ValueError(f"handoff_nanoseconds is {handoff}")
    return Ceilings(here, measured, peaks, reads, handoff, tuple(doubts))
