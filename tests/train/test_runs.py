"""Who may work in the folder of a run, and what a budget takes of what the run made."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from checkpoints import make_checkpoint
from small_rows import classes

import encast.compress.train as trains
from encast.compress import pipeline, quantise, report
from encast.compress.front import Entry
from encast.compress.recipe import Quantise, parse_recipe
from encast.compress.records import read_record, write_record
from encast.compress.stages import Context
from encast.data.datasets import Dataset, Labelled
from encast.errors import InputError, ResourceError

KEY = {"seed": 0, "recipe": [{"kind": "fine-tune", "name": "fine-tune", "epochs": 1}]}
OTHER = {"seed": 0, "recipe": [{"kind": "fine-tune", "name": "fine-tune", "epochs": 2}]}


def test_a_run_at_work_is_left_alone_whatever_the_other_asks_for(tmp_path: Path) -> None:
    """Stages that are not done may change on --resume, but not under the hands of who trains them."""
    folder = tmp_path / "run"
    held = pipeline._open(folder, KEY, False)
    (folder / ".work" / "fine-tune").mkdir(parents=True)
    for key in (KEY, OTHER):
        with pytest.raises(InputError, match="another process is at work"):
            pipeline._open(folder, key, True)
    with pytest.raises(InputError, match="exists already; add --resume"):
        pipeline._open(folder, KEY, False)
    assert (folder / ".work" / "fine-tune").is_dir()
    assert read_record(folder / "run.json", "") == KEY
    os.close(held)
    os.close(pipeline._open(folder, OTHER, True))
    assert not (folder / ".work" / "fine-tune").exists()
    assert read_record(folder / "run.json", "") == OTHER


@pytest.mark.parametrize("name", ["7b-small", "2026-small"])
def test_an_artifact_called_as_a_stage_would_be_is_none(tmp_path: Path, name: str) -> None:
    """It is named after the folder, and is there where a kill left it without a result."""
    folder = tmp_path / name
    os.close(pipeline._open(folder, KEY, False))
    (folder / f"{name}.encast").mkdir()
    os.close(pipeline._open(folder, OTHER, True))
    assert read_record(folder / "run.json", "") == OTHER
    (folder / "1-fine-tune").mkdir()
    with pytest.raises(InputError, match="differs in recipe"):
        pipeline._open(folder, KEY, True)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match="exists already; choose another place"):
            pipeline._open(tmp_path / "run", KEY, resume)
    assert (tmp_path / "run").read_text() == "mine"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(InputError, match="exists already; choose another place"):
        pipeline._open(tmp_path / "full", KEY, True)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"a', b"\xff", b"[" * 100_000, None])
def test_a_damaged_record_says_what_to_do(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "one.json"
    write_record(file, {"a": [1, 2.5, None]})
    assert read_record(file, "") == {"a": [1, 2.5, None]}
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(InputError, match=r"one\.json is damaged \(.+\); remove it"):
        read_record(file, "remove it")


def entries(**metrics: float) -> list[Entry]:
    """Of f32 with 100 points, and others that are faster one by one."""
    reference = Entry("dense f32", 100.0, 0.0, 1.0, 1.0, 1.0, 1, 1, None)
    return [
        reference,
        *(
            Entry(name.replace("_", " "), metric, 1.0 - metric / 100.0, 2.0 + number, 1.0, 1.0, 1, 1, None)
            for number, (name, metric) in enumerate(metrics.items())
        ),
    ]


def missed(max_drop: float, made: list[Entry], notes: dict[str, Any]) -> Any:
    owners = {entry.name: entry.name.split()[0] for entry in made[1:]}
    return quantise._missed(max_drop, made, owners, notes, "accuracy")


def test_the_fastest_on_the_very_budget_is_taken() -> None:
    made = entries(dense_int8=99.0, sparse_int8=98.9)
    assert made[1].drop is not None
    assert made[1].drop > 0.01, "in binary it is a bit more"
    assert quantise._choose(Quantise(max_drop=0.01), made).name == "dense int8"
    assert missed(0.01, made, {"dense": {"what": "int8"}, "sparse": {"what": "int8"}}) is None


def test_nothing_but_f32_within_the_budget_is_said() -> None:
    made = entries(dense_int8=98.0, sparse_int8=95.0)
    notes: dict[str, Any] = {"dense": {"what": "int8"}, "sparse": {"what": "int8"}}
    assert quantise._choose(Quantise(max_drop=0.01), made).name == "dense f32"
    found = missed(0.01, made, notes)
    assert (found["nearest"], found["drop"], found["over"]) == ("dense int8", pytest.approx(0.02), pytest.approx(0.01))
    # What the search of one checkpoint found nearest counts where f32 is all that it kept.
    nearest = {"name": "int8 with 2 f32", "metrics": {"accuracy": 98.5}}
    wide = [made[0], Entry(**{**vars(made[1]), "name": "dense f32", "drop": 0.0}), made[2]]
    notes["dense"] = {"what": "f32", "found": {"missed": {"nearest": nearest}}}
    assert missed(0.01, wide, notes)["nearest"] == "dense int8 with 2 f32"
    notes["dense"] = {"what": "f32", "found": {"missed": None}}
    assert missed(0.01, wide, notes) is None, "one keeps it, and is no faster than f32"
    front = {"front": [entry.to_json() for entry in made], "metric": "accuracy", "chosen": "dense f32", "missed": found}
    said = "\n".join(report.lines(pipeline.Result(Path("run"), {"quantise": front}, Path("1-dense"), None)))
    assert (
        "nothing narrower than f32 keeps the budget: the nearest, dense int8, drops 2.00%, which is 1.00% over" in said
    )


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")]),
    ],
)
def test_a_disk_that_fills_up_while_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, "quantise_stage", full)
    data = Dataset("here", "classes", [])
    context = Context("classify", data, None, "accuracy", 0, 1, "cpu", None, lambda *_: None)
    with pytest.raises(ResourceError, match=r"\(.*No space left on device.*\); make room and go on with --resume"):
        pipeline._run(tmp_path, tmp_path, parse_recipe("stages: [quantise]", "here"), context, lambda *_: None)


FIRST = "fine-tune: {epochs: 2, batch-size: 8, precision: f32}"
SECOND = "prune: {sparsity: 0.5, epochs: 0}"


@pytest.mark.parametrize(
    ("description", "stages", "begun"),
    [
        ("other words", [FIRST, SECOND], 8),
        ("", [FIRST, "prune: {sparsity: 0.6, epochs: 0}"], 8),
        ("", [FIRST, SECOND, "quantise"], 8),
        ("", [FIRST], 8),
        ("", [FIRST, "prune: {sparsity: 0.5, epochs: 0, distil: {teacher: TEACHER}}"], 8),
        ("", [FIRST.replace("8", "4"), SECOND], 0),
    ],
)
def test_the_stage_in_progress_goes_on_unless_it_differs(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch, description: str, stages: list[str], begun: int
) -> None:
    """Whatever becomes of those behind it."""
    monkeypatch.setattr(trains, "SAVE_SECONDS", 0.0)
    rows = classes(40, 1)
    data = Dataset("here", "classes", [Labelled(row["text"], row["label"]) for row in rows])
    teacher = make_checkpoint(
        tmp_path / "teacher", "bert", "classify", layers=1, hidden=32, heads=2, labels=2,
        config={"id2label": {"0": "early", "1": "late"}},
    )  # fmt: skip
    steps: list[int] = []
    step = trains.Trainer.step

    def noted(self: trains.Trainer, rows: Any) -> None:
        steps.append(self._facts.step)
        if len(steps) == 9:
            raise KeyboardInterrupt
        step(self, rows)

    def start(said: str, stages: list[str], resume: bool) -> None:
        text = f"description: '{said}'\nstages: [{', '.join(f'{{{one}}}' if ':' in one else one for one in stages)}]"
        recipe = parse_recipe(text.replace("TEACHER", str(teacher)), "here")
        pipeline.compress(
            encoder, tmp_path / "run", task="classify", recipe=recipe, train=data, threads=1, device="cpu",
            resume=resume,
        )  # fmt: skip

    monkeypatch.setattr(trains.Trainer, "step", noted)
    with pytest.raises(KeyboardInterrupt, match="run has what was done; --resume goes on"):
        start("", [FIRST, SECOND], False)
    start(description, stages, True)
    assert steps[9] == begun


def test_a_teacher_of_a_stage_that_is_not_done_may_change(tmp_path: Path, encoder: Path) -> None:
    """And of one that is done it may not."""
    data = Dataset("here", "classes", [Labelled("the", "early"), Labelled("of", "late")])
    config = {"id2label": {"0": "early", "1": "late"}}

    def start(seed: int, second: str, resume: bool) -> None:
        shutil.rmtree(tmp_path / "teacher", ignore_errors=True)
        sizes = {"layers": 1, "hidden": 32, "heads": 2, "labels": 2, "seed": seed}
        made = make_checkpoint(tmp_path / "teacher", "bert", "classify", config=config, **sizes)  # type: ignore[arg-type]
        recipe = parse_recipe(
            f"stages: [{{fine-tune: {{epochs: 0}}}}, {{distil: {{teacher: {made}, {second}}}}}]", "here"
        )
        pipeline.compress(
            encoder, tmp_path / "run", task="classify", recipe=recipe, train=data, threads=1, device="cpu",
            resume=resume,
        )  # fmt: skip

    with pytest.raises(InputError, match="diverged"):
        start(0, "learning-rate: 1.0e+30, clip: 0, max-steps: 3, epochs: 9, warmup: 0", False)
    assert list((tmp_path / "run" / ".work").glob("answers-*"))
    start(1, "max-steps: 1", True)
    (tmp_path / "run" / "result.json").unlink()
    start(1, "max-steps: 1", True)
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(InputError, match="differs in recipe"):
        start(2, "max-steps: 1", True)
