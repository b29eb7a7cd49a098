"""The type of a value: dtype and shape."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DTYPES", "ROW_SYMBOLS", "ValueType"]

DTYPES = ("f32", "bf16", "s8", "q8", "i32", "u16")
ROW_SYMBOLS = ("tokens", "seqs", "selected", "pairs")


@dataclass(frozen=True)
class ValueType:
    """Dtype (see ``DTYPES``) and shape; a dimension is a positive int or one of ``ROW_SYMBOLS``."""

    dtype: str
    shape: tuple[int | str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"
