"""One stage that trains: from a checkpoint and rows to the next checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import encast.engine as engines
from encast.archs import build_graph
from encast.compile import compile
from encast.compress.batches import Example, lengths_of
from encast.compress.model import (
    Model,
    files_of,
    head_labels,
    load_model,
    longest_text,
    open_tokenizer,
    save_checkpoint,
)
from encast.compress.recipe import Distil, Prune, Teacher, Training
from encast.compress.state import StateFolder, resumable
from encast.compress.tasks import TrainTask, find_task
from encast.compress.teacher import CachedTeacher, OnlineTeacher, Source, are_cached, cache_answers, check_teacher
from encast.compress.train import Trainer
from encast.data.datasets import Dataset
from encast.errors import CheckpointError, InputError, UndefinedError
from encast.importers import Checkpoint, open_checkpoint
from encast.scoring import score
from encast.sparsity import product_weights

__all__ = ["Context", "examples_of", "measure", "takes_unlabelled", "train_stage"]

Tensor = Any
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Context:
    """What all stages of a run share.

    ``dev`` is None where nothing is evaluated. ``unlabelled``: rows of the kind "texts", of the training rows' form,
    for stages that learn from a teacher alone. ``usd_per_hour``: of this machine, for dollars a million rows.
    ``progress(what, done, total)``; ``total`` is None where nobody knows.
    """

    task: str
    train: Dataset
    dev: Dataset | None
    metric: str
    seed: int
    threads: int
    device: str
    usd_per_hour: float | None
    progress: Progress
    unlabelled: Dataset | None = None


def measure(checkpoint: Path, context: Context, work: Path, **options: Any) -> dict[str, float]:
    """All metrics of a checkpoint on the dev set, in points of 100, as encast answers; f32 unless ``options`` of
    ``compile`` say otherwise."""
    assert context.dev is not None
    artifact = work / "measured.encast"
    compile(checkpoint, artifact, task=context.task, **{"dtype": "f32", **options})
    try:
        with engines.load(artifact, threads=context.threads) as engine:
            return score(engine, context.dev).metrics
    finally:
        shutil.rmtree(artifact, ignore_errors=True)


def train_stage(
    stage: Training, source: Path, out: Path, work: Path, teachers: Mapping[str, Path], context: Context
) -> dict[str, Any]:
    """Trains what lies in ``source`` and writes the new folder ``out``; returns its record, ``compress.json``.

    ``work`` holds what a later call goes on from. ``teachers``: the folders of stages before, by name. Raises
    ``InputError``, ``CheckpointError``, and ``ResourceError`` when the disk is full: what was done stays.
    """
    with resumable(work):
        return _train_stage(stage, source, out, work, teachers, context)


def _train_stage(
    stage: Training, source: Path, out: Path, work: Path, teachers: Mapping[str, Path], context: Context
) -> dict[str, Any]:
    checkpoint = open_checkpoint(source)
    task, examples = examples_of(stage, checkpoint, context)
    distil = stage.distil if isinstance(stage, (Distil, Prune)) else None
    model = load_model(
        checkpoint, task, seed=context.seed, dropout=stage.dropout, device=context.device,
        attention=distil is not None and distil.attention > 0,
        layers=stage.layers if isinstance(stage, Distil) else None,
    )  # fmt: skip
    work.mkdir(parents=True, exist_ok=True)
    dropped = isinstance(stage, Distil) and stage.layers is not None
    own = _saved(model, work) if dropped else checkpoint
    teacher = None if distil is None else _teacher(distil, teachers, own, examples, task, work, context)
    names = product_weights(own, names=model.parameters())
    keep = stage.keep if isinstance(stage, Prune) else ()
    trainer = Trainer(
        model,
        stage,
        examples,
        products=names,
        pruned=product_weights(own, keep, model.parameters()),
        state=StateFolder(work / "state"),
        seed=context.seed,
        evaluate=None if context.dev is None else lambda weights: _evaluate(model, weights, work, context),
        metric=context.metric,
        teacher=teacher,
        progress=lambda done, total: context.progress("steps", done, total),
        surgery=lambda done, total: context.progress("products pruned", done, total),
    )
    trained = trainer.run()
    strange = next((name for name, value in trained.weights.items() if not bool(value.isfinite().all())), None)
    if strange is not None:
        raise InputError(f"{strange} is not finite: training diverged; lower learning-rate ({stage.learning_rate:g})")
    record = {
        "stage": msgspec.to_builtins(stage),
        "source": str(source),
        "task": context.task,
        "train": {"name": context.train.name, "rows": len(context.train.rows)},
        "unlabelled": None
        if context.unlabelled is None or not takes_unlabelled(stage)
        else {"name": context.unlabelled.name, "rows": len(context.unlabelled.rows)},
        "dev": None if context.dev is None else {"name": context.dev.name, "rows": len(context.dev.rows)},
        "seed": context.seed,
        "max_length": task.max_length,
        **trained.record,
        "zeros": {name: round(float((trained.weights[name] == 0).float().mean()), 4) for name in names},
    }
    written = work / "checkpoint"
    shutil.rmtree(written, ignore_errors=True)
    save_checkpoint(model, trained.weights, written, record)
    written.rename(out)
    return record


def examples_of(stage: Training, checkpoint: Checkpoint, context: Context) -> tuple[TrainTask, list[Example]]:
    """The task of a stage, and its rows as token ids."""
    limit = longest_text(checkpoint, stage.max_length)
    task = find_task(context.task, context.train)(context.train, limit, stage.stride)
    if (labels := head_labels(checkpoint, task)) is not None:
        task.adopt(labels)
    modules = checkpoint.modules
    prompt = "" if modules is None else modules.prompts.get(modules.default_prompt_name or "", "")
    tokenizer = open_tokenizer(checkpoint, limit)
    examples = list(task.examples(context.train.rows, tokenizer, prompt))
    if context.unlabelled is not None and takes_unlabelled(stage):
        examples += task.unlabelled(context.unlabelled.rows, tokenizer, prompt)
    vocab = build_graph(checkpoint, "features").meta.vocab
    largest = max((int(ids.max(initial=0)) for example in examples for ids in example.ids), default=0)
    if largest >= vocab:
        raise CheckpointError(
            f"{checkpoint.path}: its tokenizer gives a training row the token {largest}, the model has tokens 0 to "
            f"{vocab - 1}: give the tokenizer that belongs to the model"
        )
    return task, examples


def takes_unlabelled(stage: Training) -> bool:
    """Whether no label matters to the stage."""
    distil = stage.distil if isinstance(stage, (Distil, Prune)) else None
    return distil is not None and not distil.hard


def _saved(model: Model, work: Path) -> Checkpoint:
    """The model as a checkpoint of its own: one without some layers has other products than its source."""
    folder = work / "smaller"
    shutil.rmtree(folder, ignore_errors=True)
    save_checkpoint(model, None, folder)
    return open_checkpoint(folder)


def _evaluate(model: Model, weights: Mapping[str, Tensor], work: Path, context: Context) -> dict[str, float] | None:
    folder = work / "evaluated"
    shutil.rmtree(folder, ignore_errors=True)
    save_checkpoint(model, weights, folder)
    try:
        return measure(folder, context, work)
    except UndefinedError:
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _teacher(
    distil: Teacher,
    stages: Mapping[str, Path],
    student: Checkpoint,
    examples: Sequence[Example],
    task: TrainTask,
    work: Path,
    context: Context,
) -> Source:
    folder = stages.get(distil.teacher) or Path(distil.teacher)
    layers = build_graph(student, "features").meta.layers
    check_teacher(folder, student, layers, task, distil, lambda: int(lengths_of(examples).max()))
    hidden, attention = distil.hidden > 0, distil.attention > 0
    if hidden or attention or not distil.cache or context.device != "cpu":
        model = load_model(open_checkpoint(folder), task, seed=context.seed, attention=attention, device=context.device)
        return OnlineTeacher(model, hidden=hidden, attention=attention)
    # Beside the stages' own folders: the next stage often has the same teacher and rows.
    digest = hashlib.sha256(json.dumps(files_of(open_checkpoint(folder))).encode())
    for example in examples:
        digest.update(b"".join(part.tobytes() for part in (*example.ids, *example.types)) + b"\n")
    answers = work.parent / f"answers-{digest.hexdigest()[:16]}"
    if not are_cached(answers, examples):
        artifact = work / "teacher.encast"
        compile(folder, artifact, dtype="f32", task=task.task)
        with engines.load(artifact, threads=context.threads) as engine:
            cache_answers(
                answers, engine, examples, task,
                lambda done, total: context.progress("answers of the teacher", done, total),
            )  # fmt: skip
        shutil.rmtree(artifact, ignore_errors=True)
    return CachedTeacher(answers, examples, task)
