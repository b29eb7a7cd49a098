"""The generated pages of docs/ say what the code says, and links between the documents lead somewhere."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def _script(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["make_api", "make_cli"])
def test_generated_page_is_up_to_date(name: str) -> None:
    script = _script(name)
    assert script.PATH.read_text(encoding="utf-8") == script.render(), f"run `python docs/{name}.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    for link in links:
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    tops = "core|src|tests|docs|examples|benchmarks|cmake"
    for path in re.findall(rf"`((?:{tops})/[\w./-]*\w)/?`", text):
        if re.search("FAMILY|NAME|LEVEL", path):
            continue  # stands for the name of a new file
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_commands_of_different_pages_do_not_stand_in_each_others_way() -> None:
    """An experiment's folder holds rows already when another page's command of that name was run before."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    names = [name for page in pages for name in re.findall(r"encast bench .*experiment=(\S+)", page.read_text("utf-8"))]
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
