"""Rows are whole or absent, whatever the disk does."""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from full_disk import files_of_at_most

from encast.bench.rows import BusyError, Row, RowFile, flatten, read_rows
from encast.errors import InputError, ResourceError


def row(key: str, **more: Any) -> Row:
    return {"schema": 1, "key": key, "status": "ok", "metrics": {"p50": 1.5, "list": [1, 2]}, "cost": None, **more}


def keys(file: RowFile) -> list[str]:
    return [row["key"] for row in file.rows]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_come_back(tmp_path: Path) -> None:
    with RowFile(tmp_path / "new" / "folder") as file:
        file.append([row("a"), row("b")])
        file.append([row("c")])
        assert keys(file) == ["a", "b", "c"]
    assert [one["key"] for one in read_rows(tmp_path / "new" / "folder")] == ["a", "b", "c"]
    lines = table(tmp_path / "new" / "folder")
    assert [line["key"] for line in lines] == ["a", "b", "c"]
    assert lines[0]["metrics.p50"] == "1.5"
    assert json.loads(lines[0]["metrics.list"]) == [1, 2]


def test_new_columns_are_added_to_all_lines(tmp_path: Path) -> None:
    with RowFile(tmp_path) as file:
        file.append([row("a")])
        file.append([row("b", point={"rate": 3})])
        file.append([row("c")])
    assert [line["point.rate"] for line in table(tmp_path)] == ["", "3", ""]
    with RowFile(tmp_path) as file:
        file.append([row("d", point={"cores": 2})])
    assert [line["point.cores"] for line in table(tmp_path)] == ["", "", "", "2"]


def test_a_later_row_takes_the_place_of_one_before(tmp_path: Path) -> None:
    with RowFile(tmp_path) as file:
        file.append([row("a", status="unavailable"), row("b")])
        file.append([row("a")])
        assert [(one["key"], one["status"]) for one in file.rows] == [("a", "ok"), ("b", "ok")]
    assert [(line["key"], line["status"]) for line in table(tmp_path)] == [("a", "ok"), ("b", "ok")]
    with RowFile(tmp_path) as file:
        assert keys(file) == ["a", "b"]
        file.append([row("c")])
    assert [line["key"] for line in table(tmp_path)] == ["a", "b", "c"]
    assert len(read_rows(tmp_path)) == 4, "nothing is taken from the truth"


def test_one_command_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    with RowFile(tmp_path) as file:
        file.append([row("a")])
        torn = (tmp_path / "rows.jsonl").read_bytes() + b'{"half'
        (tmp_path / "rows.jsonl").write_bytes(torn)
        with pytest.raises(BusyError) as caught:
            RowFile(tmp_path)
        assert str(caught.value) == (
            f"another `encast bench` writes to {tmp_path}; wait for its end or choose another experiment=NAME"
        )
        assert (tmp_path / "rows.jsonl").read_bytes() == torn, "the other may be about to write the rest"
    with RowFile(tmp_path) as file:
        assert keys(file) == ["a"]


def test_a_folder_that_is_refused_is_let_go(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="no row"):
        RowFile(tmp_path)
    (tmp_path / "rows.jsonl").write_text("")
    RowFile(tmp_path).close()


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RowFile(tmp_path) as file:
        file.append([row("a")])
    assert len(read_rows(tmp_path)) == 1


def test_a_full_disk_loses_no_finished_row(tmp_path: Path) -> None:
    with RowFile(tmp_path) as file:
        file.append([row("a")])
        size = (tmp_path / "rows.jsonl").stat().st_size
        with files_of_at_most(size + 60), pytest.raises(ResourceError) as caught:
            file.append([row("b"), row("c")])
        assert str(caught.value) == (
            f"{tmp_path / 'rows.jsonl'}: cannot be written (File too large); make room, or name another folder with "
            "out=FOLDER; the 1 finished rows are kept"
        )
        assert [one["key"] for one in read_rows(tmp_path)] == ["a"]
        assert keys(file) == ["a"]
        file.append([row("b")])  # there is room again
    assert [one["key"] for one in read_rows(tmp_path)] == ["a", "b"]
    assert [line["key"] for line in table(tmp_path)] == ["a", "b"]


def test_a_disk_that_has_no_room_for_the_table_keeps_the_rows(tmp_path: Path) -> None:
    with RowFile(tmp_path) as file:
        wide = {f"column{number}": number for number in range(100)}
        file.append([row("a")])
        (tmp_path / "rows.csv").unlink()
        (tmp_path / "rows.csv").mkdir()
        with pytest.raises(ResourceError, match=r"rows.csv: cannot be written .*all 2 finished rows are in rows.jsonl"):
            file.append([row("b", **wide)])
        (tmp_path / "rows.csv").rmdir()
        file.append([row("c")])
    assert [line["key"] for line in table(tmp_path)] == ["a", "b", "c"]


def test_a_line_that_a_crash_cut_off_is_removed(tmp_path: Path) -> None:
    with RowFile(tmp_path) as file:
        file.append([row("a"), row("b")])
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    with RowFile(tmp_path) as file:
        assert keys(file) == ["a"]
        file.append([row("c")])
    assert [one["key"] for one in read_rows(path)] == ["a", "c"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}\n", "line 1: no row of `encast bench`"),
        (json.dumps(row("a")) + "\n{nonsense\n", "line 2: no JSON"),
        (json.dumps(row("a", schema=9)) + "\n", "schema 1 and a status of"),
        (json.dumps(row("a", status="splendid")) + "\n", "a status of ok, unavailable"),
        ("[1]\n", "line 1: no row"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(InputError, match=said.replace("(", r"\(")) as caught:
        read_rows(tmp_path)
    assert str(tmp_path / "rows.jsonl") in str(caught.value)


def test_what_is_no_folder_of_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read .*name a folder that `encast bench` has written"):
        read_rows(tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(InputError, match="it is not UTF-8"):
        read_rows(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        RowFile(tmp_path / "file")


def test_what_is_no_number_is_no_row(tmp_path: Path) -> None:
    with RowFile(tmp_path) as file, pytest.raises(ValueError, match="JSON compliant"):
        file.append([row("a", metrics={"p50": float("nan")})])
    assert read_rows(tmp_path) == []


def test_flat_names_are_joined_by_dots() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": (2, 3)}, "e": None}) == {"a.b.c": 1, "a.d": "[2, 3]", "e": None}
