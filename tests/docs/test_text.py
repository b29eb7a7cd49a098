"""What pages name exists, and their commands do not hinder each other. Links are checked by `make docs`."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tops = "core|src|tests|docs|examples|benchmarks|cmake"
    for path in re.findall(rf"`((?:{tops})/[\w./-]*\w)/?`", text):
        if re.search("FAMILY|NAME|LEVEL", path):
            continue  # stands for the name of a new file
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_commands_of_different_pages_do_not_stand_in_each_others_way() -> None:
    """An experiment's folder holds rows already when another page's command of that name was run before."""
    names = [name for page in PAGES for name in re.findall(r"encast bench .*experiment=(\S+)", page.read_text("utf-8"))]
    assert len(names) > 5
    assert len(names) == len(set(names))


def test_nothing_is_installed_from_an_index_that_lacks_it() -> None:
    for page in PAGES:
        assert not re.search(r"pip install '?encast\b", page.read_text("utf-8")), page.name


@pytest.mark.parametrize("path", ["all-MiniLM-L6-v2/config.json", "bench-results/dtypes/rows.jsonl", "x.tuned.json"])
def test_what_the_readme_s_commands_leave_is_ignored(path: str) -> None:
    patterns = (ROOT / ".gitignore").read_text("utf-8").split()
    top = path.split("/")[0]
    assert any(fnmatch.fnmatch(f"/{top}", pattern.rstrip("/")) for pattern in patterns), path
