"""``encast run`` as users meet it: files, pipes, bad rows, interrupts, full disks."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import VOCAB, fake_engine

from encast.cli.main import main
from encast.cli.run import SOME_ROWS_BAD
from encast.jobs.answers import Answers

PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_encast.py"))]


@pytest.fixture(autouse=True)
def _fake_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(artifact: Any, *, batch_tokens: int = 64, **options: Any) -> Any:
        task = Path(artifact).stem
        width = len(VOCAB)
        rules: dict[str, Any] = {
            "embed": lambda ids: [ids[1], len(ids), 0.1, -1e-7],
            "overflow": lambda ids: [np.inf if len(ids) > 4 else 1.0, 0, 0, 0],
            "classify": lambda ids: [len(ids), 0.0],
            "value": lambda ids: [float(len(ids))],
            "answer": lambda ids: np.repeat(
                (ids == VOCAB["paris"])[:, None] * 3.0 + (ids == VOCAB["[CLS]"])[:, None], 2, axis=1
            ),
            "tag": lambda ids: np.eye(2)[(ids == VOCAB["john"]).astype(int)],
            "fill_mask": lambda ids: np.eye(width)[np.full(len(ids), VOCAB["cat"])],
        }
        names = {"overflow": "embed", "value": "classify", "features": "features"}
        labels = {"tag": ["O", "B-PER"], "classify": ["short", "long"]}.get(task)
        engine = fake_engine(
            names.get(task, task), rules.get(task, lambda ids: None), labels=labels, batch_tokens=batch_tokens
        )
        runnable: Any = engine.runnable
        runnable.at_once = options["instances"]
        return engine

    monkeypatch.setattr("encast.engine.load", load)


def _file(folder: Path, name: str, data: str | bytes) -> str:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_text_to_jsonl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["run", "embed", _file(tmp_path, "a.txt", "cat\n\nthe mat\n"), "-o", str(out), "--json"]) == 0
    found = _lines(out)
    assert [row["row"] for row in found] == [1, 2, 3]
    expected = [[VOCAB["cat"], 3, 0.1, -1e-7], [VOCAB["[SEP]"], 2, 0.1, -1e-7], [VOCAB["the"], 4, 0.1, -1e-7]]
    np.testing.assert_array_equal(np.float32([row["embedding"] for row in found]), np.float32(expected))
    summary = json.loads(capsys.readouterr().out)
    assert (summary["rows"], summary["bad_rows"], summary["errors"], summary["task"]) == (3, 0, None, "embed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out.jsonl"]


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("classify", {"text": "cat"}, {"label": "short"}),
        ("value", {"text": "cat"}, {"label": None, "score": 3.0}),
        ("answer", {"question": "where", "context": "cat in Paris"}, {"answer": "Paris", "start": 7, "end": 12}),
        ("features", {"text": ""}, {"last_hidden_state": [[VOCAB["[CLS]"]] * 4, [VOCAB["[SEP]"]] * 4]}),
    ],
)
def test_every_head_writes_records(tmp_path: Path, task: str, row: dict[str, str], expected: dict[str, Any]) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["run", task, _file(tmp_path, "a.jsonl", json.dumps(row)), "-o", str(out)]) == 0
    (found,) = _lines(out)
    assert {name: found[name] for name in expected} == expected


def test_questions_may_have_no_answer(tmp_path: Path) -> None:
    rows = [{"question": "where", "context": context} for context in ("cat in Paris", "the cat sat")]
    data = _file(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    out = tmp_path / "out.jsonl"
    for options, expected in ([], ["Paris", "the"]), (["--null-threshold", "0"], ["Paris", ""]):
        assert main(["run", "answer", data, "-o", str(out), *options]) == 0
        assert [row["answer"] for row in _lines(out)] == expected


def test_entities_masks_and_rankings(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["run", "tag", _file(tmp_path, "a.txt", "the John\n"), "-o", str(out)]) == 0
    (entity,) = _lines(out)[0]["entities"]
    assert (entity["label"], entity["text"], entity["start"], entity["end"]) == ("PER", "John", 4, 8)
    assert main(["run", "fill_mask", _file(tmp_path, "a.txt", "[MASK] sat\n"), "-o", str(out)]) == 0
    assert _lines(out)[0]["masks"][0][0]["token"] == "cat"
    rows = _file(tmp_path, "a.jsonl", json.dumps({"query": "who", "documents": ["cat", "the cat sat"]}))
    assert main(["run", "value", rows, "--task", "rerank", "-o", str(out)]) == 0
    assert _lines(out)[0]["ranking"] == [{"index": 1, "score": 7.0}, {"index": 0, "score": 5.0}]


@pytest.mark.parametrize(
    ("options", "length"),
    [
        (["--stride", "4"], (32 * 30 + 16 * 14) / 44),
        (["--stride", "4", "--pooling", "max"], 32),
        ([], (32 * 30 + 27 * 25) / 55),
    ],
)
def test_long_texts_are_pooled_windows(tmp_path: Path, options: list[str], length: float) -> None:
    out = tmp_path / "out.jsonl"
    data = _file(tmp_path, "a.txt", "cat " * 40 + "\ncat\n")
    assert main(["run", "embed", data, "-o", str(out), "--on-long", "windows", *options]) == 0
    assert [row["embedding"][1] for row in _lines(out)] == [pytest.approx(length, rel=1e-6), 3]


def test_csv_with_line_ends_inside_to_csv(tmp_path: Path) -> None:
    rows = _file(tmp_path, "a.csv", 'id,body,other\r\n1,"cat\nsat","x"\r\n2,the,y\r\n')
    out = tmp_path / "out.csv"
    assert main(["run", "classify", rows, "-o", str(out), "--text-column", "body", "--pair-column", "other"]) == 0
    with out.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["row"] for row in found] == ["2", "4"]
    assert json.loads(found[0]["scores"])[0]["label"] == "short"


def test_parquet_to_parquet_and_npy(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = ["cat", "the mat", "john"] * 1000
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    for name in ("out.parquet", "out.npy"):
        assert main(["run", "embed", str(tmp_path / "a.parquet"), "-o", str(tmp_path / name)]) == 0
    table = pq.read_table(tmp_path / "out.parquet")
    matrix = np.load(tmp_path / "out.npy")
    assert table["row"].to_pylist() == list(range(1, 3001))
    np.testing.assert_array_equal(np.array(table["embedding"].to_pylist(), np.float32), matrix)
    assert matrix[:3, 0].tolist() == [VOCAB["cat"], VOCAB["the"], VOCAB["john"]]


def test_bad_rows_go_to_the_error_file_and_the_rest_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        b'{"text": "cat"}',
        b"{",
        b'{"text": 7}',
        b'{"text": "\\ud83d"}',
        b'{"text": "mat \xff"}',
        b'{"other": 1}',
        b'{"text": null}',
        b'{"text": "' + b"cat " * 50 + b'"}',
        b'{"text": "mat"}',
    ]
    out = tmp_path / "out.jsonl"
    arguments = ["run", "embed", _file(tmp_path, "a.jsonl", b"\n".join(lines)), "-o", str(out), "--on-long", "error"]
    assert main(arguments) == SOME_ROWS_BAD == 3
    assert [row["row"] for row in _lines(out)] == [1, 9]
    errors = _lines(tmp_path / "out.jsonl.errors.jsonl")
    assert [row["row"] for row in errors] == [2, 3, 4, 5, 6, 7, 8]
    words = ["malformed", "type int", "surrogate", "UTF-8", "'text'", "NoneType", "longer than 32"]
    for row, word in zip(errors, words, strict=True):
        assert word in row["reason"]
        assert "texts[0]" not in row["reason"]
    assert errors[2]["raw"] == '{"text": "\\ud83d"}'
    assert "7 bad rows in" in capsys.readouterr().err
    assert main([*arguments, "--errors", str(tmp_path / "named.jsonl"), "--json"]) == SOME_ROWS_BAD
    assert json.loads(capsys.readouterr().out)["errors"] == str(tmp_path / "named.jsonl")
    assert len(_lines(tmp_path / "named.jsonl")) == 7


def test_answers_that_are_no_numbers_are_bad_rows(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert (
        main(["run", "overflow", _file(tmp_path, "a.txt", "cat\nthe cat sat\nmat\n"), "-o", str(out)]) == SOME_ROWS_BAD
    )
    assert [row["row"] for row in _lines(out)] == [1, 3]
    assert "finite" in _lines(tmp_path / "out.jsonl.errors.jsonl")[0]["reason"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("task", ["tag", "answer", "fill_mask"])
def test_logits_that_are_no_numbers_are_bad_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, value: float
) -> None:
    def rule(ids: Any) -> Any:
        logits = np.zeros((len(ids), 2 if task != "fill_mask" else len(VOCAB)))
        logits[ids == VOCAB["paris"]] = value
        return logits

    def selected(ids: Any) -> Any:
        return rule(ids) + (value if VOCAB["paris"] in ids else 0.0)

    engine = fake_engine(task, selected if task == "fill_mask" else rule, labels=["O", "B-LOC"])
    monkeypatch.setattr("encast.engine.load", lambda artifact, **options: engine)
    rows = [{"text": f"{word} [MASK]", "question": "where", "context": word} for word in ("cat", "paris", "mat")]
    source = _file(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    assert main(["run", task, source, "-o", str(out)]) == SOME_ROWS_BAD
    assert [row["row"] for row in _lines(out)] == [1, 3]
    assert "finite" in _lines(tmp_path / "out.jsonl.errors.jsonl")[0]["reason"]


def test_a_file_of_bad_rows_alone_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["run", "embed", _file(tmp_path, "a.jsonl", "{\n[\n"), "-o", str(out)]) == 2
    assert "none of the 2 rows could be used; the first bad one is row 1" in capsys.readouterr().err
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.npy"])
def test_empty_input_makes_an_empty_file(tmp_path: Path, name: str) -> None:
    assert main(["run", "embed", _file(tmp_path, "a.txt", ""), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embed", "missing.txt"], "missing.txt"),
        (["embed", "a.txt", "--task", "dance"], "fill_mask"),
        (["embed", "a.txt", "--task", "answer"], "--task answer"),
        (["embed", "a.txt", "--format", "xml"], "jsonl, csv, parquet, npy"),
        (["embed", "a.txt", "--input-format", "xml"], "text, jsonl, csv, parquet"),
        (["embed", "a.txt", "--on-long", "cry"], "truncate, error and windows are known"),
        (["embed", "a.txt", "--on-long", "windows", "--pooling", "min"], "mean and max are known"),
        (["embed", "a.txt", "--on-long", "windows", "--stride", "30"], "give 0 to 29"),
        (["embed", "a.txt", "--stride", "3"], "stride is 3, which is for windows"),
        (["embed", "a.txt", "--task", "features", "--on-long", "windows"], "on_long is 'windows', which embed,"),
        (["embed", "a.txt", "--task", "features", "--stride", "3"], "features has no such option"),
        (["tag", "a.txt", "--on-long", "windows", "--pooling", "max"], "tag has no such option"),
        (["embed", "a.txt", "-o", "missing/out.jsonl"], "missing/out.jsonl"),
        (["embed", "a.txt", "--format", "npy"], "standard output"),
        (["classify", "a.txt", "--format", "npy", "-o", "x.npy"], "only embeddings"),
        (["answer", "a.txt"], "question, context"),
        (["embed", "a.txt", "--text-column", "x", "--pair-column", "x"], "both 'x'"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    _file(tmp_path, "a.txt", "cat\n")
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def _start(
    *arguments: str, task: str = "embed", seconds: float = 0.0, file_size: int | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """``file_size``: the byte beyond which writing a file fails, as on a full disk."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options

    def prepare() -> None:
        # What a shell starts in the background inherits a Ctrl-C that is ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if file_size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

    return subprocess.Popen([*PROGRAM, task, str(seconds), *arguments], preexec_fn=prepare, **pipes)


