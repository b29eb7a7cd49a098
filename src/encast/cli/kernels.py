"""``encast kernels``: every kernel, whether this machine may run it, and where it would be chosen."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

__all__ = ["kernel_rows", "kernels"]

# One row (a query's tail), a short text, a full batch.
_ROW_COUNTS = (1, 16, 1024)


def kernel_rows() -> list[dict[str, Any]]:
    """The native catalog's rows, each with ``chosen_for``: the row counts for which its class picks it.

    Raises ``ResourceError`` when ``ENCAST_ISA`` names no level that this machine has.
    """
    from encast import _core

    rows: list[dict[str, Any]] = _core.kernels()
    for row in rows:
        row["chosen_for"] = [
            count for count in _ROW_COUNTS if _core.select_kernel(row["op"], row["arithmetic"], count) == row["name"]
        ]
    return rows


def kernels(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List all kernels: which can run here, and which would be chosen.

    Kernels of one op and one arithmetic class give the same bits.
    """
    rows = kernel_rows()
    if json:
        typer.echo(json_module.dumps(rows, indent=2))
        return
    header = ("op", "class", "kernel", "level", "runs here", *(f"{count} rows" for count in _ROW_COUNTS))
    table = [
        (
            row["op"],
            row["arithmetic"],
            row["name"],
            row["isa"],
            "yes" if row["allowed"] else "no",
            *("chosen" if count in row["chosen_for"] else "" for count in _ROW_COUNTS),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (header, *table)) for column in range(len(header))]
    for line in (header, *table):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
