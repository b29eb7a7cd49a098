"""Rows to a document: which sections there are, and in which order a reader wants them."""

from __future__ import annotations

from dataclasses import dataclass

from encast.bench.report.compare import Comparison
from encast.bench.report.comparison import comparison_section
from encast.bench.report.details import detail_sections
from encast.bench.report.groups import colours, group_rows
from encast.bench.report.load import Loaded
from encast.bench.report.overview import METHOD, fastest_section, summary
from encast.bench.report.results import result_sections
from encast.bench.report.tradeoffs import tradeoff_sections
from encast.measure.price import Price
from encast.pages.document import Document, Section, Text

__all__ = ["Options", "build_document"]

_LINES_IN_ALL, _FEWEST_LINES, _MOST_LINES = 1600, 12, 160
_LIST_LINES = 80
"""Of tables that a page always holds."""
_MOST_GROUPS = 40


@dataclass(frozen=True)
class Options:
    """``reference``: the backend that ratios are shown against. ``price``: of an hour of this machine."""

    title: str = "Benchmark"
    reference: str | None = None
    price: Price | None = None
    comparison: Comparison | None = None


def build_document(loaded: Loaded, options: Options) -> Document:
    """The whole report. What there is no data for has no section."""
    groups = group_rows(loaded.rows)
    lines = min(_MOST_LINES, max(_FEWEST_LINES, _LINES_IN_ALL // max(1, len(groups))))
    colour = colours(loaded.rows)
    results = result_sections(groups[:_MOST_GROUPS], colour, options.reference, lines)
    said = f"Shown are {_MOST_GROUPS} of {len(groups)} comparisons; make a report of fewer folders for the rest."
    head = Section("Results by scenario", (Text(said),) if len(groups) > _MOST_GROUPS else ())
    sections = [
        comparison_section(options.comparison, colour, _LIST_LINES) if options.comparison is not None else None,
        fastest_section(groups, min(lines, _LIST_LINES)),
        *tradeoff_sections(loaded.rows, colour, options.price, lines),
        *([head, *results] if results else []),
        *detail_sections(loaded, _LIST_LINES),
        METHOD,
    ]
    return Document(options.title, summary(loaded), tuple(section for section in sections if section is not None))
