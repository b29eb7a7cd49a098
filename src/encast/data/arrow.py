"""pyarrow, which is an extra: imported where Parquet is used, with a clear error where it is absent."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from encast.errors import ResourceError, install_hint

__all__ = ["arrow_type", "pyarrow", "pyarrow_parquet"]


def pyarrow() -> Any:
    """The module ``pyarrow``; raises ``ResourceError`` when it is not installed."""
    return _installed(lambda: importlib.import_module("pyarrow"))


def pyarrow_parquet() -> Any:
    """The module ``pyarrow.parquet``; raises ``ResourceError`` when it is not installed."""
    return _installed(lambda: importlib.import_module("pyarrow.parquet"))


def _installed(module: Callable[[], Any]) -> Any:
    try:
        return module()
    except ImportError:
        raise ResourceError(f"Parquet needs pyarrow: {install_hint('parquet')}") from None


def arrow_type(shape: Any) -> Any:
    """The Arrow type of a column's shape: "int", "float", "f32", "str", ``[shape]`` or ``{name: shape}``."""
    arrow = pyarrow()
    if isinstance(shape, list):
        return arrow.list_(arrow_type(shape[0]))
    if isinstance(shape, dict):
        return arrow.struct([(name, arrow_type(part)) for name, part in shape.items()])
    return {"int": arrow.int64(), "float": arrow.float64(), "f32": arrow.float32(), "str": arrow.string()}[shape]
