"""``encast eval``: every kind of data set against an engine whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_engine import VOCAB, fake_engine

import encast.artifact
from encast.cli.main import main
from encast.errors import ResourceError

LABELS = ["O", "B-per", "I-per"]


def _load(artifact: Any, **options: Any) -> Any:
    name = Path(artifact).name
    rules: dict[str, Any] = {
        "embed": lambda ids: [1.0, float(ids[1]), 0.0, 0.0],
        "embed2": lambda ids: [1.0, float(ids[1]), 0.5 * float(ids[1]), 0.0],
        "classify": lambda ids: [1.0, 2.0 * float(ids[1] == VOCAB["cat"])],
        "value": lambda ids: [float(ids[1])],
        "constant": lambda ids: [0.0],
        "answer": lambda ids: np.repeat(
            (ids == VOCAB["paris"])[:, None] * 9.0 + (ids == VOCAB["[CLS]"])[:, None], 2, axis=1
        ),
        "tag": lambda ids: np.eye(3)[(ids == VOCAB["john"]) + 2 * (ids == VOCAB["smith"])],
    }
    rules["numbered"] = rules["classify"]
    rules["turned"] = lambda ids: rules["classify"](ids)[::-1]
    task = {"embed2": "embed", "tag": "tag", "answer": "answer", "embed": "embed"}.get(name, "classify")
    labels = {
        "tag": LABELS, "classify": ["negative", "positive"], "turned": ["Positive", "Negative"], "numbered": ["1", "2"],
    }.get(name)  # fmt: skip
    return fake_engine(task, rules[name], labels=labels, max_length=64)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    kept: dict[str, Any] = {"accuracy": {"older/set.tsv": {"rows": 1}}}

    def opened(path: Any) -> Any:
        return SimpleNamespace(card=kept, graph=SimpleNamespace(meta=_load(path).meta))

    monkeypatch.setattr("encast.engine.load", _load)
    monkeypatch.setattr(encast.artifact, "open", opened)
    monkeypatch.setattr(encast.artifact, "update_card", lambda path, **entries: kept.update(entries))
    return kept


def _data(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


SCORES = "sentence1\tsentence2\tscore\nthe\tmat\t1\nthe\tcat\t4\nthe\tthe\t5\n"
CLASSES = "sentence\tlabel\ncat\t1\nmat\t0\ncat\tNegative\nthe\tPOSITIVE\n"
QUESTION = {"id": "1", "question": "where", "answers": [{"text": "the Paris!"}]}
SQUAD = json.dumps({"data": [{"paragraphs": [{"context": "cat in Paris", "qas": [QUESTION]}]}]})
CONLL = "john\tB-per\nsmith\tI-per\n\njohn\tO\n\ncat\tB-per\n"


@pytest.mark.parametrize(
    ("artifact", "name", "text", "metrics"),
    [
        ("embed", "s.tsv", SCORES, {"spearman": 100.0}),
        ("value", "v.tsv", "sentence\tscore\ncat\t5\nthe\t4\nmat\t6\n", {"spearman": 50.0}),
        ("classify", "c.tsv", CLASSES, {"accuracy": 50.0, "f1": 50.0, "f1_macro": 50.0, "mcc": 0.0}),
        ("numbered", "n.tsv", "sentence\tlabel\ncat\t2\nmat\t1\n", {"accuracy": 100.0}),
        ("answer", "a.json", SQUAD, {"exact_match": 100.0, "f1": 100.0}),
        ("tag", "t.conll", CONLL, {"entity_f1": 50.0, "entity_precision": 50.0, "entity_recall": 50.0}),
    ],
)
def test_metrics_of_every_task(
    tmp_path: Path, cards: Any, capsys: pytest.CaptureFixture[str], artifact: str, name: str, text: str, metrics: Any
) -> None:
    if artifact == "value":
        metrics = {"spearman": 100.0 * (1 - 6 * _rank_distance() / 24)}
    assert main(["eval", artifact, _data(tmp_path, name, text), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for metric, value in metrics.items():
        assert found["metrics"][metric] == pytest.approx(value, abs=1e-3)
    key = f"{tmp_path.name}/{name}"
    assert set(cards["accuracy"]) == {"older/set.tsv", key}
    assert cards["accuracy"][key]["metrics"] == found["metrics"]


@pytest.mark.parametrize(
    ("artifact", "name", "text", "options", "metric", "value"),
    [
        ("embed", "s.csv", 'text,pair,score\n"the",mat,1\nthe,cat,4\nthe,the,5\n', [], "spearman", 100.0),
        (
            "embed",
            "s.csv",
            "a,b,stars,text\nthe,mat,1,x\nthe,cat,4,x\nthe,the,5,x\n",
            ["--text-column", "a", "--pair-column", "b", "--score-column", "stars"],
            "spearman",
            100.0,
        ),
        ("classify", "c.csv", CLASSES.replace("\t", ","), [], "accuracy", 50.0),
        (
            "classify",
            "c.tsv",
            "body\tcontext\tlabel\tclass\ncat\t\t7\tpositive\nmat\t\t7\tnegative\n",
            ["--text-column", "body", "--label-column", "class"],
            "accuracy",
            100.0,
        ),
        ("answer", "a.csv", 'question,context,answers\nwhere,"cat in Paris",Paris\n', [], "f1", 100.0),
        (
            "answer",
            "a.csv",
            "q,text,gold\nwhere,cat in Paris,Paris\n",
            ["--text-column", "q", "--pair-column", "text", "--label-column", "gold"],
            "exact_match",
            100.0,
        ),
        (
            "tag",
            "t.jsonl",
            '{"tokens": ["john"], "tags": ["B-per"]}\n',
            ["--text-column", "tokens", "--label-column", "tags"],
            "entity_f1",
            100.0,
        ),
    ],
)
def test_tables_with_named_columns(
    tmp_path: Path,
    cards: Any,
    capsys: pytest.CaptureFixture[str],
    artifact: str,
    name: str,
    text: str,
    options: list[str],
    metric: str,
    value: float,
) -> None:
    assert main(["eval", artifact, _data(tmp_path, name, text), *options, "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["metrics"][metric] == pytest.approx(value)


def _rank_distance() -> int:
    """Squares of the rank differences of the values, which are the words' ids, and the gold scores 5, 4, 6."""
    ids = [VOCAB["cat"], VOCAB["the"], VOCAB["mat"]]
    ranks = [sorted(ids).index(one) + 1 for one in ids]
    return sum((a - b) ** 2 for a, b in zip(ranks, [2, 1, 3], strict=True))


