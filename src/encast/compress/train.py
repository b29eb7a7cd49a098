"""The loop: batches, losses, zeros, evaluations, and states from which it goes on to the same bits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812, its usual name

from encast.compress.attention import AttentionInF32
from encast.compress.batches import Example, epoch_batches, lengths_of, steps_of, tokens_of
from encast.compress.model import Answers, Model, evenly
from encast.compress.precision import choose_precision
from encast.compress.pruner import Lock, Pruner
from encast.compress.recipe import Distil, Prune, Teacher, Training
from encast.compress.schedules import learning_rate
from encast.compress.state import StateFolder
from encast.compress.surgeon import Surgeon
from encast.compress.teacher import Source
from encast.errors import InputError

__all__ = ["Trained", "Trainer"]

Tensor = Any
Evaluate = Callable[[Mapping[str, Tensor]], Mapping[str, float] | None]
Progress = Callable[[int, int], None]
Units = Callable[[Sequence[Example]], int]

SAVE_SECONDS = 120.0
"""Between two states: what a kill costs at most."""


_CALIBRATION_BATCH = 2048
"""Tokens that run together when the inputs of products are looked at."""


@dataclass(frozen=True)
class Trained:
    """``weights``: of the best evaluation, or the last ones. ``record``: what was done, for ``compress.json``."""

    weights: dict[str, Tensor]
    record: dict[str, Any]


@dataclass
class _Facts:
    """Where the loop stands, as plain data."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    precision: str = ""
    best: float | None = None
    best_step: int = 0
    stale: int = 0
    loss: float = 0.0
    losses: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains one stage.

    ``products``: names of the parameters whose zeros the stage keeps; ``pruned``: of those in which it makes some.
    ``evaluate(weights)`` gives the dev set's metrics, of which ``metric`` decides, or None where the answers have none,
    which is worse than any number; without it nothing is evaluated. ``teacher`` is needed where the stage distils. The
    same seed, machine and threads give the same bits, whether or not a run was killed and goes on from ``state``; on a
    GPU as far as torch's kernels allow.
    """

    def __init__(
        self,
        model: Model,
        stage: Training,
        examples: Sequence[Example],
        *,
        products: Sequence[str],
        pruned: Sequence[str] = (),
        state: StateFolder,
        seed: int,
        evaluate: Evaluate | None = None,
        metric: str = "",
        teacher: Source | None = None,
        progress: Progress = lambda done, total: None,
        surgery: Progress = lambda done, total: None,
    ) -> None:
        self._model, self._stage, self._examples = model, stage, examples
        self._state, self._seed = state, seed
        self._evaluate, self._metric, self._progress = evaluate, metric, progress
        self._teacher = teacher
        self._distil = stage.distil if isinstance(stage, (Distil, Prune)) else None
        self._device = model.device
        self._lengths = lengths_of(examples)
        self._steps_per_epoch = steps_of(len(examples), stage.batch_size, 1)
        self.steps = steps_of(len(examples), stage.batch_size, stage.epochs, stage.max_steps)
        weights = {name: model.parameters()[name] for name in products}
        if isinstance(stage, Prune):
            self._zeros: Lock = Pruner(weights, stage, pruned, Surgeon(model, self._calibration, surgery))
        else:
            self._zeros = Lock(weights, hold=stage.lock)
        if stage.freeze_embeddings:
            for name, parameter in model.parameters().items():
                parameter.requires_grad_("embeddings." not in name or parameter.ndim < 2)
        self._optimizer = torch.optim.AdamW(_groups(model, stage.weight_decay), lr=stage.learning_rate, fused=True)
        self._best: dict[str, Tensor] = {}
        width = int(model.module.config.hidden_size)
        self._facts = _Facts(precision=choose_precision(stage.precision, self._device, width))

    def run(self) -> Trained:
        """Trains to the end. Raises ``InputError`` where it diverges, ``ResourceError`` for a full disk."""
        if (saved := self._state.load(_Facts)) is not None:
            self._restore(saved.tensors, saved.facts)
        else:
            torch.manual_seed(self._seed)
        facts = self._facts
        began = saved_at = time.monotonic()
        before = facts.seconds
        epoch, batches = -1, []
        while facts.step < self.steps and not self._stopped():
            if facts.step // self._steps_per_epoch != epoch:
                epoch = facts.step // self._steps_per_epoch
                batches = epoch_batches(self._lengths, self._stage.batch_size, [self._seed, epoch])
            self.step(batches[facts.step % self._steps_per_epoch])
            facts.step += 1
            if self._due():
                self._judge()
            now = time.monotonic()
            facts.seconds = before + now - began
            self._progress(facts.step, self.steps)
            if now - saved_at >= SAVE_SECONDS:
                self._save()
                saved_at = time.monotonic()
        if facts.history and facts.best is None:
            raise InputError(
                f"no evaluation has a {self._metric}: the answers to the dev rows are all equal, or not finite: "
                f"training collapsed; lower learning-rate ({self._stage.learning_rate:g})"
            )
        self._zeros.finish()
        return Trained(self._best or _copy(self._model), self._record())

    # One step

    def step(self, rows: np.ndarray[Any, Any]) -> None:
        """One step of the optimiser on the mean loss of these rows. Raises ``InputError`` where it is not finite."""
        facts, stage = self._facts, self._stage
        rate = stage.learning_rate * learning_rate(stage.decay, facts.step, self.steps, stage.warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._model.module.train()
        total = self._backward(rows)
        self._zeros.before_step()
        if stage.clip:
            torch.nn.utils.clip_grad_norm_(self._model.module.parameters(), stage.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if not np.isfinite(total):
            raise InputError(
                f"the loss of step {facts.step + 1} is {total}: training diverged; lower learning-rate "
                f"({stage.learning_rate:g}), or take precision f32"
            )
        self._zeros.after_step(facts.step, self.steps)
        facts.loss += total
        facts.losses += 1
        facts.tokens += tokens_of([self._examples[row] for row in rows])

    def _backward(self, rows: np.ndarray[Any, Any]) -> float:
        """Adds the gradient of the batch's mean loss, which is returned."""
        total = 0.0
        every = [self._examples[row] for row in rows]
        for part in np.array_split(rows, min(self._stage.accumulate, len(rows))):
            loss = self._loss(part.tolist(), partial(_share, [self._examples[row] for row in part], every))
            loss.backward()
            total += loss.item()
        return total

    def _loss(self, rows: Sequence[int], share: Callable[[Units], float]) -> Tensor:
        """What these rows add to the loss of their batch. ``share``: of what a loss is a mean over, what is theirs: so
        the parts of a batch count as the whole would."""
        ids, types, mask = self._collate(rows)
        distil = self._distil
        hidden, attention = (distil.hidden > 0, distil.attention > 0) if distil is not None else (False, False)
        with self._autocast():
            own = self._model(ids, types, mask, hidden=hidden, attention=attention)
        answers, task = own.answers.float(), self._model.task
        if distil is None:
            return task.loss(answers, self._targets(rows, ids.shape[1])) * share(task.units)
        assert self._teacher is not None
        other = self._teacher(rows, ids, types, mask)
        loss, of_rows = torch.zeros((), device=self._device), share(len)
        if distil.hard:
            weight = distil.hard * (share(task.units) / of_rows)
            loss = loss + weight * task.loss(answers, self._targets(rows, ids.shape[1]))
        if distil.soft:
            weight = distil.soft * (share(task.soft_units) / of_rows)
            loss = loss + weight * task.soft_loss(answers, other.answers.float(), mask, distil.temperature)
        if hidden or attention:
            loss = loss + _inner_loss(distil, own, other, mask) * (share(tokens_of) / of_rows)
        return loss * of_rows

    def _targets(self, rows: Sequence[int], length: int) -> Tensor:
        return self._model.task.targets([self._examples[row].target for row in rows], length).to(self._device)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        if self._facts.precision != "bf16":
            yield
            return
        attention = AttentionInF32() if self._device.type == "cpu" else nullcontext()
        with torch.autocast(self._device.type, dtype=torch.bfloat16), attention:
            yield

    def _collate(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """``i64[n, length]`` ids and types, ``bool[n, length]``: all sequences of the rows, padded to the longest."""
        sequences = [
            pair for row in rows for pair in zip(self._examples[row].ids, self._examples[row].types, strict=True)
        ]
        length = max(len(ids) for ids, _ in sequences)
        out = np.full((2, len(sequences), length), self._model.pad, np.int64)
        out[1] = 0
        mask = np.zeros((len(sequences), length), bool)
        for index, (ids, types) in enumerate(sequences):
            out[0, index, : len(ids)], out[1, index, : len(ids)], mask[index, : len(ids)] = ids, types, True
        ids, types = torch.from_numpy(out).to(self._device)
        return ids, types, torch.from_numpy(mask).to(self._device)

    def _calibration(self, wanted: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Batches of like lengths, of random rows with about ``wanted`` tokens in all."""
        order = np.random.default_rng([self._seed, 1 << 32]).permutation(len(self._examples))
        tokens = np.cumsum([self._examples[row].tokens for row in order])
        rows = order[: 1 + int(np.searchsorted(tokens, wanted))]
        rows = rows[np.argsort(self._lengths[rows], kind="stable")]
        batches: list[list[int]] = []
        for row in rows.tolist():
            if not batches or (len(batches[-1]) + 1) * self._lengths[row] > _CALIBRATION_BATCH:
                batches.append([])
            batches[-1].append(row)
        return [self._collate(batch) for batch in batches]

    # Judging

    def _due(self) -> bool:
        if self._evaluate is None or not self._stage.evaluations:
            return False
        step, interval = self._facts.step, self._steps_per_epoch / self._stage.evaluations
        passed = math.floor(step / interval) > math.floor((step - 1) / interval)
        return (passed or step == self.steps) and self._zeros.done(step - 1, self.steps)

    def _judge(self) -> None:
        facts = self._facts
        assert self._evaluate is not None
        found = self._evaluate(self._model.module.state_dict())
        metrics = {self._metric: None} if found is None else {name: float(value) for name, value in found.items()}
        if self._metric not in metrics:
            raise InputError(f"metric is {self._metric!r}; this data set has {', '.join(metrics)}")
        value = metrics[self._metric]
        mean = facts.loss / facts.losses if facts.losses else None
        facts.history.append({"step": facts.step, "loss": mean, **metrics})
        facts.loss, facts.losses = 0.0, 0
        if value is not None and (facts.best is None or value > facts.best):
            facts.best, facts.best_step, facts.stale = value, facts.step, 0
            self._best = _copy(self._model)
        else:
            facts.stale += 1

    def _stopped(self) -> bool:
        return bool(self._stage.patience) and self._facts.stale >= self._stage.patience

    def _record(self) -> dict[str, Any]:
        facts = self._facts
        return {
            "steps": facts.step,
            "rows": len(self._examples),
            "tokens": facts.tokens,
            "seconds": round(facts.seconds, 1),
            "precision": facts.precision,
            "metric": self._metric or None,
            "best": facts.best,
            "best_step": facts.best_step or None,
            "history": facts.history,
        }

    # States

    def _save(self) -> None:
        tensors = {f"model.{name}": value for name, value in self._model.module.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self._best.items()}
        tensors |= {f"zeros.{name}": value for name, value in self._zeros.state().items()}
        for index, values in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
        tensors["random"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["random_cuda"] = torch.cuda.get_rng_state(self._device)
        self._state.save(self._facts.step, tensors, vars(self._facts))

    def _restore(self, tensors: Mapping[str, Tensor], facts: _Facts) -> None:
        self._facts = facts
        groups: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            group, _, rest = name.partition(".")
            groups.setdefault(group, {})[rest] = value
        self._model.module.load_state_dict(groups["model"])
        self._best = groups.get("best", {})
        self._zeros.restore(groups.get("zeros", {}))
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in groups.get("optimizer", {}).items():
            index, _, rest = name.partition(".")
            state.setdefault(int(index), {})[rest] = value
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        torch.set_rng_state(tensors["random"])
        if "random_cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random_cuda"], self._device)


def _share(part: Sequence[Example], whole: Sequence[Example], units: Units) -> float:
    return units(part) / max(units(whole), 1)


def _copy(model: Model) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in model.module.state_dict().items()}


def _groups(model: Model, decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases, norms and what else is a vector does not."""
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]


def _inner_loss(distil: Teacher, own: Answers, other: Answers, mask: Tensor) -> Tensor:
    """Of hidden states, the embeddings' among them, and of attention, over tokens that are no padding."""
    loss = torch.zeros((), device=mask.device)
    if distil.hidden:
        pairs = zip(own.hidden, _matching(other.hidden, len(own.hidden)), strict=True)
        parts = [F.mse_loss(a.float()[mask], b.float()[mask]) for a, b in pairs]
        loss = loss + distil.hidden * torch.stack(parts).mean()
    if distil.attention:
        if not own.attention or not other.attention:
            raise InputError(
                "attention: transformers gives no such weights of the model, or of its teacher; give attention 0"
            )
        # The last layer of each group of the teacher's is the one that the student's stands for.
        last = _matching((other.attention[0], *other.attention), len(own.attention) + 1)[1:]
        rows = mask[:, None, :].expand(-1, own.attention[0].shape[1], -1)
        parts = [
            (b[rows] * (b[rows].clamp_min(1e-9).log() - a.float()[rows].clamp_min(1e-9).log())).sum(-1).mean()
            for a, b in zip(own.attention, last, strict=True)
        ]
        loss = loss + distil.attention * torch.stack(parts).mean()
    return loss


def _matching(values: Sequence[Tensor], count: int) -> list[Tensor]:
    return [values[place] for place in evenly(len(values), count)]
