"""A teacher's answers: computed with every batch, or once by encast's own engine and kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from encast.compress.batches import Example
from encast.compress.model import Answers, Model
from encast.compress.tasks import TrainTask
from encast.engine import Engine
from encast.errors import InputError, ResourceError
from encast.tasks.session import pack

__all__ = ["CachedTeacher", "OnlineTeacher", "Source", "cache_answers"]

Progress = Callable[[int, int], None]
Tensor = Any

_PART = 1024
"""Rows of a file, and of what a kill can cost."""

_RUN_TOKENS = 8192


class Source(Protocol):
    """Where a batch's answers come from. ``rows``: indices of its examples; the rest is what the student is given."""

    def __call__(self, rows: Sequence[int], ids: Tensor, types: Tensor, mask: Tensor) -> Answers: ...


class OnlineTeacher:
    """The teacher as a module, asked with every batch. ``inside``: its hidden states and attention are needed too."""

    def __init__(self, model: Model, *, inside: bool) -> None:
        self._model, self._inside = model, inside
        model.module.eval().requires_grad_(False)

    def __call__(self, rows: Sequence[int], ids: Tensor, types: Tensor, mask: Tensor) -> Answers:
        with torch.no_grad():
            return self._model(ids, types, mask, inside=self._inside)


class CachedTeacher:
    """Answers that ``cache_answers`` has written."""

    def __init__(self, folder: Path, examples: Sequence[Example], task: TrainTask) -> None:
        self._task = task
        self._answers: list[np.ndarray[Any, Any]] = []
        for begin in range(0, len(examples), _PART):
            part = examples[begin : begin + _PART]
            file = _file(folder, begin)
            counts = [_rows_of(one, task) for one in part]
            array = np.load(file, mmap_mode="r", allow_pickle=False)
            if array.ndim != 2 or array.shape[0] != sum(counts):
                raise ResourceError(f"{file}: is not of this training set; remove the folder {folder}")
            self._answers += np.split(array, np.cumsum(counts)[:-1])

    def __call__(self, rows: Sequence[int], ids: Tensor, types: Tensor, mask: Tensor) -> Answers:
        found = [np.asarray(self._answers[row]) for row in rows]
        if self._task.task == "classify":
            found = [one[0] for one in found]
        return Answers(self._task.answers(found, ids.shape[1]).to(ids.device))


def cache_answers(
    folder: Path, engine: Engine, examples: Sequence[Example], task: TrainTask, progress: Progress
) -> None:
    """Writes the engine's answers for all examples to ``folder``, but for parts that are there already.

    Raises ``InputError`` for a teacher of another task, ``ResourceError`` when the disk is full.
    """
    if engine.task != task.task:
        raise InputError(f"the teacher is a model for {engine.task!r}, {task.task!r} is to be learned")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for begin in range(0, len(examples), _PART):
            file = _file(folder, begin)
            if not file.is_file():
                part = examples[begin : begin + _PART]
                temporary = file.with_suffix(".tmp")
                with open(temporary, "wb") as out:
                    np.save(out, _answer(engine, part, task))
                    out.flush()
                    os.fsync(out.fileno())
                os.replace(temporary, file)
            progress(min(begin + _PART, len(examples)), len(examples))
    except OSError as error:
        raise ResourceError(f"{folder}: the teacher's answers cannot be kept ({error.strerror}); make room") from None


def _file(folder: Path, begin: int) -> Path:
    return folder / f"answers-{begin:09d}.npy"


def _rows_of(example: Example, task: TrainTask) -> int:
    return example.tokens if task.task in ("tag", "answer") else len(example.ids)


def _answer(engine: Engine, examples: Sequence[Example], task: TrainTask) -> np.ndarray[Any, Any]:
    found: list[np.ndarray[Any, Any]] = []
    waiting: list[Example] = []
    tokens = 0
    for example in [*examples, None]:
        if waiting and (example is None or tokens + example.tokens > _RUN_TOKENS):
            ids = [one.tolist() for row in waiting for one in row.ids]
            types = [one.tolist() for row in waiting for one in row.types] if engine.meta.type_vocab > 1 else None
            found.append(engine.runnable.run(task.output, pack(ids, types)))
            waiting, tokens = [], 0
        if example is not None:
            waiting.append(example)
            tokens += example.tokens
    return np.concatenate(found)
