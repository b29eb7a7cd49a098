"""Whether an artifact answers as the graph does that it was made of: both run, on the same random tokens.

The reader of ONNX files knows a graph by what it computes, that of SavedModels by the names of its variables and a
config; this is the proof by another program. An error of theirs (other heads, another GELU) may be smaller than what
int8 and bf16 round off, so the file is compared with an artifact in f32, and that with the one that was asked for.
Which output of the file is which of the artifact is not looked up but found: the one of the right shape that agrees
best.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import encast.artifact as artifact
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch
from encast.errors import UnsupportedModelError
from encast.ir.meta import HEADS
from encast.tasks.classify import problem_type, sigmoid
from encast.verify.apart import NotComparedError, run_apart
from encast.verify.original import Original

__all__ = ["LIMITS", "verify"]

Array = np.ndarray[Any, Any]

LENGTHS = (127, 3, 55, 8, 21)
"""Tokens of the sequences, as far as the model takes them: padded to the longest they show what a mask does."""
_LONG = 1024
"""Of one sequence more for a model that takes more than 512: a file may go wrong where positions or windows end."""
_FEW_LENGTHS = (21, 3, 8)
_MOST_NUMBERS = 1 << 24
"""Of an output: the sequences are ``_FEW_LENGTHS`` where a vocabulary is so large that there would be more."""

LIMITS: dict[str, float | None] = {"f32": 3e-5, "f16": 0.1, "dynamic": 0.3, "fixed": None}
"""The largest difference, as a share of the answers, that is no error, by the file's own arithmetic.
Two runtimes in f32 differ by 2e-7 to 2e-6, and the two GELUs make 6e-5 and more. Weights may be such that rounding
alone makes more than 3e-5: see ``_noise``. Files in f16 were found to differ by
0.0002 to 0.03, dynamic ones by 0.02 to 0.2. Fixed ranges are those of the texts that they were calibrated with: of
random tokens such a file makes what it likes."""

_MOST_NOISE, _NOISE_TIMES = 1e-3, 8.0
"""A file in f32 may differ by so many times the noise of its model, but not by more than the former.
Runtimes were found to differ by 1.0 to 2.8 times it."""

_SEED = 28
_LEAST = float(np.finfo(np.float32).tiny)
"""A probability below it has no logarithm in f32."""
_SUMS = 0.01
"""How far the sum of probabilities may be from 1."""
_LOGITS = (-12.0, 6.0)
"""Between these a probability in f32 tells the logit to 3e-5: above, the next number below 1 is that far away. Below,
some runtimes' sigmoid rounds as numbers around a half do."""


