"""Two experiments compared: conclusions that noise does not cause and that differences do."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from synthetic_rows import Experiment, write

from encast.bench.report.build import Options, build_document
from encast.bench.report.compare import Comparison, compare
from encast.bench.report.load import Loaded, Row, load
from encast.cli.main import main
from encast.pages.document import to_html, to_markdown

FEW = ("encast-int8", "openvino-int8", "pytorch-f32")


def experiment(seed: int, **options: Any) -> list[dict[str, Any]]:
    made = Experiment("x", seed, backends=FEW, **options)
    return [row for length in (16, 32, 64) for row in made.point("latency", {"length": length, "batch": 1}, noisy=0)]


def read(folder: Path, rows: list[dict[str, Any]]) -> tuple[Row, ...]:
    return load([write(folder, rows)]).rows


def compared(tmp_path: Path, old: list[dict[str, Any]], new: list[dict[str, Any]], **options: Any) -> Comparison:
    return compare(read(tmp_path / "old", old), read(tmp_path / "new", new), **options)


def conclusions(comparison: Comparison) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in comparison.changes:
        found.setdefault(one.row.backend, set()).add(one.conclusion)
    return found


def test_what_changed_is_found_and_the_rest_is_noise(tmp_path: Path) -> None:
    new = experiment(1, speedup={"encast": 1.1, "openvino": 0.9}, versions={"encast": "2", "openvino": "2"})
    comparison = compared(tmp_path, experiment(0), new)
    assert conclusions(comparison) == {
        "encast-int8": {"faster"},
        "openvino-int8": {"slower"},
        "pytorch-f32": {"within noise"},
    }
    for one in comparison.changes:
        assert one.ratio is not None
        assert one.interval is not None
        assert one.interval[0] <= one.ratio <= one.interval[1]
        if one.row.name == "encast-int8":
            assert one.ratio == pytest.approx(1.1, rel=0.05), "times as fast: above 1 is faster"
    assert comparison.drift == pytest.approx(1.0, rel=0.03)
    assert comparison.warnings == ()


def test_two_runs_of_the_same_are_within_noise(tmp_path: Path) -> None:
    for seed in range(8):
        comparison = compared(tmp_path / str(seed), experiment(seed), experiment(100 + seed))
        assert {one.conclusion for one in comparison.changes} == {"within noise"}, seed


def test_the_intervals_hold_the_truth_about_as_often_as_they_say(tmp_path: Path) -> None:
    draw = random.Random(5)
    held = trials = 0
    template = experiment(0)[0]
    for _ in range(120):
        rows = []
        for scale in (100.0, 107.0):
            row = copy.deepcopy(template)
            row["samples"] = {"figure": [scale * math.exp(draw.gauss(0, 0.03)) for _ in range(11)]}
            rows.append(row)
        [one] = compared(tmp_path, rows[:1], rows[1:]).changes
        assert one.interval is not None
        held += one.interval[0] <= 1.07 <= one.interval[1]
        trials += 1
    # Binomial with p = 0.95: 0.89 is three standard deviations below; the small-sample widening keeps it above.
    assert 0.89 <= held / trials <= 1.0


def test_a_difference_below_the_margin_does_not_count(tmp_path: Path) -> None:
    old, new = experiment(0), experiment(0)
    for row in new:
        row["samples"]["figure"] = [1.02 * value for value in row["samples"]["figure"]]
    assert conclusions(compared(tmp_path, old, new, margin=0.03))["encast-int8"] == {"within noise"}
    for row in [*old, *new]:  # rounds that hardly differ
        middle = sorted(row["samples"]["figure"])[5]
        row["samples"]["figure"] = [middle * (1 + 1e-4 * index) for index in range(11)]
    assert conclusions(compared(tmp_path, old, new, margin=0.01))["encast-int8"] == {"faster"}


@pytest.mark.parametrize("place", ["far", "halved"])
def test_rows_of_another_place_are_not_compared(tmp_path: Path, place: str) -> None:
    old, new = experiment(0), experiment(1)
    for row in old:
        row["noise"]["placement"] = "near"
    for row in new:
        row["noise"]["placement"] = place
    comparison = compared(tmp_path, old, new)
    assert set().union(*conclusions(comparison).values()) == {"not comparable"}
    assert all(
        f"processors were near in the old run and {place} in the new one" in one.why for one in comparison.changes
    )


@pytest.mark.parametrize("side", ["old", "new"])
def test_a_noisy_row_has_no_conclusion_and_says_nothing_about_the_machine(tmp_path: Path, side: str) -> None:
    """The same code, once on a disturbed machine: its rounds are close to each other and far from the truth."""
    old = experiment(0)
    new = experiment(1, speedup={"openvino": 1.4, "encast": 1.4}, versions={"encast": "2"})
    for row in old if side == "old" else new:
        row["noise"]["noisy"] = row["backend"]["name"] != "pytorch-f32"
    comparison = compared(tmp_path, old, new)
    assert conclusions(comparison) == {
        "encast-int8": {"noisy"},
        "openvino-int8": {"noisy"},
        "pytorch-f32": {"within noise"},
    }
    for one in comparison.changes:
        assert one.ratio is not None
        assert (f"noisy in the {side} run" in one.why) == (one.conclusion == "noisy")
    assert comparison.drift == pytest.approx(1.0, rel=0.03), "of rows without a conclusion nothing is concluded"
    text = to_markdown(build_document(Loaded((), (), {}), Options(comparison=comparison)))
    assert "6 noisy" in text
    assert "| noisy: no conclusion | encast-int8" in text


def test_times_are_turned_round(tmp_path: Path) -> None:
    old, new = experiment(0), experiment(0)
    for row, scale in [*((row, 1.0) for row in old), *((row, 2.0) for row in new)]:
        row["samples"] = {"latency_ms": [scale * (10 + 0.01 * index) for index in range(7)]}
    assert {one.conclusion for one in compared(tmp_path, old, new).changes} == {"slower"}


def test_rows_that_cannot_be_compared_say_why(tmp_path: Path) -> None:
    old, new = experiment(0), experiment(1)
    old[0]["samples"] = {}
    new[1]["samples"] = {"other": [1.0, 2.0, 3.0]}
    new[2]["samples"]["figure"] = new[2]["samples"]["figure"][:2]
    new[3].update(status="crashed", reason="signal 11")
    old[4].update(status="timed_out")
    del old[5]
    new[6]["point"]["length"] = 99
    new[7]["point"]["length"] = 99
    new[7].update(status="unfair", reason="keeps answers")
    found = {(one.row.backend, one.row.point["length"]): one for one in compared(tmp_path, old, new).changes}
    expected = {
        ("encast-int8", 16): ("not comparable", "the old row has no rounds under samples"),
        ("openvino-int8", 16): ("not comparable", "samples are figure in the old row and other in the new one"),
        ("pytorch-f32", 16): ("not comparable", "2 rounds are too few for an interval"),
        ("encast-int8", 32): ("now fails", "was measured, now crashed: signal 11"),
        ("openvino-int8", 32): ("now works", "was timed_out"),
        ("pytorch-f32", 32): ("only in the new", ""),
        ("encast-int8", 64): ("only in the old", ""),
        ("encast-int8", 99): ("only in the new", ""),
        ("openvino-int8", 64): ("only in the old", ""),
        ("openvino-int8", 99): ("only in the new", "unfair: keeps answers"),
    }
    for key, (conclusion, why) in expected.items():
        assert (found[key].conclusion, found[key].why) == (conclusion, why)


def stream(seed: int, label: dict[str, float], metrics: dict[str, float], speed: float = 1.0) -> list[dict[str, Any]]:
    made = Experiment("x", seed, backends=FEW, speedup=dict.fromkeys(("openvino", "pytorch"), speed))
    label = {"length": 32, "batch": 1, **label}
    return made.point("open_loop", {**label, "arrivals": "poisson"}, noisy=0, metrics=metrics)


@pytest.mark.parametrize("known", ["offered_per_s", "capacity_per_s"])
def test_other_rates_are_other_questions(tmp_path: Path, known: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first backend became 20 % faster, so that a load of 0.5 is 24 requests a second instead of 20."""
    most = 40 if known == "capacity_per_s" else 20
    old = stream(0, {"load": 0.5}, {known: most})
    new = stream(1, {"load": 0.5}, {known: 1.2 * most}, speed=0.8)
    comparison = compared(tmp_path, old, new)
    assert {one.conclusion for one in comparison.changes} == {"not comparable"}
    assert {one.ratio for one in comparison.changes} == {None}
    assert comparison.drift is None, "what was asked otherwise says nothing about the machine"
    why = "20.0 requests a second were offered in the old run, 24.0 in the new one"
    assert all(why in one.why for one in comparison.changes)
    assert main(["bench", "report", "--compare", str(tmp_path / "old"), str(tmp_path / "new"), "--markdown"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "3 not comparable"
    assert f"3 rows are not comparable: {why}" in said.err
    for page in ("report.html", "report.md"):
        assert (tmp_path / "new" / page).read_text().count(why) == 4, "a line above, and each row's own"


def test_rates_that_hardly_differ_are_compared(tmp_path: Path) -> None:
    old, new = (stream(seed, {"load": 0.5}, {"capacity_per_s": most}) for seed, most in ((0, 40), (1, 40.5)))
    assert {one.conclusion for one in compared(tmp_path / "a", old, new).changes} == {"within noise"}
    # Of a given rate only chance and the number of rounds say how many came.
    old, new = (stream(seed, {"rate": 20}, {"offered_per_s": came}) for seed, came in ((0, 20), (1, 22)))
    assert {one.conclusion for one in compared(tmp_path / "b", old, new).changes} == {"within noise"}


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("tokens", 640, "other tokens: 512 in the old run, 640 in the new one"),
        ("sequences", 8, "other sequences: 4 in the old run, 8 in the new one"),
        ("lengths", [64, 96.5, 128], "other lengths: 128; 128; 128 in the old run, 64; 96.5; 128 in the new one"),
        ("lengths", ["x" * 500], f"in the old run, {'x' * 40} in the new one"),
    ],
)
def test_other_texts_of_the_same_name_are_other_questions(tmp_path: Path, field: str, value: object, why: str) -> None:
    old, new = experiment(0), experiment(1, speedup={"openvino": 0.8})
    for row in new:
        if row["backend"]["name"] != "pytorch-f32":
            row["workload"][field] = value
    comparison = compared(tmp_path, old, new)
    assert conclusions(comparison) == {
        "encast-int8": {"not comparable"},
        "openvino-int8": {"not comparable"},
        "pytorch-f32": {"within noise"},
    }
    assert comparison.drift == pytest.approx(1.0, rel=0.03)
    assert why in comparison.changes[-1].why
    assert why in comparison.warnings[-1]
    for row in old:
        row["workload"] = {"name": "grid"}
    assert "not comparable" not in conclusions(compared(tmp_path, old, new))["encast-int8"], "nobody says what it was"


