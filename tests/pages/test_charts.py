"""Charts and pages: whatever is in a text stays text, colours can be read, nothing is asked of a network."""

from __future__ import annotations

import json
import re
import sys
from typing import Any
from xml.etree import ElementTree

import pytest

from encast.cli.main import main
from encast.pages import charts
from encast.pages.charts import DARK, LIGHT, SHAPES, Axis, Chart, Guide, Mark, Series, to_svg
from encast.pages.document import (
    MOST_BYTES,
    Document,
    Figure,
    Listing,
    Section,
    Text,
    table,
    text,
    to_html,
    to_markdown,
)

EVIL = "\"><script>alert(1)</script> & ' ${1} <!-- {{ 7 * 7 }} datum.x \ud800 \ufffe \uffff \x00"


def chart(name: str = "a", alt: str = "what is to be seen", **options: Any) -> Chart:
    marks = tuple(Mark(x, 3.0 * x, f"{name} at {x}", 2.5 * x, 3.5 * x, filled=x > 8) for x in (8.0, 16.0, 512.0))
    series = tuple(Series(f"{name}{index}", index, marks, ideal=((8, 24), (512, 24))) for index in range(3))
    axes: dict[str, Axis] = {"x": Axis(f"length {name}", "values"), "y": Axis(f"ms {name}")}
    return Chart(f"title {name}", alt, **{**axes, "series": series, **options})


def luminance(colour: str) -> float:
    """WCAG 2.1, relative luminance."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("colours", "paper"), [(LIGHT, "#ffffff"), (DARK, "#0d1117")])
def test_lines_in_colour_can_be_seen(colours: tuple[str, ...], paper: str) -> None:
    assert len(set(colours)) == len(LIGHT) == len(DARK)
    for colour in colours:
        bright, dark = sorted((luminance(colour), luminance(paper)), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, colour


def test_no_other_line_gets_the_colour_of_encast() -> None:
    named = [charts._colour(Series("", colour, ())) for colour in range(60)]
    assert named[0] == "var(--c0)"
    assert "var(--c0)" not in named[1:]
    assert set(named) == {f"var(--c{index})" for index in range(len(LIGHT))}


def test_a_chart_holds_its_marks_intervals_names_and_notes() -> None:
    svg = ElementTree.fromstring(to_svg(chart(guides=(Guide(((8, 30), (512, 30)), "bound"),))))
    texts = ["".join(one.itertext()) for one in svg.iter("text")]
    assert {"title a", "length a", "ms a", "a0", "a1", "a2", "8", "16", "512", "bound"} <= set(texts)
    circles = list(svg.iter("circle"))
    assert len(circles) == 9
    assert [one.find("title").text for one in circles[:3]] == ["a at 8.0", "a at 16.0", "a at 512.0"]
    assert ["paper" in one.attrib["class"] for one in circles[:3]] == [True, False, False], "hollow where it is said"
    assert len([one for one in svg.iter("line") if one.get("class", "").startswith("c")]) == 9, "an interval a mark"
    assert svg.attrib["role"] == "img"
    assert svg.attrib["aria-label"] == "what is to be seen"


def test_names_along_y_have_their_intervals_along_x() -> None:
    rows = tuple(
        Series(
            f"b{index}", index, (Mark(1.0 + index, f"b{index}", "", 0.5 + index, 2.0 + index, shape=shape),), line=False
        )
        for index, shape in enumerate([*SHAPES.values(), "diamond"])
    )
    made = chart(x=Axis("dollars", "linear"), y=Axis("", "names"), series=rows, band=(1.0, 1.5), legend=False)
    svg = ElementTree.fromstring(to_svg(made))
    bars = [one for one in svg.iter("line") if one.get("class", "").startswith("c")]
    assert len(bars) == 4
    assert all("y2" not in one.attrib and float(one.attrib["x2"]) != 0 for one in bars)
    assert len([one for one in svg.iter() if "band" in one.get("class", "")]) == 1
    assert {f"b{index}" for index in range(4)} <= {one.text for one in svg.iter("text")}


def test_hostile_texts_stay_texts() -> None:
    made = to_svg(chart(EVIL, EVIL, guides=(Guide(((8, 30), (512, 30)), EVIL),)))
    svg = ElementTree.fromstring(made)
    assert {one.tag for one in svg.iter()} == {one.tag for one in ElementTree.fromstring(to_svg(chart())).iter()}
    assert not {name for one in svg.iter() for name in one.attrib} & {"href", "src", "style", "id", "onload"}
    assert any("alert(1)" in "".join(one.itertext()) for one in svg.iter("title"))
    cells = table(EVIL, [text(EVIL), EVIL], [[EVIL, 3]])
    page = to_html(Document(EVIL, (Text(EVIL),), (Section(EVIL, (cells, Listing(EVIL, EVIL), Figure(EVIL, ()))),)))
    page.encode()
    assert "<script" not in page
    assert "49" not in page, "a template's braces in a text are text"
    assert not set("\x00\ufffe\uffff") & set(page + made), "no characters of XML"
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in page, "no script may run and nothing be loaded"


def test_texts_of_a_chart_are_cut_before_they_are_measured() -> None:
    """Their beginning and end stay: a backend's dtype, a note's number."""
    long = "x" * 100_000
    names = Series("n", 0, (Mark(1.0, f"{long}-f32"), Mark(2.0, f"{long}-int8")), line=False)
    two = [chart(long, long, guides=(Guide(((8, 30),), long),)), chart(long, y=Axis(long, "names"), series=(names,))]
    texts = re.findall(r'"([^"]*)"', json.dumps([charts._spec(one) for one in two], ensure_ascii=False))
    assert max(map(len, texts)) == 200
    titles = ["".join(one.itertext()) for one in ElementTree.fromstring(to_svg(two[0])).iter("title")]
    assert titles[2] == "x" * 149 + "…" + "x" * 41 + " at 512.0"
    assert {mark["y"][-5:] for mark in charts._spec(two[1])["data"]["values"]} == {"x-f32", "-int8"}


def test_a_chart_knows_no_address_and_no_colour_of_its_own() -> None:
    made = to_svg(chart())
    assert not re.search(r"#[0-9a-f]{3,6}|http|url\(|font-family|id=", made), "all colours are the page's"


def test_a_full_page_names_what_it_leaves_out() -> None:
    lines = [[f"line {index}", "x" * 1000] for index in range(MOST_BYTES // 2000)]
    blocks = tuple(table(f"table {index}", ["a", "b"], lines, most=10_000) for index in range(3))
    page = to_html(Document("full", (), (Section("s", blocks, bulky=True),)))
    assert len(page.encode()) < MOST_BYTES
    assert "Left out, the page is full: table 2" in page
    assert "Left out, the page is full: table 0" not in page


def test_markdown_has_the_tables_and_no_chart() -> None:
    made = Document("T", (), (Section("S", (Figure("f", (chart(),)), table("c", [text("a"), "b"], [["x|", 1]])), 3),))
    assert to_markdown(made) == "# T\n\n### S\n\nc:\n\n| a | b |\n| :--- | ---: |\n| x\\| | 1 |\n"


@pytest.mark.parametrize("package", ["jinja2", "vl_convert"])
def test_what_is_missing_is_named_before_anything_is_measured(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["profile", "no-such-artifact", "--plot", "x.html"]) == 2
    assert f"not installed: {package}; pip install 'encast[plot]'" in capsys.readouterr().err
