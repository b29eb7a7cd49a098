"""What a page says: sections of texts, tables, figures and listings; and that as one HTML file or as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from encast.errors import need_modules
from encast.pages.charts import DARK, LIGHT, Chart, clean, to_svg

__all__ = [
    "MOST_BYTES",
    "PACKAGES",
    "Block",
    "Cell",
    "Column",
    "Document",
    "Figure",
    "Listing",
    "Section",
    "Table",
    "Text",
    "prose",
    "table",
    "text",
    "to_html",
    "to_markdown",
]

PACKAGES = ("jinja2", "vl_convert")
"""What pages are made with; the extra ``plot`` has them."""

MOST_BYTES = 900_000
"""Of a page with the tables and figures of its bulky sections. Who makes a document bounds the rest."""

_FRAME_BYTES, _JOIN_BYTES = 30_000, 64
"""For the style, headings, and sentences in place of what is left out; and for what stands between two blocks."""


@dataclass(frozen=True)
class Cell:
    """``note`` stands smaller below the text. ``kind``: "", "bad", "good", "best"."""

    text: str
    note: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Column:
    """``kind``: "" (numbers, flush right), "text" (flush left), "text wide" (sentences, broken into lines)."""

    title: str
    kind: str = ""


def text(title: str) -> Column:
    return Column(title, "text")


def prose(title: str) -> Column:
    return Column(title, "text wide")


@dataclass(frozen=True)
class Table:
    """``heads``: how many columns from the left name the line. ``left_out``: how many lines are not shown."""

    caption: str
    columns: tuple[Column, ...]
    lines: tuple[tuple[Cell, ...], ...]
    heads: int = 1
    left_out: str = ""
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """Charts beside each other. Pages only: Markdown has the tables."""

    caption: str
    charts: tuple[Chart, ...]
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Text:
    text: str
    warning: bool = False
    kind: ClassVar[str] = "text"

    @property
    def caption(self) -> str:
        return self.text


@dataclass(frozen=True)
class Listing:
    """Text as it stands in a file, folded away."""

    caption: str
    text: str
    kind: ClassVar[str] = "listing"

    @property
    def fence(self) -> str:
        """Longer than any inside."""
        return "`" * max([3, *(len(found) + 1 for found in re.findall("`+", self.text))])


Block = Table | Figure | Text | Listing


@dataclass(frozen=True)
class Section:
    """``bulky``: may be shortened when the page would become too large."""

    title: str
    blocks: tuple[Block, ...]
    level: int = 2
    bulky: bool = False


@dataclass(frozen=True)
class Document:
    title: str
    summary: tuple[Text, ...]
    sections: tuple[Section, ...] = field(default=())


def table(
    caption: str,
    columns: Iterable[object],
    lines: Sequence[Iterable[object]],
    most: int = 1000,
    heads: int = 1,
    rest: str = "rows.csv has all",
) -> Table:
    """What is no ``Column`` is the title of one with numbers, what is no ``Cell`` the text of one without a note. At
    most ``most`` lines are kept; the table says how many are left out, and where they are (``rest``)."""
    made = tuple(tuple(one if isinstance(one, Cell) else Cell(str(one)) for one in line) for line in lines[:most])
    over = len(lines) - len(made)
    left_out = f"{over:,} more line{'s' if over > 1 else ''} not shown here; {rest}." if over > 0 else ""
    heading = tuple(one if isinstance(one, Column) else Column(str(one)) for one in columns)
    return Table(caption, heading, made, heads, left_out)


def to_html(document: Document) -> str:
    """The page, the same bytes for the same document. All texts are escaped; it holds no script and may load nothing.

    Tables and figures of bulky sections that would make the page larger than ``MOST_BYTES`` are left out, each named in
    its place. Everything else is on the page, however much it is: titles, texts, listings, and sections that are not
    bulky. Raises ``InputError`` without the packages of the extra ``plot``.
    """
    block: Callable[[Any], str] = _environment().get_template("block.html.j2").module.block
    made = [[str(block(one)) for one in section.blocks] for section in document.sections]
    sizes = [sum(len(one.encode()) + _JOIN_BYTES for one in texts) for texts in made]
    # What may not be shortened leaves room for the rest.
    room = MOST_BYTES - _FRAME_BYTES - sum(len(str(block(one)).encode()) for one in document.summary)
    room -= sum(size for size, section in zip(sizes, document.sections, strict=True) if not section.bulky)
    for texts, section in zip(made, document.sections, strict=True):
        for index, one in enumerate(section.blocks if section.bulky else ()):
            size = len(texts[index].encode()) + _JOIN_BYTES
            if size > room and one.kind != "text":
                texts[index] = str(block(Text(f"Left out, the page is full: {one.caption}", warning=True)))
            else:
                room -= size
    sections = list(zip(_anchors(document), document.sections, made, strict=True))
    page = _environment().get_template("page.html.j2")
    return str(page.render(document=document, sections=sections, light=LIGHT, dark=DARK))


def to_markdown(document: Document) -> str:
    """GitHub's Markdown, without charts. Texts are of users and peers: nothing in them can end a cell or begin HTML."""
    return str(_environment().get_template("page.md.j2").render(document=document)).rstrip() + "\n"


@cache
def _environment() -> Any:
    need_modules("plot", *PACKAGES)
    import jinja2
    from markupsafe import Markup

    def cleaned(value: Any) -> Any:
        return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("encast.pages", "."),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        finalize=cleaned,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(svg=lambda chart: Markup(to_svg(chart)), markdown=_markdown)
    return made


def _markdown(text: str) -> str:
    shown = re.sub(r"[\\`*_|\[\]#~]", r"\\\g<0>", clean(" ".join(text.split())))
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _anchors(document: Document) -> list[str]:
    found: list[str] = []
    for section in document.sections:
        name = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        found.append(name)
    return [
        name if found.index(name) == at else f"{name}-{found[:at].count(name) + 1}" for at, name in enumerate(found)
    ]
