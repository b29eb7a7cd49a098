"""Numbers as people read them: three digits that mean something, units by size, intervals to the digits they allow."""

from __future__ import annotations

import math

__all__ = [
    "amount",
    "cut",
    "decimals",
    "dollars",
    "interval",
    "plain",
    "ratio",
    "ratio_interval",
    "seconds",
    "short",
    "size",
]

NOTHING = "\u2013"
"""Where there is no number."""


def decimals(value: float, digits: int = 3) -> int:
    """How many decimals show ``digits`` significant ones of the value; 0 for what is large enough without."""
    if value == 0 or not math.isfinite(value):
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}")))))


def amount(value: float | None, digits: int = 3) -> str:
    """``0.712``, ``12.3``, ``1,234``; below a ten-thousandth ``1.2e-7``."""
    if value is None:
        return NOTHING
    if value != 0 and abs(value) < 1e-4:
        mantissa, exponent = f"{value:.{max(1, digits - 2)}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.{decimals(value, digits)}f}"


def interval(bounds: tuple[float, float] | None, near: float | None = None) -> str:
    """``[12.1, 12.6]``, with enough decimals that the ends differ when they do; no fewer than ``near`` has."""
    if bounds is None:
        return ""
    low, high = bounds
    places = decimals(near if near else high)
    if high > low:
        places = max(places, min(decimals(high - low, 1), places + 2))
    return f"[{low:,.{places}f}, {high:,.{places}f}]"


def ratio(value: float | None) -> str:
    """``1.43x``, ``12.3x``, ``143x``."""
    if value is None:
        return NOTHING
    return f"{value:,.{_ratio_places(value)}f}x"


def ratio_interval(bounds: tuple[float, float] | None, near: float | None = None) -> str:
    """The interval of a ratio, to the digits of the ratio ``near``."""
    if bounds is None:
        return ""
    places = _ratio_places(near if near is not None else bounds[1])
    return f"[{bounds[0]:,.{places}f}, {bounds[1]:,.{places}f}]"


def _ratio_places(value: float) -> int:
    return 2 if 0.1 <= abs(value) < 9.995 else 1 if 0.1 <= abs(value) < 99.95 else 0 if abs(value) >= 99.95 else 3


def seconds(value: float | None) -> str:
    """``23 us``, ``4.1 ms``, ``12 s``."""
    if value is None:
        return NOTHING
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale or unit == "us":
            return f"{amount(value / scale, 2 if value < 100 * scale else 3)} {unit}"
    raise AssertionError


def size(value: float | None) -> str:
    """Bytes in the largest unit of 1024 that leaves at least 1: ``438 MiB``."""
    if value is None:
        return NOTHING
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= scale:
            return f"{amount(value / scale)} {unit}"
    return f"{value:.0f} B"


def dollars(value: float | None) -> str:
    """``$0.472``, ``$12.30``, ``$1,234``."""
    if value is None:
        return NOTHING
    return f"${value:,.{min(2, decimals(value, 4))}f}" if value >= 10 else f"${amount(value)}"


def short(value: float) -> str:
    """A round number that somebody chose: ``0.03``, ``0.0005``, ``1e-6``."""
    mantissa, _, exponent = f"{value:.2g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def plain(value: float | int | str) -> str:
    """A label: whole numbers without separators, others to the digits they have."""
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return NOTHING
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def cut(value: object, letters: int = 200) -> str:
    """The beginning of a text that is too long; nothing for None."""
    shown = "" if value is None else str(value)
    return shown if len(shown) <= letters else shown[: letters - 1] + "…"
