"""The latency limit of a service (its SLO, service level objective): a percentile and its bound."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encast.errors import InputError

__all__ = ["Slo"]

_SLO = re.compile(r"p(\d{1,3}(?:[._]\d{1,4})?)\s*=\s*(\d{1,9}(?:\.\d{1,9})?)\s*(us|ms|s)")
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_LONGEST_MS = 3_600_000.0


@dataclass(frozen=True)
class Slo:
    """``percent`` of all requests are answered within ``limit_ms`` milliseconds of their arrival."""

    percent: float
    limit_ms: float

    @staticmethod
    def parse(text: str) -> Slo | None:
        """From ``p99=10ms``, ``p95=0.2s`` or ``p99.9=800us``; None from ``none``. Raises ``InputError``."""
        if text.strip().lower() == "none":
            return None
        found = _SLO.fullmatch(text.strip().lower())
        if found is None:
            raise InputError(f"--slo is {text!r}; give a percentile and its limit, such as p99=10ms, or none")
        return Slo._checked(float(found[1].replace("_", ".")), float(found[2]) * _UNITS[found[3]], f"--slo {text}")

    @staticmethod
    def from_json(document: object, where: str) -> Slo | None:
        """From ``{"p99_ms": 10}`` or null, as the configuration file has it. Raises ``InputError``."""
        if document is None:
            return None
        if isinstance(document, Mapping) and len(document) == 1:
            ((name, limit),) = document.items()
            found = re.fullmatch(r"p(\d{1,3}(?:_\d{1,4})?)_ms", str(name))
            if found is not None and isinstance(limit, (int, float)) and not isinstance(limit, bool):
                return Slo._checked(float(found[1].replace("_", ".")), float(limit), where)
        raise InputError(f'{where} is {document!r}; one percentile with its milliseconds is needed: {{"p99_ms": 10}}')

    @staticmethod
    def _checked(percent: float, limit_ms: float, where: str) -> Slo:
        if not 1 <= percent <= 99.99:
            raise InputError(f"{where}: the percentile {percent:g} is not between 1 and 99.99")
        if not 0 < limit_ms <= _LONGEST_MS:
            raise InputError(f"{where}: the limit of {limit_ms:g} ms is not above 0 and at most {_LONGEST_MS:,.0f} ms")
        return Slo(percent, limit_ms)

    @property
    def name(self) -> str:
        """``p99``, ``p99_9``: as fields of results are named."""
        return "p" + f"{self.percent:g}".replace(".", "_")

    def to_json(self) -> dict[str, Any]:
        return {f"{self.name}_ms": self.limit_ms}

    def __str__(self) -> str:
        return f"p{self.percent:g} within {self.limit_ms:g} ms"