def test_against_another_artifact(tmp_path: Path, cards: Any, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "embed2"
    other.mkdir()
    (other / "card.json").write_text("{}")
    arguments = ["eval", "embed", _data(tmp_path, "s.tsv", SCORES), "--against", str(other)]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["against"]
    ids = [VOCAB[word] for word in ("the", "mat", "the", "cat", "the", "the")]
    cosines = [(1 + i * i) / np.sqrt((1 + i * i) * (1 + 1.25 * i * i)) for i in ids]
    assert found["agreement"]["cosine_mean"] == pytest.approx(np.mean(cosines))
    assert found["agreement"]["cosine_min"] == pytest.approx(min(cosines))
    assert main(arguments) == 0
    assert "cosine_min" in capsys.readouterr().out


def test_a_class_of_more_digits_than_python_reads(
    tmp_path: Path, cards: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "classify", _data(tmp_path, "c.tsv", f"sentence\tlabel\ncat\t{'9' * 5000}\n")]) == 2
    assert "give rows with these labels" in capsys.readouterr().err


def test_against_another_order_of_the_same_classes(
    tmp_path: Path, cards: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "turned"
    other.mkdir()
    (other / "card.json").write_text("{}")
    rows = _data(tmp_path, "c.tsv", "sentence\tlabel\ncat\tpositive\nmat\tpositive\n")  # none is negative
    assert main(["eval", "classify", rows, "--against", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["against"]["metrics"]["accuracy"] == found["metrics"]["accuracy"]
    assert found["against"]["agreement"] == {"equal_answers": 1.0, "kl_divergence": 0.0}


@pytest.mark.parametrize("kind", ["single_label", "multi_label"])
def test_against_a_model_that_is_less_sure(
    tmp_path: Path, cards: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The divergence is from the other model's answers, and tells apart what accuracy does not."""
    sure, unsure = (1 / (1 + np.exp(-logit)) for logit in (1.0, 0.25))

    def load(path: Any, **options: Any) -> Any:
        scale = 0.25 if Path(path).name == "unsure" else 1.0
        return fake_engine("classify", lambda ids: [scale, 0.0], labels=["a", "b"], problem_type=kind, max_length=64)

    monkeypatch.setattr("encast.engine.load", load)
    (tmp_path / "unsure").mkdir()
    (tmp_path / "unsure" / "card.json").write_text("{}")
    rows = _data(tmp_path, "c.tsv", "sentence\tlabel\ncat\ta\nmat\tb\n")
    assert main(["eval", "classify", rows, "--against", str(tmp_path / "unsure"), "--json"]) == 0
    agreement = json.loads(capsys.readouterr().out)["against"]["agreement"]
    p, q = np.array([unsure, 1 - unsure]), np.array([sure, 1 - sure])
    expected = {"kl_divergence": pytest.approx(np.sum(p * np.log(p / q)))} if kind == "single_label" else {}
    assert agreement == {"equal_answers": 1.0, **expected}


def test_classes_of_answers_that_overflow_are_not_scored(
    tmp_path: Path, cards: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules: Any = {"labels": ["a", "b"], "max_length": 64}
    monkeypatch.setattr(
        "encast.engine.load",
        lambda path, **options: fake_engine("classify", lambda ids: [np.nan * (ids[1] == VOCAB["cat"]), 0.0], **rules),
    )
    rows = _data(tmp_path, "c.tsv", "sentence\tlabel\ncat\ta\nmat\tb\nmat\ta\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "card.json").write_text("{}")
    assert main(["eval", "classify", rows, "--against", str(tmp_path / "other"), "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "not a finite number" in said.err


def test_against_a_checkpoint_compiles_it_exactly(
    tmp_path: Path, cards: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def compile(source: str, out: Path, **options: Any) -> Path:
        calls.append((source, options))
        return out.with_name("embed2")

    import encast.compile  # the module must be there before its function is replaced

    monkeypatch.setattr(sys_modules()["encast.compile"], "compile", compile)
    arguments = ["eval", "embed", _data(tmp_path, "s.tsv", SCORES), "--against", "some/model", "--json"]
    assert main(arguments) == 0, capsys.readouterr().err
    assert calls == [("some/model", {"dtype": "f32", "task": "embed", "exact": True})]
    assert encast.compile is not None


def sys_modules() -> dict[str, Any]:
    import sys

    return dict(sys.modules)


def test_pairs_are_measured_by_what_the_anchors_find(
    tmp_path: Path, cards: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A text's vector is (1, id of its first word), ids being the 5, cat 6, sat 7, on 8, mat 9; the nearest come first.
    pairs = [("the", "the cat"), ("cat", "mat"), ("cat", "sat on"), ("on", "cat mat"), ("the", "the cat")]
    data = _data(tmp_path, "p.csv", "anchor,positive\n" + "\n".join(map(",".join, pairs)) + "\n")
    # The cat's second positive comes after "cat mat" alone; before that of "on" come "mat" and "sat on".
    expected = {"accuracy_at_1": 100 / 3, "mrr_at_10": 100 * (1 + 1 / 2 + 1 / 3) / 3}
    for at_once, block in (1 << 24, 256), (1, 256), (11, 2):  # the blocks of scores make no difference
        monkeypatch.setattr("encast.scoring._SCORES_AT_ONCE", at_once)
        monkeypatch.setattr("encast.scoring._BLOCK", block)
        assert main(["eval", "embed", data, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["rows"], found["metrics"]) == (5, pytest.approx(expected, abs=1e-4))


def _questions(folder: Path, *answers: list[str]) -> str:
    """Where somebody is, of contexts of which the first alone names Paris."""
    rows = [
        {"question": "where", "context": "cat sat" if at else "cat in Paris", "answers": one}
        for at, one in enumerate(answers)
    ]
    return _data(folder, "q.jsonl", "\n".join(map(json.dumps, rows)))


def test_questions_without_answers_may_be_declined(
    tmp_path: Path, cards: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def metrics(data: str, *options: str) -> Any:
        assert main(["eval", "answer", data, *options, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)["metrics"]

    answered = _questions(tmp_path, ["Paris"], ["the cat"], ["sat"])
    assert metrics(answered) == {
        "exact_match": pytest.approx(200 / 3, abs=1e-4),
        "f1": pytest.approx(200 / 3, abs=1e-4),
    }
    assert metrics(answered, "--null-threshold", "100") == metrics(answered)
    some = _questions(tmp_path, ["Paris"], [], ["sat"], [])
    assert metrics(some) == {
        "exact_match": 75.0,
        "f1": 75.0,
        "no_ans_exact_match": 100.0,
        "no_ans_f1": 100.0,
        "has_ans_exact_match": 50.0,
        "has_ans_f1": 50.0,
    }
    always = metrics(some, "--null-threshold", "100")
    assert (always["has_ans_f1"], always["no_ans_f1"]) == (50.0, 0.0)
    assert metrics(some, "--null-threshold", "-100") == {
        **metrics(some),
        "exact_match": 50.0,
        "f1": 50.0,
        "has_ans_exact_match": 0.0,
        "has_ans_f1": 0.0,
    }
    assert set(metrics(_questions(tmp_path, []))) == {"exact_match", "f1", "no_ans_exact_match", "no_ans_f1"}


def test_limit_and_metric(tmp_path: Path, cards: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data = _data(tmp_path, "c.tsv", CLASSES)
    assert main(["eval", "classify", data, "--limit", "2", "--metric", "accuracy", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["metrics"]) == (2, {"accuracy": 100.0})


@pytest.mark.parametrize(
    ("artifact", "name", "text", "options", "message"),
    [
        ("embed", "c.tsv", CLASSES, [], "it takes one for 'classify'"),
        ("classify", "p.csv", "query,positive\na,b\n", [], "it takes one for 'embed'"),
        ("embed", "p.csv", "query,positive\na,b\nc,b\n", [], "a single positive"),
        ("classify", "c.tsv", CLASSES, ["--null-threshold", "0"], "holds classes; it is for questions alone"),
        ("tag", "a.json", SQUAD, [], "it takes one for 'answer'"),
        ("value", "c.tsv", CLASSES, [], "regression"),
        ("classify", "s.tsv", SCORES, [], "regression"),
        ("classify", "c.tsv", "sentence\tlabel\ncat\t7\n", [], "label '7'"),
        (
            "numbered",
            "c.tsv",
            "sentence\tlabel\ncat\t1\nmat\t0\n",
            [],
            "row 2 has the label '0'; the model's are ['1', '2']: ",
        ),
        ("embed", "v.tsv", "sentence\tscore\ncat\t5\n", [], "pairs"),
        ("constant", "s.tsv", SCORES, [], "cannot be computed"),
        ("embed", "s.tsv", SCORES, ["--limit", "1"], "at least 2"),
        ("embed", "s.tsv", SCORES, ["--metric", "accuracy"], "spearman, pearson"),
        ("embed", "s.tsv", SCORES, ["--task", "tag"], "compiled for 'embed'"),
        ("embed", "s.csv", "text,pair,label\na,b,3\n", [], "--score-column"),
        ("value", "s.csv", "text,label\na,3\n", [], "--score-column"),
        ("embed", "s.csv", "a,b\n1,2\n", [], "no 'text'; its columns are 'a', 'b'"),
        ("embed", "s.csv", "a,b\n1,2\n", ["--text-column", "c"], "no 'c'; its columns are 'a', 'b'"),
        ("tag", "t.csv", "words,labels\na b,O O\n", [], "give .conll, JSONL or Parquet"),
        ("tag", "t.csv", "words,labels\na,O\n", ["--pair-column", "x"], "rows for 'tag' have words, labels"),
        (
            "tag",
            "t.conll",
            "john\tB-per\n\ncat\tO\nsat\tVERB\n",
            [],
            "the word 'sat' of sentence 2 has the label 'VERB'",
        ),
        ("tag", "t.conll", "john\tS-per\n", [], "write those of BIOES and BILOU so"),
        ("answer", "a.csv", "q\n", ["--score-column", "x"], "rows for 'answer' have question, context, answers"),
        ("answer", "a.json", SQUAD, ["--text-column", "x"], ".json has no columns to name"),
        ("embed", "s.tsv", SCORES, ["--text-column", "x", "--pair-column", "x"], "two of the columns are 'x'"),
        ("embed", "s.tsv", SCORES, ["--label-column", "x", "--score-column", "y"], "are both given"),
    ],
)
def test_what_does_not_go_together_is_said(
    tmp_path: Path,
    cards: Any,
    capsys: pytest.CaptureFixture[str],
    artifact: str,
    name: str,
    text: str,
    options: list[str],
    message: str,
) -> None:
    assert main(["eval", artifact, _data(tmp_path, name, text), *options]) == 2
    assert message in capsys.readouterr().err
    assert set(cards["accuracy"]) == {"older/set.tsv"}


def test_a_card_that_cannot_be_written_comes_after_the_result(
    tmp_path: Path, cards: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, **entries: Any) -> None:
        raise ResourceError("card.json cannot be updated")

    monkeypatch.setattr(encast.artifact, "update_card", refuse)
    assert main(["eval", "embed", _data(tmp_path, "s.tsv", SCORES)]) == 2
    captured = capsys.readouterr()
    assert "spearman" in captured.out
    assert "cannot be updated" in captured.err
