"""``encast compress`` as a user runs it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from full_disk import files_of_at_most
from small_rows import classes

import encast
import encast.compress.train as trains
from encast.cli.main import main

RECIPE = """
stages:
  - fine-tune: {epochs: 10, learning-rate: 4.0e-3, batch-size: 16}
  - prune: {sparsity: 0.6, epochs: 4, learning-rate: 4.0e-3, batch-size: 16, distil: {teacher: fine-tune}}
  - quantise
"""


@pytest.fixture
def data(write_rows: Callable[..., Path]) -> Path:
    return write_rows("data", classes(300, 1), classes(80, 2))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def run(encoder: Path, data: Path, recipe: Path | str, out: Path, *more: str) -> int:
    options = ["--task", "classify", "--data", str(data), "--recipe", str(recipe), "-o", str(out), "--threads", "1"]
    return main(["compress", str(encoder), *options, "--device", "cpu", *more])


def test_from_a_checkpoint_to_an_artifact(
    tmp_path: Path, encoder: Path, data: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    assert run(encoder, data, recipe, out, "--price", "0.17/h") == 0
    said = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [
        "1-fine-tune", "2-prune", "report.html", "result.json", "run.json", "small.encast",
    ]  # fmt: skip
    document = json.loads((out / "result.json").read_text())
    front = document["stages"]["quantise"]["front"]
    assert [entry["name"].split(",")[0] for entry in front] == ["fine-tune f32", "fine-tune int8", "prune int8"]
    assert front[0]["drop"] == 0
    assert all(entry["usd_per_million"] > 0 and entry["peak_bytes"] > 1 << 20 for entry in front)
    assert any(entry["best"] for entry in front)
    for name in ("fine-tune", "prune", "fine-tune int8", "prune int8", "$/M rows", str(out / "small.encast")):
        assert name in said
    assert re.search(r"prune: .* 60\.\d% zeros", said)
    with encast.load(out / "small.encast", threads=1) as engine:
        assert {one.label for one in engine.classify(["the of", "with that"])} <= {"early", "late"}
    page = (out / "report.html").read_text()
    assert "prune int8" in page
    assert "<svg" in page

    # A second time it is done, and without --resume it is refused.
    assert run(encoder, data, recipe, out, "--price", "0.17/h", "--resume") == 0
    assert capsys.readouterr().out == said
    assert run(encoder, data, recipe, out) == 2
    assert "add --resume" in capsys.readouterr().err
    # Only a price may change.
    assert run(encoder, data, recipe, out, "--price", "0.51/h", "--resume") == 0
    paid = json.loads((out / "result.json").read_text())["stages"]["quantise"]["front"]
    assert [entry.pop("usd_per_million") for entry in paid] == [
        pytest.approx(3 * entry.pop("usd_per_million")) for entry in front
    ]
    assert paid == front


def test_a_budget_over_all_takes_the_fastest_within(
    tmp_path: Path, encoder: Path, data: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    assert run(encoder, data, recipe, out, "--max-drop", "0.05") == 0
    record = json.loads((out / "result.json").read_text())["stages"]["quantise"]
    within = [entry for entry in record["front"] if entry["drop"] <= 0.05]
    assert record["chosen"] == max(within, key=lambda entry: entry["speed"])["name"]
    assert record["missed"] is None
    assert record["chosen"] in capsys.readouterr().out


def test_dry_run_writes_nothing(tmp_path: Path, encoder: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(encoder, data, "auto", tmp_path / "small", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["fine-tune", "sparse50", "sparse70", "sparse80", "sparse90", "quantise"]
    assert [line.split(":")[0] for line in lines[:-1]] == names
    assert "30 steps" in lines[0]  # three epochs of 300 rows, 32 a step
    assert "of disk" in lines[-1]
    assert not (tmp_path / "small").exists()


def test_the_forecast_is_of_the_layers_that_stay(
    tmp_path: Path, encoder: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = ["fine-tune", "distil: {teacher: fine-tune, layers: [0]}", "prune: {sparsity: 0.5}"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stages:\n" + "".join(f"- {stage}\n" for stage in stages))
    taken: list[int] = []
    step = trains.Trainer.step

    def noted(self: trains.Trainer, rows: Any) -> None:
        taken.append(self._model.module.config.num_hidden_layers)
        step(self, rows)

    monkeypatch.setattr(trains.Trainer, "step", noted)
    assert run(encoder, data, recipe, tmp_path / "small", "--dry-run", "--json") == 0
    foreseen = {entry["name"]: entry["disk"] for entry in json.loads(capsys.readouterr().out)}
    assert list(dict.fromkeys(taken)) == [2, 1]
    monkeypatch.undo()
    assert run(encoder, data, recipe, tmp_path / "small") == 0
    for number, name in enumerate(foreseen, 1):
        file = tmp_path / "small" / f"{number}-{name}" / "model.safetensors"
        assert foreseen[name] == pytest.approx(file.stat().st_size, rel=0.1), name


@pytest.mark.parametrize("wanted", ["f32", "bf16"])
def test_the_forecast_times_the_precision_that_training_takes(
    tmp_path: Path, encoder: Path, data: Path, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    step = trains.Trainer.step

    def noted(self: trains.Trainer, rows: Any) -> None:
        taken.append(self._facts.precision)
        step(self, rows)

    monkeypatch.setattr(trains, "choose_precision", lambda *_: wanted)
    monkeypatch.setattr(trains.Trainer, "step", noted)
    assert run(encoder, data, "fine-tune", tmp_path / "small", "--dry-run") == 0
    assert set(taken) == {wanted}


@pytest.mark.parametrize("size", [60_000, 120_000])
def test_a_disk_too_small_for_a_checkpoint(
    tmp_path: Path, encoder: Path, data: Path, recipe: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    recipe.write_text("stages: [{fine-tune: {epochs: 1}}]")
    with files_of_at_most(size):
        assert run(encoder, data, recipe, tmp_path / "small") == 2
    assert "free space" in (said := capsys.readouterr().err) or "make room" in said
    assert not (tmp_path / "small" / "1-fine-tune").exists()
    assert run(encoder, data, recipe, tmp_path / "small", "--resume") == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--metric", "bleu"], "bleu"),
        (["--max-drop", "1.5"], "0.01 is 1 %"),
        (["--label-column", "nothing"], "nothing"),
        (["--recipe", "sparse81"], "fine-tune, sparse70"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--device", "meta"], "give cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "device is 'cuda:99'"),
        (["--seed", str(2**64)], "from 0 to 18446744073709551615"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, encoder: Path, data: Path, recipe: Path, more: list[str], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(encoder, data, recipe, tmp_path / "small", *more) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(("task", "said"), [("classify", "needs a head"), ("tag", "holds classes")])
def test_what_only_compiles_needs_a_head_before_anything_is_made(
    tmp_path: Path, encoder: Path, data: Path, recipe: Path, task: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text("stages: [quantise]")
    assert run(encoder, data, recipe, tmp_path / "small", "--task", task) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


def test_another_run_is_not_gone_on_with(
    tmp_path: Path, encoder: Path, data: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text("stages: [{fine-tune: {epochs: 0}}]")
    assert run(encoder, data, recipe, tmp_path / "small") == 0
    assert run(encoder, data, recipe, tmp_path / "small", "--resume", "--seed", "3") == 2
    assert "differs in seed" in capsys.readouterr().err


def test_later_stages_may_change_on_resume(
    tmp_path: Path, encoder: Path, data: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip in a late stage does not cost the stages that are done."""
    out = tmp_path / "small"
    recipe.write_text("stages: [{fine-tune: {epochs: 0}}, {prune: {sparsity: 0.5, learning-rate: 1.0e+30, clip: 0}}]")
    assert run(encoder, data, recipe, out) == 2
    assert "diverged" in capsys.readouterr().err
    before = (out / "1-fine-tune" / "model.safetensors").stat().st_mtime_ns
    recipe.write_text("stages: [{fine-tune: {epochs: 0}}, {prune: {sparsity: 0.5, epochs: 0}}]")
    assert run(encoder, data, recipe, out, "--resume") == 0
    assert (out / "1-fine-tune" / "model.safetensors").stat().st_mtime_ns == before
    assert (out / "2-prune").is_dir()


