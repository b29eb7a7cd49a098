"""Labelled data sets: their forms, their errors, and the real ones where they are there."""

from __future__ import annotations

import contextlib
import gzip
import json
from decimal import Decimal
from pathlib import Path

import pytest

from encast.data.datasets import Labelled, Pair, Question, Sentence, file_of, open_dataset
from encast.data.source import Source
from encast.data.texts import read_texts
from encast.errors import InputError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz"])
def test_glue_tables(tmp_path: Path, suffix: str) -> None:
    sst = open_dataset(_file(tmp_path, "sst" + suffix, 'sentence\tlabel\na "quoted word \t1\nb\t0\n'))
    assert (sst.kind, sst.rows) == ("classes", [Labelled('a "quoted word ', "1"), Labelled("b", "0")])
    mrpc = open_dataset(
        _file(tmp_path, "m" + suffix, "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\ta\tb\r\n")
    )
    assert (mrpc.kind, mrpc.rows) == ("classes", [Labelled(("a", "b"), "1")])
    stsb = open_dataset(_file(tmp_path, "s" + suffix, "index\tsentence1\tsentence2\tscore\n0\ta\tb\t2.50\n"))
    assert (stsb.kind, stsb.rows) == ("scores", [Labelled(("a", "b"), 2.5)])


_PARSE = "( ( The cat ) sat )\t( It sat )\t(ROOT (S (NP (DT The))))\t(ROOT (S (NP (PRP It))))"


@pytest.mark.parametrize(
    ("header", "lines", "rows"),
    [
        (  # CoLA; its test set has a header, and no labels
            "",
            ['gj04\t1\t\tThe "cat sat.', "gj04\t0\t*\tThe sat cat."],
            [Labelled('The "cat sat.', "1"), Labelled("The sat cat.", "0")],
        ),
        (
            "index\tquestion\tsentence\tlabel",
            ["0\tWho sat?\tThe cat.\tentailment", '1\tWho "ran?\tThe cat.\tnot_entailment'],
            [Labelled(("Who sat?", "The cat."), "entailment"), Labelled(('Who "ran?', "The cat."), "not_entailment")],
        ),
        (  # RTE; WNLI's labels are numbers
            "index\tsentence1\tsentence2\tlabel",
            ["0\tA cat sat.\tIt sat.\tnot_entailment", "1\ta\tb\tentailment"],
            [Labelled(("A cat sat.", "It sat."), "not_entailment"), Labelled(("a", "b"), "entailment")],
        ),
        ("index\tsentence1\tsentence2\tlabel", ["0\ta\tb\t1"], [Labelled(("a", "b"), "1")]),
        (
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
            ['133273\t213221\t213222\tHow "is a?\tWhat is b?\t1'],
            [Labelled(('How "is a?', "What is b?"), "1")],
        ),
        (  # MNLI's train set
            "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
            "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
            [f"0\t31193\t31193n\tgovernment\t{_PARSE}\tThe cat sat\tIt sat\tentailment\tneutral"],
            [Labelled(("The cat sat", "It sat"), "neutral")],
        ),
        (  # and its dev sets
            "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
            "sentence2_parse\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
            [f"0\t1\t1c\tslate\t{_PARSE}\tThe cat sat\tIt sat" + "\tneutral" * 5 + "\tcontradiction"],
            [Labelled(("The cat sat", "It sat"), "contradiction")],
        ),
    ],
)
def test_the_layouts_of_glue(tmp_path: Path, header: str, lines: list[str], rows: list[Labelled]) -> None:
    _file(tmp_path, "dev.tsv", "\n".join([*([header] if header else []), *lines, ""]))
    data = open_dataset(tmp_path)
    assert (data.kind, data.rows) == ("classes", rows)


def test_broken_lines_of_qqp_are_passed_over_and_told(tmp_path: Path) -> None:
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    path = _file(tmp_path, "train.tsv", f"{header}\n1\t2\t3\ta\tb\t0\n4\t5\t6\tc\nd\te\t1\n7\t8\t9\tf\tg\t1\n")
    with pytest.warns(UserWarning, match=r"train\.tsv: passed over 2 lines with fewer fields than the header: 3, 4"):
        data = open_dataset(path)
    assert data.rows == [Labelled(("a", "b"), "0"), Labelled(("f", "g"), "1")]
    with pytest.raises(InputError, match="line 2 has 7 fields, the first line has 6"):
        open_dataset(_file(tmp_path, "more.tsv", f"{header}\n1\t2\t3\ta\tb\t0\tx\n"))


