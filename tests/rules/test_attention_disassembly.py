"""The products inside attention keep their sums in registers, as those of gemm do."""

from __future__ import annotations

import re

import pytest

from rules.test_gemm_disassembly import disassemble, find_objdump, multiplying_loops, optimised_object

LEVELS = {"avx2": 10, "avxvnni": 12, "avx512": 24, "avx512vnni": 24, "avx512bf16": 24}
"""ISA level → multiply-accumulates that the loop of its largest tile must have at least."""

TILE = re.compile(r"(narrow_scores|narrow_context|score_tile|context_tile)")


@pytest.mark.parametrize("level", LEVELS)
def test_sums_stay_in_registers(level: str) -> None:
    objdump = find_objdump()
    if objdump is None:
        pytest.skip("neither llvm-objdump nor objdump is installed")
    listing = disassemble(objdump, optimised_object(f"kernels/attention/attention_{level}.cc"))
    loops = [loop for loop in multiplying_loops(listing) if TILE.search(loop[0])]
    for product in ("score", "context"):
        largest = max((multiplies for name, multiplies, _ in loops if product in name), default=0)
        assert largest >= LEVELS[level], f"the main loop of {product} was not found"
    for function, multiplies, stores in loops:
        assert not stores, f"{function}: a loop with {multiplies} multiply-accumulates spills: {stores}"