def test_what_is_gone_of_a_run_that_is_done_is_made_again(
    tmp_path: Path, encoder: Path, data: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    recipe.write_text("stages: [{fine-tune: {epochs: 0}}, quantise]")
    assert run(encoder, data, recipe, out) == 0
    weights = (out / "1-fine-tune" / "model.safetensors").read_bytes()
    for gone in ("small.encast", "1-fine-tune"):
        shutil.rmtree(out / gone)
        assert run(encoder, data, recipe, out, "--resume") == 0
        assert f"{out / gone} is not there any more and is made again" in capsys.readouterr().err
        with encast.load(out / "small.encast", threads=1) as engine:
            assert engine.classify(["the of"])
        assert (out / "1-fine-tune" / "model.safetensors").read_bytes() == weights
        assert not (out / ".work").exists()


def test_a_source_that_has_moved_is_not_gone(
    tmp_path: Path, encoder: Path, data: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe that trains nothing names it as the checkpoint."""
    recipe.write_text("stages: [{fine-tune: {epochs: 0}}]")
    assert run(encoder, data, recipe, tmp_path / "head") == 0
    recipe.write_text("stages: [quantise]")
    (tmp_path / "deep").mkdir()
    assert run(tmp_path / "head" / "1-fine-tune", data, recipe, tmp_path / "deep" / "small") == 0
    moved = (tmp_path / "deep" / "small").rename(tmp_path / "small")
    before = (moved / "result.json").read_bytes()
    capsys.readouterr()
    assert run(tmp_path / "head" / "1-fine-tune", data, recipe, moved, "--resume") == 0
    assert "made again" not in capsys.readouterr().err
    assert (moved / "result.json").read_bytes() == before


def test_what_is_damaged_is_not_gone_on_from(
    tmp_path: Path, encoder: Path, data: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    recipe.write_text("stages: [{fine-tune: {epochs: 0}}, {prune: {sparsity: 0.5, epochs: 0}}]")
    assert run(encoder, data, recipe, out) == 0
    weights = (out / "2-prune" / "model.safetensors").read_bytes()
    result = (out / "result.json").read_text()
    for name, old, new, remedy in (
        ("run.json", '"recipe": ', '"recipe": null, "other": ', f"remove {out} and begin anew"),
        ("result.json", '"artifact": null', '"artifact": 1', "remove it and go on with --resume"),
        ("1-fine-tune/compress.json", '"steps": 0', '"steps": 1', f"remove the folder {out / '1-fine-tune'}"),
        ("1-fine-tune/config.json", "early", "later", f"remove the folder {out / '1-fine-tune'}"),
        ("1-fine-tune/tokenizer.json", None, None, f"remove the folder {out / '1-fine-tune'}"),
    ):
        if name != "result.json":
            (out / "result.json").unlink()
        whole = (out / name).read_text()
        (out / name).unlink()
        if old is not None:
            assert old in whole
            (out / name).write_text(whole.replace(old, new))
        assert run(encoder, data, recipe, out, "--resume") == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{out / name} is damaged" in said
        assert remedy in said
        (out / name).write_text(whole)
        (out / "result.json").write_text(result)
    shutil.rmtree(out / "1-fine-tune")
    (out / "result.json").unlink()
    assert run(encoder, data, recipe, out, "--resume") == 0
    assert (out / "2-prune" / "model.safetensors").read_bytes() == weights


def test_a_metric_of_zero_has_no_drop(
    tmp_path: Path, encoder: Path, write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"words": ["the", "of"], "labels": ["O", "B-x"]}, {"words": ["in", "is"], "labels": ["O", "B-x"]}]
    data = write_rows("tags", rows, rows)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stages: [{fine-tune: {epochs: 0}}, quantise]")
    options = ["--data", str(data), "--recipe", str(recipe), "-o", str(tmp_path / "small"), "--threads", "1"]
    assert main(["compress", str(encoder), "--task", "tag", *options]) == 0
    front = json.loads((tmp_path / "small" / "result.json").read_text())["stages"]["quantise"]["front"]
    assert [entry["drop"] for entry in front] == ([None] * 2 if front[0]["metric"] <= 0 else [0.0, front[1]["drop"]])


def test_a_full_disk_loses_nothing(
    tmp_path: Path, encoder: Path, data: Path, recipe: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("encast.compress.train.SAVE_SECONDS", 0.0)
    out = tmp_path / "small"
    with files_of_at_most(150_000):  # a checkpoint fits, a state does not
        assert run(encoder, data, recipe, out) == 2
    assert "make room and go on with --resume" in capsys.readouterr().err
    assert run(encoder, data, recipe, out, "--resume") == 0
    assert (out / "small.encast").is_dir()
    with files_of_at_most(1000):  # of all that is written now, the report
        assert run(encoder, data, recipe, out, "--resume") == 2
    assert "report.html cannot be written" in (said := capsys.readouterr().err)
    assert "--resume writes it" in said
