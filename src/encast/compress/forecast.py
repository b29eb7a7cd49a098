"""What a run will do, how long it will take on this machine, and the disk that it needs: ``--dry-run``."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

import encast.engine as engines
from encast.compile import compile
from encast.compress.batches import Example, epoch_batches, lengths_of, steps_of, tokens_of
from encast.compress.model import Model, load_model, save_checkpoint
from encast.compress.recipe import Distil, Prune, Quantise, Recipe, Training
from encast.compress.scores import SCORES
from encast.compress.stages import Context, examples_of
from encast.compress.state import StateFolder
from encast.compress.surgeon import calibration_tokens, surgery_seconds
from encast.compress.train import Trainer
from encast.errors import ResourceError
from encast.importers import Checkpoint, open_checkpoint
from encast.sparsity import product_weights
from encast.tasks.session import pack

__all__ = ["Forecast", "forecast"]

_TRIALS = 5
_ENGINE_TOKENS = 4096
_STATES = 16
"""Times the weights: three states while one is written, each with the weights, the best ones, and two moments; and
what is evaluated."""


@dataclass(frozen=True)
class Forecast:
    """Of one stage. ``seconds``: None for a stage that compiles, whose time depends on what it finds. ``disk``: bytes
    that stay; ``scratch``: bytes that it needs besides while it runs.
    """

    name: str
    what: str
    steps: int
    tokens: int
    seconds: float | None
    disk: int
    scratch: int


def forecast(source: str, recipe: Recipe, context: Context) -> Iterator[Forecast]:
    """One stage after the other, from some trial steps of each on rows of middling lengths.

    Nothing that stays is written. Raises ``ResourceError`` when the folder for temporary files is full.
    """
    with tempfile.TemporaryDirectory(prefix="encast-") as folder:
        yield from _forecast(source, recipe, context, Path(folder))


def _forecast(source: str, recipe: Recipe, context: Context, scratch: Path) -> Iterator[Forecast]:
    torch.set_num_threads(context.threads)
    checkpoint = open_checkpoint(source)
    rate = _engine_rate(source, context, scratch)
    weights, products = _sizes(checkpoint)
    dev_tokens = 0
    teacher = 0  # bytes of answers, which stay to the end
    answered: set[tuple[Any, ...]] = set()
    for stage, name in zip(recipe.stages, recipe.names(), strict=True):
        if isinstance(stage, Quantise):
            what = f"compile to {stage.dtype}"
            if stage.max_drop is not None:
                what += f" within {stage.max_drop:.2%} of the metric"
            narrowed = {"f32": 0, "bf16": 2 * products, "int8": 3 * products}[stage.dtype]  # embeddings stay f32
            yield Forecast(name, what, 0, 0, None, weights - narrowed, 3 * weights)
            continue
        assert isinstance(stage, Training)
        task, examples = examples_of(stage, checkpoint, context)
        if context.dev is not None and not dev_tokens:
            # The dev set's rows are about as long as those of the training set.
            dev_tokens = tokens_of(examples) * len(context.dev.rows) // len(context.train.rows)
        layers = stage.layers if isinstance(stage, Distil) else None
        plain = load_model(checkpoint, task, seed=0, layers=layers, dropout=stage.dropout, device=context.device)
        if layers is not None:
            checkpoint = _saved(plain, scratch / f"stage-{name}")
            weights, products = _sizes(checkpoint)
        bare = _without_teacher(stage)
        # Rows without labels take as long as others of as many tokens.
        labelled = [one for one in examples if one.target is not None]
        trainer = Trainer(plain, bare, labelled, products=[], state=StateFolder(scratch / "states"), seed=0)
        step = _step_seconds(trainer, labelled, stage.batch_size) * _mean_tokens(examples) / _mean_tokens(labelled)
        steps = steps_of(len(examples), stage.batch_size, stage.epochs, stage.max_steps)
        epochs = steps / steps_of(len(examples), stage.batch_size, 1)
        tokens = round(tokens_of(examples) * epochs)
        seconds = steps * step
        distil = stage.distil if isinstance(stage, (Prune, Distil)) else None
        if distil is not None:
            own = tokens_of(examples)
            if distil.cache and not distil.hidden + distil.attention and context.device == "cpu":
                key = (distil.teacher, task.max_length, task.stride, len(examples))
                if key not in answered:
                    answered.add(key)
                    seconds += own / rate
                    labels = len(task.head().get("id2label", ())) or 2
                    teacher += 4 * labels * (own if task.task in ("tag", "answer") else len(examples))
            else:
                seconds *= 4 / 3  # a forward of the teacher is a third of a step's work
        if isinstance(stage, Prune) and SCORES[stage.score].by_outputs:
            names = product_weights(checkpoint, stage.keep, plain.parameters())
            wanted = min(calibration_tokens(plain, names), tokens_of(examples))
            # Every layer of two models runs once, and twice again in parts.
            seconds += surgery_seconds(plain, names, stage.pattern, wanted) + 5 * wanted / rate
        if context.dev is not None:
            seconds += math.ceil(stage.evaluations * epochs) * dev_tokens / rate
        yield Forecast(name, _what(stage), steps, tokens, seconds, weights, _STATES * weights + teacher)


def _sizes(checkpoint: Checkpoint) -> tuple[int, int]:
    """Bytes of all weights in f32, and how many of them are in products."""
    counts = {name: int(np.prod(checkpoint.tensors.shape(name))) for name in checkpoint.tensors}
    return 4 * sum(counts.values()), sum(counts[name] for name in product_weights(checkpoint))


def _saved(model: Model, folder: Path) -> Checkpoint:
    try:
        save_checkpoint(model, None, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ResourceError(f"{folder} cannot be written ({reason}); make room, or set TMPDIR") from None
    return open_checkpoint(folder)


def _what(stage: Training) -> str:
    what = f"{stage.epochs:g} epoch{'s' * (stage.epochs != 1)} in steps of {stage.batch_size} rows"
    if stage.max_steps is not None:
        what += f", at most {stage.max_steps:,}"
    if isinstance(stage, Prune):
        what += f", to {stage.sparsity:.0%} zeros in blocks of {stage.pattern}"
    distil = stage.distil if isinstance(stage, (Prune, Distil)) else None
    return what if distil is None else f"{what}, teacher {distil.teacher}"


def _without_teacher(stage: Training) -> Training:
    """The fields that a step's time depends on."""
    return Training(**{name: getattr(stage, name) for name in Training.__struct_fields__})


def _mean_tokens(examples: Sequence[Example]) -> float:
    return tokens_of(examples) / len(examples)


def _step_seconds(trainer: Trainer, examples: Sequence[Example], batch_size: int) -> float:
    batches = sorted(epoch_batches(lengths_of(examples), batch_size, [0, 0]), key=lambda rows: examples[rows[0]].tokens)
    chosen = [batches[round(part * (len(batches) - 1))] for part in np.linspace(0.1, 0.9, _TRIALS)]
    trainer.step(chosen[0])
    began = time.perf_counter()
    for rows in chosen:
        trainer.step(rows)
    return (time.perf_counter() - began) / len(chosen)


def _engine_rate(source: str, context: Context, scratch: Path) -> float:
    """Tokens a second of encast's engine in f32."""
    artifact = compile(source, scratch / "model.encast", dtype="f32", task="features")
    with engines.load(artifact, threads=context.threads) as engine:
        batch = pack([[1] * 32] * (_ENGINE_TOKENS // 32), None)
        engine.runnable.run("last_hidden_state", batch)
        began = time.perf_counter()
        engine.runnable.run("last_hidden_state", batch)
        return _ENGINE_TOKENS / (time.perf_counter() - began)
