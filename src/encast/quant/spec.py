"""``QuantSpec``: which products compute in which dtype, as plain data that passes apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from encast.errors import InputError
from encast.quant.ranges import RANGES

__all__ = ["ACTIVATIONS", "DTYPES", "ZERO_POINTS", "QuantSpec"]

DTYPES = ("f32", "bf16", "int8")
"""From wide to narrow."""

ZERO_POINTS = ("never", "after_activation", "always")

ACTIVATIONS = ("dynamic", "static")

ROWS = ("tokens", "selected", "seqs")


@dataclass(frozen=True)
class QuantSpec:
    """The dtype of products, and the exceptions.

    ``dtype``: of the weights and the inputs of every product, those inside attention among them, unless an
    exception holds; attention with vectors of distances (DeBERTa) is f32 always. Sums and everything between products
    are f32 (int32 and f32 with int8).
    ``keep``: pairs (pattern, dtype): products and attentions whose module name matches the pattern (as a shell
    matches file names; ``encast inspect`` lists the names) get that dtype instead; the first match counts.
    ``zero_point``: which quantised activations get a zero point: ``always``, ``after_activation`` (those that
    come out of gelu and the like) or ``never``. ``quant/README.md`` has the measurements behind the default.
    ``rows``: only products with these rows are narrowed. Products on one row a sequence (``seqs``: poolers,
    classifiers) cost next to nothing and decide the answer, so they stay f32.
    ``min_outputs``: products with fewer outputs stay f32: label and span heads, which would use a fraction
    of a 64-column panel.
    ``activations`` of int8: ``dynamic``: a scale a row, found at run time; ``static``: one scale for all rows, found
    by calibration, outside of whose range bytes saturate.
    ``ranges``: how static ones are chosen, ``minmax``, ``percentile`` (``percentile`` per cent of all elements lie
    inside) or ``entropy``: see ``quant/ranges.py``.
    ``move_outliers``: None, or the exponent from 0 to 1 with which channels that are far out in what products read are
    scaled down there and up in the weights (``passes/move_outliers.py``; 0.5 shares the burden). Needs a calibration.
    """

    dtype: str = "int8"
    keep: tuple[tuple[str, str], ...] = ()
    zero_point: str = "always"
    rows: tuple[str, ...] = ("tokens", "selected")
    min_outputs: int = 32
    activations: str = "dynamic"
    ranges: str = "percentile"
    percentile: float = 99.99
    move_outliers: float | None = None

    def __post_init__(self) -> None:
        _need_one_of("dtype", self.dtype, DTYPES)
        _need_one_of("zero_point", self.zero_point, ZERO_POINTS)
        _need_one_of("activations", self.activations, ACTIVATIONS)
        _need_one_of("ranges", self.ranges, RANGES)
        if not _is_number(self.percentile) or not 50.0 < self.percentile <= 100.0:
            raise InputError(f"percentile is {self.percentile!r}; a number over 50 and up to 100 is needed")
        if self.move_outliers is not None and (
            not _is_number(self.move_outliers) or not 0.0 <= self.move_outliers <= 1.0
        ):
            raise InputError(f"move_outliers is {self.move_outliers!r}; None or an exponent from 0 to 1 is needed")
        if self.dtype != "int8" and self.needs_calibration:
            what = "static activations" if self.activations == "static" else "move_outliers"
            raise InputError(f"dtype is {self.dtype!r}, and {what} are for int8; leave one of them out")
        if isinstance(self.keep, str) or isinstance(self.rows, str):
            raise InputError("keep and rows of a QuantSpec are sequences, not strings")
        try:
            keep = tuple((pattern, dtype) for pattern, dtype in self.keep)
        except (TypeError, ValueError):
            raise InputError(f"keep is {self.keep!r}; a sequence of pairs (pattern, dtype) is needed") from None
        object.__setattr__(self, "keep", keep)
        object.__setattr__(self, "rows", tuple(self.rows))
        for pattern, dtype in keep:
            if not isinstance(pattern, str) or not pattern:
                raise InputError(f"the pattern {pattern!r} in keep is no non-empty string")
            _need_one_of(f"the dtype of {pattern!r} in keep", dtype, DTYPES)
            if DTYPES.index(dtype) > DTYPES.index(self.dtype):
                raise InputError(f"keep asks {dtype} for {pattern!r}, which is narrower than the rest ({self.dtype})")
        for rows in self.rows:
            _need_one_of("a name in rows", rows, ROWS)
        if not isinstance(self.min_outputs, int) or isinstance(self.min_outputs, bool) or self.min_outputs < 0:
            raise InputError(f"min_outputs is {self.min_outputs!r}; a count is needed")

    @property
    def needs_calibration(self) -> bool:
        return self.activations == "static" or self.move_outliers is not None

    def dtype_of(self, name: str, rows: str, outputs: int) -> str:
        """The dtype of the product called ``name`` with ``outputs`` columns and such rows."""
        for pattern, dtype in self.keep:
            if fnmatchcase(name, pattern):
                return dtype
        return self.dtype if rows in self.rows and outputs >= self.min_outputs else "f32"

    def dtype_of_attention(self, name: str) -> str:
        """The dtype of the products inside the attention called ``name``, of queries by keys and powers by values."""
        for pattern, dtype in self.keep:
            if fnmatchcase(name, pattern):
                return dtype
        return self.dtype if "tokens" in self.rows else "f32"

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "keep": [list(pair) for pair in self.keep],
            "zero_point": self.zero_point,
            "rows": list(self.rows),
            "min_outputs": self.min_outputs,
            "activations": self.activations,
            "ranges": self.ranges,
            "percentile": self.percentile,
            "move_outliers": self.move_outliers,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> QuantSpec:
        """The inverse of ``to_json``; absent fields get their defaults, unknown ones raise ``InputError``."""
        known = {field.name for field in fields(QuantSpec)}
        if not isinstance(data, Mapping) or not known.issuperset(data):
            unknown = sorted(set(data) - known) if isinstance(data, Mapping) else repr(data)
            raise InputError(f"a QuantSpec has the fields {sorted(known)}, not {unknown}")
        for name in ("keep", "rows"):
            if name in data and not isinstance(data[name], (list, tuple)):
                raise InputError(f"{name} is {data[name]!r}; a list is needed")
        return QuantSpec(**data)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _need_one_of(what: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise InputError(f"{what} is {value!r}; one of {', '.join(accepted)} is needed")
