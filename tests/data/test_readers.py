"""Rows in: every format, whole and broken."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encast.data import BadRow, BadRows, Row, open_rows, readers
from encast.data import source as sources
from encast.data.csv_records import parse_records
from encast.data.source import Line, Source
from encast.errors import InputError


def _read(path: Path, columns: list[str], format: str = "auto") -> list[Any]:
    with open_rows(path, columns, format) as reader:
        return [
            (row.number, *(row.values[c] for c in columns)) if isinstance(row, Row) else (row.number, row.reason)
            for row in reader
        ]


def _file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_text_is_a_row_a_line(tmp_path: Path, end: bytes, last: bool) -> None:
    data = b"\xef\xbb\xbf" + end.join([b"one", b"", "dr\u00e9i\u2028 x".encode()]) + (end if last else b"")
    assert _read(_file(tmp_path, "a.txt", data), ["text"]) == [(1, "one"), (2, ""), (3, "dr\u00e9i\u2028 x")]


def test_text_has_one_column(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="question, context"):
        _read(_file(tmp_path, "a.txt", b"x\n"), ["question", "context"])


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    assert _read(_file(tmp_path, name, b""), ["text"]) == []
    assert _read(_file(tmp_path, name + ".gz", gzip.compress(b"")), ["text"]) == []


def test_gzip_is_told_by_its_bytes(tmp_path: Path) -> None:
    assert _read(_file(tmp_path, "a.jsonl", gzip.compress(b'{"text": "x"}\n')), ["text"]) == [(1, "x")]
    assert _read(_file(tmp_path, "b.jsonl.gz", gzip.compress(b'{"text": "x"}\n')), ["text"]) == [(1, "x")]


def test_damaged_gzip_is_an_error_with_its_line(tmp_path: Path) -> None:
    data = gzip.compress(b"".join(b"%d\n" % (i * i * 7919) for i in range(20_000)))
    for broken in (data[: len(data) // 2], data[:-4] + b"\0\0\0\0", data[:500] + b"\xff\xff\xff\xff" + data[504:]):
        with pytest.raises(InputError, match="damaged gzip data after line"):
            _read(_file(tmp_path, "a.txt.gz", broken), ["text"])


def test_bad_bytes_spoil_their_row_only(tmp_path: Path) -> None:
    rows = _read(_file(tmp_path, "a.txt", b"ok\na\xffb\nok\n"), ["text"])
    assert rows == [(1, "ok"), (2, "byte 0xff at 1 is not UTF-8"), (3, "ok")]


def test_a_huge_line_spoils_its_row_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(Source.lines, "__defaults__", (100,))
    for size, whole in ((99, True), (100, True), (103, False), (5_000_000, False)):
        rows = _read(_file(tmp_path, "a.txt", b"ok\n" + b"x" * size + b"\nok\n"), ["text"])
        assert rows[0] == (1, "ok")
        assert rows[2] == (3, "ok")
        assert rows[1] == ((2, "x" * size) if whole else (2, rows[1][1]))
        assert whole or "longer than 100 bytes" in rows[1][1]
    assert sources.MAX_ROW_BYTES >= 4 * 100_000  # a text of 100,000 characters always fits


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "malformed JSON"),
        (b"{} {}", "malformed JSON"),
        (b'{"text": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "malformed JSON"),
        (b'{"text": ' + b"9" * 10_000 + b"}", "malformed JSON"),
        (b"[1]", "array stands here"),
        (b'"x"', "string stands here"),
        (b"null", "null stands here"),
        (b"7", "number stands here"),
        (b'{"other": "x"}', "no field 'text'"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_bad_json_spoils_its_row_only(tmp_path: Path, line: bytes, reason: str) -> None:
    rows = _read(_file(tmp_path, "a.jsonl", b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}'), ["text"])
    assert rows[0] == (1, "a")
    assert rows[1][0] == 3
    assert reason in rows[1][1]
    assert rows[2] == (4, "b")


def test_csv_of_rfc_4180(tmp_path: Path) -> None:
    data = (
        b'\xef\xbb\xbfid,text\r\n1,"a, ""quoted"" word"\r\n2,"two\r\nlines\n\nand more"\r\n\r\n'
        b'3,5" pipe\r\n4,""\r\n"5",\xc3\xa9'
    )
    assert _read(_file(tmp_path, "a.csv", data), ["text", "id"]) == [
        (2, 'a, "quoted" word', "1"),
        (3, "two\r\nlines\n\nand more", "2"),
        (8, '5" pipe', "3"),
        (9, "", "4"),
        (10, "\u00e9", "5"),
    ]


def test_bad_csv_spoils_its_row_only(tmp_path: Path) -> None:
    data = b'text,id\na,1\nb\nc,1,2\n"d"x,1\ne\xff,1\nf,1\n"never closed,1\ng,1\n"h\ni",1\n'
    rows = _read(_file(tmp_path, "a.csv", data), ["text"])
    assert rows[0] == (2, "a")
    assert [row[0] for row in rows] == list(range(2, 11))
    assert ["fields" in rows[at][1] for at in (1, 2)] == [True, True]
    assert "closing quote" in rows[3][1]
    assert "not UTF-8" in rows[4][1]
    assert rows[5] == (7, "f")
    assert "closing quote" in rows[6][1]
    assert rows[7:] == [(9, "g"), (10, "h\ni")]


def test_a_quote_that_never_closes_swallows_nothing(tmp_path: Path) -> None:
    rows = _read(_file(tmp_path, "a.csv", b'text\na\n"b\nc\nd\n'), ["text"])
    assert rows == [(2, "a"), (3, "a quoted field is never closed"), (4, "c"), (5, "d")]


def test_csv_records_are_bounded() -> None:
    lines = [Line(1, b'"' + b"x" * 50, True), *(Line(i, b"y" * 50, True) for i in range(2, 9)), Line(9, b'z"', True)]
    records = list(parse_records(lines, 200))
    assert [record.number for record in records] == list(range(1, 10))
    assert records[0].reason
    assert not any(record.reason for record in records[1:])
    cut = list(parse_records([Line(1, b"x" * 10, False), Line(2, b"ok", True)], 200))
    assert [bool(record.reason) for record in cut] == [True, False]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"id,other\n1,2\n", "no column 'text'; the columns are 'id', 'other'"),
        (b"text,text\n1,2\n", "twice"),
        (b'"text\n', "header"),
        (b'id,text\r1,"a\rb"\r2,c\r', "the header line holds CR, .* convert the file"),
    ],
)
def test_a_csv_header_that_does_not_fit_ends_it(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _read(_file(tmp_path, "a.csv", data), ["text"])


_CELL = st.text(st.sampled_from('ab",\r\n \u00e9\u2028'), max_size=8)


@settings(max_examples=200)
@given(st.lists(st.tuples(_CELL, _CELL), max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_csv_reads_what_a_csv_writer_wrote(rows: list[tuple[str, str]], end: str) -> None:
    text = io.StringIO(newline="")
    # A writer with "\n" leaves "\r" at the end of a record unquoted, unless told to quote all.
    csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL if end == "\n" else csv.QUOTE_MINIMAL).writerows(rows)
    lines = []
    for number, data in enumerate(text.getvalue().encode().split(b"\n"), 1):
        body, ending = (data[:-1], b"\r\n") if data.endswith(b"\r") else (data, b"\n")
        lines.append(Line(number, body, True, ending))
    found = [tuple(field.decode() for field in record.fields) for record in parse_records(lines, 1 << 20)]
    assert found == rows


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"\n", b'"')), max_size=8))
def test_csv_survives_anything(data: list[bytes]) -> None:
    lines = [Line(i, line, True) for i, line in enumerate(data, 1)]
    numbers = [record.number for record in parse_records(lines, 64)]
    assert numbers == sorted(set(numbers))


def test_parquet(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pa.array(["a", None, "c" * 100_000]).cast(pa.string())
    broken = pa.Array.from_buffers(pa.string(), 3, pa.array([b"x", b"\xff", b"z"], pa.binary()).buffers())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts, "broken": broken, "n": pa.array([1, 2, 3])}), path)
    assert _read(path, ["text", "n"]) == [(1, "a", 1), (2, None, 2), (3, "c" * 100_000, 3)]
    assert _read(path, ["broken"]) == [(1, "x"), (2, "a string that is not UTF-8"), (3, "z")]
    with pytest.raises(InputError, match="no column 'nope'"):
        _read(path, ["nope"])
    with pytest.raises(InputError, match="standard input"):
        open_rows("-", ["text"], "parquet")
    data = path.read_bytes()
    for cut in (data[:40], data[:-1], b"", b"PAR1" * 3):
        with pytest.raises(InputError, match="Parquet"):
            _read(_file(tmp_path, "b.parquet", cut), ["text"])


def test_parquet_values_that_python_has_not_spoil_their_row_only(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    broken = pa.Array.from_buffers(pa.string(), 3, pa.array([b"x", b"\xff", b"z"], pa.binary()).buffers())
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), broken)
    times = pa.array([0, 1, 2**62], pa.timestamp("us"))
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": ["a", "b", "c"], "lists": lists, "times": times, "bytes": [b"0", b"1", b"2"]}), path
    )
    assert _read(path, ["text", "lists"]) == [(1, "a", ["x"]), (2, "a string that is not UTF-8"), (3, "c", ["z"])]
    *_, last = _read(path, ["text", "times"])
    assert last == (3, "a value that cannot be read (date value out of range)")
    assert _read(path, ["bytes"]) == [(1, b"0"), (2, b"1"), (3, b"2")]


def _claims(path: Path, rows: int, claimed: int) -> None:
    """Has the index of a Parquet file say that it has other rows, in Thrift's numbers: zigzag, 7 bits a byte."""

    def number(value: int) -> bytes:
        value, found = 2 * value, b""
        while value > 127:
            value, found = value >> 7, found + bytes([value & 127 | 128])
        return found + bytes([value])

    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    index = data[-8 - size : -8]
    assert index.count(number(rows)) >= 3  # of the file, of its group, of its column
    index = index.replace(number(rows), number(claimed))
    path.write_bytes(data[: -8 - size] + index + len(index).to_bytes(4, "little") + b"PAR1")