def test_a_table_of_four_columns_keeps_its_header(tmp_path: Path) -> None:
    path = _file(tmp_path, "s.tsv", "id\tlabel\tx\ttext\n1\t0\t\ta\n")
    assert open_dataset(path).rows == [Labelled("a", "0")]
    with pytest.raises(InputError, match="line 2 has 3 fields"):
        open_dataset(_file(tmp_path, "cola.tsv", "gj04\t1\t\ta\ngj04\t1\tb\n"))


@pytest.mark.parametrize(
    ("files", "train", "dev"),
    [
        ("train.tsv.gz dev.tsv test.tsv dev_ids.tsv msr_train.txt", "train.tsv.gz", "dev.tsv"),
        ("train-v1.1.json dev-v1.1.json.gz dev-predictions.bert.json.gz", "train-v1.1.json", "dev-v1.1.json.gz"),
        ("train.tsv dev_matched.tsv dev_mismatched.tsv", "train.tsv", "dev_matched.tsv"),
        ("wnut17train.conll.gz emerging.dev.conll", "wnut17train.conll.gz", "emerging.dev.conll"),
        (
            "train-00000-of-00001.parquet validation-00000-of-00001.parquet trainer.json constrain.csv devices.csv",
            "train-00000-of-00001.parquet",
            "validation-00000-of-00001.parquet",
        ),
        ("Train.jsonl validation.csv development.csv", "Train.jsonl", "validation.csv"),
    ],
)
def test_the_file_of_a_split(tmp_path: Path, files: str, train: str, dev: str) -> None:
    for name in files.split():
        (tmp_path / name).touch()
    assert file_of(tmp_path, "train") == tmp_path / train
    assert file_of(tmp_path, "dev") == tmp_path / dev


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("", r"no file of the split 'dev', .* dev or validation .* in this folder: none; name the file: .*SQuAD"),
        ("train.tsv notes.txt test.jsonl", r"in this folder: test\.jsonl, train\.tsv; name the file"),
        ("dev.tsv dev.jsonl", r"'dev' may be dev\.jsonl or dev\.tsv; name the file"),
        ("dev-v1.1.json dev-v2.0.json", r"may be dev-v1\.1\.json or dev-v2\.0\.json"),
    ],
)
def test_a_folder_whose_split_no_single_file_has(tmp_path: Path, files: str, message: str) -> None:
    for name in files.split():
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=message):
        open_dataset(tmp_path)


def test_a_folder_stands_for_its_split(tmp_path: Path) -> None:
    _file(tmp_path, "dev.tsv.gz", "sentence\tlabel\na\t1\n")
    _file(tmp_path, "train.tsv", "sentence\tlabel\na\t1\nb\t0\n")
    assert len(open_dataset(tmp_path).rows) == 1
    assert len(open_dataset(tmp_path, split="train").rows) == 2
    with pytest.raises(InputError, match="split is 'test'; 'train' and 'dev' are known"):
        open_dataset(tmp_path, split="test")


@pytest.mark.parametrize("name", ["STS-B", "dev.tsv", "dev.jsonl", "dev.parquet", "dev.conll"])
def test_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"{name}: no such file or folder; .*\.csv.*\.parquet.*SQuAD"):
        open_dataset(tmp_path / name)


def _squad(context: str, *answers: dict[str, object], **more: object) -> str:
    asked = {"id": 1, "question": "q", "answers": answers, **more}
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [asked]}]}]})


def test_squad(tmp_path: Path) -> None:
    path = _file(tmp_path, "s.json", _squad("c", {"text": "c"}))
    assert open_dataset(path).rows == [Question("1", "q", "c", ("c",))]
    path = _file(
        tmp_path,
        "s.json.gz",
        _squad("\U0001f431 é Paris, Paris", {"text": "Paris", "answer_start": 11}, {"text": "é", "answer_start": 2}),
    )
    assert open_dataset(path).rows == [Question("1", "q", "\U0001f431 é Paris, Paris", ("Paris", "é"), (11, 2))]


