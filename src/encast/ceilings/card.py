"""What a GPU can do at most, measured once and kept by the card's name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from encast.ceilings.documents import date, date_text, rate, read_kept, write_kept
from encast.ceilings.store import cache_dir
from encast.errors import ResourceError

__all__ = ["CardCeilings", "find_card", "keep_card"]

_FORMAT = 1


@dataclass(frozen=True)
class CardCeilings:
    """``card``: its name. ``ops_per_second``: dtype (f32, f16, bf16, f8, int8) to multiplications and additions a
    second of a large product by the card's library; what it has no product of is absent. ``bytes_per_second``: of its
    memory, read and written by copies."""

    card: str
    measured: datetime
    """When, in UTC."""
    ops_per_second: Mapping[str, float]
    bytes_per_second: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, units in the names."""
        return {
            "measured_utc": date_text(self.measured),
            "operations_per_second": dict(self.ops_per_second),
            "memory_bytes_per_second": self.bytes_per_second,
        }


def keep_card(ceilings: CardCeilings) -> Path:
    """As ``keep``."""
    return write_kept(_path(ceilings.card), {"format": _FORMAT, "card": ceilings.card, **ceilings.to_json()})


def find_card(card: str) -> tuple[CardCeilings | None, str | None]:
    """What is kept of the card of that name, and the problem with what is there, or with the place. Raises
    ``InputError`` on a knob's wrong value."""
    try:
        path = _path(card)
    except ResourceError as error:
        return None, str(error)
    return read_kept(path, lambda document: _parse(document, card), "this card")


def _path(card: str) -> Path:
    return cache_dir() / f"card-{hashlib.sha256(card.encode()).hexdigest()[:16]}.json"


def _parse(document: Mapping[str, Any], card: str) -> CardCeilings:
    if document.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT}")
    if document.get("card") != card:
        raise ValueError("it is another card's")
    products = document.get("operations_per_second")
    if not isinstance(products, dict):
        raise ValueError("operations_per_second is no object")
    rates = {dtype: rate(products, dtype) for dtype in products}
    return CardCeilings(card, date(document, "measured_utc"), rates, rate(document, "memory_bytes_per_second"))