def verify(
    folder: Path, original: Original, wide: Path | None = None, shake: Callable[[], Path | None] | None = None
) -> dict[str, Any]:
    """Runs the artifact in ``folder`` and the ``original``, and returns what the card says of it.

    ``wide``: an f32 artifact of the same graph, where that in ``folder`` is none: the original is compared with it.
    ``shake`` makes an f32 artifact with all weights moved by a last bit, and is called where a file in f32 differs by
    more than most do: it shows how much of that is the rounding of these weights. None: there was no room for it.

    ``relative`` is the norm of the difference over the norm of the original's answers, ``limit`` what it may be (None:
    anything), ``largest`` the largest difference of two numbers, ``cosine`` the lowest of a row, for the output that is
    the task's, or for the last hidden state where a sentence embedding is made of that and the file ends there.
    ``narrow`` has the same for the artifact in ``folder`` and the task's output of ``wide``; None without ``wide``.

    Raises ``UnsupportedModelError`` where the answers differ by more or are not finite, and ``NotComparedError`` where
    the runtime cannot run the original within a minute and some gigabytes or none of its outputs is one of the
    artifact's.
    """
    opened = artifact.open(folder if wide is None else wide)
    ids = _sequences(opened, original.takes.positions, padded=original.takes.masked)
    types = [[int(token >= len(one) // 2) for token in range(len(one))] for one in ids]
    batch = Batch.of(ids, types if opened.graph.meta.type_vocab > 1 else None)
    answers = run_apart(original, ids, types)
    theirs = answers.outputs
    limit = LIMITS[original.arithmetic]

    def rank(pair: _Pair) -> tuple[bool, bool, float]:
        """Logits that agree tell more than probabilities that do."""
        agrees = limit is None or pair.share <= limit
        return not agrees, agrees and "(logits)" in pair.output, pair.share

    answered = _answers(opened, batch)
    if any(not np.isfinite(array).all() for array in answered.values()):
        raise UnsupportedModelError(
            f"{original.source}: the artifact's answers to random tokens are not all finite; look for NaN and infinity "
            "in the file's weights"
        )
    pairs = [
        min(found, key=rank)
        for name, own in answered.items()
        if (found := list(_pairs(opened, name, own, theirs, batch)))
    ]
    if not pairs:
        names = " or ".join(answered)
        raise NotComparedError(
            f"{original.label}: none of its outputs {sorted(theirs)} has the shape of {names} of the artifact; compile "
            "without verify, or for the task that the file is for"
        )
    best = pairs[0]
    if best.output == "embedding" and not (limit is not None and best.share <= limit):
        best = min(pairs, key=lambda pair: pair.share)  # a pooler's output has the shape of an embedding, and is none
    if limit is None and not np.isfinite(best.share):
        raise NotComparedError(
            f"{original.label}: {original.runtime.name} answers random tokens with numbers that are not finite; "
            "compile without verify"
        )
    if shake is not None and original.arithmetic == "f32" and limit is not None and limit < best.share <= _MOST_NOISE:
        moved = shake()
        if moved is not None:
            limit = max(limit, min(_NOISE_TIMES * _noise(best, artifact.open(moved), theirs, batch), _MOST_NOISE))
    if limit is not None and not best.share <= limit:
        raise UnsupportedModelError(
            f"{original.source}: its output {best.of!r} by {original.runtime.name} and {best.output} of the artifact "
            f"differ by {best.share:.2g} of their size, where {limit:g} is allowed; {original.runtime.advice}"
        )
    return {
        "runtime": f"{original.runtime.module} {answers.version}",
        "tokens": batch.tokens,
        "output": best.output,
        "of": best.of,
        "limit": None if limit is None else _short(limit),
        **_distances(best),
        "narrow": None if wide is None else _narrow(answered, artifact.open(folder), original, batch),
    }


def _narrow(wide: dict[str, Array], opened: artifact.Artifact, original: Original, batch: Batch) -> dict[str, Any]:
    """How far the task's own output of ``opened`` is from the same in f32."""
    name, dtype = next(iter(wide)), opened.card["dtype"]
    own = _answers(opened, batch)[name]
    if not np.isfinite(own).all():
        raise UnsupportedModelError(
            f"{original.source}: compiled to {dtype} its answers to random tokens are not all finite; compile to "
            "another dtype"
        )
    return {"dtype": dtype, "output": name} | _distances(_Pair(name, own, name, wide[name]))


def _noise(best: _Pair, shaken: artifact.Artifact, theirs: dict[str, Array], batch: Batch) -> float:
    """How far a last bit of every weight moves what is compared in ``best``, as a share of it; 0 where that is not
    finite."""
    moved = (
        pair.own
        for name, own in _answers(shaken, batch).items()
        for pair in _pairs(shaken, name, own, theirs, batch)
        if (pair.output, pair.of) == (best.output, best.of)
    )
    share = _Pair(best.output, next(moved, best.own), best.of, best.own).share
    return share if np.isfinite(share) else 0.0


def _distances(pair: _Pair) -> dict[str, float]:
    return {
        "relative": _short(pair.share),
        "largest": _short(float(np.abs(pair.own - pair.other).max())),
        "cosine": round(float(_cosines(pair.own, pair.other).min()), 6),
    }


def _sequences(opened: artifact.Artifact, most: int | None = None, *, padded: bool = True) -> list[list[int]]:
    """Random ids, none of a special token: a model may take its padding id for padding.

    ``most``: the length of texts that the file fixes, None for any; without a mask shorter ones cannot be ``padded``.
    """
    meta, tokens = opened.graph.meta, json.loads(opened.tokenizer_json)
    special = {one["id"] for one in tokens.get("added_tokens", []) if one.get("special")}
    plain = np.setdiff1d(np.arange(meta.vocab), np.array(sorted(special), np.int64))
    if not plain.size:
        raise NotComparedError("every token of the model is a special one; compile without verify")
    widest = max(int(opened.graph.type_of(value).shape[1]) for value in opened.graph.outputs.values())
    lengths: tuple[int, ...] = LENGTHS if len(LENGTHS) * max(LENGTHS) * widest <= _MOST_NUMBERS else _FEW_LENGTHS
    random = np.random.default_rng(_SEED)
    if meta.max_len > 512 and (len(lengths) + 1) * min(_LONG, meta.max_len) * widest <= _MOST_NUMBERS:
        lengths = (*lengths, _LONG)
    if most is not None:
        if most < 1:
            raise NotComparedError(f"the file takes texts of {most} tokens; compile without verify")
        if not padded and most > meta.max_len:
            raise NotComparedError(
                f"the file takes texts of {most} tokens alone, the artifact {meta.max_len}; compile without verify"
            )
        lengths = tuple(min(length, most) for length in lengths) if padded else (most,) * len(_FEW_LENGTHS)
    return [random.choice(plain, min(length, meta.max_len)).tolist() for length in lengths]


def _outputs(opened: artifact.Artifact) -> list[tuple[str, str]]:
    """Names and symbols of rows of what is compared: the task's own, and what a sentence embedding is made of."""
    head = HEADS[opened.graph.meta.task]
    if head is None:
        return [("last_hidden_state", "tokens")]
    return [(head[0], head[1]), *([("last_hidden_state", "tokens")] if head[0] == "embedding" else [])]


def _answers(opened: artifact.Artifact, batch: Batch) -> dict[str, Array]:
    """By the names of ``_outputs``, in their order."""
    every = np.arange(batch.tokens, dtype=np.int32)
    runnable = CpuRunnable(opened, instances=1)
    try:
        return {
            name: runnable.run(name, batch, every if rows == "selected" else None) for name, rows in _outputs(opened)
        }
    finally:
        runnable.close()


@dataclass(frozen=True)
class _Pair:
    """An output of the artifact, and what the file says of it; ``share``: of the norm of the latter."""

    output: str
    own: Array
    of: str
    other: Array

    @cached_property
    def share(self) -> float:
        share = float(np.linalg.norm(self.own - self.other) / max(float(np.linalg.norm(self.other)), 1e-30))
        return share if np.isfinite(share) else float("inf")


def _pairs(opened: artifact.Artifact, name: str, own: Array, theirs: dict[str, Array], batch: Batch) -> Iterator[_Pair]:
    """Every output of the file that has the shape.

    A file may end before the last step of the artifact: before the normalisation that modules.json asks for, before the
    largest logit of a word, and with start and end of an answer apart. It may end behind it, with probabilities.
    """
    flat = [other for other, array in theirs.items() if array.shape == own.shape[:1]]
    if len(flat) == 2 and own.shape[1:] == (2,):
        named = sorted(flat, key=lambda one: "end" in one)
        told = ["start" in one for one in named] == [True, False]
        for pair in (named,) if told else (flat, flat[::-1]):
            yield _Pair(name, own, "+".join(pair), np.stack([theirs[other] for other in pair], axis=1))
    for other, array in theirs.items():
        if array.shape == own.shape:
            yield _Pair(name, own, other, array)
            if name == "logits":
                yield from _probabilities(opened, own, other, array)
            if name == "embedding":
                norms = np.linalg.norm(array, axis=1, keepdims=True)
                yield _Pair(name, own, other, array / np.maximum(norms, 1e-12))
        if array.shape == own.shape[:1] and own.shape[1:] == (1,):
            yield _Pair(name, own, other, array[:, None])  # a regression's number
        if name == "sparse_embedding" and array.shape == (batch.tokens, *own.shape[1:]):
            yield _Pair(name, own, other, np.maximum(np.maximum.reduceat(array, batch.cu_seqlens[:-1]), 0))


def _probabilities(opened: artifact.Artifact, own: Array, other: str, array: Array) -> Iterator[_Pair]:
    """Where ``array`` is what the artifact's tasks make of logits, or its logarithm.

    Logarithms and logits are compared, whose errors are those of logits: probabilities near 0 and 1 would hide them.
    """
    kind = problem_type(opened.graph.meta, own.shape[1])
    if kind == "multi_label" and np.all((array >= 0) & (array <= 1)):
        shares = np.clip(array.astype(np.float64), *sigmoid(np.array(_LOGITS)))
        yield _Pair("clip(logits)", np.clip(own, *_LOGITS), f"logit({other})", np.log(shares / (1 - shares)))
    if kind != "single_label" or opened.graph.meta.task == "answer":
        return
    shifted = own - own.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    if np.all(array >= 0) and np.all(np.abs(array.sum(axis=1) - 1) < _SUMS):
        least = np.float32(np.log(_LEAST))
        yield _Pair("log_softmax(logits)", np.maximum(logs, least), f"log({other})", np.log(np.maximum(array, _LEAST)))
    elif np.all(array <= _SUMS) and np.all(np.abs(np.exp(array).sum(axis=1) - 1) < _SUMS):
        yield _Pair("log_softmax(logits)", logs, other, array)


def _cosines(own: Array, other: Array) -> Array:
    norms = np.linalg.norm(own, axis=1) * np.linalg.norm(other, axis=1)
    return np.asarray((own * other).sum(axis=1) / np.maximum(norms, 1e-30))


def _short(value: float) -> float:
    return float(f"{value:.3g}")