def test_standard_input_to_standard_output() -> None:
    process = _start("run", "x", "-", "--json")
    out, err = process.communicate(b"cat\nthe mat\n", timeout=60)
    assert process.returncode == 0, err
    assert [json.loads(line)["row"] for line in out.splitlines()] == [1, 2]
    assert json.loads(err)["rows"] == 2
    process = _start("run", "x", "--input-format", "jsonl")
    out, err = process.communicate(gzip.compress(b'{"text": "cat"}\n{\n'), timeout=60)
    assert process.returncode == SOME_ROWS_BAD, err
    assert len(out.splitlines()) == 1
    assert json.loads(err.splitlines()[0])["row"] == 2


@pytest.mark.parametrize("format", ["jsonl", "csv", "npy"])
def test_an_interrupt_keeps_the_finished_rows(tmp_path: Path, format: str) -> None:
    rows = _file(tmp_path, "a.txt", "the cat sat\n" * 20_000)
    out = tmp_path / f"out.{format}"
    process = _start("run", "x", rows, "-o", str(out), "--batch-tokens", "40", seconds=0.05)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 2000 for path in tmp_path.glob(".out*.tmp")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    partial = tmp_path / f"out.{format}.partial"
    assert f"interrupted; the {_rows_of(partial, format):,} finished rows are in {partial}" in err.decode()
    assert b"Traceback" not in err
    assert 0 < _rows_of(partial, format) < 20_000
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", partial.name]


