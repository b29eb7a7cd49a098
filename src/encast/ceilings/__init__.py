"""The machine's ceilings: what bounds a step, whatever its kernel does.

``measure`` measures them (``encast doctor --measure``), ``keep`` writes them to the user's cache directory under the
machine's fingerprint, ``load`` reads them back.
"""

from __future__ import annotations

from encast.ceilings.measure import measure
from encast.ceilings.model import LEVELS, CacheLevel, Ceilings, Fingerprint
from encast.ceilings.store import Kept, cache_dir, find, keep, load, to_json

__all__ = [
    "LEVELS",
    "CacheLevel",
    "Ceilings",
    "Fingerprint",
    "Kept",
    "cache_dir",
    "find",
    "keep",
    "load",
    "measure",
    "to_json",
]
