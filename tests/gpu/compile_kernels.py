"""Compiles every kernel, in the forms that models use, to machine code of a card that need not be there.

``python compile_kernels.py 80 90``: compute capabilities. Prints a line a kernel. Fails where one wants more shared
memory than a multiprocessor has, or where attention has more values than registers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from encast.backends.gpu.kernels import attention, epilogue, norm

TYPES = {"f32": tl.float32, "f16": tl.float16, "bf16": tl.bfloat16}
POINTERS = {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16"}


def attentions() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    kinds = ("f16", "f16"), ("f32", "bf16"), ("f32", "f32")
    for (stored, dtype), size in product(kinds, (64, attention.LARGEST_HEAD)):
        for seen, bias, local in ((True, True, False), (True, False, True)):
            types = dict.fromkeys(("qkv", "out"), POINTERS[stored]) | dict.fromkeys(
                ("offsets", "tiles", "seen"), "*i32"
            )
            types |= {"bias": "*fp32", "row_stride": "i32", "hidden": "i32", "bias_columns": "i32"}
            types |= {"scale": "fp32", "reach": "i32"}
            fixed = attention.form(size, TYPES[dtype], seen, bias, local)
            yield attention._attend, types, fixed, attention.options(TYPES[dtype])


def norms() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    for stored in ("f32", "bf16"):
        for copy in range(5):
            codes = "*i8" if copy > 1 else "*bf16" if copy else POINTERS[stored]
            types = dict.fromkeys(("x", "residual", "out"), POINTERS[stored]) | {"codes": codes, "shifts": "*i32"}
            types |= dict.fromkeys(("gamma", "beta", "scales"), "*fp32")
            types |= dict.fromkeys(("columns", "x_stride", "residual_stride"), "i32")
            types |= dict.fromkeys(("size", "eps", "fixed_scale", "fixed_inverse", "fixed_zero"), "fp32")
            fixed = {"BLOCK": 1024, "HAS_RESIDUAL": copy % 2 == 0, "CENTRED": copy != 3, "COPY": copy}
            yield norm._norm, types, fixed, {"enable_fp_fusion": False}


def epilogues() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    for stored, kinds in (("f32", range(1)), ("f16", epilogue.KINDS.values())):
        for kind in kinds:
            integers = kind % 2 == 0
            types = {"sums": "*i32" if integers else "*fp32", "out": POINTERS[stored], "bias": "*fp32"}
            types |= dict.fromkeys(("row_scale", "column_scale"), "*fp32")
            types |= dict.fromkeys(("row_shift", "column_sums"), "*i32")
            types |= dict.fromkeys(("rows", "columns", "stride"), "i32")
            fixed = {"ROWS": 16, "COLUMNS": 128, "INTEGERS": integers, "HAS_BIAS": kind != 3, "KIND": kind}
            yield epilogue._epilogue, types, fixed, {}


def stack(code: bytes) -> int:
    """Bytes a thread keeps in memory for want of registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage = subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], text=True)
    return int(re.findall(r"STACK:(\d+)", usage)[0])


def main() -> None:
    for capability in map(int, sys.argv[1:]):
        for kernel, types, fixed, options in (*attentions(), *norms(), *epilogues()):
            # What Triton finds at a launch: memory begins at multiples of 16 bytes, and rows are as long.
            whole = {
                (place,): [["tt.divisibility", 16]]
                for place, (name, type) in enumerate(types.items())
                if type.startswith("*") or name in ("row_stride", "hidden")
            }
            source = ASTSource(kernel, {**types, **dict.fromkeys(fixed, "constexpr")}, constexprs=fixed, attrs=whole)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            shared = made.metadata.shared
            assert len(made.asm["cubin"]) > 0
            assert shared <= 99 << 10, f"{kernel} {fixed} wants {shared} bytes of shared memory"
            if kernel is attention._attend:
                assert (spilled := stack(made.asm["cubin"])) == 0, f"{fixed} spills {spilled} bytes"
            print(capability, kernel.fn.__name__, fixed, f"{shared} bytes shared")


if __name__ == "__main__":
    main()