def _rows_of(path: Path, format: str) -> int:
    if format == "npy":
        return len(np.load(path))
    if format == "csv":
        with path.open(newline="") as file:
            return len(list(csv.DictReader(file)))
    return len(_lines(path))


def test_an_interrupt_before_the_first_row_leaves_nothing(tmp_path: Path) -> None:
    process = _start("run", "x", "-", "-o", str(tmp_path / "out.jsonl"))
    assert process.stdin is not None
    process.stdin.write(b"c")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out*")):  # it now waits for the rest of the line
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"encast: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_ends_the_run_quietly(tmp_path: Path) -> None:
    process = _start("run", "x", _file(tmp_path, "a.txt", "the cat sat\n" * 20_000), "--batch-tokens", "200")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("format", ["jsonl", "csv", "npy", "parquet"])
def test_a_full_disk_keeps_the_finished_rows(tmp_path: Path, format: str) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    rows = _file(tmp_path, "a.txt", "the cat sat\n" * 5_000)
    out = tmp_path / f"out.{format}"

    process = _start("run", "x", rows, "-o", str(out), "--batch-tokens", "100", file_size=20_001)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert b"make room" in err
    assert b"Traceback" not in err
    assert not out.exists()
    left = {path.name for path in tmp_path.iterdir()} - {"a.txt"}
    if format == "parquet":  # which cannot be read without the index at its end
        assert left == set()
    else:
        assert left == {f"out.{format}.partial"}
        assert 0 < _rows_of(tmp_path / f"out.{format}.partial", format) < 5_000
        assert f"out.{format}.partial" in err.decode()


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        path = _file(tmp_path, f"{rows}.txt", "the cat sat on the mat in paris\n" * rows)
        program = "import resource, runpy, sys\ntry:\n runpy.run_path(sys.argv[0], run_name='__main__')\nfinally:\n"
        program += " print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.argv = {[*PROGRAM[1:], 'embed', '0', 'run', 'x', path, '-o', os.devnull]!r}\n{program}",
        ]
        done = subprocess.run(command, capture_output=True, timeout=120, check=True)
        return int(done.stderr.split()[-1])

    small, large = peak(2_000), peak(60_000)
    assert large - small < 16_000  # KiB; the file has 1.9 MB, its answers as records some 60 MB


