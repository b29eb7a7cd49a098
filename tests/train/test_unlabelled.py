"""Rows without labels teach what a teacher says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from small_rows import classes, sentences

import encast.compress.stages as stages
from encast.cli.main import main

FINE = "fine-tune: {epochs: 6, learning-rate: 4.0e-3, batch-size: 16}"
PRUNE = (
    "prune: {sparsity: 0.5, score: obs, schedule: one-shot, epochs: 1, evaluations: 0, distil: {teacher: fine-tune}}"
)
MORE = "distil: {teacher: fine-tune, epochs: 1, evaluations: 0}"
HARD = "distil: {name: hard, teacher: fine-tune, epochs: 1, hard: 0.5, evaluations: 0}"


@pytest.fixture
def data(write_rows: Callable[..., Path]) -> Path:
    return write_rows("data", classes(96, 1), classes(40, 2))


def run(
    tmp_path: Path, encoder: Path, data: Path, recipe: str, texts: str | None, task: str = "classify", *others: str
) -> int:
    (tmp_path / "recipe.yaml").write_text(f"stages: [{recipe}]")
    more = []
    if texts is not None:
        (tmp_path / "texts.jsonl").write_text(texts)
        more = ["--unlabelled", str(tmp_path / "texts.jsonl")]
    return main(
        [
            "compress", str(encoder), "--task", task, "--data", str(data), "--recipe", str(tmp_path / "recipe.yaml"),
            "-o", str(tmp_path / "out"), "--threads", "1", "--device", "cpu", *more, *others,
        ]
    )  # fmt: skip


def lines(rows: list[Any]) -> str:
    return "\n".join(map(json.dumps, rows))


def record(tmp_path: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "out" / stage / "compress.json").read_text())
    return found


def test_stages_that_need_no_label_train_on_them(
    tmp_path: Path, encoder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[int] = []
    cache = stages.cache_answers

    def counted(folder: Path, engine: Any, examples: list[Any], *rest: Any) -> None:
        answered.append(len(examples))
        cache(folder, engine, examples, *rest)

    monkeypatch.setattr(stages, "cache_answers", counted)
    texts = lines([{"text": text} for text in sentences(160, 5)])
    recipe = ", ".join(f"{{{stage}}}" for stage in (FINE, PRUNE, MORE, HARD))
    assert run(tmp_path, encoder, data, recipe, texts) == 0
    rows = {name: record(tmp_path, name)["rows"] for name in ("1-fine-tune", "2-prune", "3-distil", "4-hard")}
    assert rows == {"1-fine-tune": 96, "2-prune": 256, "3-distil": 256, "4-hard": 96}
    assert record(tmp_path, "2-prune")["unlabelled"]["rows"] == 160
    assert record(tmp_path, "4-hard")["unlabelled"] is None
    assert record(tmp_path, "2-prune")["steps"] == 8
    assert answered == [256, 96]  # the second stage finds the first one's answers


def test_questions_without_answers(tmp_path: Path, encoder: Path, data: Path) -> None:
    context = "the cat sat on the mat and the dog was in it"
    document = {
        "version": "1.1",
        "data": [
            {
                "title": "a",
                "paragraphs": [
                    {
                        "context": context,
                        "qas": [
                            {"id": f"q{n}", "question": "of the", "answers": [{"text": "mat", "answer_start": 19}]}
                            for n in range(8)
                        ],
                    }
                ],
            }
        ],
    }
    folder = tmp_path / "squad"
    folder.mkdir()
    for split in ("train", "dev"):
        (folder / f"{split}.json").write_text(json.dumps(document))
    recipe = "{fine-tune: {epochs: 1}}, {distil: {teacher: fine-tune, epochs: 1}}"
    texts = lines([{"question": "and it", "context": context}] * 5)
    assert run(tmp_path, encoder, folder, recipe, texts, "answer") == 0
    assert record(tmp_path, "2-distil")["rows"] == 13


@pytest.mark.parametrize(
    ("names", "more", "task"),
    [
        (("sentence",), {"label": 1}, "classify"),
        (("sentence1", "sentence2"), {"label": 1}, "classify"),
        (("anchor", "positive"), {}, "embed"),
        (("query", "positive"), {}, "embed"),
    ],
)
def test_columns_called_as_those_of_training_rows(
    tmp_path: Path, encoder: Path, write_rows: Callable[..., Path], names: tuple[str, ...], more: dict[str, Any],
    task: str,
) -> None:  # fmt: skip
    made = [{name: f"{text} {name}" for name in names} for text in sentences(12, 1)]
    rows = [{**row, **{name: value * (number % 2) for name, value in more.items()}} for number, row in enumerate(made)]
    recipe = "{fine-tune: {epochs: 0}}, {distil: {teacher: fine-tune, epochs: 1, evaluations: 0}}"
    assert run(tmp_path, encoder, write_rows("named", rows, rows), recipe, lines(made[:5]), task) == 0
    assert record(tmp_path, "2-distil")["rows"] == 17


def test_words_take_none_whatever_the_file_is(
    tmp_path: Path, encoder: Path, write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"words": ["the", "of"], "labels": ["B-X", "O"]}]
    assert run(tmp_path, encoder, write_rows("words", rows, rows), f"{{{FINE}}}", lines([{"words": ["a"]}]), "tag") == 2
    assert "labels of words are not learned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "texts", "said"),
    [
        (f"{{{FINE}}}, {{{HARD}}}", lines([{"text": "of it"}]), "no stage learns from a teacher alone"),
        (f"{{{FINE}}}, {{{MORE}}}", "", "holds no rows"),
        (f"{{{FINE}}}, {{{MORE}}}", lines([{"line": "of it"}]), "text"),
        (f"{{{FINE}}}, {{{MORE}}}", lines([{"text": "of it"}, {"text": 7}]), "row 2: 'text' is no text"),
        (f"{{{FINE}}}, {{{MORE}}}", lines([{"text": "of it"}]) + "\n{", "row 2"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, encoder: Path, data: Path, capsys: pytest.CaptureFixture[str], recipe: str, texts: str, said: str
) -> None:
    assert run(tmp_path, encoder, data, recipe, texts) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_texts_are_another_run(
    tmp_path: Path, encoder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = f"{{{FINE}}}, {{{MORE}}}"
    assert run(tmp_path, encoder, data, recipe, lines([{"text": "of it"}])) == 0
    (tmp_path / "texts.jsonl").write_text(lines([{"text": "by it"}]))
    options = ["--recipe", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "out"), "--threads", "1"]
    more = ["--device", "cpu", "--unlabelled", str(tmp_path / "texts.jsonl"), "--resume"]
    assert main(["compress", str(encoder), "--task", "classify", "--data", str(data), *options, *more]) == 2
    assert "differs in unlabelled" in capsys.readouterr().err


def test_a_dry_run_counts_them(tmp_path: Path, encoder: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for texts in (lines([{"text": text} for text in sentences(96, 3)]), None):
        assert run(tmp_path, encoder, data, f"{FINE}, {MORE}", texts, "classify", "--dry-run") == 0
        said.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("distil")])
    assert "6 steps" in said[0][0]
    assert "3 steps" in said[1][0]
