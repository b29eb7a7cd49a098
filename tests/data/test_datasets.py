"""Evaluation sets: their forms, their errors, and the real ones where they are there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from encast.data.datasets import Labelled, Question, Sentence, open_dataset
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


def test_a_folder_stands_for_its_dev_set(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"without dev\.tsv"):
        open_dataset(tmp_path)
    _file(tmp_path, "dev.tsv.gz", "sentence\tlabel\na\t1\n")
    assert len(open_dataset(tmp_path).rows) == 1


@pytest.mark.parametrize("name", ["STS-B", "dev.tsv", "dev.jsonl", "dev.parquet", "dev.conll"])
def test_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"{name}: no such file or folder; .*\.csv.*\.parquet.*SQuAD"):
        open_dataset(tmp_path / name)


def test_squad(tmp_path: Path) -> None:
    data = {
        "data": [{"paragraphs": [{"context": "c", "qas": [{"id": 1, "question": "q", "answers": [{"text": "c"}]}]}]}]
    }
    assert open_dataset(_file(tmp_path, "s.json", json.dumps(data))).rows == [Question("1", "q", "c", ("c",))]


def test_conll(tmp_path: Path) -> None:
    text = "-DOCSTART- O\n\nJohn\tB-per\n lives\tO\n\n\n\nParis NNP B-loc\n"
    assert open_dataset(_file(tmp_path, "s.conll", text)).rows == [
        Sentence(("John", "lives"), ("B-per", "O")),
        Sentence(("Paris",), ("B-loc",)),
    ]


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
            {"id": "x", "question": "q", "context": "c", "answers": {"text": ["c", "d"], "answer_start": [0, 1]}},
            "answers",
            Question("x", "q", "c", ("c", "d")),
        ),
        ({"words": ["a"], "labels": ["O"]}, "entities", Sentence(("a",), ("O",))),
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


def test_only_the_named_columns_count(tmp_path: Path) -> None:
    path = _file(tmp_path, "s.csv", "sentence1,sentence2,context,label,gold,body\nx,y,z,0,1,b\n")
    assert open_dataset(path, {"text": "body", "label": "gold"}).rows == [Labelled("b", "1")]
    assert open_dataset(path, {"score": "gold"}).rows == [Labelled(("x", "y"), 1.0)]


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
        ("s.parquet", "PAR1", "not a Parquet file"),
        ("s.jsonl", '{"text": "a", "label": 1.5}\n{"text": "b", "label": "x"}\n', "one is 'x'"),
        ("s.jsonl", '{"text": "a", "label": null}\n', "null"),
        ("s.jsonl", '{"id": 1, "question": "q", "context": "c", "answers": ["c"]}\n' * 2, "line 2 has the id '1'"),
        ("s.tsv", "sentence\tlabel\n", "no rows"),
        ("s.tsv", "sentence\tlabel\na\n", "line 2 has 1 fields"),
        ("s.tsv", "sentence\tscore\na\tx\n", "line 2 .*the score is 'x'; a number"),
        ("s.json", "{", "SQuAD"),
        ("s.json", "[]", "SQuAD"),
        (
            "s.json",
            '{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": 1, "question": "q", "answers": []}]}]}]}',
            "no answer",
        ),
        (
            "s.json",
            '{"data": [{"paragraphs": [{"context": "c", "qas": '
            '[{"id": 1, "question": "q", "answers": [{"text": 5}]}]}]}]}',
            "5 is no text",
        ),
        ("s.jsonl", '{"question": "q", "context": "c", "answers": [{"text": 5}]}\n', "5 is no text"),
        ("s.conll", "word\n", "line 1"),
        ("s.conll", "a\tO\nb\t\n", "line 2"),
        ("s.jsonl", '{"text": "a", "label": 1}\n{"text": 2, "label": 1}\n', "line 2"),
        ("s.jsonl", '{"text": "a"}\n', "line 1"),
        ("s.jsonl", "[]\n", "line 1"),
        ("s.jsonl", '{"words": ["a"], "labels": []}\n', "line 1"),
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
        ("glue/MRPC/train.tsv.gz", "classes", 3668),
        ("glue/STS-B", "scores", 1500),
        ("glue/STS-B/train.tsv.gz", "scores", 5749),
        ("squad-v1.1/dev-v1.1.rebuilt.json.gz", "answers", 10570),
        ("wnut17/emerging.dev.conll", "entities", 1009),
        ("wnut17/wnut17train.conll.gz", "entities", 3394),
    ],
)
def test_real_sets_have_the_rows_that_they_should(name: str, kind: str, rows: int) -> None:
    data = open_dataset(DATA / name)
    assert (data.kind, len(data.rows)) == (kind, rows)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")
def test_the_real_conll_set_has_its_words_and_entities() -> None:
    from encast.metrics import entity_spans

    data = open_dataset(DATA / "wnut17/emerging.dev.conll")
    assert sum(len(row.words) for row in data.rows) == 15_733
    assert sum(len(entity_spans(row.labels)) for row in data.rows) == 836
