"""The manifests of kernels: nothing in them is untested, unnamed or beyond reach."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KERNELS = ROOT / "core/kernels"
ROW = re.compile(r"^ENCAST_KERNEL\(([^)]*)\)", re.MULTILINE)


def manifest(family: str) -> list[list[str]]:
    """Rows of a family's manifest: op, name, arithmetic, isa, min_rows, function type."""
    text = (KERNELS / family / "kernels.inc").read_text(encoding="utf-8")
    return [[cell.strip() for cell in row.split(",")] for row in ROW.findall(text)]


FAMILIES = sorted(path.parent.name for path in KERNELS.glob("*/kernels.inc"))
LEVELS = re.findall(r"^ENCAST_ISA\((\w+),", (ROOT / "core/cpu/isa.inc").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_manifest_is_in_the_catalog() -> None:
    text = (KERNELS / "manifest.inc").read_text(encoding="utf-8")
    assert sorted(re.findall(r'#include "kernels/(\w+)/kernels.inc"', text)) == FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_names_follow_family_and_level(family: str) -> None:
    for _, name, _, isa, min_rows, _ in manifest(family):
        assert isa in LEVELS, name
        assert name.startswith(family + "_") or family == "reduce", name
        assert name.endswith("_" + isa), name
        assert int(min_rows) >= 1, name


LAYOUTS = {"sparse_q8s8_columns", "narrow_columns"}
"""What no plan names: a step of the runtime keeps its values so where a kernel can, and else as rows."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_class_runs_everywhere(family: str) -> None:
    """Each op has a scalar kernel from one row on, so that lowering finds a class on any machine."""
    for op in {row[0] for row in manifest(family)} - LAYOUTS:
        assert any(row[0] == op and row[3] == "scalar" and row[4] == "1" for row in manifest(family)), op


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_tested_from_its_manifest(family: str) -> None:
    """Its test sweeps the catalog or names every op, so that a row added to the manifest is a row tested."""
    tests = [path for path in (KERNELS / family).glob("*.cc") if path.stem == "test" or path.stem.endswith("_test")]
    assert tests, f"core/kernels/{family} has no test"
    text = "".join(path.read_text(encoding="utf-8") for path in tests)
    assert "kernels.inc" in text or "all_kernels" in text, f"{family}: its test lists kernels by hand"
    for op in {row[0] for row in manifest(family)}:
        assert re.search(rf"\b{op}\b", text), f"{family}: no test speaks of {op}"


def test_the_native_catalog_is_the_manifests() -> None:
    core = pytest.importorskip("encast._core", reason="the native core is not built")
    listed = [(row["family"], row["op"], row["name"], row["isa"]) for row in core.kernels()]
    written = [(family, row[0], row[1], row[3]) for family in FAMILIES for row in manifest(family)]
    assert sorted(listed) == sorted(written)
    assert len(set(listed)) == len(listed)


def test_the_chosen_kernel_is_allowed_and_of_the_class() -> None:
    core = pytest.importorskip("encast._core", reason="the native core is not built")
    rows = {row["name"]: row for row in core.kernels()}
    for op, arithmetic in {(row["op"], row["arithmetic"]) for row in rows.values()}:
        for count in (0, 1, 7, 16, 100_000):
            name = core.select_kernel(op, arithmetic, count)
            members = [r for r in rows.values() if (r["op"], r["arithmetic"]) == (op, arithmetic) and r["allowed"]]
            usable = [r for r in members if r["min_rows"] <= max(count, 1)]
            assert (name is None) == (not usable), (op, arithmetic, count)
            if name is not None:
                best = max(usable, key=lambda r: (LEVELS.index(r["isa"]), r["min_rows"]))
                assert name == best["name"]
    assert core.select_kernel("no_such_op", "f32", 1) is None