def test_figures_of_different_quantities_have_no_ratio(tmp_path: Path) -> None:
    """Batch scaling was compared by the sum of sequences a second, and did not say so."""
    made = [Experiment("x", seed, backends=FEW) for seed in (0, 1)]
    old, new = (one.point("batch_scaling", {"batch": 8, "instances": 2}, noisy=0) for one in made)
    for row in new:
        row["compared_by"] = "latency (p50)"
    comparison = compared(tmp_path / "a", old, new)
    assert {(one.conclusion, one.why) for one in comparison.changes} == {
        ("not comparable", "rounds are of throughput in the old row and of latency (p50) in the new one")
    }
    for row in (*old, *new):
        row["scenario"] = "latency"
    assert {one.conclusion for one in compared(tmp_path / "b", old, new).changes} == {"within noise"}


def test_the_machine_is_not_mistaken_for_the_code(tmp_path: Path) -> None:
    slower = dict.fromkeys(("encast", "openvino", "pytorch"), 0.8)
    comparison = compared(tmp_path, experiment(0), experiment(1, speedup=slower, versions={"encast": "2"}))
    assert comparison.drift == pytest.approx(0.8, rel=0.03)
    assert any("did not change are 0.8" in warning for warning in comparison.warnings)
    new = experiment(1)
    for row in new:
        row["machine"]["fingerprint"] = "another"
    assert "same machine" in compared(tmp_path / "b", experiment(0), new).warnings[0]
    new = [{**row, "model": {**row["model"], "sha": "abc"}} for row in experiment(1)]
    assert "model's files differ" in compared(tmp_path / "c", experiment(0), new).changes[0].why


