"""Histograms, random ids, padding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from encast.batch import Batch
from encast.errors import InputError
from encast.profile.workload import of_batches, of_lengths, padded, read_histogram

META = {"max_len": 64, "vocab": 30}
COUNTS = {16: 3, 32: 2}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h.json", '{"16": 3, "32": 2}'),
        ("h.json", "[[16, 3], [32, 2]]"),
        ("h.csv", "length,count\n16,3\n\n32,2\n"),
        ("h.csv", "16,3\n32,2"),
        ("h.tsv", "tokens\ttexts\n16\t3\n32\t2\n"),
    ],
)
def test_files(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert Counter(read_histogram(str(path))) == COUNTS


def test_words() -> None:
    lengths = read_histogram("16:3,32:2")
    assert Counter(lengths) == COUNTS
    assert lengths == read_histogram("16:3, 32:2,")
    assert len(read_histogram(",".join(f"{length}:1" for length in range(1, 513)))) == 512, "longer than a file's name"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("16:0", "holds no sequence"),
        (",", "cannot be read"),
        ("16:x", "'16:x' is no pair"),
        ("16:3:4", "'16:3:4' is no pair"),
        ("-1:3", "no pair"),
        ("16:99999999", "more than"),
        ("nowhere.csv", "cannot be read as a histogram"),
        ("a\0b", "cannot be read as a histogram"),
    ],
)
def test_bad_words(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read_histogram(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "holds no sequence"),
        (b"length,count\n", "holds no sequence"),
        (b"{nope", "malformed JSON"),
        (b"[" * 100_000, "malformed JSON"),
        (b"[16, 3]", "no pair"),
        (b'{"16": true}', "no pair"),
        (b'{"16": 1.5}', "no pair"),
        (b"16,3\nx,2\n", "'x:2' is no pair"),
        (b"16\n", "'16' is no pair"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_files(tmp_path: Path, text: bytes, reason: str) -> None:
    path = tmp_path / "h"
    path.write_bytes(text)
    with pytest.raises(InputError, match=reason):
        read_histogram(str(path))


def test_random_ids() -> None:
    workload = of_lengths("w", [10, 20, 30, 40], META, 50, seed=1)
    assert [batch.cu_seqlens.tolist() for batch in workload.batches] == [[0, 10, 30], [0, 30], [0, 40]]
    assert (workload.tokens, workload.seqs) == (100, 4)
    ids = np.concatenate([batch.token_ids for batch in workload.batches])
    assert ids.min() >= 0
    assert ids.max() < 30
    again = of_lengths("w", [10, 20, 30, 40], META, 50, seed=1)
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(workload.batches, again.batches, strict=True))
    assert workload.selects()[0].tolist() == [0, 10]


@pytest.mark.parametrize(("lengths", "reason"), [([], "no sequence"), ([65], "65 tokens"), ([3, 0], "0 tokens")])
def test_lengths_the_model_does_not_take(lengths: list[int], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        of_lengths("w", lengths, META, 50, seed=1)


def test_no_text() -> None:
    with pytest.raises(InputError, match=r"texts\.txt holds no text"):
        of_batches("texts.txt", [])


def test_padding() -> None:
    batch = Batch.of([[1, 2, 3], [4]], [[0, 1, 1], [1]])
    (longer,) = padded(of_batches("w", [batch])).batches
    assert longer.token_ids.tolist() == [1, 2, 3, 4, 0, 0]
    assert longer.token_type_ids is not None
    assert longer.token_type_ids.tolist() == [0, 1, 1, 1, 0, 0]
    assert longer.cu_seqlens.tolist() == [0, 3, 6]
