"""Rows out: every format, and what is left when writing ends early."""

from __future__ import annotations

import csv
import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encast.data import open_writer
from encast.data.output import OutputFile
from encast.errors import InputError, ResourceError

COLUMNS = {"row": "int", "embedding": ["f32"]}
NESTED = {"row": "int", "label": "str", "score": "float", "scores": [{"label": "str", "score": "float"}]}
VECTORS = np.random.RandomState(3).standard_normal((6, 5)).astype(np.float32) * np.float32(1e-3)
RECORDS = [{"row": at + 1, "embedding": vector} for at, vector in enumerate(VECTORS)]


def _load(path: Path, format: str) -> np.ndarray[Any, Any]:
    if format == "npy":
        return np.load(path)
    if format == "parquet":
        pq = pytest.importorskip("pyarrow.parquet")
        return np.array(pq.read_table(path)["embedding"].to_pylist(), np.float32)
    if format == "csv":
        with path.open(newline="") as file:
            return np.array([json.loads(row["embedding"]) for row in csv.DictReader(file)], np.float32)
    return np.array([json.loads(line)["embedding"] for line in path.read_text().splitlines()], np.float32)


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet", "npy"])
def test_embeddings_come_back_bit_for_bit(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"out.{format}"
    writer = open_writer(path, COLUMNS, width=5)
    writer.write(RECORDS[:4])
    writer.write([])
    writer.write(RECORDS[4:])
    assert not path.exists()
    writer.finish()
    assert _load(path, format).tobytes() == VECTORS.tobytes()
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet", "npy"])
def test_no_rows_are_a_valid_file(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"out.{format}"
    open_writer(path, COLUMNS, width=5).finish()
    assert len(_load(path, format)) == 0
    if format == "npy":
        assert np.load(path).shape == (0, 5)


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet", "npy"])
def test_what_breaks_off_is_kept_as_a_valid_partial_file(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"out.{format}"
    path.write_bytes(b"of an earlier run")
    writer = open_writer(path, COLUMNS, width=5)
    writer.write(RECORDS[:2])
    writer.write(RECORDS[2:3])
    kept = writer.keep()
    assert kept == tmp_path / f"out.{format}.partial"
    assert _load(kept, format).tobytes() == VECTORS[:3].tobytes()
    assert path.read_bytes() == b"of an earlier run"
    assert sorted(tmp_path.iterdir()) == [path, kept]


@pytest.mark.parametrize("format", ["jsonl", "csv", "npy"])
def test_half_a_block_is_cut_off(tmp_path: Path, format: str) -> None:
    writer = open_writer(tmp_path / "out", COLUMNS, format, width=5)
    writer.write(RECORDS[:2])
    os.write(writer.output.fd, b'{"row": 3, "embed')  # what an interrupt in the middle of a block leaves
    kept = writer.keep()
    assert kept is not None
    assert _load(kept, format).tobytes() == VECTORS[:2].tobytes()


def test_nothing_written_leaves_nothing(tmp_path: Path) -> None:
    assert open_writer(tmp_path / "out.jsonl", COLUMNS).keep() is None
    assert list(tmp_path.iterdir()) == []


def test_gzip_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.gz"
    writer = open_writer(path, COLUMNS)
    writer.write(RECORDS[:3])
    writer.write(RECORDS[3:])
    writer.finish()
    assert len(gzip.decompress(path.read_bytes()).splitlines()) == 6


def test_nested_values(tmp_path: Path) -> None:
    record = {"row": 1, "label": 'a "b", \n\u00e9\U0001f600', "score": 0.1, "scores": [{"label": "a", "score": 0.1}]}
    for format in ("jsonl", "csv", "parquet"):
        path = tmp_path / f"out.{format}"
        writer = open_writer(path, NESTED)
        writer.write([record, {**record, "label": None, "scores": []}])
        writer.finish()
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().split("\n")[:-1]] == [
        record,
        {**record, "label": None, "scores": []},
    ]
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {"row": "1", "label": record["label"], "score": "0.1", "scores": json.dumps(record["scores"])}
    assert rows[1]["label"] == ""
    pq = pytest.importorskip("pyarrow.parquet")
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [record, {**record, "label": None, "scores": []}]


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_a_device_is_written_to_directly(format: str) -> None:
    writer = open_writer("/dev/null", COLUMNS, format)
    writer.write(RECORDS)
    writer.finish()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_full_disk_is_named() -> None:
    writer = open_writer("/dev/full", COLUMNS, "jsonl")
    with pytest.raises(ResourceError, match=r"/dev/full: writing failed after 0 bytes .*make room"):
        writer.write(RECORDS)
    assert writer.keep() is None


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "missing" / "out.jsonl", tmp_path / "folder"):
        with pytest.raises(ResourceError, match=str(path)):
            open_writer(path, COLUMNS, "jsonl")
    with pytest.raises(InputError, match="jsonl, csv, parquet, npy"):
        open_writer(tmp_path / "out", COLUMNS, "xml")
    with pytest.raises(InputError, match="only embeddings"):
        open_writer(tmp_path / "out.npy", NESTED, width=5)
    for format in ("npy", "parquet"):
        with pytest.raises(InputError, match="/dev/null"):
            open_writer("/dev/null", COLUMNS, format, width=5)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ResourceError, match=r"encast\[parquet\]"):
        open_writer(tmp_path / "out.parquet", COLUMNS)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_get_its_name_is_not_lost(tmp_path: Path) -> None:
    file = OutputFile(tmp_path / "out", "--plot")
    file.append(b"whole")
    (tmp_path / "out").mkdir()
    with pytest.raises(ResourceError, match="what was written is in") as failure:
        file.finish()
    file.discard()
    assert Path(str(failure.value).rpartition(" ")[2]).read_bytes() == b"whole"
