"""Shadow accuracy: a sample of the runs is also given to a reference artifact, off the hot path, and compared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from encast.artifact import Artifact
from encast.errors import EncastError, InputError
from encast.serve.metrics import Counts
from encast.serve.models import Runner, Timing
from encast.tasks.session import F32, Run

__all__ = ["ClosingRunner", "ShadowRunner", "compare", "parse_shadow", "shadowed"]

_LATER_S = 0.02
"""The reference is asked so much later than the model has answered: the answer goes out first."""

_MOST_WAITING = 8
"""Comparisons of one front; what is chosen beyond is dropped."""

_PATIENCE_S = 30.0


def parse_shadow(text: str) -> tuple[str, float]:
    """``REF.encast:1%`` as the artifact and the share of runs, 0 to 1. Raises ``InputError``."""
    artifact, _, percent = text.rpartition(":")
    try:
        share = float(percent.removesuffix("%")) / 100 if percent.endswith("%") else -1.0
    except ValueError:
        share = -1.0
    if not artifact or not 0 < share <= 1:
        raise InputError(f"shadow {text!r}: give an artifact and a share above 0 % and up to 100 %: f32.encast:1%")
    return artifact, share


def shadowed(models: Mapping[str, Artifact], reference: Artifact) -> str:
    """The name of the model that the reference can be compared with: the first of the same task, labels, tokenizer and
    size of its answers. Raises ``InputError`` that says of each model why not.
    """
    reasons = []
    for name, model in models.items():
        reason = _difference(model, reference)
        if reason is None:
            return name
        reasons.append(f"{name} has {reason}")
    raise InputError(
        f"{reference.path} cannot be the shadow of a served model: {'; '.join(reasons)}; compile it from the same "
        "checkpoint"
    )


def _difference(model: Artifact, reference: Artifact) -> str | None:
    ours, theirs = model.graph, reference.graph
    if ours.meta.task != theirs.meta.task:
        return f"the task {ours.meta.task}, not {theirs.meta.task}"
    if ours.meta.labels != theirs.meta.labels:
        return "other labels"
    cut = model.card.get("tokenizer"), reference.card.get("tokenizer")
    if model.tokenizer_json != reference.tokenizer_json or cut[0] != cut[1] or model.max_length != reference.max_length:
        return "another tokenizer"
    shapes = [{name: graph.type_of(value).shape for name, value in graph.outputs.items()} for graph in (ours, theirs)]
    return "answers of another size" if shapes[0] != shapes[1] else None


class ClosingRunner(Runner, Protocol):
    """A ``Runner`` over a connection."""

    async def close(self) -> None:
        """Refuses what has no answer yet, and disconnects."""
        ...


class ShadowRunner:
    """Answers as ``main`` does; ``share`` of the runs are then asked of ``reference`` too, and the drift is counted.

    The runs are chosen by their number, so no client has a say in it. ``model`` and ``task``: of ``main``.
    """

    def __init__(
        self, main: ClosingRunner, reference: ClosingRunner, share: float, counts: Counts, *, model: str, task: str
    ) -> None:
        self._main, self._reference, self._share, self._counts = main, reference, share, counts
        self._model, self._task = model, task
        self._owed = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, run: Run, *, arrived: float, deadline: float, before: int, size: int, timing: Timing) -> F32:
        """See ``Runner.run``."""
        rows = await self._main.run(run, arrived=arrived, deadline=deadline, before=before, size=size, timing=timing)
        self._owed += self._share
        if self._owed >= 1:
            self._owed -= 1
            if len(self._tasks) >= _MOST_WAITING:
                self._counts.count("shadow_dropped_total", self._model)
            else:
                task = asyncio.get_running_loop().create_task(self._follow(run, rows))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return rows

    @property
    def backlog_s(self) -> float:
        """Of the main runner."""
        return self._main.backlog_s

    def full(self, size: int) -> bool:
        """Of the main runner."""
        return self._main.full(size)

    async def close(self) -> None:
        """Closes both, and gives up comparisons under way."""
        for task in list(self._tasks):
            task.cancel()
        await self._main.close()
        await self._reference.close()

    async def _follow(self, run: Run, rows: F32) -> None:
        await asyncio.sleep(_LATER_S)
        now = time.monotonic()
        try:
            expected = await self._reference.run(
                run, arrived=now, deadline=now + _PATIENCE_S, before=0, size=0, timing=Timing()
            )
        except EncastError:
            self._counts.count("shadow_dropped_total", self._model)
            return
        if not (np.isfinite(rows).all() and np.isfinite(expected).all()):  # one NaN would stay in the sums for ever
            self._counts.count("shadow_dropped_total", self._model)
            return
        measure, drifts, changed = await asyncio.to_thread(compare, run.output, self._task, rows, expected)
        for drift in drifts:
            self._counts.observe("shadow_drift", drift, self._model, measure)
        self._counts.count("shadow_compared_total", self._model)
        self._counts.count("shadow_labels_changed_total", self._model, by=changed)


def compare(output: str, task: str, rows: F32, expected: F32) -> tuple[str, list[float], int]:
    """How far two answers of one run are apart, ``f32[n, m]`` each: the measure, its value for each row, and how many
    rows have their largest logit elsewhere (0 for a question's answer, whose rows are tokens with a start and an end).

    The measure is "cosine_distance" of embeddings and hidden states, else "logit_difference", the largest of a row.
    """
    a, b = rows.astype(np.float64), expected.astype(np.float64)
    if output == "logits":
        changed = 0 if task == "answer" else int(np.count_nonzero(a.argmax(1) != b.argmax(1)))
        return "logit_difference", np.abs(a - b).max(1).tolist(), changed
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        distances = 1 - np.einsum("nm,nm->n", a, b) / norms
    return "cosine_distance", np.where(norms > 0, np.maximum(distances, 0), 1.0).tolist(), 0
