"""Compiles every kernel, in the forms that models use, to machine code of a card that need not be there.

``python compile_kernels.py 80 90``: compute capabilities. Prints a line a kernel. Fails where one wants more shared
memory than a multiprocessor has, or where attention, norms or products have more values than registers.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from encast.backends.gpu.kernels import attention, epilogue, narrow, norm, product

TYPES = {"f32": tl.float32, "f16": tl.float16, "bf16": tl.bfloat16}
POINTERS = {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16"}
CODES = {0: None, 1: "*bf16", 5: "*fp8e4nv"}
HOPPER = 90


def attentions() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    kinds = ("f16", "f16"), ("f32", "bf16"), ("f32", "f32")
    for (stored, dtype), size in itertools.product(kinds, (64, attention.LARGEST_HEAD)):
        for seen, bias, local in ((True, True, False), (True, False, True)):
            types = dict.fromkeys(("qkv", "out"), POINTERS[stored]) | dict.fromkeys(
                ("offsets", "tiles", "seen"), "*i32"
            )
            types |= {"bias": "*fp32", "row_stride": "i32", "hidden": "i32", "bias_columns": "i32"}
            types |= {"scale": "fp32", "reach": "i32"}
            fixed = attention.form(size, TYPES[dtype], seen, bias, local)
            yield attention._attend, types, fixed, attention.options(fixed, 4 if stored == "f32" else 2)


def norms() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    for stored in ("f32", "bf16"):
        for copy in range(6):
            codes = CODES.get(copy, "*i8") or POINTERS[stored]
            copies = {"codes": codes, "scales": "*fp32", "shifts": "*i32"}
            numbers = dict.fromkeys(("fixed_scale", "fixed_inverse", "fixed_zero"), "fp32")
            options = {"num_warps": narrow.warps_for(768), "enable_fp_fusion": False}
            types = dict.fromkeys(("x", "residual"), POINTERS[stored]) | dict.fromkeys(("gamma", "beta"), "*fp32")
            types |= {"out": POINTERS[stored], **copies}
            types |= dict.fromkeys(("columns", "x_stride", "residual_stride"), "i32")
            types |= {"size": "fp32", "eps": "fp32", **numbers}
            fixed = {"BLOCK": 1024, "HAS_RESIDUAL": copy % 2 == 0, "CENTRED": copy != 3, "COPY": copy}
            yield norm._norm, types, fixed, options
            types = dict.fromkeys(("ids", "types", "places"), "*i32")
            types |= dict.fromkeys(("word", "token_type", "position"), POINTERS[stored])
            types |= dict.fromkeys(("gamma", "beta"), "*fp32") | {"out": POINTERS[stored], **copies}
            types |= {"columns": "i32", "size": "fp32", "offset": "i32", "eps": "fp32", **numbers}
            fixed = {"BLOCK": 1024, "HAS_TYPE": copy != 2, "HAS_POSITION": copy != 1, "COPY": copy}
            yield norm._embed, types, fixed, options
            if copy > 1:
                types = {"x": POINTERS[stored], **copies, "columns": "i32", "x_stride": "i32", **numbers}
                yield narrow._narrow, types, {"BLOCK": 4096, "COPY": copy}, {**options, "num_warps": 4}


def products() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    for operands, element, itemsize in ((0, "fp16", 2), (0, "bf16", 2), (1, "fp8e4nv", 1), (2, "i8", 1)):
        for stored, rows in itertools.product(("f16", "f32"), (128, 256, 2048, 8192)):
            if element == "fp8e4nv" and stored == "f32":  # values are f16 beside f8
                continue
            of_dtype = {"f32": torch.float32}.get(stored, torch.float16)
            sizes, options = product.form(rows, 3072, itemsize, of_dtype, 132)
            names = [
                "x",
                "weight",
                "out",
                "bias",
                "row_scale",
                "row_shift",
                "column_scale",
                "column_sums",
                "rows",
                "columns",
                "inner",
            ]
            of = f"tensordesc<{element}[{sizes['ROWS']}, {sizes['INNER']}]>"
            types = dict.fromkeys(names, "i32") | dict.fromkeys(("bias", "row_scale", "column_scale"), "*fp32")
            types |= dict.fromkeys(("row_shift", "column_sums"), "*i32")
            types |= {"x": of, "weight": f"tensordesc<{element}[{sizes['COLUMNS']}, {sizes['INNER']}]>"}
            types["out"] = f"tensordesc<{POINTERS[stored][1:]}[{sizes['ROWS']}, {sizes['COLUMNS']}]>"
            fixed = {**sizes, "GROUP": 8, "OPERANDS": operands, "HAS_BIAS": True, "STORED": TYPES[stored]}
            for kind in (0, 1 if stored == "f32" else 6):
                yield product._product, types, {**fixed, "KIND": kind}, options


def epilogues() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    for stored, kinds in (("f32", range(1)), ("f16", range(7))):
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
        for kernel, types, fixed, options in (*attentions(), *norms(), *epilogues(), *products()):
            if capability < HOPPER and (kernel is product._product or "*fp8e4nv" in types.values()):
                continue
            # What Triton finds at a launch: memory begins at multiples of 16 bytes, and rows are as long.
            whole = {
                (place,): [["tt.divisibility", 16]]
                for place, (name, type) in enumerate(types.items())
                if type.startswith("*") or name in ("row_stride", "hidden", "inner")
            }
            source = ASTSource(kernel, {**types, **dict.fromkeys(fixed, "constexpr")}, constexprs=fixed, attrs=whole)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            shared = made.metadata.shared
            assert len(made.asm["cubin"]) > 0
            most = 227 if kernel is product._product else 99
            assert shared <= most << 10, f"{kernel} {fixed} wants {shared} bytes of shared memory"
            if kernel in (attention._attend, product._product, norm._norm, norm._embed, narrow._narrow):
                assert (spilled := stack(made.asm["cubin"])) == 0, f"{fixed} spills {spilled} bytes"
            print(capability, kernel.fn.__name__, fixed, f"{shared} bytes shared")


if __name__ == "__main__":
    main()
