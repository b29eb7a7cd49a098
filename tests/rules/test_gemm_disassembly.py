"""The main loops of gemm keep their sums in registers.

A compiler that spills them halves the speed without failing any other test, so the built objects are disassembled
and no loop around a multiply-accumulate may store a vector to the stack.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from rules.test_isa_symbols import object_folder

LEVELS = {
    "avx2": {"DotF32": 12, "DotBF16": 24, "DotQ8": 24},
    "avxvnni": {"DotQ8": 12},
    "avx512": {"DotF32": 24, "DotBF16": 48, "DotQ8": 48},
    "avx512vnni": {"DotQ8": 24},
    "avx512bf16": {"DotPairs": 24},
}
"""ISA level → Dot → multiply-accumulates in the loop of its largest tile."""

MULTIPLY = re.compile(r"v(fmadd\d+ps|pmaddwd|pdpbusd|dpbf16ps)")
STACK_STORE = re.compile(r"%[xyz]mm\d+, ?-?(0x[0-9a-f]+)?\(%r[sb]p\b")


@dataclass(frozen=True)
class Instruction:
    address: int
    mnemonic: str
    operands: str


def find_objdump() -> str | None:
    names = ["llvm-objdump", *(f"llvm-objdump-{version}" for version in range(25, 15, -1)), "objdump"]
    return next((path for name in names if (path := shutil.which(name))), None)


def read_functions(text: str) -> dict[str, list[Instruction]]:
    """Function → instructions, from the AT&T listing of GNU's or LLVM's objdump without raw bytes."""
    functions: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            current = functions.setdefault(head[1], [])
        elif body := re.match(r"\s*([0-9a-f]+):\s+(?:\{vex\}\s+)?(\S+)\s*(.*)", line):
            current.append(Instruction(int(body[1], 16), body[2], body[3]))
    return functions


def innermost_loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Bodies that end with a jump back to their start and jump nowhere else."""
    index = {instruction.address: i for i, instruction in enumerate(instructions)}
    loops = []
    for end, instruction in enumerate(instructions):
        target = re.match(r"(?:0x)?([0-9a-f]+)", instruction.operands)
        if not instruction.mnemonic.startswith("j") or target is None:
            continue
        start = index.get(int(target[1], 16), end + 1)
        body = instructions[start : end + 1]
        if body and not any(inside.mnemonic.startswith("j") for inside in body[:-1]):
            loops.append(body)
    return loops


def multiplying_loops(text: str) -> list[tuple[str, int, list[str]]]:
    """``(function, multiply-accumulates, stores to the stack)`` of every innermost loop that multiplies."""
    found = []
    for function, instructions in read_functions(text).items():
        for body in innermost_loops(instructions):
            multiplies = sum(1 for inside in body if MULTIPLY.match(inside.mnemonic))
            stores = [f"{i.mnemonic} {i.operands}" for i in body if STACK_STORE.search(i.operands)]
            if multiplies:
                found.append((function, multiplies, stores))
    return found


def optimised_object(source: str) -> Path:
    """The object of a source below core/, of a build whose loops say something."""
    folder = object_folder()
    if folder is None:
        pytest.skip("no build of encast_core below build/; set ENCAST_BUILD_DIR to the folder of one")
    path = folder / f"{source}.o"
    assert path.is_file(), f"{path} is missing: was the source renamed?"
    cache = (folder.parents[2] / "CMakeCache.txt").read_text(encoding="utf-8")
    if "CMAKE_BUILD_TYPE:STRING=Release" not in cache and "CMAKE_BUILD_TYPE:STRING=RelWithDebInfo" not in cache:
        pytest.skip("the build is not optimised")
    if re.search(r"^ENCAST_SANITIZE:STRING=.+", cache, re.MULTILINE):
        pytest.skip("the build has sanitizers, whose checks take the registers")
    if b"GCC: (" in path.read_bytes() and b"clang version" not in path.read_bytes():
        pytest.skip("built with GCC, which is known to spill (CMake warns of it)")
    return path


def disassemble(objdump: str, path: Path) -> str:
    command = [objdump, "-d", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("level", LEVELS)
def test_sums_stay_in_registers(level: str) -> None:
    objdump = find_objdump()
    if objdump is None:
        pytest.skip("neither llvm-objdump nor objdump is installed")
    loops = multiplying_loops(disassemble(objdump, optimised_object(f"kernels/gemm/x86_{level}.cc")))
    for dot, expected in LEVELS[level].items():
        counts = {multiplies for function, multiplies, _ in loops if dot in function}
        assert expected in counts, f"the main loop of {dot} was not found among loops of {sorted(counts)}"
    for function, multiplies, stores in loops:
        assert not stores, f"{function}: a loop with {multiplies} multiply-accumulates spills: {stores}"


LISTING = """
0000000000000000 <kernel>:
       0:       xorl    %eax, %eax
      10:       vbroadcastss    (%rdi), %zmm31
      16:       vfmadd231ps     (%rsi), %zmm31, %zmm0
      1c:       {0}
      24:       addq    $0x1, %rax
      28:       jne     {1} <kernel+0x10>
      2a:       vmovups %zmm0, 0x40(%rsp)
      2e:       retq
"""


@pytest.mark.parametrize("target", ["0x10", "10"], ids=["llvm", "gnu"])
@pytest.mark.parametrize(
    ("instruction", "spills"),
    [
        ("vmovups %zmm0, -0x40(%rsp)", True),
        ("vmovaps %ymm3,0x20(%rbp)", True),
        ("vmovups %zmm0, (%rsp)", True),
        ("vmovups -0x40(%rsp), %zmm1", False),  # a constant that is read is no sum
        ("vmovups %zmm0, 0x40(%rdx)", False),
    ],
)
def test_the_reader_finds_spills(target: str, instruction: str, spills: bool) -> None:
    ((function, multiplies, stores),) = multiplying_loops(LISTING.format(instruction, target))
    assert (function, multiplies, bool(stores)) == ("kernel", 1, spills)
