"""What a report says, before it is a page or Markdown: sections of texts, tables, figures and listings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Block", "Cell", "Column", "Document", "Figure", "Listing", "Section", "Table", "Text", "cut"]


@dataclass(frozen=True)
class Cell:
    """``note`` stands smaller below the text. ``kind``: "", "bad", "good", "best"."""

    text: str
    note: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Column:
    """``text``: flush left. ``wide``: its texts may be sentences, and are broken into lines."""

    title: str
    text: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """``heads``: how many columns from the left name the line. ``left_out``: lines that are not shown, and where
    they are, as a sentence."""

    caption: str
    columns: tuple[Column, ...]
    lines: tuple[tuple[Cell, ...], ...]
    heads: int = 1
    left_out: str = ""


@dataclass(frozen=True)
class Figure:
    """Plots as SVG, with what they say for those who do not see them. Pages only: Markdown has the tables."""

    caption: str
    plots: tuple[str, ...]


@dataclass(frozen=True)
class Text:
    text: str
    warning: bool = False


@dataclass(frozen=True)
class Listing:
    """Text as it stands in a file, folded away."""

    title: str
    text: str


Block = Table | Figure | Text | Listing


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]
    level: int = 2
    bulky: bool = False
    """May be shortened when the page would become too large."""


@dataclass(frozen=True)
class Document:
    title: str
    summary: tuple[Text, ...]
    sections: tuple[Section, ...]


def cut(
    caption: str, columns: Sequence[Column], lines: Sequence[Sequence[Cell | str]], most: int, heads: int = 1
) -> Table:
    """A table of at most ``most`` lines, which says how many it leaves out."""
    kept = tuple(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in line) for line in lines[:most])
    rest = len(lines) - len(kept)
    left_out = f"{rest:,} more line{'s' if rest > 1 else ''} not shown here; rows.csv has all." if rest else ""
    return Table(caption, tuple(columns), kept, heads, left_out)
