"""Rows to a document: which sections there are, and in which order a reader wants them."""

from __future__ import annotations

from dataclasses import dataclass

from encast.bench.report.choices import choice_sections
from encast.bench.report.compare import Comparison
from encast.bench.report.document import Block, Document, Section, Text
from encast.bench.report.groups import group_rows
from encast.bench.report.load import Loaded
from encast.bench.report.overview import (
    backends_section,
    glance_section,
    machine_section,
    method_section,
    summary,
)
from encast.bench.report.results import result_sections, styles
from encast.bench.report.trust import broken_section, cold_section, failures_section, trust_section
from encast.bench.report.verdicts import comparison_section
from encast.measure.price import Price

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
    colours = styles(loaded.rows)
    results = result_sections(groups[:_MOST_GROUPS], colours, options.reference, lines)
    head = [Section("Results by scenario", _results_note(len(groups)))] if results else []
    sections = [
        comparison_section(options.comparison, colours, _LIST_LINES) if options.comparison is not None else None,
        glance_section(groups, min(lines, _LIST_LINES)),
        *choice_sections(loaded.rows, colours, options.price, lines),
        *head,
        *results,
        failures_section(loaded.rows, _LIST_LINES),
        trust_section(loaded.rows, _LIST_LINES),
        cold_section(loaded.rows, _LIST_LINES),
        backends_section(loaded.rows, _LIST_LINES) if loaded.rows else None,
        machine_section(loaded, 60),
        broken_section(loaded, _LIST_LINES),
        method_section(),
    ]
    return Document(options.title, summary(loaded), tuple(section for section in sections if section is not None))


def _results_note(groups: int) -> tuple[Block, ...]:
    if groups <= _MOST_GROUPS:
        return ()
    return (Text(f"Shown are {_MOST_GROUPS} of {groups} comparisons; make a report of fewer folders for the rest."),)
