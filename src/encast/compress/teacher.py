"""A teacher's answers: computed with every batch, or once by encast's own engine and kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from encast.archs import build_graph
from encast.compress.batches import Example
from encast.compress.model import Answers, Model
from encast.compress.recipe import Teacher
from encast.compress.state import resumable
from encast.compress.tasks import TrainTask
from encast.engine import Engine
from encast.errors import InputError, ResourceError
from encast.importers import Checkpoint, open_checkpoint
from encast.tasks.session import pack

__all__ = ["CachedTeacher", "OnlineTeacher", "Source", "are_cached", "cache_answers", "check_teacher"]

Progress = Callable[[int, int], None]
Tensor = Any

_PART = 1024
"""Rows of a file, and of what a kill can cost."""

_RUN_TOKENS = 8192
_DIGEST_BYTES = hashlib.sha256().digest_size
_TOKENIZER_PARTS = ("model", "normalizer", "pre_tokenizer", "post_processor")


class Source(Protocol):
    """Where a batch's answers come from. ``rows``: indices of its examples; the rest is what the student is given."""

    def __call__(self, rows: Sequence[int], ids: Tensor, types: Tensor, mask: Tensor) -> Answers: ...


class OnlineTeacher:
    """The teacher as a module, asked with every batch. ``hidden``, ``attention``: those are needed too."""

    def __init__(self, model: Model, *, hidden: bool = False, attention: bool = False) -> None:
        self._model, self._hidden, self._attention = model, hidden, attention
        model.module.eval().requires_grad_(False)

    def __call__(self, rows: Sequence[int], ids: Tensor, types: Tensor, mask: Tensor) -> Answers:
        with torch.no_grad():
            return self._model(ids, types, mask, hidden=self._hidden, attention=self._attention)


class CachedTeacher:
    """Answers that ``cache_answers`` has written."""

    def __init__(self, folder: Path, examples: Sequence[Example], task: TrainTask) -> None:
        self._task = task
        self._answers: list[np.ndarray[Any, Any]] = []
        for begin in range(0, len(examples), _PART):
            part = examples[begin : begin + _PART]
            file = _file(folder, begin)
            counts = [_rows_of(one, task) for one in part]
            try:
                array = _read(file)
            except (OSError, ValueError, EOFError) as error:
                raise ResourceError(f"{file} is damaged ({error}); remove it, and go on with --resume") from None
            if array.ndim != 2 or array.shape[0] != sum(counts):
                raise ResourceError(f"{file}: is not of this training set; remove the folder {folder}")
            self._answers += np.split(array, np.cumsum(counts)[:-1])

    def __call__(self, rows: Sequence[int], ids: Tensor, types: Tensor, mask: Tensor) -> Answers:
        found = [np.asarray(self._answers[row]) for row in rows]
        if self._task.task == "classify":
            found = [one[0] for one in found]
        return Answers(self._task.answers(found, ids.shape[1]).to(ids.device))


def check_teacher(
    folder: Path, student: Checkpoint, layers: int, task: TrainTask, distil: Teacher, longest: Callable[[], int]
) -> None:
    """Raises ``InputError`` unless the checkpoint answers the same task in the same form, from the same token ids, and
    has what else ``distil`` compares. ``layers``: of the student that are trained. ``longest``: the tokens of the
    longest row, asked where a teacher reads fewer than the student.
    """
    teacher = open_checkpoint(folder)
    teacher.need_hugging_face("teaching")
    own, other = (json.loads(one.tokenizer.json) for one in (student, teacher))
    if any(own.get(part) != other.get(part) for part in _TOKENIZER_PARTS):
        raise InputError(
            f"the teacher {folder} has another tokenizer than {student.path}; token ids would mean other words to it: "
            "give a teacher with the same"
        )
    graph = build_graph(teacher, task.task)  # says where the head is missing
    labels = list(task.head().get("id2label", {}).values())
    known = list(graph.meta.labels or ())
    if labels and known and known not in (labels, [f"LABEL_{index}" for index in range(len(labels))]):
        raise InputError(f"the teacher {folder} knows the classes {known}, the data has {labels}")
    width = graph.type_of(graph.outputs[task.output]).shape[1]
    if task.task == "embed":
        mine = build_graph(student, "embed")
        wanted = mine.type_of(mine.outputs["embedding"]).shape[1]
    else:
        wanted = len(labels) or int(task.head()["num_labels"])
    if width != wanted:
        raise InputError(f"the teacher {folder} gives {width} numbers where the model gives {wanted}; give another one")
    meta, own_meta = graph.meta, build_graph(student, "features").meta
    if meta.max_len < task.max_length and (tokens := longest()) > meta.max_len:
        raise InputError(
            f"the teacher {folder} reads {meta.max_len} tokens at most, and a row has {tokens}; give max-length "
            f"{meta.max_len}, or another teacher"
        )
    wants = " and ".join(name for name in ("hidden", "attention") if getattr(distil, name))
    if distil.hidden and meta.hidden != own_meta.hidden:
        raise InputError(
            f"hidden: the model's states are {own_meta.hidden} wide, those of the teacher {folder} {meta.hidden}; give "
            "a teacher as wide, or hidden 0"
        )
    if wants and meta.layers < layers:
        raise InputError(
            f"{wants}: the model has {layers} layers, the teacher {folder} {meta.layers}; give a teacher of as many at "
            f"least, or {wants} 0"
        )
    if distil.attention and meta.heads != own_meta.heads:
        raise InputError(
            f"attention: the model has {own_meta.heads} heads, the teacher {folder} {meta.heads}; give a teacher of as "
            "many, or attention 0"
        )


def are_cached(folder: Path, examples: Sequence[Example]) -> bool:
    """Whether ``cache_answers`` has written all of them."""
    return all(_file(folder, begin).is_file() for begin in range(0, len(examples), _PART))


def cache_answers(
    folder: Path, engine: Engine, examples: Sequence[Example], task: TrainTask, progress: Progress
) -> None:
    """Writes the engine's answers for all examples to ``folder``, but for parts that are there already.

    Raises ``ResourceError`` when the disk is full.
    """
    with resumable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for begin in range(0, len(examples), _PART):
            file = _file(folder, begin)
            if not file.is_file():
                part = examples[begin : begin + _PART]
                temporary = file.with_suffix(".tmp")
                with open(temporary, "wb") as out:
                    np.save(out, found := _answer(engine, part, task))
                    out.write(_digest(found))
                    out.flush()
                    os.fsync(out.fileno())
                os.replace(temporary, file)
            progress(min(begin + _PART, len(examples)), len(examples))


def _file(folder: Path, begin: int) -> Path:
    return folder / f"answers-{begin:09d}.npy"


def _read(file: Path) -> np.ndarray[Any, Any]:
    """What ``cache_answers`` wrote: an array of numpy's format, and behind it the SHA-256 of its numbers."""
    array: np.ndarray[Any, Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    with open(file, "rb") as whole:
        whole.seek(-_DIGEST_BYTES, os.SEEK_END)
        if whole.read() != _digest(array):
            raise ValueError("its SHA-256 is not what was written")
    return array


def _digest(array: np.ndarray[Any, Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array).data).digest()


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
