"""Code of a faster ISA level must not reach processors of a slower one through the linker.

An inline function that two objects define is one weak symbol, and the linker keeps any one of the two bodies:
if the one compiled with AVX-512 flags wins, an AVX2 machine dies of an illegal instruction, in code that looks
innocent. So objects compiled with ISA flags define no weak symbols except in a namespace of their level.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rules.elf import read_symbols

ROOT = Path(__file__).parent.parent.parent


def isa_table() -> dict[str, str]:
    """Level → compiler flags, as core/cpu/isa.inc lists them."""
    text = (ROOT / "core/cpu/isa.inc").read_text(encoding="utf-8")
    return dict(re.findall(r'^ENCAST_ISA\((\w+), "[^"]*", "([^"]*)"\)', text, re.MULTILINE))


LEVELS = [level for level, flags in isa_table().items() if flags]


def level_of(path: Path) -> str | None:
    """The flagged level that a source's name ends with, by the rule of cmake/sources.cmake."""
    stem = path.name.split(".")[0]
    fitting = [level for level in LEVELS if stem == level or stem.endswith("_" + level)]
    return max(fitting, key=len) if fitting else None


def object_folder() -> Path | None:
    """Where CMake put the library's objects: below ENCAST_BUILD_DIR, or else in the newest tree below build/."""
    chosen = os.environ.get("ENCAST_BUILD_DIR")
    if chosen:
        folder = Path(chosen).resolve() / "CMakeFiles/encast_core.dir/core"
        assert folder.is_dir(), f"ENCAST_BUILD_DIR={chosen} holds no objects of encast_core"
        return folder
    # clang-tidy's tree is configured and holds no objects.
    found = {path.stat().st_mtime: path for path in ROOT.glob("build/*/CMakeFiles/encast_core.dir/core/base/*.o")}
    return found[max(found)].parents[1] if found else None


def sources() -> list[Path]:
    return [path for path in sorted((ROOT / "core").rglob("*.cc")) if level_of(path) and "test" not in path.stem]


def offenders(symbols: Path, level: str) -> list[str]:
    """Weak definitions outside of the level's namespace. Landing pads' pointers to the personality are data."""
    namespace = re.compile(rf"^_Z\w*?(?<!\d){len(level)}{level}")  # mangled: the length, then the name
    return [
        symbol.name
        for symbol in read_symbols(symbols)
        if symbol.defined
        and symbol.binding in ("weak", "unique")
        and not symbol.name.startswith("DW.ref.")
        and not namespace.match(symbol.name)
    ]


def test_every_flagged_level_is_used() -> None:
    assert {level_of(path) for path in sources()} >= set(LEVELS)


@pytest.mark.parametrize("source", sources(), ids=lambda path: str(path.relative_to(ROOT / "core")))
def test_no_weak_symbols_outside_of_the_level(source: Path) -> None:
    folder = object_folder()
    if folder is None:
        pytest.skip("no build tree below build/; make test builds one")
    compiled = folder / (str(source.relative_to(ROOT / "core")) + ".o")
    assert compiled.is_file(), f"{compiled} is missing: is the build tree older than the source?"
    level = level_of(source)
    assert level is not None
    assert offenders(compiled, level) == []


@pytest.mark.skipif(shutil.which("clang++-16") is None and shutil.which("c++") is None, reason="no system compiler")
def test_the_rule_finds_what_it_looks_for(tmp_path: Path) -> None:
    """A weak function outside of the namespaces is found, one inside is let through."""
    source = tmp_path / "x86_avx2.cc"
    source.write_text(
        "template <class T> __attribute__((noinline)) T outside(T x) { return x * x; }\n"
        "namespace encast::avx2 { template <class T> __attribute__((noinline)) T inside(T x) { return x + x; } }\n"
        "float kernel(float x) { return outside(x) + encast::avx2::inside(x); }\n"
    )
    compiler = shutil.which("clang++-16") or shutil.which("c++")
    assert compiler is not None
    subprocess.run([compiler, "-O1", "-c", str(source), "-o", str(tmp_path / "x.o")], check=True)
    found = offenders(tmp_path / "x.o", "avx2")
    assert len(found) == 1
    assert "outside" in found[0]
