"""Compiles every kernel, in the forms that models use, to machine code of a card that need not be there.

``python compile_kernels.py 80 90``: compute capabilities. Prints a line a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from encast.backends.gpu.kernels import attention, epilogue, norm

TYPES = {
    "f32": ("*fp32", tl.float32, torch.float32),
    "f16": ("*fp16", tl.float16, torch.float16),
    "bf16": ("*bf16", tl.bfloat16, torch.bfloat16),
}


def attentions() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    for stored, dtype, size in (("f16", "f16", 64), ("f32", "bf16", 128), ("f32", "f32", attention.LARGEST_HEAD)):
        for seen, bias, local in ((True, True, False), (True, False, True))[: 1 if dtype == "f32" else 2]:
            types = dict.fromkeys(("qkv", "out"), TYPES[stored][0]) | dict.fromkeys(
                ("offsets", "tiles", "seen"), "*i32"
            )
            types |= {"bias": "*fp32", "row_stride": "i32", "hidden": "i32", "bias_columns": "i32"}
            types |= {"scale": "fp32", "reach": "i32"}
            fixed = attention.form(size, TYPES[stored][2], TYPES[dtype][1], seen, bias, local)
            yield attention._attend, types, fixed, attention.OPTIONS


def norms() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    for stored in ("f32", "bf16"):
        for copy in range(5):
            codes = "*i8" if copy > 1 else "*bf16" if copy else TYPES[stored][0]
            types = dict.fromkeys(("x", "residual", "out"), TYPES[stored][0]) | {"codes": codes, "shifts": "*i32"}
            types |= dict.fromkeys(("gamma", "beta", "scales"), "*fp32")
            types |= dict.fromkeys(("columns", "x_stride", "residual_stride"), "i32")
            types |= dict.fromkeys(("size", "eps", "fixed_scale", "fixed_inverse", "fixed_zero"), "fp32")
            fixed = {"BLOCK": 1024, "HAS_RESIDUAL": copy % 2 == 0, "CENTRED": copy != 3, "COPY": copy}
            yield norm._norm, types, fixed, {"enable_fp_fusion": False}


def epilogues() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    for stored, kinds in (("f32", range(1)), ("f16", epilogue.KINDS.values())):
        for kind in kinds:
            integers = kind % 2 == 0
            types = {"sums": "*i32" if integers else "*fp32", "out": TYPES[stored][0], "bias": "*fp32"}
            types |= dict.fromkeys(("row_scale", "column_scale"), "*fp32")
            types |= dict.fromkeys(("row_shift", "column_sums"), "*i32")
            types |= dict.fromkeys(("rows", "columns", "stride"), "i32")
            fixed = {"ROWS": 16, "COLUMNS": 128, "INTEGERS": integers, "HAS_BIAS": kind != 3, "KIND": kind}
            yield epilogue._epilogue, types, fixed, {}


def main() -> None:
    for capability in map(int, sys.argv[1:]):
        for kernel, types, fixed, options in (*attentions(), *norms(), *epilogues()):
            source = ASTSource(kernel, {**types, **dict.fromkeys(fixed, "constexpr")}, constexprs=fixed)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            shared = made.metadata.shared
            assert len(made.asm["cubin"]) > 0
            assert shared <= 99 << 10, f"{kernel} {fixed} wants {shared} bytes of shared memory"
            print(capability, kernel.fn.__name__, fixed, f"{shared} bytes shared")


if __name__ == "__main__":
    main()