def test_nothing_in_common_and_nothing_at_all(tmp_path: Path) -> None:
    other = [{**row, "scenario": "throughput"} for row in experiment(0)]
    assert "No row of one" in compared(tmp_path, experiment(0), other).warnings[0]
    empty = compared(tmp_path / "b", [], [])
    assert empty.changes == ()
    for comparison in (empty, compared(tmp_path / "c", experiment(0), [])):
        made = build_document(Loaded((), (), {}), Options(comparison=comparison))
        assert "No row in either" in to_html(made) or "only in the old" in to_html(made)
        to_markdown(made)


def test_the_command_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "before", experiment(0))
    new = write(tmp_path / "after", experiment(1, speedup={"encast": 1.2}, versions={"encast": "2"}))
    assert main(["bench", "report", "--compare", str(old), str(new), "--markdown"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "3 faster, 6 within noise"
    assert str(new / "report.html") in said, "beside the new one, unless --out says otherwise"
    text = (new / "report.md").read_text()
    assert "## after against before" in text
    assert "| faster | encast-int8 | latency | bert-base | length 16, batch 1, instances 1, threads 2 |" in text
    assert main(["bench", "report", "--compare", str(old), str(new), "--json", "--out", str(tmp_path / "out")]) == 0
    comparison = json.loads(capsys.readouterr().out)["comparison"]
    assert comparison["counts"]["faster"] == 3
    assert comparison["conclusions"][0]["interval"][0] > 1
