"""What a sweep is over stands in its rows, so that nobody takes one of them for another."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from unittest import mock

import pytest
from lab import QUICK, TINY, backends
from small_reports import FEW, document
from synthetic_rows import Experiment, write

from encast.bench.comparison import Comparison, tell_apart
from encast.bench.config import load_jobs
from encast.bench.report.compare import compare
from encast.bench.report.load import load
from encast.bench.rows import read_rows
from encast.bench.run import Run
from encast.bench.scenarios.max_throughput import best_rows
from encast.bench.session import open_session, resume_session
from encast.cli.bench import _line
from encast.pages.document import to_markdown

SHORT = ["backend=encast-f32", *TINY]


@pytest.fixture(autouse=True)
def every_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were installed."""
    module = importlib.import_module("encast.launch.environment")  # by its name it is the function
    monkeypatch.setattr(module, "_library", lambda *_: Path("lib.so"))


def points(tmp_path: Path, *overrides: str) -> list[dict[str, object]]:
    """Of all rows of a command, without the division of the cores."""
    comparisons = [
        Comparison(job, cache=tmp_path)
        for job in load_jobs([*SHORT, "launcher.core_list=0", *overrides], multirun=True)
    ]
    tell_apart(comparisons)
    found = [
        comparison._row(point, Run(spec, failure=("failed", "is not asked for")))["point"]
        for comparison in comparisons
        for point in comparison.points
        for spec in comparison.job.backends
    ]
    return [{name: one[name] for name in one if name not in ("instances", "threads")} for one in found]


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (
            ["launcher.allocator=system,tcmalloc"],
            [{"launcher.allocator": "system"}, {"launcher.allocator": "tcmalloc"}],
        ),
        (["launcher.openmp=true,false"], [{"launcher.openmp": "true"}, {"launcher.openmp": "false"}]),
        (["model.data=/one,/two"], [{"model.data": "/one"}, {"model.data": "/two"}]),
        (["workload.shortest=0.5,1.0"], [{"workload.shortest": 0.5}, {"workload.shortest": 1.0}]),
        (["backend.encast-f32.pin=true,false"], [{"backend.encast-f32.pin": text} for text in ("true", "false")]),
        (
            ["workload.seed=0,1", "scenario.seconds=1,2"],
            [{"workload.seed": seed, "scenario.seconds": seconds} for seed in (0, 1) for seconds in (1, 2)],
        ),
    ],
)
def test_what_no_column_says_has_its_own(tmp_path: Path, given: list[str], own: list[dict[str, object]]) -> None:
    assert points(tmp_path, *given) == [{"batch": 1, "length": 32, **fields} for fields in own]


@pytest.mark.parametrize(
    "given",
    [
        ["workload.length=16,32", "workload.batch=1,2"],
        ["scenario=core_scaling", "scenario.threads=1,[1]"],
        ["scenario=open_loop", "scenario.rate=5,10"],
        ["scenario=latency,throughput"],
        ["launcher=one,throughput,latency"],
    ],
)
def test_what_a_column_or_a_name_says_has_none(tmp_path: Path, given: list[str]) -> None:
    assert not [name for one in points(tmp_path, *given) for name in one if "." in name]


def test_fields_of_scenarios_of_another_name_are_not_compared(tmp_path: Path) -> None:
    found = points(tmp_path, "scenario=latency,throughput", "scenario.seconds=1,2")
    assert [one["scenario.seconds"] for one in found] == [1, 2, 1, 2]


def test_an_option_is_its_backend_s_alone(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "two.yaml").write_text(
        "# Two.\njobs:\n"
        "  - [backend=encast-f32, backend.encast-f32.pin=true]\n"
        "  - ['backend=[encast-f32,encast-int8]', backend.encast-f32.pin=false]\n"
    )
    comparisons = [Comparison(job, cache=tmp_path) for job in load_jobs(["study=two", *TINY], folders=[tmp_path])]
    tell_apart(comparisons)
    both = comparisons[1]
    found = [both._columns(both.points[0], spec) for spec in both.job.backends]
    assert ["backend.encast-f32.pin" in one for one in found] == [True, False]


def test_a_resumed_sweep_has_the_rows_of_a_whole_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backends(tmp_path, honest="Honest")
    given = [*TINY, *QUICK, f"out={tmp_path}", f"cache={tmp_path / 'cache'}", "backend=honest", "experiment=sweep"]
    session = open_session([*given, "workload.shortest=0.5,1.0", "workload.batch=2"], multirun=True, folders=[tmp_path])
    said: list[str] = []
    whole = session.run(said.append, _line)
    assert [row["point"]["workload.shortest"] for row in whole] == [0.5, 1.0]
    assert "workload.shortest 0.5" in "".join(said)
    assert "workload.shortest=0.5" in capsys.readouterr().out
    with (session.folder / "rows.csv").open(newline="") as table:
        assert [line["point.workload.shortest"] for line in csv.DictReader(table)] == ["0.5", "1.0"]
    file = session.folder / "rows.jsonl"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    resume_session(session.folder).run()
    again = read_rows(session.folder)
    assert [(row["key"], row["point"]) for row in again] == [(row["key"], row["point"]) for row in whole]


