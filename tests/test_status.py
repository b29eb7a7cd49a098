"""docs/status.md is complete: every architecture, head, dtype and ISA level that the code has, and no miss."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encast import _core
from encast.archs import TASKS, model_types
from encast.quant.spec import DTYPES

DOCS = Path(__file__).parent.parent / "docs"
STATUS = DOCS / "status.md"
RUN_IT = "run `python docs/make_status.py`"


@pytest.fixture(scope="module")
def script() -> Any:
    """docs/make_status.py as a module."""
    spec = importlib.util.spec_from_file_location("make_status", DOCS / "make_status.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_status"] = module  # where its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def _tables() -> dict[str, list[list[str]]]:
    """The rows of the table below each heading, the header first and the rule left out."""
    tables: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            rows = tables.setdefault(line.removeprefix("## "), [])
        elif line.startswith("|") and not line.startswith("| ---"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return tables


def test_every_dtype_has_a_table_and_nothing_was_missed() -> None:
    assert set(_tables()) == set(DTYPES), f"a dtype came, went or missed something; {RUN_IT}"


def test_every_architecture_and_head_has_a_row() -> None:
    wanted = [[arch, head] for arch in model_types() for head in TASKS]
    for dtype, (_, *rows) in _tables().items():
        assert [row[:2] for row in rows] == wanted, f"{dtype}: {RUN_IT}"


def test_every_level_has_a_column_and_every_cell_is_ok_or_was_not_run() -> None:
    levels = [name for name, *_ in _core.isa_levels()]
    for dtype, (header, *rows) in _tables().items():
        assert header[2:] == levels, f"{dtype}: {RUN_IT}"
        for row in rows:
            assert len(row) == len(header)
            assert set(row[2:]) <= {"ok", "."}, f"{dtype}, {row}: {RUN_IT}"


def test_all_levels_but_amx_were_run() -> None:
    for dtype, (header, *rows) in _tables().items():
        for row in rows:
            not_run = [level for level, cell in zip(header[2:], row[2:], strict=True) if cell == "."]
            assert not_run in ([], ["amx"]), f"{dtype}, {row[:2]}: run the script on a machine with AVX-512 BF16"


def test_the_script_finds_an_engine_right_that_is(script: Any, tmp_path: Path) -> None:
    """Answers of this head in bf16 were once called wrong: three logits had settled the edges of all layers."""
    for cell in script.cells_of("mpnet", "classify", tmp_path):
        assert not cell.levels, f"{cell.key} was not compiled: {cell.levels}"
        with np.load(tmp_path / f"{cell.key}.npz") as expected:
            assert script.fault(tmp_path / f"{cell.key}.encast", expected) == "", cell.key