def test_a_parquet_index_that_lies_is_found_before_its_rows_are_listed(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["same"] * 12345}), path)
    with open_rows(path, ["text"]) as reader:  # fewer bytes than rows, and it is whole
        assert [span.rows for span in reader.spans(10_000)] == [10_000, 2345]
    _claims(path, 12345, 2**52)
    with (
        open_rows(path, ["text"]) as reader,
        pytest.raises(InputError, match=r"damaged after row 12345 \(its index names more rows\)"),
    ):
        next(reader.spans(4096))
    with pytest.raises(InputError, match="damaged after row 12345"):
        _read(path, ["text"])


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.txt", tmp_path):
        with pytest.raises(InputError, match=str(path)):
            _read(path, ["text"])
    with pytest.raises(InputError, match="text, jsonl, csv, parquet"):
        open_rows(_file(tmp_path, "a", b""), ["text"], "xml")


def test_fraction_grows_to_one(tmp_path: Path) -> None:
    with open_rows(_file(tmp_path, "a.txt", b"line\n" * 200_000), ["text"]) as reader:
        seen = [reader.fraction() for at, _ in enumerate(reader) if at % 50_000 == 0]
        assert seen == sorted(seen)  # type: ignore[type-var]
        assert reader.fraction() == 1.0


def test_bad_rows_are_kept_as_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "errors.jsonl"
    path.write_text("of an earlier run\n")
    bad_rows = BadRows(path)
    assert not path.exists()
    bad_rows.add(BadRow(3, "why", "caf\u00e9 \ud83d"))
    bad_rows.add(BadRow(9, "long", "x" * 100_000))
    bad_rows.close()
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert first == {"row": 3, "reason": "why", "raw": "caf\u00e9 \ud83d"}
    assert (len(second["raw"]), second["cut"]) == (65_536, True)
    assert bad_rows.count == 2


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz", "rows.json", "rows.npy"])
def test_a_table_of_another_kind_is_not_taken_for_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"a\tb\n")
    with pytest.raises(InputError, match=r"is no format that rows are read from.*--input-format text"):
        open_rows(path, ["text"])


def test_any_file_can_be_read_as_text_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"a\tb\n")
    with open_rows(path, ["text"], "text") as reader:
        assert [row.values["text"] for row in reader if isinstance(row, Row)] == ["a\tb"]
