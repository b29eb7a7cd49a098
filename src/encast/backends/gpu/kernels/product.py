"""Products with weights whose sums never leave the registers: scales, bias, activation and rounding follow at once.

For cards whose matrix units read tiles that a copy engine brought to shared memory, of which they have 227 KB for a
program (see ``runs_products``). One program a multiprocessor goes through the tiles of the output, so that the next
tile's operands arrive while one is finished. A row is summed in the order of its columns, whatever tile it is in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from encast.backends.gpu.device import runs_products
from encast.backends.gpu.kernels.dtypes import INTERPRETED, TRITON_DTYPES, product_onto, rounded
from encast.backends.gpu.kernels.epilogue import activated, kind_of

__all__ = ["Scales", "can_multiply", "form", "multiply"]

_GROUP = 8
"""Tiles of rows that are gone through together, so that what the cache holds of a weight is read again."""

_FLOATS, _F8, _INT8 = range(3)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, out, bias, row_scale, row_shift, column_scale, column_sums, rows, columns, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    OPERANDS: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_down * tiles_across, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * tiles_across) * GROUP
        down = tl.minimum(tiles_down - first, GROUP)
        place = tile % (GROUP * tiles_across)
        begin, left = (first + place % down) * ROWS, place // down * COLUMNS

        sums = tl.zeros((ROWS, COLUMNS), tl.int32 if OPERANDS == 2 else tl.float32)
        for k in range(0, inner, INNER):
            sums = product_onto(sums, x.load([begin, k]), weight.load([left, k]).T)

        row, column = begin + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
        real_row, real_column = row < rows, column < columns
        if OPERANDS == 2:
            shift = tl.load(row_shift + row, mask=real_row, other=0)
            sums += shift[:, None] * tl.load(column_sums + column, mask=real_column, other=0)[None, :]
        value = sums.to(tl.float32)
        if OPERANDS > 0:
            scale = tl.load(row_scale + row, mask=real_row, other=0.0)
            value *= scale[:, None] * tl.load(column_scale + column, mask=real_column, other=0.0)[None, :]
        if HAS_BIAS:
            value += tl.load(bias + column, mask=real_column, other=0.0).to(tl.float32)[None, :]
        out.store([begin, left], rounded(activated(value, KIND), STORED))


@dataclass(frozen=True)
class Scales:
    """Of f8: ``rows: f32[rows]``, ``columns: f32[n]``. Of bytes also ``shifts: i32[rows]``, added to every byte of a
    row of ``x``, and ``sums: i32[n]``, those of the weight's rows."""

    rows: torch.Tensor
    columns: torch.Tensor
    shifts: torch.Tensor | None = None
    sums: torch.Tensor | None = None


@cache
def _multiprocessors(device: torch.device) -> int:
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _has_kernel(device: torch.device) -> bool:
    return INTERPRETED if device.type == "cpu" else runs_products(device)


def can_multiply(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``multiply`` takes these: rows begin at multiples of 16 bytes, as the copy engine wants."""
    return (
        _has_kernel(x.device)
        and x.shape[1] == weight.shape[1]
        and x.shape[1] * x.element_size() % 16 == 0
        and all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in (x, weight))
    )


_TILES = ((64, 64, 4, 1.0), (64, 128, 4, 1.4), (128, 128, 8, 2.2), (128, 256, 8, 3.7))
"""Rows, columns, warps, and how long the tiles of all multiprocessors take: medians over 54 products of f16, f8 and
int8 on an H100."""


def form(
    rows: int, columns: int, itemsize: int, stored: torch.dtype, processors: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of a tile, and how the kernel is compiled, for operands of ``itemsize`` bytes: the tile that takes the
    least time."""
    # A tile on its way out lies in shared memory beside the operands of the next one.
    fitting = [tile for tile in _TILES if stored.itemsize == 2 or tile[1] < 256]

    def time(tile: tuple[int, int, int, float]) -> float:
        count = -(-rows // tile[0]) * -(-columns // tile[1])
        return -(-count // processors) * tile[3]

    down, across, warps, _ = min(fitting, key=time)
    inner = 64 if itemsize == 2 and across > 64 else 128
    sizes = {"ROWS": down, "COLUMNS": across, "INNER": inner}
    return sizes, {"num_warps": warps, "num_stages": 3 if across == 256 else 4}


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    stored: torch.dtype,
    scales: Scales | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)`` in ``stored``: ``x: [rows, k]`` and ``weight: [n, k]`` of one dtype, f16 or
    bf16, or f8 or bytes with ``scales``, which ``can_multiply`` has seen. Rows of the answer begin at multiples of 16
    bytes."""
    rows, inner = x.shape
    columns = weight.shape[0]
    processors = _multiprocessors(x.device)
    sizes, options = form(rows, columns, x.element_size(), stored, processors)
    stride = columns + -columns % (16 // stored.itemsize)
    out = torch.empty((rows, stride), dtype=stored, device=x.device)[:, :columns]
    tile = [sizes["ROWS"], sizes["COLUMNS"]]
    operands = _FLOATS if scales is None else _F8 if scales.shifts is None else _INT8
    count = triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1])
    _product[(min(count, processors),)](
        TensorDescriptor(x, [rows, inner], [inner, 1], [tile[0], sizes["INNER"]]),
        TensorDescriptor(weight, [columns, inner], [inner, 1], [tile[1], sizes["INNER"]]),
        TensorDescriptor(out, [rows, columns], [stride, 1], tile),
        out if bias is None else bias,
        out if scales is None else scales.rows,
        out if scales is None or scales.shifts is None else scales.shifts,
        out if scales is None else scales.columns,
        out if scales is None or scales.sums is None else scales.sums,
        rows, columns, inner,
        **sizes, GROUP=_GROUP, OPERANDS=operands, HAS_BIAS=bias is not None, KIND=kind_of(activation, stored),
        STORED=TRITON_DTYPES[stored], **options,
    )  # fmt: skip
    return out
