"""``encast compile --max-drop``: options, text, JSON, exit codes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import outliers
import pytest
from adapter_files import ADAPTERS, make_adapted

from encast import artifact
from encast.budget import race, workshop
from encast.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a guilty layer, ``pairs.jsonl`` with its own scores, and ``named.csv`` of other columns."""
    folder = tmp_path_factory.mktemp("budget")
    made = outliers.checkpoint(folder / "model", "embed", guilty=(0,), layers=1, pooling=("mean",), normalize=True)
    rows = outliers.own_scores(folder, made, 60).rows
    lines = [{"text": row.text[0], "pair": row.text[1], "score": row.gold} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = "".join(f"{row.text[0]},{row.text[1]},{row.gold}\n" for row in rows)
    (folder / "named.csv").write_text("left,right,stars\n" + table)
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workshop, "race", outliers.times_by_size)

    def call(*options: str) -> tuple[int, str, str]:
        code = main(["compile", str(folder / "model"), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_it_prints_layers_candidates_and_the_decision(
    run: Run, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run("--max-drop", "0.03", "--data", str(folder / "pairs.jsonl"))
    assert code == 0, err
    head, layers, candidates, decision = out.split("\n\n")
    assert head.startswith(f"spearman of f32 on {folder.name}/pairs.jsonl: 100.000 (60 rows); with a drop of 3 % at")
    assert "97.000 at least" in head
    assert layers.splitlines()[1].split()[0] == "encoder.layer.0.output.dense"
    assert layers.splitlines()[1].split()[-1] == "bf16"
    assert len(layers.splitlines()) == 6
    rows = {line.split("  ")[0]: line for line in candidates.splitlines()}
    assert rows["int8"].endswith("over the budget")
    assert rows["int8 but 1 bf16"].endswith("chosen")
    assert rows["f32"].split()[1:] == ["100.000", "0.00%", "1.00"]
    assert decision.startswith(f"{tmp_path / 'model.encast'}: int8 but 1 bf16, ")
    assert "measure the artifact on others with `encast eval`" in decision
    assert "encast: score int8 but 1 f32" in err.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["model.encast"]
    assert main(["inspect", "model.encast"]) == 0
    shown = capsys.readouterr().out
    assert f"{folder.name}/pairs.jsonl: embed, 60 rows" in shown
    assert "  chosen on these rows: spearman at most 3 % below the 100.000 of f32\n" in shown


def test_json_is_one_document(run: Run, folder: Path) -> None:
    code, out, err = run("--max-drop", "0.03", "--data", str(folder / "pairs.jsonl"), "--json", "--metric", "pearson")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["metric"] == "pearson"
    assert document["card"] == artifact.open(document["artifact"]).card
    assert {layer["name"] for layer in document["layers"]} >= {"encoder.layer.0.output.dense"}


def test_columns_are_named_as_for_eval(run: Run, folder: Path) -> None:
    code, out, err = run(
        *("--max-drop", "0.9", "--data", str(folder / "named.csv"), "--json"),
        *("--text-column", "left", "--pair-column", "right", "--score-column", "stars"),
    )
    assert code == 0, err
    assert json.loads(out)["rows"] == 60


def test_an_impossible_budget_is_said_and_ends_well(run: Run, folder: Path, tmp_path: Path) -> None:
    code, out, _ = run("--max-drop", "0", "--data", str(folder / "pairs.jsonl"))
    assert code == 0
    assert "nothing narrower than f32 keeps the budget\nthe nearest, " in out
    assert "the most is lost in encoder.layer.0.output.dense, " in out
    assert artifact.open(tmp_path / "model.encast").graph.meta.dtype == "f32"


@pytest.mark.parametrize(
    ("number", "exit_code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_an_interrupted_search_goes_on(
    run: Run,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    exit_code: int,
    word: str,
) -> None:
    def interrupted(*_: object) -> float:
        signal.raise_signal(number)
        raise AssertionError("the signal was ignored")

    options = ("--max-drop", "0.03", "--data", str(folder / "pairs.jsonl"))
    with monkeypatch.context() as patch:
        patch.setattr(workshop.Workshop, "distance", interrupted)
        code, _, err = run(*options)
    assert code == exit_code
    assert f"encast: {word}; model.encast.journal has what was measured; --resume goes on" in err
    code, _, err = run(*options)
    assert code == 2
    assert "go on with it by --resume" in err
    code, out, err = run(*options, "--resume")
    assert code == 0, err
    assert "score bf16" not in err, "the journal has it"
    assert "int8 but 1 bf16" in out
    assert not (tmp_path / "model.encast.journal").exists()
    code, again, err = run(*options, "--resume")
    assert (code, err) == (0, "encast: the search is done: model.encast has what it found\n")
    assert again.split("; found in")[0] == out.split("; found in")[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-drop", "0.01"], "--max-drop needs --data"),
        (["--max-drop", "0.01", "--data", "absent.tsv"], "absent.tsv: no such file"),
        (["--max-drop", "1", "--data", "PAIRS"], "max_drop is 1.0"),
        (["--max-drop", "0.1", "--data", "PAIRS", "--dtype", "bf16"], "--dtype was given: the search of --max-drop"),
        (["--max-drop", "0.1", "--data", "PAIRS", "--keep", "*=f32"], "--keep was given: the search of --max-drop"),
        (["--max-drop", "0.1", "--data", "PAIRS", "--calibrate", "t.txt"], "--calibrate was given: the search of"),
        (["--max-drop", "0.1", "--data", "PAIRS", "--strict"], "--strict was given: the search of --max-drop"),
        (["--max-drop", "0.1", "--data", "PAIRS", "--sparse", "some"], "sparse is 'some'"),
        (["--data", "PAIRS"], "--data was given: it is for a search with --max-drop"),
        (["--score-column", "score"], "--score-column was given: it is for a search with --max-drop"),
        (["--resume"], "--resume was given: it is for a search with --max-drop"),
    ],
)
def test_options_that_do_not_go_together(run: Run, folder: Path, tmp_path: Path, options: list[str], said: str) -> None:
    code, out, err = run(*(str(folder / "pairs.jsonl") if option == "PAIRS" else option for option in options))
    assert (code, out) == (2, "")
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_rounds_are_enough_for_a_median() -> None:
    assert race.ROUNDS >= 5
    assert race.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0, "the median of ratios, not a ratio of medians"


def test_a_budget_is_kept_with_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an artifact of another adapter, of the same files and precision, is not taken for it."""
    monkeypatch.setattr(workshop, "race", outliers.times_by_size)
    folder, out = make_adapted(tmp_path / "made"), tmp_path / "out.encast"
    texts = outliers.texts(60)
    rows = [{"text": one, "pair": other, "score": len(one)} for one, other in zip(texts[::2], texts[1::2], strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--max-drop", "0.9", "--data", str(tmp_path / "rows.jsonl"), "-o", str(out)]
    for adapter in ADAPTERS[:2]:
        assert main(["compile", str(folder), *options, "--adapter", adapter]) == 0
        assert artifact.open(out).card["source"]["adapter"] == adapter
