"""A document as Markdown: the same texts and tables as the page, without its plots."""

from __future__ import annotations

from collections.abc import Iterator

from encast.bench.report.document import Block, Cell, Document, Figure, Listing, Table, Text

__all__ = ["to_markdown"]


def to_markdown(document: Document) -> str:
    """GitHub's Markdown. Texts are of users and peers: nothing in them can end a cell or begin HTML."""
    return "\n".join(_lines(document)).rstrip() + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield f"# {_plain(document.title)}"
    yield ""
    for text in document.summary:
        yield from _block(text)
    for section in document.sections:
        yield f"{'#' * section.level} {_plain(section.title)}"
        yield ""
        for block in section.blocks:
            yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        yield f"**{_plain(block.text)}**" if block.warning else _plain(block.text)
        yield ""
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Listing):
        # A fence longer than any inside.
        fence = "```"
        while fence in block.text:
            fence += "`"
        yield _plain(block.title)
        yield ""
        yield fence
        yield from block.text.encode("utf-8", "replace").decode("utf-8").rstrip().splitlines()
        yield fence
        yield ""
    else:
        assert isinstance(block, Figure)


def _table(table: Table) -> Iterator[str]:
    yield f"{_plain(table.caption)}:"
    yield ""
    yield _row([_plain(column.title) for column in table.columns])
    yield _row([":---" if column.text else "---:" for column in table.columns])
    for line in table.lines:
        yield _row([_cell(cell) for cell in line])
    yield ""
    if table.left_out:
        yield _plain(table.left_out)
        yield ""


def _cell(cell: Cell) -> str:
    text = _plain(cell.text)
    if cell.kind == "best" and text:
        text = f"**{text}**"
    return f"{text} ({_plain(cell.note)})" if cell.note else text


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    shown = " ".join(text.split())
    for special in "\\`*_<>|[]#~&":
        shown = shown.replace(special, f"\\{special}" if special in "\\`*_|[]#~" else _ENTITIES[special])
    return "".join(one if one >= " " else "\ufffd" for one in shown).encode("utf-8", "replace").decode("utf-8")


_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