@pytest.mark.parametrize("output", ["in.txt", "out.jsonl"])
@pytest.mark.parametrize("errors", ["in.txt", "out.jsonl", "link"])
def test_files_of_a_run_must_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, errors: str
) -> None:
    source = _file(tmp_path, "in.txt", "cat\nmat\n")
    (tmp_path / "link").symlink_to(source)
    if (output, errors) == ("out.jsonl", "out.jsonl"):
        _file(tmp_path, "out.jsonl", "older")
    assert main(["run", "embed", source, "-o", str(tmp_path / output), "--errors", str(tmp_path / errors)]) == 2
    assert "are one file" in capsys.readouterr().err
    assert Path(source).read_text() == "cat\nmat\n"


def test_a_closed_standard_input_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", "embed"]) == 2
    assert "standard input is closed" in capsys.readouterr().err


def test_instances_answer_groups_side_by_side_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups at once give the file that one instance gives, bad rows included."""
    three, first, real = threading.Barrier(3, timeout=30), threading.local(), Answers.of

    def of(self: Answers, group: Any) -> Any:
        if not hasattr(first, "over"):
            first.over = True
            three.wait()
        return real(self, group)

    rows = [f"row {index} " + "cat " * (index % 7) for index in range(3000)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" if i % 500 else "{\n" for i, text in enumerate(rows)))
    written = []
    for instances in (1, 3):
        if instances == 3:
            monkeypatch.setattr(Answers, "of", of)
        out = tmp_path / f"{instances}.jsonl"
        assert main(["run", "embed", str(source), "-o", str(out), "--instances", str(instances)]) == SOME_ROWS_BAD
        written.append((out.read_bytes(), out.with_name(out.name + ".errors.jsonl").read_bytes()))
    assert written[0] == written[1]
    assert written[0][0].count(b"\n") == 3000 - 6


@pytest.mark.parametrize("instances", [1, 8])
def test_groups_before_a_damaged_part_are_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], instances: int
) -> None:
    """Also those that are under way when it is read."""
    rng = np.random.default_rng(1)
    data = gzip.compress("".join(f"the cat {rng.random()}\n" for _ in range(9000)).encode())
    source = _file(tmp_path, "a.txt.gz", data[: len(data) // 2])
    out = tmp_path / "out.jsonl"
    given = ["run", "embed", source, "-o", str(out), "--batch-tokens", "1024", "--instances", str(instances)]
    assert main(given) == 2
    err = capsys.readouterr().err
    said = re.search(r"after line (\d+) .*; the ([\d,]+) finished rows are in", err)
    assert said is not None, err
    read, answered = int(said[1]), int(said[2].replace(",", ""))
    assert answered == len(_lines(tmp_path / "out.jsonl.partial"))
    assert read > 1000
    assert read - answered < 200, "less than a group"
