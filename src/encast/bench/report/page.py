"""A document as one HTML page that needs no network, in light and dark, on wide screens and on phones."""

from __future__ import annotations

import re
from collections.abc import Iterator

from encast.bench.report.chart import STYLE as PLOTS
from encast.bench.report.document import Block, Cell, Document, Figure, Listing, Table, Text
from encast.web_page import escaped, page

__all__ = ["MOST_BYTES", "to_html"]

MOST_BYTES = 600_000
"""Of a page: reports are committed."""

_FRAME_BYTES, _JOIN_BYTES = 30_000, 64
"""For the style, headings, and sentences in place of what is left out; and for what stands between two blocks."""

_STYLE = (
    """
body { max-width: 1280px; box-sizing: border-box; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; padding-top: .6rem; border-top: 1px solid var(--grid); }
h3 { font-size: 1.02rem; margin: 1.8rem 0 .3rem; overflow-wrap: anywhere; }
nav { margin: 1rem 0; display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
a { color: inherit; }
p { max-width: 78ch; }
.scroll { margin: .7rem 0 1.1rem; overflow-x: auto; max-width: 100%; }
.scroll:focus-visible { outline: 2px solid var(--soft); }
caption { text-align: left; font-weight: 600; padding: .2rem .6rem .2rem 0; white-space: normal; }
th, td { padding: .2rem .6rem; line-height: 1.3; }
th { vertical-align: bottom; }
td, tbody th { vertical-align: top; }
thead th { color: var(--soft); white-space: normal; }
tbody th { font-weight: 400; }
tbody th:first-child { position: sticky; left: 0; background: var(--paper); }
small { display: block; color: var(--soft); font-size: .85em; }
.wide { white-space: normal; min-width: 15rem; max-width: 46rem; overflow-wrap: anywhere; }
.tables { display: flex; flex-wrap: wrap; gap: 0 2.5rem; align-items: flex-start; }
.best { font-weight: 700; }
.best small { font-weight: 400; }
.bad { color: var(--bad); }
.good { color: var(--good); }
figure { margin: 1rem 0; }
figcaption { color: var(--soft); max-width: 78ch; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(330px, 100%), 1fr)); gap: .6rem 1rem; }
.plots > svg { max-width: 560px; }
details { margin: .6rem 0; }
pre { overflow-x: auto; background: var(--raised); padding: .7rem; font-size: 12px; }
@media print { .scroll { overflow: visible; } table { white-space: normal; } }
"""
    + PLOTS
)

_SCRIPT = """
for (const figure of document.querySelectorAll("figure")) {
  const all = figure.querySelectorAll("g[data-s]");
  for (const one of all) {
    one.addEventListener("mouseenter", () => {
      figure.classList.add("dim");
      for (const other of all) other.classList.toggle("on", other.dataset.s === one.dataset.s);
    });
    one.addEventListener("mouseleave", () => figure.classList.remove("dim"));
  }
}
"""


def to_html(document: Document) -> str:
    """The page, the same bytes for the same document. All texts are escaped.

    Tables and figures that would make the page larger than ``MOST_BYTES`` are left out, each named in its place.
    """
    anchors = _anchors(document)
    body = [f"<main><h1>{escaped(document.title)}</h1>", *map(_text, document.summary), "<nav>"]
    body += [
        f'<a href="#{anchor}">{escaped(section.title)}</a>'
        for anchor, section in zip(anchors, document.sections, strict=True)
        if section.level == 2
    ]
    body.append("</nav>")
    # What may not be shortened comes first, and leaves room for the rest.
    room = MOST_BYTES - _FRAME_BYTES - sum(len(line.encode()) + 1 for line in body)
    shown = [[_block(block) for block in section.blocks] for section in document.sections]
    room -= sum(
        len(text.encode()) + _JOIN_BYTES
        for section, texts in zip(document.sections, shown, strict=True)
        for text in texts
        if not section.bulky
    )
    for anchor, section, texts in zip(anchors, document.sections, shown, strict=True):
        body.append(f'<h{section.level} id="{anchor}">{escaped(section.title)}</h{section.level}>')
        inside = False
        for block, text in zip(section.blocks, texts, strict=True):
            # Narrow tables stand beside each other where there is room.
            if isinstance(block, Table) != inside:
                inside = not inside
                body.append('<div class="tables">' if inside else "</div>")
            if section.bulky and not isinstance(block, Text):
                size = len(text.encode()) + _JOIN_BYTES
                if size > room:
                    text = f'<p class="warning">Left out, the page is full: {escaped(_caption(block))}</p>'
                else:
                    room -= size
            body.append(text)
        if inside:
            body.append("</div>")
    body.append("</main>")
    return page(document.title, _STYLE, body, _SCRIPT)


def _anchors(document: Document) -> list[str]:
    used: dict[str, int] = {}
    found = []
    for section in document.sections:
        name = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        used[name] = used.get(name, 0) + 1
        found.append(name if used[name] == 1 else f"{name}-{used[name]}")
    return found


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return _text(block)
    if isinstance(block, Table):
        return "\n".join(_table(block))
    if isinstance(block, Figure):
        plots = "\n".join(block.plots)
        return f'<figure><div class="plots">{plots}</div>\n<figcaption>{escaped(block.caption)}</figcaption></figure>'
    return f"<details><summary>{escaped(block.title)}</summary><pre>{escaped(block.text)}</pre></details>"


def _text(text: Text) -> str:
    return f"<p{' class=warning' if text.warning else ''}>{escaped(text.text)}</p>"


def _table(table: Table) -> Iterator[str]:
    # A scrolling region must be reachable by keyboard, and named.
    name = escaped(table.caption)
    yield f'<div class="scroll" role="region" tabindex="0" aria-label="{name}"><table><caption>{name}</caption>'
    yield "<thead><tr>"
    for column in table.columns:
        yield f"<th scope=col{' class=text' if column.text else ''}>{escaped(column.title)}</th>"
    yield "</tr></thead><tbody>"
    for line in table.lines:
        cells = []
        for number, (cell, column) in enumerate(zip(line, table.columns, strict=True)):
            classes = [name for name, on in (("text", column.text), ("wide", column.wide)) if on]
            classes += [cell.kind] if cell.kind else []
            cells.append(_cell(cell, classes, head=number < table.heads))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table>"
    if table.left_out:
        yield f"<p>{escaped(table.left_out)}</p>"
    yield "</div>"


def _cell(cell: Cell, classes: list[str], *, head: bool) -> str:
    tag = "th scope=row" if head else "td"
    of_class = "" if not classes else f" class={classes[0]}" if len(classes) == 1 else f' class="{" ".join(classes)}"'
    note = f"<small>{escaped(cell.note)}</small>" if cell.note else ""
    return f"<{tag}{of_class}>{escaped(cell.text)}{note}</{'th' if head else 'td'}>"


def _caption(block: Block) -> str:
    return block.title if isinstance(block, Listing) else block.text if isinstance(block, Text) else block.caption