def test_squad_2_has_questions_without_answers(tmp_path: Path) -> None:
    plausible = [{"text": "c", "answer_start": 0}]
    path = _file(tmp_path, "s.json", _squad("c", is_impossible=True, plausible_answers=plausible))
    assert open_dataset(path).rows == [Question("1", "q", "c", ())]
    path = _file(tmp_path, "t.json", _squad("c", {"text": "c", "answer_start": 0}, is_impossible=False))
    assert open_dataset(path).rows == [Question("1", "q", "c", ("c",), (0,))]


def test_conll(tmp_path: Path) -> None:
    text = "-DOCSTART- O\n\nJohn\tB-per\n lives\tO\n\n\n\nParis NNP B-loc\n"
    assert open_dataset(_file(tmp_path, "s.conll", text)).rows == [
        Sentence(("John", "lives"), ("B-per", "O")),
        Sentence(("Paris",), ("B-loc",)),
    ]


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n", "\r\r\n"])
def test_line_ends_of_any_machine(tmp_path: Path, end: str) -> None:
    words = end.join(["foo\tB-X", "a O", "", "bar\tO", ""])
    assert open_dataset(_file(tmp_path, "s.conll", words)).rows == [
        Sentence(("foo", "a"), ("B-X", "O")),
        Sentence(("bar",), ("O",)),
    ]
    table = end.join(["sentence\tlabel", "a\tx", "b\ty", ""])
    assert open_dataset(_file(tmp_path, "s.tsv", table)).rows == [Labelled("a", "x"), Labelled("b", "y")]


def test_many_carriage_returns_take_no_hours(tmp_path: Path) -> None:
    text = "foo\tB-X\n" + "\r" * 400_000 + "bar\tO\n"
    assert len(open_dataset(_file(tmp_path, "s.conll", text)).rows) == 2


def test_a_carriage_return_in_a_cell_ends_no_line_where_others_do(tmp_path: Path) -> None:
    data = open_dataset(_file(tmp_path, "s.tsv", "sentence\tlabel\na\rb\tx\n"))
    assert data.rows == [Labelled("a\rb", "x")]


@pytest.mark.parametrize("text", ["text,label\na,x\n", "text,label\na\n"])
def test_files_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    closed: list[bool] = []
    close = Source.close
    monkeypatch.setattr(Source, "close", lambda source: (closed.append(True), close(source))[1])
    with contextlib.suppress(InputError):
        open_dataset(_file(tmp_path, "s.csv", text))
    assert closed


