"""docs/status.md is complete: every architecture, head, dtype and ISA level that the code has, and no miss."""

from __future__ import annotations

from pathlib import Path

from encast import _core
from encast.archs import TASKS, model_types
from encast.quant.spec import DTYPES

STATUS = Path(__file__).parent.parent / "docs" / "status.md"
RUN_IT = "run `python docs/make_status.py`"


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
