"""Grids, histograms, texts and data sets as batches; what is wrong with a file, and where."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from input_specs import inputs
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from encast.batch import Batch
from encast.errors import InputError
from encast.measure.batches import pick
from encast.measure.input_spec import InputSpec
from encast.measure.texts import read_texts
from encast.measure.workloads import (
    Drawn,
    Several,
    Workload,
    describe,
    make_workload,
    padding,
    random_ids,
)
from encast.tasks.tokenize import Tokenizer

WORDS = ("[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d")


def with_tokenizer(max_length: int = 12) -> InputSpec:
    """[CLS] one token a word [SEP], and [SEP] again after a second text."""
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    return InputSpec(len(WORDS), 16, 2, lambda: Tokenizer(backend.to_str(), max_length=max_length))


def lengths_of(batches: Sequence[Batch]) -> list[list[int]]:
    return [np.diff(batch.cu_seqlens).tolist() for batch in batches]


def sequences(batch: Batch) -> list[tuple[int, ...]]:
    parts = np.split(batch.token_ids, batch.cu_seqlens[1:-1])
    return [tuple(part.tolist()) for part in parts]


def test_a_shape_has_sets_of_different_ids() -> None:
    workload = make_workload({"kind": "grid", "batch": 3, "length": 8}, inputs())
    assert workload.label == {"batch": 3, "length": 8}
    sets = workload.draw()
    assert lengths_of(sets) == [[8, 8, 8]] * 4
    assert len({batch.token_ids.tobytes() for batch in sets}) == 4
    again = workload.draw()
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(sets, again, strict=True))
    assert (workload.draw(seed=1)[0].token_ids != sets[0].token_ids).any()
    assert lengths_of(workload.draw(1, batch=2, length=5)) == [[5, 5]]


def test_the_grid_of_the_article() -> None:
    batch, length = [1, 4, 8, 16, 32, 64, 128, 300], [8, 16, 32, 64, 80, 128, 256, 384, 512]
    workload = make_workload({"name": "article", "kind": "grid", "batch": batch, "length": length}, inputs())
    assert isinstance(workload, Several)
    assert [(part.label["batch"], part.label["length"]) for part in workload.parts()] == [
        (b, n) for b in batch for n in length
    ]
    (largest,) = workload.parts()[-1].draw(1)
    assert (largest.seqs, largest.tokens) == (300, 300 * 512)
    with pytest.raises(InputError, match=r"72 shapes.*workload\.batch=N"):
        workload.draw()


def test_unequal_lengths_in_a_grid() -> None:
    workload = make_workload({"kind": "grid", "batch": 16, "length": 32, "shortest": 0.25}, inputs())
    (lengths,) = {tuple(one) for one in lengths_of(workload.draw())}
    assert list(lengths) == sorted(lengths)
    assert 8 <= lengths[0] < lengths[-1] == 32
    assert 0 < padding(workload.draw()) < 0.75
    assert padding(make_workload({"kind": "grid"}, inputs()).draw()) == 0
    arrivals = lengths_of(workload.arrivals(20))
    assert len(arrivals) == 20
    assert arrivals != sorted(arrivals), "requests do not come by length"


@given(st.integers(3, 300_000))
def test_ordinary_ids(vocab: int) -> None:
    ids = random_ids(np.random.default_rng(0), 100, vocab)
    assert ids.dtype == np.int32
    assert min(1000, vocab // 2) <= ids.min() <= ids.max() < max(vocab - 1, 2)


def drawn(batch: int = 2, **more: Any) -> Drawn:
    config = {"kind": "histogram", "file": "4:5,9:3,30:2", "batch": batch, **more}
    workload = make_workload(config, inputs())
    assert isinstance(workload, Drawn)
    return workload


def test_a_histogram_is_replayed_whole_and_sorted_within_batches() -> None:
    workload = drawn(batch=4)
    batches = workload.replay()
    assert Counter(length for lengths in lengths_of(batches) for length in lengths) == {4: 5, 9: 3, 30: 2}
    assert sorted(lengths_of(batches)) == [[4, 4, 4, 4], [4, 9, 9, 9], [30, 30]]
    assert padding(batches) < 0.1
    assert describe("h", batches) == {"name": "h", "sequences": 10, "tokens": 107, "lengths": [4, 6.5, 30]}


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 200))
def test_batches_by_tokens_stay_within_them_when_padded(lengths: list[int], tokens: int) -> None:
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    pool = Batch(np.arange(cu_seqlens[-1], dtype=np.int32), cu_seqlens)
    batches = Drawn("pool", inputs(), 1, pool).replay(tokens=tokens)
    assert sorted(len(ids) for batch in batches for ids in sequences(batch)) == sorted(lengths)
    assert sorted(row for batch in batches for row in sequences(batch)) == sorted(sequences(pool))
    for one in lengths_of(batches):
        assert len(one) == 1 or len(one) * max(one) <= tokens


def test_a_draw_stands_for_the_distribution() -> None:
    (half,) = {tuple(lengths) for lengths in lengths_of(drawn().draw(batch=10))}
    assert half == (4,) * 5 + (9,) * 3 + (30,) * 2
    assert lengths_of(drawn().draw(1, batch=1)) == [[9]], "the median's place"
    assert lengths_of(drawn().draw(1, batch=3, length=7)) == [[7, 7, 7]]
    assert lengths_of(drawn().draw(1, batch=20)) == [[4] * 10 + [9] * 6 + [30] * 4], "more than there are"


def test_sets_of_texts_have_the_same_tokens_in_another_order() -> None:
    first, second = drawn().draw(2, batch=3)
    for one, other in zip(sequences(first), sequences(second), strict=True):
        assert sorted(one) == sorted(other)
        assert (one[0], one[-1]) == (other[0], other[-1])
    assert first.token_ids.tolist() != second.token_ids.tolist()


def test_arrivals_come_in_the_order_of_the_file() -> None:
    workload = drawn()
    singles = [sequences(batch)[0] for batch in workload.arrivals(13)]
    assert singles[:10] == sequences(workload.pool)
    assert singles[10:] == singles[:3]


def test_picked_sequences_keep_their_token_types() -> None:
    batch = Batch.of([[1, 2], [3], [4, 5]], [[0, 1], [0], [1, 1]])
    picked = pick(batch, [2, 0])
    assert sequences(picked) == [(4, 5), (1, 2)]
    assert picked.token_type_ids is not None
    assert picked.token_type_ids.tolist() == [1, 1, 0, 1]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def texts(path: str, **more: Any) -> Workload:
    return make_workload({"kind": "texts", "file": path, **more}, with_tokenizer())


def test_texts_go_through_the_tokenizer(tmp_path: Path) -> None:
    workload = texts(write(tmp_path / "t.txt", "a b\nc\n" + "a " * 40 + "\n"))
    assert [sequences(batch)[0] for batch in workload.arrivals(2)] == [(1, 3, 4, 2), (1, 5, 2)]
    (long,) = workload.arrivals(3)[2:]
    assert long.tokens == 12, "cut at the tokenizer's longest"
    assert workload.label == {"batch": 1, "lengths": "t.txt"}
    assert long.token_type_ids is None


def test_pairs_have_token_types(tmp_path: Path) -> None:
    rows = "\n".join(json.dumps({"q": "a b", "p": word}) for word in "cd")
    path = write(tmp_path / "pairs.jsonl", rows)
    first, _ = texts(path, column="q", pair_column="p").arrivals(2)
    assert first.token_ids.tolist() == [1, 3, 4, 2, 5, 2]
    assert first.token_type_ids is not None
    assert first.token_type_ids.tolist() == [0, 0, 0, 0, 1, 1]


def test_a_sample_of_texts_is_the_same_every_time(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", "\n".join("a " * count for count in range(1, 10)))
    some = texts(path, sequences=4)
    assert lengths_of(some.arrivals(4)) == lengths_of(texts(path, sequences=4).arrivals(4))
    assert len({length for (length,) in lengths_of(some.arrivals(4))}) == 4
    assert lengths_of(texts(path, sequences=4, seed=1).arrivals(4)) != lengths_of(some.arrivals(4))


@pytest.mark.parametrize(
    ("name", "text", "line", "reason"),
    [
        ("t.jsonl", '{"text": "a"}\n{"text": \n{"text": "b"}\n', 2, "malformed JSON"),
        ("t.jsonl", '{"text": "a"}\n\n["b"]\n', 3, "array"),
        ("t.jsonl", '{"text": 7}\n', 1, "is of type int"),
        ("t.jsonl", '{"txt": "a"}\n', 1, "no field 'text'"),
        ("t.jsonl", '{"text": "\\ud800"}\n', 1, "surrogate"),
        ("t.csv", 'text,n\na,1\n"b\nb",2\nc\n', 5, "1 fields"),
    ],
)
def test_broken_rows_name_file_and_line(tmp_path: Path, name: str, text: str, line: int, reason: str) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(InputError, match=f"{name}:{line}: .*{reason}"):
        texts(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"a\nb\n\xff\n")
    with pytest.raises(InputError, match=r"t\.txt:3: byte 0xff"):
        texts(str(path))


@pytest.mark.parametrize(("text", "place"), [("16,3\n\nx,2\n", ":3: 'x:2'"), ("[[4, 2], [5]]", ", entry 2: '5'")])
def test_a_broken_histogram_names_its_line(tmp_path: Path, text: str, place: str) -> None:
    path = write(tmp_path / "h.csv", text)
    with pytest.raises(InputError, match=f"h.csv{place} is no pair"):
        make_workload({"kind": "histogram", "file": path}, inputs())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"kind": "gird"}, "'gird'; grid, histogram, texts, dataset are known"),
        ({"kind": "grid", "lenght": 3}, r"workload\.lenght is no field .*'length'"),
        ({"kind": "grid", "length": 513}, "513 tokens; this model takes 1 to 512"),
        ({"kind": "grid", "length": 0}, "give a whole number above 0"),
        ({"kind": "grid", "batch": [1, "x"]}, "give a whole number above 0"),
        ({"kind": "grid", "batch": True}, "give a whole number above 0"),
        ({"kind": "grid", "shortest": 1.5}, "up to 1"),
        ({"kind": "grid", "seed": -1}, "a seed is"),
        ({"kind": "histogram", "file": None}, r"needs LENGTH:COUNT.*workload\.file="),
        ({"kind": "histogram", "file": "600:1"}, "600 tokens; this model takes"),
        ({"kind": "histogram", "file": "6:1", "sequences": 0}, "give a whole number above 0"),
        ({"kind": "texts"}, r"workload=texts needs a file"),
        ({"kind": "dataset", "set": "squad", "data": "."}, "squad-questions, .* are known"),
        ({"kind": "dataset", "set": "nq-queries", "data": None}, r"workload\.data="),
        ({"kind": "dataset", "set": "nq-queries", "data": "/nowhere"}, r"/nowhere/queries/.*no such file"),
    ],
)
def test_what_is_no_workload(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        make_workload(config, inputs())


def test_an_empty_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.measure.workloads.real_texts", lambda which, data: [])
    with pytest.raises(InputError, match=f"{tmp_path}: nq-queries: holds no text"):
        make_workload({"kind": "dataset", "set": "nq-queries", "data": str(tmp_path)}, inputs())


def test_empty_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{tmp_path}/t.txt: holds no text"):
        texts(write(tmp_path / "t.txt", ""))
    assert read_texts(write(tmp_path / "t.jsonl", "\n\n"), ["text"]) == []


def test_a_batch_too_large_to_hold() -> None:
    workload = make_workload({"kind": "grid", "batch": 1 << 20, "length": 512}, inputs())
    with pytest.raises(InputError, match="give less"):
        workload.draw()


def test_public_sets_by_their_folder(tmp_path: Path) -> None:
    """In the layout of the originals: SQuAD's JSON and NQ-open's lines, gzipped; GLUE's table."""
    squad = {
        "data": [
            {
                "title": "t",
                "paragraphs": [
                    {
                        "context": "a b c",
                        "qas": [
                            {"id": "1", "question": "a", "answers": [{"text": "b", "answer_start": 2}]},
                            {"id": "2", "question": "b", "answers": [{"text": "b", "answer_start": 2}]},
                        ],
                    }
                ],
            }
        ]
    }
    for folder in ("squad-v1.1", "queries", "glue/MRPC"):
        (tmp_path / folder).mkdir(parents=True)
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    rows = '1\t1\t2\t"a b\tb\n0\t3\t4\ta\t" a b c\n'
    (tmp_path / "glue" / "MRPC" / "dev.tsv").write_text(header + rows)
    (tmp_path / "squad-v1.1" / "dev-v1.1.json.gz").write_bytes(gzip.compress(json.dumps(squad).encode()))
    (tmp_path / "queries" / "NQ-open.dev.jsonl.gz").write_bytes(gzip.compress(b'{"question": "a b", "answer": []}\n'))

    def of(which: str, count: int) -> list[list[int]]:
        config = {"kind": "dataset", "set": which, "data": str(tmp_path)}
        return lengths_of(make_workload(config, with_tokenizer()).arrivals(count))

    assert of("squad-questions", 3) == [[3], [3], [3]]
    assert of("squad-paragraphs", 2) == [[5], [5]], "one paragraph, however many questions"
    assert of("squad-pairs", 2) == [[7], [7]]
    assert of("nq-queries", 1) == [[4]]
    assert sorted(of("mrpc-pairs", 2)) == [[7], [8]]
