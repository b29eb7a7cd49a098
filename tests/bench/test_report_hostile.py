"""Reports: nothing in a row can break a page, and pages stay small and the same."""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from small_reports import FEW, Rows, document, few
from synthetic_rows import BACKENDS, Experiment, everything, write

from encast.bench.report.build import Options, build_document
from encast.bench.report.groups import ratio_to
from encast.bench.report.load import load
from encast.measure.price import parse_price
from encast.pages.document import MOST_BYTES, to_html, to_markdown

EVIL = "\"><script>alert(1)</script><img src=x onerror=alert(2)> & ' `|` ] [ \\ \u202e \ud800 \ufffe \uffff \x00 \n# h"


class Tags(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in ("meta",) and (tag, "/") not in attrs:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def poisoned(value: Any) -> Any:
    """The same row with a hostile text in place of, or behind, each of its texts and names."""
    if isinstance(value, dict):
        kept = ("latency_ms", "sequences_per_s", "ratio", "low", "high", "p50", "agreement", "cosine_mean")
        return {name if name in kept else f"{name}": poisoned(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return value + EVIL if isinstance(value, str) else value


def test_names_with_html_in_them_stay_text(tmp_path: Path) -> None:
    rows = []
    for row in [*few(), Experiment("few").failed("cheat-f32", "crashed", "why")]:
        evil = poisoned(row)
        evil.update(status=row["status"], scenario=row["scenario"] + EVIL)
        evil["ratio_to"] = {name + EVIL: ratio for name, ratio in row["ratio_to"].items()}
        evil["point"] = {**row["point"], EVIL: EVIL}
        evil["backend"]["facts"] = {EVIL: EVIL}
        evil["metrics"] = {**row["metrics"], EVIL: 3.0}
        rows.append(evil)
    folder = write(tmp_path, rows, settings=EVIL.replace("\ud800", ""))
    made = document(folder, title=EVIL, price=parse_price("0.17/h"))
    page = to_html(made)
    page.encode()
    clean = parsed(to_html(document(write(tmp_path / "clean", [*few()]), price=parse_price("0.17/h"))))
    found = parsed(page)
    assert found.tags <= clean.tags | {"details", "summary", "pre"}
    assert found.attributes <= clean.attributes
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    markdown = to_markdown(made)
    outside = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    assert "<" not in outside, "Markdown would let HTML through"
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in outside.splitlines() if line.startswith("| enc")}) < 9


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from paths(inner, (*path, name))


ODD = (None, "x", {}, [1, [2]], -1, 0, math.nan, 1e308, True, 5e-324, 10**400)
SLO = {
    "sequences_per_s_within_slo": 30.0,
    "slo": {"limit_ms": 5.0, "percentile": "p99", "latency_ms": 3.0, "met": True},
}
SMALL = [
    row
    for made in [Experiment("small", backends=FEW[:2])]
    for length in (16, 32)
    for scenario, metrics in (("latency", None), ("slo_throughput", SLO))
    for row in made.point(scenario, {"length": length, "batch": 1}, metrics=metrics)
]


@pytest.mark.parametrize("target", [0, 2], ids=["latency", "production"])
def test_any_field_may_be_missing_or_odd(tmp_path: Path, target: int) -> None:
    """Every field of a row gone, and one odd value after the other in its place: a page or a broken row."""
    fields = list(paths(SMALL[target]))
    assert len(fields) > 70
    price = parse_price("0.17/h")
    for number, path in enumerate(fields):
        for odd in (..., ODD[number % len(ODD)], ODD[(number * 7 + 3) % len(ODD)]):
            rows = copy.deepcopy(SMALL)
            inner: Any = rows[target]
            for name in path[:-1]:
                inner = inner[name]
            if odd is ...:
                del inner[path[-1]]
            else:
                inner[path[-1]] = odd
            loaded = load([write(tmp_path, rows)])
            assert len(loaded.rows) + len(loaded.broken) + loaded.replaced == len(rows)
            made = build_document(loaded, Options(price=price))
            if path[0] not in ("backend", "machine"):  # whose facts are shown as they are
                assert not re.search(r"\bnan\b", to_html(made)), (path, odd)
            to_markdown(made)


@pytest.mark.parametrize("low", [0, -1, math.nan])
def test_a_ratio_has_no_interval_that_a_logarithmic_axis_could_not_hold(tmp_path: Path, low: float) -> None:
    rows = few()
    for row in rows:
        for ratio in row["ratio_to"].values():
            ratio.update(low=low)
    row = load([write(tmp_path, rows)]).rows[0]
    assert ratio_to(row, "openvino-int8") == (row.number("ratio_to", "openvino-int8", "ratio"), None)
    assert "Times as fast as openvino-int8 against length" in to_html(document(tmp_path))


def test_a_page_stays_small_whatever_it_is_made_of(tmp_path: Path) -> None:
    backends = [f"backend{index}-{dtype}" for index in range(9) for dtype in ("f32", "int8")]
    rows: Rows = []
    template = Experiment("much", backends=FEW[:1])
    for number in range(10_000):
        backend = backends[number % len(backends)]
        batch, length = 1 << (number // 18 % 9), 8 * (1 + number // 162)
        [row] = template.point("latency", {"batch": batch, "length": length}, noisy=0.5)
        row["backend"].update(name=backend, dtype=backend.rsplit("-", 1)[1])
        row.update(key=str(number), experiment=f"experiment {number // 5000}")
        rows.append(row)
    loaded = load([write(tmp_path, rows)])
    assert len(loaded.rows) == 10_000
    page = to_html(build_document(loaded, Options(price=parse_price("0.17/h"))))
    assert len(page.encode()) < MOST_BYTES
    assert "Left out, the page is full: latency (p50), ms, f32" in page, "what is not there is named"
    parsed(page)


def test_thousands_of_odd_rows_stay_small(tmp_path: Path) -> None:
    long = "reason " * 2000
    rows = [
        {**Experiment("x").failed(f"backend{number}-f32", "crashed", f"{number} {long}"), "key": str(number)}
        for number in range(1500)
    ]
    for number, row in enumerate(rows):
        row["backend"]["facts"] = {f"fact {index}": long for index in range(3)}
        row["experiment"] = f"experiment {number}"
    path = write(tmp_path, rows) / "rows.jsonl"
    with path.open("a") as file:
        file.write("nonsense\n" * 3000)
    page = to_html(document(tmp_path))
    assert len(page.encode()) < MOST_BYTES
    parsed(page)


def test_rows_of_thousands_of_machines_and_of_missed_limits_stay_small(tmp_path: Path) -> None:
    missed = {"sequences_per_s_within_slo": None, "slo": {**SLO["slo"], "latency_ms": 9.0, "met": False}}
    rows: Rows = []
    for number in range(1500):
        made = Experiment(f"experiment {number}", backends=FEW[:1])
        [row] = made.point("slo_throughput", {"length": 16, "batch": 1}, metrics=missed)
        rows.append({**row, "key": str(number), "machine": {**row["machine"], "processor": f"CPU {number:04}"}})
    shown = document(write(tmp_path, rows))
    page = to_html(shown)
    assert len(page.encode()) < MOST_BYTES
    assert "CPU 0019, 2 cores; and 1,480 more machines." in page
    assert "and 1,480 more missed limits" in page
    assert "And 1,492 more machines." in page
    parsed(page)


def test_the_articles_grid_with_every_backend_fits_without_leaving_anything_out(tmp_path: Path) -> None:
    made = Experiment("article", backends=BACKENDS)
    rows = [
        row
        for batch in (1, 4, 8, 16, 32, 64, 128, 300)
        for length in (8, 16, 32, 64, 80, 128, 256, 384, 512)
        for row in made.point("latency", {"batch": batch, "length": length})
    ]
    page = to_html(document(write(tmp_path, rows), price=parse_price("0.17/h")))
    assert len(page.encode()) < MOST_BYTES
    assert "the page is full" not in page


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "rows", list(everything()))
    made = set()
    for seed in ("1", "2"):
        out = tmp_path / f"out{seed}"
        arguments = ["bench", "report", str(tmp_path / "rows"), "--out", str(out), "--markdown", "--price", "1/h"]
        subprocess.run(
            [sys.executable, "-m", "encast.cli.main", *arguments],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        made.add((out / "report.html").read_bytes() + (out / "report.md").read_bytes())
    assert len(made) == 1
