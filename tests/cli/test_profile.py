"""``encast profile`` as users meet it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from profiles import CEILINGS, compiled

from encast.ceilings import Kept
from encast.cli.main import main

pytestmark = pytest.mark.serial("times kernels and forwards")

ONCE = ["--repeats", "1", "--threads", "1"]
QUICK = [*ONCE, "--batch", "2", "--length", "8"]


@pytest.fixture(autouse=True)
def _ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encast.ceilings.find", lambda: Kept(None, CEILINGS))


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compiled("bert-embed", "int8", tmp_path_factory))


def test_table(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", path, *QUICK]) == 0
    out = capsys.readouterr().out
    assert "embedding of 2x8, 1 thread\n" in out
    for word in ("encoder.layer.*.intermediate.dense", "GFLOP/s", "waiting", "outside", "total", "limit", "accounting"):
        assert word in out
    assert "encoder.layer.0.intermediate" not in out


def test_layers(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", path, *QUICK, "--layers", "--output", "last_hidden_state"]) == 0
    out = capsys.readouterr().out
    assert "encoder.layer.0.intermediate.dense" in out
    assert "pooling" not in out


def test_files(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {option: tmp_path / option for option in ("json", "trace", "plot")}
    arguments = [word for option, file in names.items() for word in (f"--{option}", str(file))]
    assert main(["profile", path, *QUICK, *arguments]) == 0
    assert json.loads(names["json"].read_text())["output"] == "embedding"
    assert json.loads(names["trace"].read_text())["traceEvents"]
    assert names["plot"].read_text().startswith("<!DOCTYPE html>")
    assert sorted(os.listdir(tmp_path)) == ["json", "plot", "trace"]
    assert "total" in capsys.readouterr().out


def test_json_on_standard_output_is_alone(path: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", path, *QUICK, "--ablate", "--json", "-"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert {"qkv_fusion", "padding_removal"} <= {one["without"] for one in document["ablations"]}


def test_other_files_on_standard_output_are_alone_too(path: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", path, *QUICK, "--trace", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["traceEvents"]
    assert main(["profile", path, *QUICK, "--plot", "-"]) == 0
    assert capfd.readouterr().out.startswith("<!DOCTYPE html>")


def test_histogram_and_texts(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", path, *ONCE, "--lengths", "4:3,9:2"]) == 0
    assert "5 sequences by 4:3,9:2" in capsys.readouterr().out
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "one two"}\n{"text": "three"}\n')
    assert main(["profile", path, *ONCE, "--texts", str(texts)]) == 0
    assert f"2 texts of {texts}" in capsys.readouterr().out


def test_without_ceilings_they_are_measured(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("encast.ceilings.find", lambda: Kept(None, None, "the file is damaged"))
    monkeypatch.setattr("encast.ceilings.measure", lambda: CEILINGS)
    assert main(["profile", path, *QUICK]) == 0
    out = capsys.readouterr().out
    assert "measured just now (the file is damaged)" in out
    assert "encast doctor --measure" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--output", "logits"], "--output is 'logits'; this artifact has last_hidden_state, embedding"),
        (["--length", "4096"], "a sequence of 4096 tokens; this model takes 1 to"),
        (["--lengths", "4:0"], "holds no sequence"),
        (["--lengths", "4:1", "--texts", "-"], "give one of them"),
        (["--lengths", "4:1", "--length", "4"], "give one of them"),
        (["--texts", "-", "--batch", "4"], "give one of them"),
        (["--checkpoint", "somewhere"], "is for --ablate"),
        (["--texts", "/nowhere.txt"], "/nowhere.txt"),
        (["--json", "-", "--trace", "-"], "--json and --trace need a file each"),
        (["--plot", "/nowhere/plot.html"], "choose another --plot"),
        (["--trace", "/"], "choose another --trace"),
        (["--length", "8", "--json", "/dev/full"], "choose another --json"),
    ],
)
def test_errors(path: str, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", path, *ONCE, *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error


@pytest.mark.parametrize(("text", "reason"), [("", "holds no text"), ('{"text": 3}\n', "is no text"), ("{\n", "row 1")])
def test_bad_texts(path: str, text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(text)
    plot = tmp_path / "plot.html"
    assert main(["profile", path, *ONCE, "--texts", str(texts), "--plot", str(plot)]) == 2
    assert reason in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["texts.jsonl"], "nothing half-written stays"


def test_wrong_answers_are_a_defect(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("encast.profile.ablate.difference", lambda answers, expected: 0.9)
    assert main(["profile", path, *QUICK, "--ablate"]) == 1
    assert "answers move by more than arithmetic explains without qkv_fusion" in capsys.readouterr().err
