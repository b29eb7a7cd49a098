"""The part of ``importers``' exports that architectures read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from encast.ir import Graph

__all__ = ["ExportLike", "OutputLike"]


class OutputLike(Protocol):
    """An output of the export: rows of ``kind`` tokens (``rows``), ``sequences``, or one ``column`` of them."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def value(self) -> str: ...

    @property
    def column(self) -> int: ...


class ExportLike(Protocol):
    """The part of ``importers``' ``Export`` that is read here."""

    @property
    def graph(self) -> Graph: ...

    @property
    def outputs(self) -> Sequence[OutputLike]: ...

    @property
    def where(self) -> str: ...

    @property
    def rounding(self) -> float: ...

    @property
    def angles(self) -> float: ...

    @property
    def fixed(self) -> Mapping[str, tuple[float, int]]: ...

    @property
    def quantised(self) -> str: ...

    @property
    def cut(self) -> int: ...

    @property
    def distances(self) -> Mapping[str, np.ndarray[Any, Any]]: ...
