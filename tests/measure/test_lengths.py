"""Histograms of lengths, in words and in files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from encast.errors import InputError
from encast.measure.lengths import read_histogram

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
