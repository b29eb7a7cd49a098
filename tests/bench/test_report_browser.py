"""The page in a real browser, without a network: nothing complains, nothing is fetched, everything has its place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import EXECUTABLE, Chromium
from synthetic_rows import BACKENDS, everything, write

from encast.cli.main import main

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed: apt-get install chromium")

# Texts of a plot that cover each other or leave it, in CSS pixels; a little overlap of boxes is no overlap of letters.
COLLISIONS = """
[...document.querySelectorAll("svg.plot")].flatMap((svg, index) => {
  const frame = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll("text")].map(one => [one.textContent, one.getBoundingClientRect()]);
  const found = [];
  boxes.forEach(([text, box], number) => {
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
        || box.bottom > frame.bottom + 1) found.push(`${index}: ${text} leaves the plot`);
    for (const [other, its] of boxes.slice(number + 1)) {
      const wide = Math.min(box.right, its.right) - Math.max(box.left, its.left);
      const high = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
      if (wide > 1 && high > 0.45 * Math.min(box.height, its.height)) found.push(`${index}: ${text} / ${other}`);
    }
  });
  return found;
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything at once: all scenarios, a comparison, a price, broken rows."""
    folder = tmp_path_factory.mktemp("report")
    backends = [name for name in BACKENDS if not name.startswith(("torchscript", "tensorflow-xla", "jax"))]
    old = write(folder / "old", list(everything(backends=backends)))
    changed = {"speedup": {"encast": 1.1}, "versions": {"encast": "2"}}
    new = write(folder / "new", list(everything(1, backends=backends, **changed)))
    with (new / "rows.jsonl").open("a") as file:
        file.write('{"schema": 1, "backend": "<script>throw 1</script>')
    assert main(["bench", "report", str(new), "--compare", str(old), str(new), "--price", "c5.xlarge"]) == 0
    assert "the page is full" not in (new / "report.html").read_text()
    return new / "report.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 800, 390])
def test_the_page_is_whole(browser: Chromium, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()], "the page and nothing else"
    expected = page.read_text().count("<svg")
    sizes = browser.evaluate(
        '[...document.querySelectorAll("svg.plot")].map(one => one.getBoundingClientRect())'
        ".map(box => [box.width, box.height])"
    )
    assert len(sizes) == expected > 30
    assert all(wide > 200 and high > 100 for wide, high in sizes)
    marks = browser.evaluate(
        '[...document.querySelectorAll("svg.plot")].map(svg => '
        '[...svg.querySelectorAll("[class^=c]")]'
        ".filter(one => one.getBoundingClientRect().width > 1).length)"
    )
    assert min(marks) > 0, "a plot without a mark"
    wide = browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0, "the page itself scrolls sideways; its tables should"
    assert browser.evaluate(COLLISIONS) == []
    smallest = browser.evaluate(
        'Math.min(...[...document.querySelectorAll("svg.plot text")]'
        ".map(one => parseFloat(getComputedStyle(one).fontSize) * one.ownerSVGElement.getScreenCTM().a))"
    )
    assert smallest >= 8.5, "letters too small to read"


def test_light_and_dark_differ_and_can_be_read(browser: Chromium, page: Path) -> None:
    papers = []
    for dark in (False, True):
        browser.open(page, dark=dark)
        papers.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        line = browser.evaluate('getComputedStyle(document.querySelector("svg.plot [class^=c]")).stroke')
        assert line not in ("none", papers[-1])
    assert papers == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"]


def test_those_who_do_not_see_it_are_told(browser: Chromium, page: Path) -> None:
    browser.open(page)
    assert browser.evaluate(
        '[...document.querySelectorAll("svg.plot")].every(one => one.getAttribute("role") === "img" '
        '&& one.getAttribute("aria-label").length > 30)'
    )
    assert browser.evaluate('[...document.querySelectorAll("figure")].every(one => one.querySelector("figcaption"))')
    assert browser.evaluate(
        '[...document.querySelectorAll("table")].every(one => one.caption && one.querySelector("th[scope=col]") '
        '&& one.parentElement.tabIndex === 0 && one.parentElement.getAttribute("aria-label"))'
    )
    # A table in the section of every figure.
    assert browser.evaluate("""
        [...document.querySelectorAll("figure")].every(figure => {
          for (let one = figure.nextElementSibling; one && !/^H[123]$/.test(one.tagName); one = one.nextElementSibling)
            if (one.querySelector("table")) return true;
          return false;
        })
    """)
    levels = browser.evaluate('[...document.querySelectorAll("h1,h2,h3")].map(one => +one.tagName[1])')
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    targets = browser.evaluate(
        '[...document.querySelectorAll("nav a")].map(one => document.querySelector(one.getAttribute("href"))?.tagName)'
    )
    assert set(targets) == {"H2"}
    assert browser.evaluate("new Set([...document.querySelectorAll('[id]')].map(one => one.id)).size") == (
        browser.evaluate("document.querySelectorAll('[id]').length")
    )


def test_a_pointer_on_a_mark_dims_the_others_and_reads_it(browser: Chromium, page: Path) -> None:
    browser.open(page)
    place = browser.evaluate("""
        (() => {
          const many = one => one.querySelectorAll("path.c2").length && one.querySelectorAll("circle.c1").length;
          window.figure = [...document.querySelectorAll("figure")].find(many);
          figure.scrollIntoView();
          window.mark = figure.querySelector("circle.c1");
          const box = mark.getBoundingClientRect();
          return {x: box.x + box.width / 2, y: box.y + box.height / 2};
        })()
    """)
    shown = "['.c1', '.c2'].map(one => getComputedStyle(figure.querySelector(one)).opacity)"
    assert browser.evaluate(shown) == ["1", "1"]
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
    assert browser.evaluate(shown) == ["1", "0.15"]
    assert browser.evaluate("mark.querySelector('title').textContent.length") > 10


def test_the_browser_would_notice(browser: Chromium, page: Path, tmp_path: Path) -> None:
    """The checks above can fail: a page that asks for something is seen to."""
    bad = tmp_path / "bad.html"
    text = (
        page.read_text()
        .replace("default-src 'none'; ", "")
        .replace("<main>", '<img src="http://example.org/x.png"><main>')
    )
    bad.write_text(text.replace("</main>", "<script>console.error('no')</script></main>"))
    browser.open(bad)
    assert "http://example.org/x.png" in browser.requests
    assert any("no" in one for one in browser.complaints)
