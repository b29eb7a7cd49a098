"""Jobs in one process: shards, resuming after kills, bad rows, and what is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_disk import files_of_at_most
from job_rows import answers, content, make_rows, text
from object_store import object_store

from encast.cli.main import main
from encast.cli.run_job import SOME_ROWS_BAD
from encast.errors import InputError, ResourceError
from encast.jobs.folder import FINISHED
from encast.jobs.run import error_of_shard
from encast.jobs.sealed import unseal
from encast.jobs.worker import Worker


def run(*arguments: Any) -> int:
    return main(["run", *map(str, arguments)])


def test_a_job_has_every_row_of_every_file_once(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(tmp_path / "rows", 130)
    out = tmp_path / "out"
    assert run(artifact, rows, "-o", out, "--shard-rows", 50, "--json") == SOME_ROWS_BAD
    summary = json.loads(capsys.readouterr().out)
    assert (summary["rows"], summary["bad_rows"], summary["shards"]) == (4 * 130 - 2, 2, 12)
    found = answers(out)
    names = [str(rows / name) for name in ("a.jsonl", "b.csv", "more/c.txt.gz", "more/d.parquet")]
    bad = answers(out, "part-?????.errors.jsonl")
    assert [(one["input"], one["row"]) for one in bad] == [(names[0], 50), (names[0], 100)]
    assert bad[0]["reason"] == "the text is of type int; a str is needed"
    for name in names:
        single = tmp_path / "single.jsonl"
        run(artifact, name, "-o", single)
        whole = [json.loads(line) for line in single.read_text().splitlines()]
        assert whole == [{key: one[key] for key in ("row", "embedding")} for one in found if one["input"] == name]
    # Shards have a fixed number of rows, bad ones counted, and do not cross files.
    manifest = json.loads((out / "manifest.json").read_text())["parts"]
    assert [part["rows"] + part["bad_rows"] for part in manifest] == [50, 50, 30] * 4
    assert [part["bytes"] for part in manifest] == [
        path.stat().st_size for path in sorted(out.glob("part-?????.jsonl"))
    ]
    assert [part["first_row"] for part in manifest[:6]] == [1, 51, 101, 2, 102, 202]


@pytest.mark.parametrize("format", ["csv", "parquet", "npy"])
def test_formats_hold_the_same_answers(artifact: Path, tmp_path: Path, format: str) -> None:
    rows = tmp_path / "a.txt"
    rows.write_text("".join(text(number) + "\n" for number in range(30)))
    run(artifact, rows, "-o", tmp_path / "out", "--shard-rows", 12, "--format", format)
    run(artifact, rows, "-o", f"{tmp_path}/json/", "--shard-rows", 12)
    expected = [one["embedding"] for one in answers(tmp_path / "json")]
    parts = sorted((tmp_path / "out").glob(f"part-*.{format}"))
    assert len(parts) == 3
    found: list[Any] = []
    for part in parts:
        if format == "npy":
            found += np.load(part).tolist()
        elif format == "parquet":
            import pyarrow.parquet

            found += pyarrow.parquet.read_table(part)["embedding"].to_pylist()
        else:
            import csv

            with part.open(newline="") as file:
                found += [json.loads(one["embedding"]) for one in csv.DictReader(file)]
    np.testing.assert_array_equal(np.float32(found), np.float32(expected))


def test_the_rows_of_truncated_embeddings_are_as_wide_as_they_are(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b\nc\n")
    run(artifact, tmp_path / "a.txt", "-o", f"{tmp_path}/out/", "--format", "npy", "--truncate-dim", 8)
    assert np.load(tmp_path / "out" / "part-00000.npy").shape == (2, 8)
    run(artifact, tmp_path / "a.txt", "-o", tmp_path / "out.npy", "--truncate-dim", 8)
    assert np.load(tmp_path / "out.npy").shape == (2, 8)


def finished(out: Path) -> list[int]:
    """The shards that the journal has."""
    path = out / FINISHED
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    entries = map(unseal, whole.splitlines())
    return [entry["shard"] for entry in entries if "shard" in entry]


def test_killed_at_random_moments_a_job_goes_on_to_the_same_bits(artifact: Path, tmp_path: Path) -> None:
    rows = make_rows(tmp_path / "rows", 1500)
    command = [sys.executable, "-m", "encast.cli.main", "run", str(artifact), str(rows), "--shard-rows", "100", "-o"]
    assert subprocess.run([*command, str(tmp_path / "whole")], check=False).returncode == SOME_ROWS_BAD
    seed = time.time_ns()
    print("kills by the seed", seed)
    generator = random.Random(seed)
    out = tmp_path / "out"
    ended: dict[str, int] = {}
    for _ in range(4):
        more = len(finished(out)) + generator.randint(1, 10)
        process = subprocess.Popen([*command, str(out)])
        while len(finished(out)) < more:
            assert process.poll() is None
        time.sleep(generator.uniform(0, 0.01))  # anywhere in a shard
        process.kill()
        process.wait()
        # What the journal calls finished is never written again.
        now = finished(out)
        assert 0 < len(now) < 60
        for shard in now:
            name = f"part-{shard:05d}.jsonl"
            ended.setdefault(name, (out / name).stat().st_mtime_ns)
    assert subprocess.run([*command, str(out)], check=False).returncode == SOME_ROWS_BAD
    assert content(out) == content(tmp_path / "whole")
    assert {name: (out / name).stat().st_mtime_ns for name in ended} == ended
    assert sorted(finished(out)) == list(range(60))
    assert not list(out.glob(".encast/*/*"))


@pytest.mark.parametrize(
    ("sent", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_job_that_is_asked_to_stop_stops_in_order(
    artifact: Path, tmp_path: Path, sent: int, code: int, word: str
) -> None:
    rows = tmp_path / "a.txt"
    rows.write_text("a b c\n" * 20_000)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "encast.cli.main", "run", str(artifact), str(rows), "--shard-rows", "100", "-o"]
    process = subprocess.Popen([*command, f"{out}/"], stderr=subprocess.PIPE, text=True)
    while len(finished(out)) < 3:
        assert process.poll() is None
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, word in said) == (code, True), said
    assert f"{len(finished(out))} of 200 shards are finished; the same command goes on" in said
    assert 0 < len(finished(out)) < 200
    assert not list(out.glob(".encast/*/*"))


def test_a_group_of_parquet_rows_is_fetched_once_by_each_instance(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": [text(number) for number in range(400)]}), tmp_path / "a.parquet")
    fetched: list[int] = []
    plain = pq.ParquetFile.iter_batches

    def note(self: Any, *, row_groups: list[int], **more: Any) -> Any:
        fetched.extend(row_groups)
        return plain(self, row_groups=row_groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", note)
    for instances in (1, 2):
        fetched.clear()
        out = tmp_path / f"out{instances}"
        options = ["--shard-rows", 20, "--threads", 1, "--instances", instances]
        assert run(artifact, tmp_path / "a.parquet", "-o", f"{out}/", *options) == 0
        # The second takes half of what the first has left, so that neither goes back but for that.
        assert 1 <= len(fetched) <= 2 * instances, fetched
        assert [one["row"] for one in answers(out)] == list(range(1, 401))
    assert content(tmp_path / "out1") == content(tmp_path / "out2")


def test_a_finished_job_computes_nothing(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a\nb\n")
    run(artifact, tmp_path / "a.txt", "-o", f"{tmp_path}/out/")
    before = content(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "__init__", None)
        assert run(artifact, tmp_path / "a.txt", "-o", tmp_path / "out") == 0
    (tmp_path / "out" / "part-00000.jsonl").unlink()
    assert run(artifact, tmp_path / "a.txt", "-o", tmp_path / "out") == 0
    assert content(tmp_path / "out") == before


def test_a_folder_holds_one_job(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in rows:
        path.write_text("a\nb\n")
    run(artifact, *rows, "-o", tmp_path / "out")
    other = tmp_path / "other.encast"
    other.symlink_to(artifact)

    def said(*arguments: Any) -> str:
        capsys.readouterr()
        assert run(*arguments, "-o", tmp_path / "out") == 2
        return capsys.readouterr().err

    assert "--shard-rows was 4096, now it is 1" in said(artifact, *rows, "--shard-rows", 1)
    assert "--on-long was truncate, now it is error" in said(artifact, *rows, "--on-long", "error")
    assert "--format was jsonl, now it is csv" in said(artifact, *rows, "--format", "csv")
    assert "2 files were read, 1 are named now" in said(artifact, rows[0])
    assert f"where {rows[0]} was read, {rows[1]} is named now" in said(artifact, *reversed(rows))
    assert run(other, *rows, "-o", tmp_path / "out") == 0  # another path of the same artifact
    rows[1].write_text("a\nc\n")
    assert f"{rows[1]} has been written since" in said(artifact, *rows)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    assert run(artifact, *rows, "-o", tmp_path / "full") == 2
    assert "holds mine and no job" in capsys.readouterr().err


def test_windows_belong_to_the_job(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, single = tmp_path / "a.txt", tmp_path / "single.jsonl"
    rows.write_text("a b\n" + "the cat sat " * 40 + "\nc\n")
    asked = [artifact, rows, "--on-long", "windows", "--stride", 7, "--pooling", "max"]
    assert run(*asked, "-o", tmp_path / "out", "--shard-rows", 1) == 0
    assert run(*asked, "-o", single) == 0
    whole = [json.loads(line) for line in single.read_text().splitlines()]
    assert whole == [{key: one[key] for key in ("row", "embedding")} for one in answers(tmp_path / "out")]
    for change, reason in (
        (["--on-long", "windows", "--stride", 8, "--pooling", "max"], "--stride was 7, now it is 8"),
        (["--on-long", "windows", "--stride", 7], "--pooling was max, now it is None"),
        ([], "--on-long was windows, now it is truncate"),
    ):
        capsys.readouterr()
        assert run(artifact, rows, *change, "-o", tmp_path / "out", "--shard-rows", 1) == 2
        assert reason in capsys.readouterr().err
    assert run(*asked, "-o", tmp_path / "out", "--shard-rows", 1) == 0


def test_one_process_at_a_time(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from encast.jobs.folder import JobFolder

    (tmp_path / "a.txt").write_text("a\n")
    with JobFolder(tmp_path / "out"):
        assert run(artifact, tmp_path / "a.txt", "-o", tmp_path / "out") == 2
    assert "another process runs this job" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (InputError("the input cannot be read"), "the input cannot be read"),
        (
            OverflowError("date value out of range"),
            "OverflowError: date value out of range; this is a defect of encast",
        ),
    ],
    ids=["input", "defect"],
)
def test_a_shard_that_fails_does_not_stop_the_others(
    error: Exception,
    words: str,
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.txt").write_text("a\n" * 10)
    compute = Worker.run

    def fail(self: Worker, number: int) -> Any:
        if number == 2:
            raise error
        return compute(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run", fail)
        assert run(artifact, tmp_path / "a.txt", "-o", tmp_path / "out", "--shard-rows", 2) == 2
    said = capsys.readouterr().err
    assert "1 of 5 shards failed" in said
    assert f"shard 2 ({tmp_path / 'a.txt'}, 2 rows from row 5): {words}" in said
    assert len(list((tmp_path / "out").glob("part-*"))) == 4
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert run(artifact, tmp_path / "a.txt", "-o", tmp_path / "out", "--shard-rows", 2) == 0
    assert len(answers(tmp_path / "out")) == 10


def test_an_error_of_a_shard_has_no_credentials() -> None:
    url = "s3://KEYKEY:SECRET@bucket/a"
    for error in (OSError(f"no {url}"), ValueError("x" * 290 + "SECRET"), RuntimeError(url)):
        told = error_of_shard(error, ["a.txt", url])
        assert isinstance(told, ResourceError) == isinstance(error, OSError)
        assert "SECRET" not in str(told)
        assert "KEYKEY" not in str(told)


def test_a_full_disk_stops_the_job_and_leaves_nothing_half(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a\n" * 300 + "b\n" * 5)
    with files_of_at_most(100_000):
        assert run(artifact, tmp_path / "a.txt", "-o", tmp_path / "out", "--shard-rows", 300) == 2
    assert "make room" in capsys.readouterr().err
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name != ".encast"]
    assert run(artifact, tmp_path / "a.txt", "-o", tmp_path / "out", "--shard-rows", 300) == 0
    assert len(answers(tmp_path / "out")) == 305


def test_an_input_that_changes_meanwhile_is_seen(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\nb\n")
    run(artifact, path, "-o", f"{tmp_path}/out/")
    worker = Worker(tmp_path / "out", artifact, [str(path)], threads=1)
    try:
        worker.run(0)
        os.utime(path, ns=(1, 1))
        with pytest.raises(InputError, match="is not the file that the job began with"):
            worker.run(0)
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-", "-o", "out/"], "a job reads files"),
        (["rows", "-o", "-"], "a job reads files"),
        (["rows", "-o", "rows/out"], "lies inside of the input rows"),
        (["file://{}/rows", "-o", "rows/out"], "--output rows/out lies inside of the input /"),
        (["file://{}/rows/a.txt", "-o", "rows/a.txt"], "are one file"),
        (["file://{}/rows/a.txt#b", "-o", "out/"], "/rows/a.txt#b: a URL with #"),
        (["file://{}/rows/a.txt#b", "-o", "out.jsonl"], "/rows/a.txt#b: a URL with #"),
        (["rows", "rows/a.txt", "-o", "out"], "named already"),
        (["odd", "-o", "out"], "does not say which of"),
        (["empty", "-o", "out"], "holds no files"),
        (["rows", "absent", "-o", "out"], "absent: cannot be read"),
        (["rows", "-o", "out", "--errors", "e"], "--errors is for one file"),
        (["rows", "-o", "out", "--format", "xml"], "output format 'xml' is unknown"),
        (["rows", "-o", "out", "--task", "classify"], "--task classify"),
        (["rows", "-o", "s3://key:secret@bucket/out"], "--output s3://bucket/out: answers are written to file systems"),
        (["rows/a.txt", "-o", "s3://key:secret@bucket/out"], "--output s3://bucket/out: answers are written to"),
        (["rows", "-o", "out.parquet"], "say --output out --format parquet, or end the name with /"),
        (["rows", "-o", "odd/a.md"], "--output odd/a.md is a file"),
        (["rows", "-o", "out", "--threads", "0"], "must be at least 1"),
        (["rows", "-o", "out", "--instances", "0"], "must be at least 1"),
        (["rows", "-o", "out", "--truncate-dim", "99999"], "truncate_dim is 99999"),
        (["rows", "-o", "out", "--prompt-name", "absent"], "prompt_name is 'absent'"),
        (["rows", "-o", "out", "--on-long", "windows", "--stride", "999"], "stride is 999; a window holds"),
        (["rows", "-o", "out", "--stride", "9"], "stride is 9, which is for windows"),
        (["rows", "-o", "out", "--task", "features", "--on-long", "windows"], "on_long is 'windows', which embed,"),
        (["pipe.txt", "-o", "out/"], "pipe.txt: is no regular file"),
        (["rows", "gone.txt", "-o", "out/"], "gone.txt: cannot be read (No such file"),
        (["file:///absent/x.jsonl", "-o", "out/"], "/absent/x.jsonl: cannot be read (No such file"),
    ],
)
def test_what_cannot_be_done_is_said_and_makes_nothing(
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows/a.txt", "odd/a.md", "empty/_x"):
        Path(name).parent.mkdir()
        Path(name).write_text("a\n")
    os.mkfifo("pipe.txt")
    Path("gone.txt").symlink_to("nowhere")
    before = sorted(Path().rglob("*"))
    assert run(artifact, *(one.format(tmp_path) for one in arguments)) == 2
    assert reason in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


def test_bits_that_would_differ_are_refused(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a\nb\n")
    options = [artifact, tmp_path / "a.txt", "-o", f"{tmp_path}/out/", "--shard-rows", 1]
    run(*options)
    (tmp_path / "out" / "part-00000.jsonl").unlink()
    monkeypatch.setattr(Worker, "numbers", lambda self: {"arithmetic": ["bf16_tile"]})
    assert run(*options) == 2
    assert "arithmetic is bf16_tile, elsewhere it is" in capsys.readouterr().err
    (tmp_path / "out" / "part-00001.jsonl").unlink()
    assert run(*options) == 0  # of what was computed elsewhere nothing is left


def test_inputs_of_an_object_store(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    rows = make_rows(tmp_path / "store" / "bucket" / "rows", 60)
    with object_store(tmp_path / "store") as how:
        assert run(artifact, f"s3://bucket/rows?{how}", "-o", f"{tmp_path}/out/", "--shard-rows", 25) == SOME_ROWS_BAD
        assert run(artifact, f"s3://bucket/rows/b.csv?{how}", "-o", tmp_path / "b.jsonl") == 0
        assert run(artifact, f"s3://bucket/absent?{how}", "-o", f"{tmp_path}/none/") == 2
    run(artifact, rows, "-o", f"{tmp_path}/local/", "--shard-rows", 25)
    found = [{**one, "input": one["input"].replace("s3://bucket/rows", str(rows))} for one in answers(tmp_path / "out")]
    assert found == answers(tmp_path / "local")
    assert len((tmp_path / "b.jsonl").read_text().splitlines()) == 60


def test_credentials_are_written_nowhere(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    rows = make_rows(tmp_path / "store" / "bucket" / "rows", 60)
    out = tmp_path / "out"
    with object_store(tmp_path / "store") as how:
        url = f"s3://KEYKEY:SECRET@bucket/rows/?{how}"
        options = ["-o", out, "--shard-rows", 25, "--json"]
        assert run(artifact, url, *options) == SOME_ROWS_BAD
        (out / "part-00000.jsonl").unlink()
        # Whoever comes later brings credentials of his own.
        assert run(artifact, url.replace("SECRET", "SECRET2"), *options) == SOME_ROWS_BAD
        (rows / "more" / "d.parquet").write_bytes(b"another")
        assert run(artifact, url, *options) == 2
        assert run(artifact, f"s3://KEYKEY:SECRET@bucket/rows/b.csv?{how}", "-o", tmp_path / "b.jsonl", "--json") == 0
    said = "".join(capsys.readouterr())
    assert '"s3://bucket/rows/b.csv"' in said
    assert "s3://bucket/rows/more/d.parquet has been written since" in said
    for kept in (said.encode(), *(path.read_bytes() for path in out.rglob("*") if path.is_file())):
        assert b"SECRET" not in kept
        assert b"KEYKEY" not in kept
    assert answers(out)[0]["input"] == "s3://bucket/rows/a.jsonl"


def test_names_that_are_not_utf8(artifact: Path, tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.txt")
    with open(path, "wb") as file:
        file.write(b"a\nb\n")
    assert run(artifact, os.fsdecode(path), "-o", f"{tmp_path}/out/") == 0
    assert run(artifact, os.fsdecode(path), "-o", f"{tmp_path}/out/") == 0
    assert [one["input"] for one in answers(tmp_path / "out")] == [f"{tmp_path}/caf\\xe9.txt"] * 2
