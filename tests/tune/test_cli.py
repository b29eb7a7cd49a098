"""``encast tune`` as users meet it: files, bad input, interrupts. The machine is made up, the rest is real."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from profiles import compiled

import encast
from encast.backends.groups import Setup
from encast.cli.main import main
from encast.errors import ResourceError
from encast.tune.evaluate import METHOD
from encast.tune.measurement import Measurement

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")

LENGTHS = "4:10,8:20,16:5,40:3"


class Made:
    """Stands for ``LiveEvaluator``: more cores and larger batches are faster."""

    interrupt_at: int | None = None
    terminate_at: int | None = None
    calls = 0

    def __init__(self, *_: Any, slo: Any, **options: Any) -> None:
        self.slo = slo

    def __enter__(self) -> Made:
        return self

    def __exit__(self, *_: object) -> None:
        if self.terminate_at is not None:
            os.kill(os.getpid(), signal.SIGTERM)  # `timeout` sends two

    def probe(self, tokens: int, threads: int, instances: int) -> float:
        return 1e-4 + tokens * 1e-5 / threads

    def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
        Made.calls += 1
        if Made.calls == Made.interrupt_at:
            raise KeyboardInterrupt
        if Made.calls == Made.terminate_at:
            os.kill(os.getpid(), signal.SIGTERM)
        rates = [100.0 * setup.cores * (1 - 100 / (setup.batch_tokens + 200)) for setup in setups]
        return [Measurement(rate, rate, {"p99": 5.0}, memory_bytes=10**6) for rate in rates]


@pytest.fixture(autouse=True)
def _made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.tune.evaluate.LiveEvaluator", Made)
    monkeypatch.setattr(Made, "calls", 0)
    monkeypatch.setattr(Made, "interrupt_at", None)
    monkeypatch.setattr(Made, "terminate_at", None)


@pytest.fixture
def artifact(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compiled("bert-embed", "int8", tmp_path_factory))


def test_the_file_is_what_load_reads(artifact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.tuned.json"
    assert (
        main(["tune", artifact, "--workload", LENGTHS, "--slo", "p99=10ms", "--price", "0.36/h", "--out", str(out)])
        == 0
    )
    document = json.loads(out.read_text())
    assert document["schema"] == 1
    assert document["slo"] == {"p99_ms": 10.0}
    assert document["workload"]["sequences"] == 38
    best = document["front"][0]
    assert best["usd_per_million"] == pytest.approx(0.36 / 3600 / best["sequences_per_s"] * 1e6)
    assert list(tmp_path.iterdir()) == [out]
    with encast.load(artifact, config=out, strict=True) as engine:
        assert engine.session.batch_tokens == document["chosen"]["batch_tokens"]
    shown = capsys.readouterr().out
    assert str(out) in shown
    assert "$/million" in shown


def test_a_limit_that_nothing_keeps_is_an_error_with_the_nearest(
    artifact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Made, "measure", lambda _, setups: [Measurement(0.0, 10.0, excess=7.5)] * len(setups))
    out = tmp_path / "x.tuned.json"
    arguments = ["tune", artifact, "--workload", LENGTHS, "--slo", "p99=0.01ms", "--trials", "1", "--out", str(out)]
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert "no set-up keeps the latency limit (p99" in shown.err
    assert "at most 1 trial;" in shown.err
    assert "at 7.5 times the limit" in shown.err
    assert "texts/s" not in shown.out, "no table without a line"
    assert "1 trial of" in shown.out
    assert json.loads(out.read_text())["front"] == []


def test_a_set_up_that_fails_is_no_broken_limit(
    artifact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Measurement.failure(ResourceError("the process ended by SIGKILL"))
    monkeypatch.setattr(Made, "measure", lambda _, setups: [failed] * len(setups))
    arguments = ["tune", artifact, "--workload", LENGTHS, "--trials", "1", "--out", str(tmp_path / "x.tuned.json")]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "no set-up could be measured: the process ended by SIGKILL" in said
    assert "limit" not in said
    assert list(tmp_path.iterdir()) == []


def test_what_is_going_on_is_said_from_the_start(
    artifact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.tuned.json"
    assert main(["tune", artifact, "--workload", LENGTHS, "--trials", "8", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert re.match(r"encast: \d+ set-ups, at most 8 trials; first some runs are timed", shown.err)
    assert "encast: best so far, trial 1: " in shown.err
    assert "set-up: instances x threads" in shown.out
    assert "trials were done" not in shown.out


def test_json_is_alone_on_standard_output(artifact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "x.tuned.json")
    assert main(["tune", artifact, "--workload", LENGTHS, "--trials", "3", "--json", "--out", out]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["file"] == out
    assert len(document["trials"]) == 3


def test_texts_and_files_of_lengths(artifact: str, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a b c\n" * 6 + "a b c d e f g h\n" * 3)
    (tmp_path / "lengths.csv").write_text("length,count\n4,6\n20,3\n")
    for name in ("texts.txt", "lengths.csv"):
        out = tmp_path / f"{name}.tuned.json"
        arguments = ["--workload", str(tmp_path / name), "--trials", "1", "--out", str(out)]
        assert main(["tune", artifact, *arguments]) == 0
        assert json.loads(out.read_text())["workload"]["sequences"] == 9


def test_texts_from_standard_input(artifact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(b"a b c\nd e\n"))))
    out = tmp_path / "x.tuned.json"
    assert main(["tune", artifact, "--workload", "-", "--trials", "1", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["workload"]["sequences"] == 2


def test_an_interrupt_keeps_the_best_and_resume_goes_on(
    artifact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.tuned.json"
    arguments = ["tune", artifact, "--workload", LENGTHS, "--trials", "8", "--out", str(out)]
    monkeypatch.setattr(Made, "interrupt_at", 4)
    assert main(arguments) == 130
    assert "the best of 3 trials" in capsys.readouterr().err
    before = json.loads(out.read_text())
    assert len(before["trials"]) == 3
    assert main(arguments) == 2
    assert "go on with it by --resume" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    after = json.loads(out.read_text())
    assert after["trials"][:3] == before["trials"]
    assert list(tmp_path.iterdir()) == [out]


def test_trials_that_were_measured_in_another_way_are_not_resumed(
    artifact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", artifact, "--workload", LENGTHS, "--trials", "8", "--out", str(tmp_path / "x.tuned.json")]
    monkeypatch.setattr(Made, "interrupt_at", 4)
    assert main(arguments) == 130
    monkeypatch.setattr("encast.tune.evaluate.METHOD", 99)
    assert main([*arguments, "--resume"]) == 2
    said = capsys.readouterr().err
    assert (
        f"its method of measuring is {METHOD}, now it is 99; resume with the same arguments, machine and version"
        in said
    )
    assert Made.calls == 4
    monkeypatch.undo()
    monkeypatch.setattr("encast.machine.usable_cores", lambda: [0, 1, 2])
    assert main([*arguments, "--resume"]) == 2
    assert "its cores is" in capsys.readouterr().err


def test_an_interrupt_before_a_limit_was_kept_leaves_the_nearest(
    artifact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(_: Made, setups: Sequence[Setup]) -> list[Measurement]:
        Made.calls += 1
        if Made.calls == 4:
            raise KeyboardInterrupt
        return [Measurement(0.0, 10.0, excess=7.5)] * len(setups)

    monkeypatch.setattr(Made, "measure", late)
    out = tmp_path / "x.tuned.json"
    assert main(["tune", artifact, "--workload", LENGTHS, "--slo", "p99=0.01ms", "--out", str(out)]) == 130
    assert (
        f"of 3 trials none keeps the latency limit, the nearest is in {out}; --resume goes on"
        in capsys.readouterr().err
    )
    assert len(json.loads(out.read_text())["trials"]) == 3
    assert len(list(tmp_path.iterdir())) == 2, "the journal too"


def test_sigterm_is_an_interrupt_with_its_own_status(
    artifact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.tuned.json"
    arguments = ["tune", artifact, "--workload", LENGTHS, "--trials", "8", "--out", str(out)]
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        monkeypatch.setattr(Made, "terminate_at", 4)
        assert main(arguments) == 143
        assert "encast: terminated; the best of 3 trials is in" in capsys.readouterr().err
        assert len(json.loads(out.read_text())["trials"]) == 3
        assert received == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM], "the handler of before is back"
    finally:
        signal.signal(signal.SIGTERM, before)
    monkeypatch.setattr(Made, "terminate_at", None)
    assert main([*arguments, "--resume"]) == 0
    assert list(tmp_path.iterdir()) == [out]


def test_time_that_ends_a_search_leaves_its_journal(
    artifact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.tuned.json"
    arguments = ["tune", artifact, "--workload", LENGTHS, "--trials", "8", "--out", str(out)]
    clock = itertools.count()  # a second goes by between any two looks at it
    monkeypatch.setattr("encast.tune.search.time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert main([*arguments, "--time", "3"]) == 0
    assert re.search(r"3 trials of \d+ set-ups; the 3 seconds were over; --resume goes on", capsys.readouterr().out)
    assert main([*arguments, "--resume"]) == 0
    assert "no more than 8 were allowed\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--workload", "4:x"], "is no pair of a length and a count"),
        (["--workload", "99999:3"], "this model takes 1 to 48"),
        (["--workload", "absent.txt"], "absent.txt"),
        (["--workload", LENGTHS, "--slo", "fast"], "such as p99=10ms"),
        (["--workload", LENGTHS, "--price", "cheap"], "neither an amount an hour"),
        (["--workload", LENGTHS, "--resume"], "nothing to resume"),
        (["--workload", LENGTHS, "--out", "/absent/x.json"], "/absent/x.json"),
        (["--workload", LENGTHS, "--out", "/"], "is a folder"),
    ],
)
def test_bad_input(
    arguments: list[str], reason: str, artifact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "x.tuned.json")]
    assert main(["tune", artifact, *arguments, *out]) == 2
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert Made.calls == 0


def test_broken_rows_are_named(artifact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    arguments = ["tune", artifact, "--workload", str(file), "--out", str(tmp_path / "x.json")]
    file.write_text('{"text": "a b"}\n{"text": \n')
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "1 row cannot be read: " in said
    assert f"{file}:2: " in said
    file.write_text('{"text": 17}\n{"text": "a b"}\n' + 4 * '{"text": \n')
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "5 rows cannot be read: " in said
    assert [line for line in range(1, 7) if f"{file}:{line}: " in said] == [1, 3, 4]
    assert "; and 2 more; " in said


@pytest.mark.parametrize("package", ["optuna", "psutil", "scipy", "yaml"])
def test_a_package_that_is_not_installed_is_named(
    package: str, artifact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    given = ["--workload", LENGTHS, "--out", str(tmp_path / "x.json"), "--price", "c5.xlarge"]
    assert main(["tune", artifact, *given]) == 2
    assert capsys.readouterr().err == f"encast: error: not installed: {package}; pip install 'encast[bench]'\n"
