"""Spans: a file read in pieces gives the rows that it gives as a whole, whatever stands in it."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encast.data import BadRow, Row, open_rows
from encast.data.rows import Span

JSONL = st.sampled_from(
    [
        b'{"text": "cat"}',
        b'{"text": "\xc3\xa4\\n"}',
        b"{",
        b"",
        b"  ",
        b"\t\r",
        b"\xff",
        b"[1]",
        "\u2003".encode(),
        b"x",
    ]
)
CSV = st.sampled_from([b"cat,1", b'"two\r\nlines",1', b'"never closed,1', b'"a"b,1', b"", b"one", b"\xff,1", b'"",""'])
TEXT = st.sampled_from([b"cat", b"", b"\xff\xfe", b"\r", "ä".encode()])
ENDS = st.sampled_from([b"\n", b"\r\n"])


def rows_of(path: Path, columns: list[str], format: str, span: Any = None) -> list[Row | BadRow]:
    with open_rows(path, columns, format) as reader:
        return list(reader.at(span) if span else reader)


def check(path: Path, columns: list[str], format: str) -> None:
    whole = rows_of(path, columns, format)
    for size in (1, 2, 3, 1000):
        with open_rows(path, columns, format) as reader:
            spans = list(reader.spans(size))
        assert [span.rows for span in spans[:-1]] == [size] * (len(spans) - 1)
        assert [row for span in spans for row in rows_of(path, columns, format, span)] == whole
        # One reader reads them in any order.
        for order in (spans, spans[::2], spans[::-1]):
            with open_rows(path, columns, format) as reader:
                found = {span: list(reader.at(span)) for span in order}
            for span, rows in found.items():
                begin = spans.index(span) * size
                assert rows == whole[begin : begin + size], span


@pytest.mark.parametrize(
    ("format", "lines", "head"), [("jsonl", JSONL, b""), ("csv", CSV, b"text,n\n"), ("text", TEXT, b"")]
)
@pytest.mark.parametrize("packed", [False, True])
def test_lines(tmp_path_factory: pytest.TempPathFactory, format: str, lines: Any, head: bytes, packed: bool) -> None:
    folder = tmp_path_factory.mktemp("spans")

    @given(st.lists(st.tuples(lines, ENDS), max_size=9), st.booleans(), st.booleans())
    def run(content: list[tuple[bytes, bytes]], bom: bool, last_end: bool) -> None:
        data = (b"\xef\xbb\xbf" if bom else b"") + head + b"".join(line + end for line, end in content)
        data = data if last_end else data.rstrip(b"\r\n")
        path = folder / "rows"
        path.write_bytes(gzip.compress(data) if packed else data)
        check(path, ["text"], format)

    run()


def test_lines_beyond_the_limit_count_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.data.source.Source.lines.__defaults__", (64,))
    path = tmp_path / "long.txt"
    path.write_bytes(b"a\n" + b"x" * 5_000_000 + b"\nb\n" + b"y" * 70 + b"\n\nc")
    assert [row.number for row in rows_of(path, ["text"], "text") if isinstance(row, BadRow)] == [2, 4]
    check(path, ["text"], "text")


def test_parquet_across_row_groups(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(3000)]}), path, row_group_size=700)
    whole = rows_of(path, ["text"], "parquet")
    for size in (1, 699, 700, 701, 1024, 2999, 5000):
        with open_rows(path, ["text"], "parquet") as reader:
            spans = list(reader.spans(size))
        for span in spans if size > 1 else spans[695:705]:
            assert rows_of(path, ["text"], "parquet", span) == whole[span.offset : span.offset + span.rows], span
        assert sum(span.rows for span in spans) == 3000
        generator = random.Random(size)
        with open_rows(path, ["text"], "parquet") as reader:
            for span in generator.choices(spans, k=20):
                assert list(reader.at(span)) == whole[span.offset : span.offset + span.rows], span


def test_a_group_of_rows_that_spans_share_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(9000)]}), path, row_group_size=3000)
    fetched: list[int] = []
    plain = pq.ParquetFile.iter_batches

    def note(self: Any, *, row_groups: list[int], **more: Any) -> Any:
        fetched.extend(row_groups)
        return plain(self, row_groups=row_groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", note)
    with open_rows(path, ["text"], "parquet") as reader:
        for begin in range(0, 9000, 400):  # every other span: neighbours of the same file go on
            list(reader.at(Span(begin, begin + 1, 200)))
    assert fetched == [0, 1, 2]