def test_keys_are_those_of_before(tmp_path: Path) -> None:
    jobs = load_jobs([*SHORT, "launcher.allocator=system,tcmalloc"], multirun=True)
    comparisons = [Comparison(job, cache=tmp_path) for job in jobs]
    before = [comparison.keys() for comparison in comparisons]
    tell_apart(comparisons)
    assert [comparison.keys() for comparison in comparisons] == before


def test_a_resumed_open_loop_knows_its_rates(tmp_path: Path) -> None:
    """What a scenario finds again are the columns that it gave itself."""
    given = [*SHORT, "scenario=open_loop", "scenario.load=[0.5,0.8]", "scenario.seed=0,1"]
    jobs = load_jobs(given, multirun=True)
    comparisons = [Comparison(job, cache=tmp_path) for job in jobs]
    tell_apart(comparisons)
    first = comparisons[0]
    row = first._row(first.points[0], Run(first.job.backends[0], failure=("failed", "")))
    assert row["point"]["scenario.seed"] == 0
    row["metrics"] = {"capacity_per_s": 123.0}
    with mock.patch.object(first, "_prepare", return_value=("failed", "")):
        assert len(list(first.rows([row]))) == 1
    assert list(first._scenario._capacity.values()) == [123.0]  # type: ignore[attr-defined]
    shape = tuple(
        sorted((name, value) for name, value in row["point"].items() if name not in ("load", "scenario.seed"))
    )
    assert list(first._scenario._capacity) == [shape]  # type: ignore[attr-defined]


def test_the_report_and_a_comparison_tell_swept_rows_apart(tmp_path: Path) -> None:
    made = Experiment("sweep", backends=FEW)
    rows = []
    for allocator in ("system", "tcmalloc"):
        rows += made.point("latency", {"length": 32, "batch": 1, "launcher.allocator": allocator}, noisy=0)
    for number, row in enumerate(rows):
        row["key"] = str(number)
        row["metrics"]["latency_ms"]["p50"] = 10.0 + number
    text = to_markdown(document(write(tmp_path, rows)))
    assert "launcher.allocator system" in text
    for number in range(len(rows)):
        assert f"{10 + number}.0" in text, "no row takes the place of another"
    loaded = load([tmp_path]).rows
    assert {one.conclusion for one in compare(loaded, loaded).changes} == {"within noise"}
    assert len(compare(loaded, loaded).changes) == len(rows)


def test_a_strict_limit_has_an_answer_of_its_own(tmp_path: Path) -> None:
    made = Experiment("limits", backends=FEW)
    rows = []
    for limit, rates in ((5, {1: 50.0, 4: None}), (10, {1: 50.0, 4: 80.0})):
        for batch, rate in rates.items():
            slo = {"limit_ms": limit, "percentile": "p99", "latency_ms": 2.0 * batch, "met": rate is not None}
            label = {"length": 32, "batch": batch, "instances": 1, "threads": 2, "scenario.limit_ms": limit}
            rows += made.point(
                "slo_throughput", label, noisy=0, metrics={"sequences_per_s_within_slo": rate, "slo": slo}
            )
    text = to_markdown(document(write(tmp_path, rows)))
    assert "| backend | scenario.limit\\_ms 5 | scenario.limit\\_ms 10 |" in text
    assert "| encast-int8 | **50.0** (1.00x, batch 1, 1 x 2, p99 2.00 ms) | **80.0** (1.00x, batch 4" in text


def test_different_limits_are_different_questions() -> None:
    """Also in rows whose point does not say it."""
    rows = [
        {
            "status": "ok",
            "scenario": "slo_throughput",
            "model": {"name": "m"},
            "backend": {"name": "b"},
            "point": {"length": 32, "batch": batch},
            "metrics": {
                "sequences_per_s_within_slo": rate,
                "slo": {"limit_ms": limit, "percentile": percentile},
                "latency_ms": {"mean": 1.0},
            },
        }
        for limit, percentile, batch, rate in (
            (5.0, "p99", 1, 50.0), (5.0, "p99", 4, None), (10.0, "p99", 4, 80.0), (5.0, "p99_9", 1, 40.0),
        )
    ]  # fmt: skip
    assert [row["metrics"]["sequences_per_s_within_slo"] for row in best_rows(rows)] == [50.0, 80.0, 40.0]


def test_requests_of_different_lengths_are_no_alternatives(tmp_path: Path) -> None:
    made = Experiment("short", backends=FEW)
    rows = []
    for shortest in (0.5, 1.0):
        rows += made.point("throughput", {"length": 32, "batch": 8, "workload.shortest": shortest}, noisy=0)
    text = to_markdown(document(write(tmp_path, rows)))
    assert "On the front: bert-base, length 32, workload.shortest 0.5:" in text
    assert "On the front: bert-base, length 32, workload.shortest 1:" in text
