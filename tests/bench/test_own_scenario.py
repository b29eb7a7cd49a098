"""A scenario of one's own: the example of docs/howto/benchmark.md is measured, and mistakes are its file's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lab import PEERS, QUICK, TINY, backends

from encast.bench.config import load_jobs
from encast.bench.rows import read_rows
from encast.cli.main import main
from encast.errors import InputError

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "benchmark.md"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The folder of the page's example, with a backend."""
    part = PAGE.read_text(encoding="utf-8").partition("A scenario in `mine/scenario/worst.yaml`")[2]
    folder = backends(tmp_path / "mine", honest="Honest") / "scenario"
    folder.mkdir()
    for kind, name in (("yaml", "worst.yaml"), ("python", "worst.py")):
        (text,) = re.findall(rf"```{kind}\n(.*?)```", part, re.DOTALL)
        (folder / name).write_text(text)
    return folder


def bench(mine: Path, *given: str) -> int:
    home = mine.parent.parent
    quick = [one for one in QUICK if not one.startswith("scenario.")]
    places = [f"out={home / 'out'}", f"cache={home / 'cache'}", "experiment=own"]
    return main(
        ["bench", "--conf", str(mine.parent), *TINY, *quick, *places, "backend=honest", "scenario=worst", *given]
    )


def test_the_example_of_the_page_is_measured(mine: Path) -> None:
    assert bench(mine, "scenario.calls=4") == 0
    (row,) = read_rows(mine.parent.parent / "out" / "own")
    assert (row["status"], row["scenario"]) == ("ok", "worst")
    assert row["metrics"]["worst_ms"] >= 2
    assert row["compared_by"] == "the scenario's own figure"


OLD = """
from encast.bench.peers.base import Peer{more}

class Own(Peer):
    name, dtypes = "own", ("f32",)
    def open(self): ...
    def run(self, output, batch, select=None): ...
"""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "{own} lacks bind; a Peer needs `open()` and `bind(batch)`, which returns the call that is timed, "),
        (", Padded", "{own}: cannot be imported (cannot import name 'Padded' from 'encast.bench.peers.base' "),
    ],
)
def test_a_backend_of_the_older_kind_is_told_what_is_needed(mine: Path, more: str, said: str) -> None:
    folder = mine.parent / "backend"
    (folder / "own.py").write_text(OLD.format(more=more))
    (folder / "own.yaml").write_text("peer: own.py:Own\ndtype: f32\n")
    assert bench(mine, "backend=own") == 2
    (row,) = read_rows(mine.parent.parent / "out" / "own")
    assert row["status"] == "failed"
    assert said.format(own=f"{folder / 'own.py'}:Own") in row["reason"]
    assert row["reason"].endswith('see "Adding a backend or a scenario" in docs/howto/benchmark.md')


@pytest.mark.parametrize(
    ("before", "after", "line", "said"),
    [
        ("from encast", "raise KeyError(3)\nfrom encast", 1, "KeyError: 3"),
        ("launcher.place(machine)", "launcher.plaze(machine)", 9, "AttributeError: 'Launcher' object has no"),
        ("calls=self.calls)", "cals=3)", 15, "TypeError: "),
        ("1e9 / max", "1e9 / 0 * max", 18, "ZeroDivisionError: "),
        ("/ 1e6", "/ zork", 21, "NameError: name 'zork' is not defined"),
    ],
)
def test_a_mistake_is_named_by_file_and_line(
    mine: Path, before: str, after: str, line: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = mine / "worst.py"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))
    assert bench(mine) == 2
    last = capsys.readouterr().err.splitlines()
    (error,) = [one for one in last if "error:" in one]
    assert f"{file}, line {line}: {said}" in error
    assert "defect of encast" not in "".join(last)


def test_a_figure_that_is_no_number_is_the_scenarios_fault(mine: Path) -> None:
    file = mine / "worst.py"
    file.write_text(file.read_text().replace("return 1e9 /", "return float('nan') *", 1))
    assert bench(mine) == 2, "nothing was measured"
    (row,) = read_rows(mine.parent.parent / "out" / "own")
    assert row["status"] == "failed"
    assert row["reason"].startswith("scenario Worst: `figure` returned nan for round 0 of honest; correct it")


def test_an_unknown_key_names_the_scenario(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (mine / "worst.yaml").open("a") as file:
        file.write("zork: 1\n")
    assert bench(mine) == 2
    assert "scenario worst: got an unexpected keyword argument 'zork'; correct its YAML" in capsys.readouterr().err


def test_points_that_are_none(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "worst.py").write_text((mine / "worst.py").read_text().replace("return [Point", "[Point"))
    assert bench(mine) == 2
    assert "scenario worst: its `points` must return a Point at least" in capsys.readouterr().err


def test_a_relative_file_lies_beside_its_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, here = tmp_path / "backend", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    (folder / "mine.yaml").write_text("peer: mine.py:Honest\ndtype: f32\n")

    def peer() -> str:
        return load_jobs(["backend=mine"], folders=[tmp_path])[0].backends[0].peer

    with pytest.raises(InputError, match=rf"there is no file {folder}/mine.py, beside the YAML, and no {here}/mine.py"):
        peer()
    for place in (here, folder):  # what is beside the YAML goes first
        (place / "mine.py").write_text(PEERS.read_text())
        assert peer() == f"{place / 'mine.py'}:Honest"