@pytest.mark.parametrize(
    ("line", "kind", "row"),
    [
        ({"text": "a", "label": 1}, "classes", Labelled("a", "1")),
        ({"text": "a", "pair": "b", "label": "yes"}, "classes", Labelled(("a", "b"), "yes")),
        ({"sentence1": "a", "sentence2": "b", "score": 2}, "scores", Labelled(("a", "b"), 2.0)),
        ({"text": "a", "label": 2.5}, "scores", Labelled("a", 2.5)),
        ({"question": "q", "context": "c", "answers": ["c"]}, "answers", Question("0", "q", "c", ("c",))),
        (
            {"id": "x", "question": "q", "context": "c", "answers": [{"text": "c"}]},
            "answers",
            Question("x", "q", "c", ("c",)),
        ),
        ({"id": "x", "question": "q", "context": "c", "answers": "c"}, "answers", Question("x", "q", "c", ("c",))),
        (
            {"id": "x", "question": "q", "context": "cd", "answers": {"text": ["c", "d"], "answer_start": [0, 1]}},
            "answers",
            Question("x", "q", "cd", ("c", "d"), (0, 1)),
        ),
        (
            {"id": "x", "question": "q", "context": "dc", "answers": {"text": ["c", "d"], "answer_start": None}},
            "answers",
            Question("x", "q", "dc", ("c", "d")),
        ),
        (
            {"id": "x", "question": "q", "context": "dc", "answers": [{"text": "c", "answer_start": 1}]},
            "answers",
            Question("x", "q", "dc", ("c",), (1,)),
        ),
        (
            {"id": "x", "question": "q", "context": "c", "answers": {"text": [], "answer_start": []}},
            "answers",
            Question("x", "q", "c", ()),
        ),
        (
            {"question": "q", "context": "c", "answers": [], "is_impossible": True},
            "answers",
            Question("0", "q", "c", ()),
        ),
        ({"question": "q", "context": "c", "answers": ""}, "answers", Question("0", "q", "c", ())),
        ({"question": "q", "context": "c", "answers": [""]}, "answers", Question("0", "q", "c", ())),
        (
            {"question": "q", "context": "dc", "answers": {"text": ["", "c"], "answer_start": [-1, 1]}},
            "answers",
            Question("0", "q", "dc", ("c",), (1,)),
        ),
        (
            {"question": "q", "context": "c", "answers": [{"text": "", "answer_start": 0}], "is_impossible": True},
            "answers",
            Question("0", "q", "c", ()),
        ),
        ({"words": ["a"], "labels": ["O"]}, "entities", Sentence(("a",), ("O",))),
        ({"anchor": "a", "positive": "b", "negative": "c"}, "pairs", Pair("a", "b")),
        ({"query": "a", "positive": "b"}, "pairs", Pair("a", "b")),
        ({"text": "a", "positive": True, "label": 1}, "classes", Labelled("a", "1")),
        ({"premise": "a", "hypothesis": "b", "label": 2}, "classes", Labelled(("a", "b"), "2")),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson.gz", ".parquet"])
def test_rows_of_jsonl_and_parquet(
    tmp_path: Path, suffix: str, line: dict[str, object], kind: str, row: object
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / "s.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([line]), path)
    else:
        path = _file(tmp_path, "s" + suffix, json.dumps(line) + "\n")
    data = open_dataset(path)
    assert (data.kind, data.rows) == (kind, [row])


def test_both_halves_of_a_character_are_one(tmp_path: Path) -> None:
    data = open_dataset(_file(tmp_path, "s.jsonl", '{"text": "\\ud83d\\udc31", "label": 1}\n'))
    assert data.rows == [Labelled("\U0001f431", "1")]


def test_texts_without_labels_hold_no_lone_surrogate(tmp_path: Path) -> None:
    path = _file(tmp_path, "s.jsonl", '{"text": "a"}\n{"text": "\\ud800"}\n')
    with pytest.raises(InputError, match=r"s\.jsonl: row 2: 'text': .* lone surrogate .* at character 0"):
        list(read_texts(path, ["text"]))


def test_csv(tmp_path: Path) -> None:
    data = open_dataset(_file(tmp_path, "s.csv.gz", 'text,label\n"a, ""b""",1\nc,0\n'))
    assert (data.kind, data.rows) == ("classes", [Labelled('a, "b"', "1"), Labelled("c", "0")])


def test_number_labels_are_scores_when_one_has_a_fraction(tmp_path: Path) -> None:
    lines = ['{"text": "a", "label": 5.0}', '{"text": "b", "label": 3}']
    whole = open_dataset(_file(tmp_path, "w.jsonl", "\n".join(lines)))
    assert (whole.kind, [row.gold for row in whole.rows]) == ("classes", ["5", "3"])
    lines.append('{"text": "c", "label": 3.8}')
    scores = open_dataset(_file(tmp_path, "s.jsonl", "\n".join(lines)))
    assert (scores.kind, [row.gold for row in scores.rows]) == ("scores", [5.0, 3.0, 3.8])


@pytest.mark.parametrize(("suffix", "mark"), [("csv", ","), ("tsv", "\t")])
def test_number_labels_in_cells_are_told_by_how_they_are_written(tmp_path: Path, suffix: str, mark: str) -> None:
    def read(*labels: str) -> tuple[str, list[str | float]]:
        lines = [f"text{mark}label", *(f"a{mark}{label}" for label in labels)]
        data = open_dataset(_file(tmp_path, f"s.{suffix}", "\n".join(lines)))
        return data.kind, [row.gold for row in data.rows]

    assert read("1.5", "2", "-3e-1") == ("scores", [1.5, 2.0, -0.3])
    assert read("5.0", "3") == ("classes", ["5.0", "3"])
    # What Python takes for a number, and nobody writes as one.
    assert read("nan", "inf", "1_0", "1e999") == ("classes", ["nan", "inf", "1_0", "1e999"])


@pytest.mark.parametrize(("suffix", "mark"), [("csv", ","), ("tsv", "\t")])
def test_white_space_around_labels_in_cells_does_not_count(tmp_path: Path, suffix: str, mark: str) -> None:
    lines = [f"text{mark}label", f"a{mark} pos", f"b{mark}pos", f" c {mark}pos  "]
    data = open_dataset(_file(tmp_path, f"s.{suffix}", "\n".join(lines)))
    assert data.rows == [Labelled("a", "pos"), Labelled("b", "pos"), Labelled(" c ", "pos")]


def test_labels_of_parquet_are_texts_and_numbers(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    def read(*labels: object, name: str = "label", type: object = None) -> tuple[str, list[str | float]]:
        table = {"text": ["a"] * len(labels), name: arrow.array(labels, type)}
        pyarrow.parquet.write_table(arrow.table(table), tmp_path / "s.parquet")
        data = open_dataset(tmp_path / "s.parquet")
        return data.kind, [row.gold for row in data.rows]

    assert read(Decimal("1.5"), Decimal("2.0")) == ("scores", [1.5, 2.0])
    assert read(Decimal("1.0"), Decimal(10**30)) == ("classes", ["1", str(10**30)])
    assert read(Decimal("1.5"), name="score") == ("scores", [1.5])
    assert read("x", "y", type=arrow.dictionary(arrow.int8(), arrow.string())) == ("classes", ["x", "y"])
    assert read(True, False) == ("classes", ["True", "False"])
    for label in (["x"], b"x", {"x": 1}):
        with pytest.raises(InputError, match=r"row 1 does not fit \(the label is .*x.*; a text or a finite number"):
            read(label)


def test_texts_as_labels_are_classes_whatever_they_say(tmp_path: Path) -> None:
    data = open_dataset(_file(tmp_path, "s.jsonl", '{"text": "a", "label": "1.5"}\n{"text": "b", "label": "2.x"}\n'))
    assert (data.kind, [row.gold for row in data.rows]) == ("classes", ["1.5", "2.x"])


def test_of_a_label_and_a_score_the_named_one_counts(tmp_path: Path) -> None:
    path = _file(tmp_path, "s.csv", "text,label,score\na,good,0.9\n")
    assert open_dataset(path, {"label": "label"}).rows == [Labelled("a", "good")]
    assert open_dataset(path, {"score": "score"}).rows == [Labelled("a", 0.9)]
    with pytest.raises(InputError, match="'label' and 'score', of which one counts"):
        open_dataset(path, {"text": "text"})


def test_only_the_named_columns_count(tmp_path: Path) -> None:
    path = _file(tmp_path, "s.csv", "sentence1,sentence2,context,label,gold,body\nx,y,z,0,1,b\n")
    assert open_dataset(path, {"text": "body", "label": "gold"}).rows == [Labelled("b", "1")]
    assert open_dataset(path, {"score": "gold"}).rows == [Labelled(("x", "y"), 1.0)]
    assert open_dataset(path, {"anchor": "body", "positive": "sentence1"}).rows == [Pair("b", "x")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.xml", "", r"\.tsv"),
        ("s.tsv", "", "no rows"),
        ("s.tsv", "a\tb\n1\t2\n", "no 'text'; its columns are 'a', 'b'"),
        ("s.tsv", "text\ttext\n1\t2\n", "occur twice"),
        ("s.tsv", "text\tb\n1\t2\n", "no 'label or score'; its columns are 'text', 'b'"),
        ("s.csv", "text,label\na,1,2\n", "line 2: 3 fields; the header has 2"),
        ("s.csv", "text,score\na,high\n", "line 2 .*'high'; a number"),
        ("s.csv", "text,score\na,1\nb,nan\n", "line 3 .*the score is 'nan'; a number is needed, and a finite one"),
        ("s.tsv", "sentence\tscore\na\t-inf\n", "line 2 .*the score is '-inf'; a number"),
        ("s.jsonl", '{"text": "a", "score": 1}\n{"text": "a", "score": 1e999}\n', "line 2 .*the score is inf"),
        ("s.jsonl", '{"text": "a", "score": "nan"}\n', "line 1 .*the score is 'nan'; a number"),
        (
            "s.jsonl",
            '{"text": "a", "label": 1}\n{"text": "b\\ud83d", "label": 1}\n',
            "line 2 .*lone surrogate .* at character 1",
        ),
        ("s.jsonl", '{"text": "a", "label": "\\ud800"}\n', "line 1 .*lone surrogate .* at character 0"),
        ("s.jsonl", '{"words": ["a", "\\udc00"], "labels": ["O", "O"]}\n', "line 1 .*lone surrogate"),
        ("s.json", _squad("c \ud800", {"text": "c"}), "lone surrogate .* at character 2"),
        ("s.jsonl", '{"text": "a", "score": true}\n', "line 1 .*the score is True; a number"),
        ("s.jsonl", '{"text": "a", "score": "1_000"}\n', "line 1 .*the score is '1_000'; a number"),
        (
            "s.jsonl",
            '{"text": "a", "label": 1}\n{"text": "b", "label": ["x", "y"]}\n',
            "line 2 .*the label is .'x', 'y'.; a",
        ),
        ("s.jsonl", '{"text": "a", "label": {"x": 1}}\n', "line 1 .*the label is {'x': 1}; a text or a finite number"),
        ("s.jsonl", f'{{"text": "a", "score": 1{"0" * 400}}}\n', "line 1 .*a number is needed, and a finite one"),
        ("s.parquet", "PAR1", "not a Parquet file"),
        ("s.jsonl", '{"text": "a", "label": 1.5}\n{"text": "b", "label": "x"}\n', "one is 'x'"),
        ("s.csv", "text,label\na,1.5\nb,good\n", r"fractions \(1\.5\), one is 'good'; .* as texts in JSONL"),
        ("s.jsonl", '{"text": "a", "label": null}\n', r"line 1 .*the label is missing \(null\)"),
        ("s.csv", "text,label\na,good\nb,\n", r"line 3 .*the label is missing \(empty\)"),
        ("s.tsv", "sentence\tlabel\na\t \n", r"line 2 .*the label is missing \(empty\)"),
        ("s.jsonl", '{"text": "a", "label": ""}\n', r"line 1 .*the label is missing \(empty\)"),
        ("s.jsonl", '{"text": "a", "label": -1e999}\n', "line 1 .*the label is -inf; a text or a finite number"),
        ("s.jsonl", f'{{"text": "a", "label": 1{"0" * 400}}}\n', "line 1 .*a text or a finite number"),
        ("s.csv", "text,label,score\na,good,0.9\n", "line 2 .*'label' and 'score'.* --label-column label or --score"),
        ("s.jsonl", '{"text": "a", "gold_label": "x", "score": 1}\n', "line 1 .*--label-column gold_label or --score"),
        ("s.jsonl", '{"id": 1, "question": "q", "context": "c", "answers": ["c"]}\n' * 2, "line 2 has the id '1'"),
        ("s.tsv", "sentence\tlabel\n", "no rows"),
        ("s.tsv", "sentence\tlabel\na\n", "line 2 has 1 fields"),
        ("s.tsv", "sentence\tscore\na\tx\n", "line 2 .*the score is 'x'; a number"),
        ("s.json", "{", "SQuAD"),
        ("s.json", "[]", "SQuAD"),
        ("s.json", _squad("c", {"text": "c"}, is_impossible=True), "question '1' has is_impossible and the answers"),
        (
            "s.json",
            '{"data": [{"paragraphs": [{"context": "c", "qas": '
            '[{"id": 1, "question": "q", "answers": [{"text": 5}]}]}]}]}',
            "5 is no text",
        ),
        ("s.jsonl", '{"question": "q", "context": "c", "answers": [{"text": 5}]}\n', "5 is no text"),
        (
            "s.json",
            _squad("in Paris", {"text": "Paris", "answer_start": 2}),
            "question '1' has the answer 'Paris' at answer_start 2, where its context has ' Pari'",
        ),
        ("s.json", _squad("in Paris", {"text": "Pa", "answer_start": -5}), "answer_start -5, .* has ''"),
        ("s.json", _squad("c", {"text": "c", "answer_start": 0}, {"text": "c"}), "2 answers and 1 answer_start"),
        ("s.json", _squad("c", {"text": "c", "answer_start": "0"}), "answer_start is '0'; a whole number"),
        (
            "s.jsonl",
            '{"question": "q", "context": "cd", "answers": {"text": ["d"], "answer_start": [0]}}\n',
            "line 1: question '0' has the answer 'd' at answer_start 0, where its context has 'c'",
        ),
        ("s.conll", "word\n", "line 1"),
        ("s.conll", "a\tO\nb\t\n", "line 2"),
        ("s.conll", "a\tO\n\tO\n", "line 2 .* a word, a tab and its label are needed"),
        ("s.conll", "a\tO\n\u00a0\tB-X\n", "line 2 .* a word, a tab and its label are needed"),
        ("s.jsonl", '{"text": "a", "label": 1}\n{"text": 2, "label": 1}\n', "line 2"),
        ("s.jsonl", '{"text": "a"}\n', "line 1"),
        ("s.jsonl", "[]\n", "line 1"),
        ("s.jsonl", '{"words": ["a"], "labels": []}\n', "line 1"),
        ("s.jsonl", '{"anchor": "a", "positive": ["b"]}\n', r"line 1 does not fit \(\['b'\] is no text"),
        ("s.jsonl", '{"anchor": "a", "positive": "b"}\n{"text": "a", "label": 1}\n', "holds labels, the .* pairs"),
        (
            "s.jsonl",
            '{"text": "a", "pair": "b", "label": "x"}\n{"text": "a", "label": "y"}\n',
            "line 2 holds a single text, the lines before pairs; keep one form a file",
        ),
        ("s.jsonl", '{"text": "a", "score": 1}\n{"text": "a", "pair": "b", "score": 2}\n', "line 2 holds a pair, the"),
        ("s.jsonl", '{"text": "a", "label": 1}\n{"words": ["a"], "labels": ["O"]}\n', "one kind"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_dataset(_file(tmp_path, name, text))


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "s.tsv"
    path.write_bytes(b"sentence\tlabel\n\xff\t1\n")
    with pytest.raises(InputError, match="byte 15 is not UTF-8"):
        open_dataset(path)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")
@pytest.mark.parametrize(
    ("name", "kind", "rows"),
    [
        ("glue/SST-2", "classes", 872),
        ("glue/MRPC", "classes", 408),
        ("glue/STS-B", "scores", 1500),
        ("squad-v1.1/dev-v1.1.rebuilt.json.gz", "answers", 10570),
        ("wnut17/emerging.dev.conll", "entities", 1009),
    ],
)
def test_real_sets_have_the_rows_that_they_should(name: str, kind: str, rows: int) -> None:
    data = open_dataset(DATA / name)
    assert (data.kind, len(data.rows)) == (kind, rows)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")
@pytest.mark.parametrize(
    ("name", "train", "dev"),
    [
        ("glue/SST-2", 67_349, 872),
        ("glue/MRPC", 3_668, 408),
        ("glue/STS-B", 5_749, 1_500),
        ("squad-v1.1", 87_599, 10_570),
        ("wnut17", 3_394, 1_009),
    ],
)
def test_the_splits_of_real_sets(name: str, train: int, dev: int) -> None:
    assert len(open_dataset(DATA / name, split="dev").rows) == dev
    data = open_dataset(DATA / name, split="train")
    assert len(data.rows) == train
    if data.kind == "answers":
        assert all(len(row.starts) == len(row.answers) == 1 for row in data.rows)


def test_two_questions_of_one_id(tmp_path: Path) -> None:
    asked = [{"id": "1", "question": "q", "answers": [{"text": "a"}]}] * 2
    document = {"data": [{"paragraphs": [{"context": "a b", "qas": asked}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="2 questions have the id '1'"):
        open_dataset(tmp_path / "dev.json")


def test_columns_of_no_form(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a", "label": "b"}\n')
    with pytest.raises(InputError, match="'foo'"):
        open_dataset(tmp_path / "x.jsonl", {"foo": "x"})


@pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")
def test_the_real_conll_set_has_its_words_and_entities() -> None:
    from encast.metrics import entity_spans

    data = open_dataset(DATA / "wnut17/emerging.dev.conll")
    assert sum(len(row.words) for row in data.rows) == 15_733
    assert sum(len(entity_spans(row.labels)) for row in data.rows) == 836
