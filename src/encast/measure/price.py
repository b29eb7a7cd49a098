"""Dollars per million requests: the price of an hour of this machine, over the answers it gives in that hour.

The price is of the machine as a whole, whatever share of it a run used. Nothing is scaled: two instances seldom give
twice the throughput of one, so a run on one core of two says what that run would cost on a machine rented for it alone,
which is at most (and rarely exactly) what a full machine's answers cost. ``share`` says which kind of figure it is.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encast.errors import InputError, need_modules

__all__ = ["PRICES", "Price", "cost_record", "parse_price", "read_prices", "share", "usd_per_million"]

PRICES = Path(__file__).parent / "prices.yaml"
"""The table of machines; an editable file."""

_AMOUNT = re.compile(r"\$?\s*(\d+(?:\.\d*)?|\.\d+)\s*/\s*(?:h|hour)")
_FIELDS = {"name": str, "usd_per_hour": (int, float), "cpus": int, "date": datetime.date, "source": str}


@dataclass(frozen=True)
class Price:
    """Dollars for an hour of a whole machine.

    ``cpus``: its hardware threads, None when only an amount was given. ``source``: who says so, and when.
    """

    name: str
    usd_per_hour: float
    cpus: int | None
    source: str


def parse_price(text: str, prices: Path = PRICES) -> Price:
    """An amount an hour (``0.17/h``, ``$0.17/hour``) or the name of a machine of the table.

    Raises ``InputError`` for anything else, an amount that is not above 0, and a table that cannot be read.
    """
    wanted = text.strip()
    amount = _AMOUNT.fullmatch(wanted)
    if amount is not None:
        usd = float(amount[1])
        if not 0 < usd < math.inf:
            raise InputError(f"price {text!r}: an hour costs more than nothing and less than infinity")
        return Price(f"${usd:g} an hour", usd, None, "as given")
    known = read_prices(prices)
    if wanted not in known:
        plain = re.fullmatch(r"\$?\s*(\d*\.?\d+)", wanted)  # an amount whose unit was left out
        example = f"{plain[1] if plain and len(plain[1]) < 10 else '0.17'}/h"
        raise InputError(
            f"price {text!r} is neither an amount an hour such as {example} nor a machine of {prices.name}: "
            f"{', '.join(known)}; give one of them, or add yours to {prices}"
        )
    return known[wanted]


def read_prices(path: Path = PRICES) -> dict[str, Price]:
    """The table by name, in its order. Raises ``InputError`` naming the entry and the field that is wrong."""
    need_modules("bench", "yaml")
    import yaml  # type: ignore[import-untyped]

    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read ({_first_line(error)}); correct it or restore it") from None
    if not isinstance(entries, list):
        raise InputError(f"{path}: a list of machines is expected, each with {', '.join(_FIELDS)}")
    prices: dict[str, Price] = {}
    for number, entry in enumerate(entries, 1):
        _check(path, number, entry)
        if entry["name"] in prices:
            raise InputError(f"{path}, entry {number}: {entry['name']!r} is there already; remove one of the two")
        prices[entry["name"]] = Price(
            entry["name"], float(entry["usd_per_hour"]), entry["cpus"], f"{entry['source']}, {entry['date']}"
        )
    return prices


def usd_per_million(usd_per_hour: float, requests_per_s: float) -> float:
    """Dollars for a million answers at that throughput. Raises ``InputError`` unless both are above 0 and finite."""
    if not (0 < usd_per_hour < math.inf and 0 < requests_per_s < math.inf):
        raise InputError(f"{usd_per_hour} dollars an hour at {requests_per_s} requests a second: both must be above 0")
    return usd_per_hour / 3600 / requests_per_s * 1e6


def cost_record(price: Price | None, requests_per_s: float | None) -> dict[str, float] | None:
    """The field ``cost`` of a row; None without a price or without a throughput."""
    if price is None or requests_per_s is None or not 0 < requests_per_s < math.inf:
        return None
    return {"usd_per_hour": price.usd_per_hour, "usd_per_million": usd_per_million(price.usd_per_hour, requests_per_s)}


def share(threads: int | None, instances: int | None, cores: int | None) -> float | None:
    """Which share of a machine's cores a run of ``instances`` of ``threads`` threads could use, at most 1.

    None where one of them is unknown.
    """
    if threads is None or cores is None or threads < 1 or cores < 1 or (instances is not None and instances < 1):
        return None
    return min(1.0, threads * (instances or 1) / cores)


def _check(path: Path, number: int, entry: Any) -> None:
    where = f"{path}, entry {number}"
    if not isinstance(entry, Mapping) or set(entry) != set(_FIELDS):
        raise InputError(f"{where}: give exactly the fields {', '.join(_FIELDS)}")
    for field, kind in _FIELDS.items():
        value = entry[field]
        if isinstance(value, bool) or not isinstance(value, kind):  # type: ignore[arg-type]
            accepted = {"date": "a day such as 2026-11-20", "cpus": "a whole number", "usd_per_hour": "a number"}
            raise InputError(f"{where}: {field} is {value!r}; give {accepted.get(field, 'a text')}")
    if not 0 < entry["usd_per_hour"] < math.inf or entry["cpus"] < 1:
        raise InputError(f"{where}: usd_per_hour and cpus must be above 0 and finite")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
