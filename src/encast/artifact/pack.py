"""The stored layouts of constants: what kernels read straight from the mapped file.

    panels_f32    f32[n, k]  → f32 [n/64][k][64]
    panels_bf16   bf16[n, k] → bf16 [n/64][k/2][64][2]
    panels_int8   s8[n, k]   → s8 [n/64][k/4][64][4], and NAME.colsum: i32[n rounded up to 64], the sum over k
    vector        f32[n]     → f32[n rounded up to 64]
    sums          i32[n]     → i32[n rounded up to 64]
    dense         as it is

A panel holds 64 outputs. Inside it, k runs outermost, so that a kernel streams it once from front to back; the
innermost group is what one dot-product instruction consumes of an output (two bf16, four s8). n and k are padded
with zeros to whole panels and groups. core/kernels/gemm/gemm.h says how large these are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast._core import PANEL, panel_group
from encast.errors import GraphError
from encast.ir import Graph
from encast.ir.storage import STORED_FORMS, stored_forms
from encast.ir.types import ValueType

__all__ = ["NUMPY_DTYPES", "StoredSpec", "pack", "stored_specs", "unpack"]

Array = np.ndarray[Any, Any]

_PADDED = ("vector", "sums")

NUMPY_DTYPES = {"f32": np.float32, "bf16": np.uint16, "s8": np.int8, "i32": np.int32, "u16": np.uint16}


@dataclass(frozen=True)
class StoredSpec:
    """One stored tensor: its name, dtype and shape in the file, and the constant and form that it comes from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    constant: str
    form: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(NUMPY_DTYPES[self.dtype]).itemsize


def stored_specs(graph: Graph) -> Iterator[StoredSpec]:
    """The tensors that a graph's constants are stored as, in the graph's order; raises ``GraphError``."""
    forms = stored_forms(graph)
    for name, constant in graph.constants.items():
        form, type = forms[name], constant.type
        if (dtype := STORED_FORMS[form]) not in (None, type.dtype):
            raise GraphError(f"constant {name!r} is {type}, stored as {form} it must be {dtype}")
        yield StoredSpec(name, type.dtype, packed_shape(type, form), name, form)
        if form == "panels_int8":
            yield StoredSpec(f"{name}.colsum", "i32", (_up(_sizes(type)[0], PANEL),), name, "colsum")


def packed_shape(type: ValueType, form: str) -> tuple[int, ...]:
    """The stored shape of a constant of ``type`` in ``form``."""
    sizes = _sizes(type)
    if form == "dense":
        return sizes
    if form in _PADDED:
        return (_up(sizes[0], PANEL),)
    n, k = sizes
    group = panel_group(type.dtype)
    inner = (PANEL,) if group == 1 else (PANEL, group)
    return (_up(n, PANEL) // PANEL, _up(k, group) // group, *inner)


def pack(spec: StoredSpec, array: Array) -> Array:
    """The bytes of ``spec``, from the array of its constant, C-contiguous.

    Raises ``GraphError`` if the array does not have the constant's dtype.
    """
    if spec.form != "colsum" and array.dtype != NUMPY_DTYPES[spec.dtype]:
        raise GraphError(f"the array of {spec.constant!r} is {array.dtype}, it is to be stored as {spec.dtype}")
    if spec.form == "dense":
        return np.ascontiguousarray(array)
    if spec.form in _PADDED:
        return np.pad(array, (0, spec.shape[0] - array.shape[0]))
    if spec.form == "colsum":
        return np.pad(array.sum(axis=1, dtype=np.int32), (0, spec.shape[0] - array.shape[0]))
    k = array.shape[1]
    group = panel_group(spec.dtype)
    panels, steps = spec.shape[:2]
    packed = np.zeros((panels, steps, PANEL, group), array.dtype)
    for panel in range(panels):
        rows = array[panel * PANEL : (panel + 1) * PANEL]
        whole = k // group
        # [rows, k] → [k / group, rows, group]
        packed[panel, :whole, : len(rows)] = rows[:, : whole * group].reshape(len(rows), whole, group).swapaxes(0, 1)
        if k % group:
            packed[panel, whole, : len(rows), : k % group] = rows[:, whole * group :]
    return packed.reshape(spec.shape)


def unpack(spec: StoredSpec, packed: Array, type: ValueType) -> Array:
    """The array of the constant (``type``) again; the inverse of ``pack`` for every form but ``colsum``."""
    sizes = _sizes(type)
    if spec.form == "dense":
        return packed
    if spec.form in _PADDED:
        return packed[: sizes[0]]
    n, k = sizes
    panels = packed.reshape(*packed.shape[:3], panel_group(spec.dtype))
    return np.ascontiguousarray(panels.transpose(0, 2, 1, 3).reshape(panels.shape[0] * PANEL, -1)[:n, :k])


def _sizes(type: ValueType) -> tuple[int, ...]:
    if not all(isinstance(size, int) for size in type.shape):
        raise GraphError(f"a constant of type {type} cannot be stored: its rows depend on the batch")
    return tuple(int(size) for size in type.shape)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
