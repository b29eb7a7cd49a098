"""Compiles candidates, scores them and times them; keeps the best one at its place."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import encast.artifact as artifacts
import encast.engine as engines
from encast.artifact.write import version
from encast.budget.plans import F32, INT8, Plan, alone, narrow_layers
from encast.budget.race import race, ratio
from encast.budget.sample import Recorder, Sample, distance
from encast.compile import compile
from encast.data.datasets import Dataset
from encast.engine import Engine
from encast.errors import EncastError
from encast.quant import QuantSpec
from encast.scoring import Scored, score

__all__ = ["Speeds", "Workshop"]

Speeds = tuple[dict[str, float], dict[str, float]]

_DISTANCE_TOKENS = 8192
"""Of the texts on which a layer is measured. Some hundred texts know a mean square to a tenth, and layers that matter
differ by more."""
_RACE_TOKENS = 2048
"""Of the texts that are timed: two chunks of a forward, where throughput has settled."""


class Workshop:
    """``scratch`` is a folder beside ``out``, in which f32, one candidate and one measured layer lie at a time."""

    def __init__(
        self,
        source: str | os.PathLike[str],
        data: Dataset,
        out: Path,
        scratch: Path,
        *,
        files: dict[str, str],
        threads: int | None = None,
        **options: Any,
    ) -> None:
        """``files``: the checkpoint's, with their SHA-256; ``threads``: default: the usable cores; ``options`` of
        ``compile``, with ``task`` and ``exact``."""
        self._source, self._data, self._out, self._scratch = source, data, out, scratch
        self._files, self._threads, self._options = files, threads, options
        self._made: Plan | None = None

    # Accuracy

    def score(self, plan: Plan) -> Scored:
        """Of all rows; raises ``EncastError``."""
        if plan == F32:
            return self._reference[0]
        with self._load(self._candidate(plan, "never")) as engine:
            return score(engine, self._data)

    def layers(self) -> list[tuple[str, str]]:
        """What int8 makes narrow: see ``narrow_layers``."""
        return narrow_layers(artifacts.open(self._candidate(INT8, "never")).graph)

    def distance(self, layer: str) -> float:
        """Of the outputs with this layer alone in int8 from those of f32; raises ``EncastError``.

        Alone, and not the only wide one among narrow ones: what it loses is then measured against nothing rather than
        against the noise of all others, and two layers that each spoil the answers are both found out.
        """
        path = self._compile(alone(layer), "layer", "never")
        try:
            with self._load(path) as engine:
                narrow = self._sample.run(engine.runnable)
        finally:
            shutil.rmtree(path, ignore_errors=True)
        return distance(self._sample.output, self._wide, narrow)

    @cached_property
    def _f32(self) -> Path:
        return self._compile(F32.spec, "f32", "never")

    @cached_property
    def _reference(self) -> tuple[Scored, Recorder]:
        with self._load(self._f32) as engine:
            recorder = Recorder(engine.runnable)
            return score(Engine(engine.session, recorder), self._data), recorder

    @cached_property
    def _sample(self) -> Sample:
        return self._reference[1].sample(_DISTANCE_TOKENS)

    @cached_property
    def _wide(self) -> Any:
        with self._load(self._f32) as engine:
            return self._sample.run(engine.runnable)

    @cached_property
    def _race_sample(self) -> Sample:
        return self._reference[1].sample(_RACE_TOKENS)

    # Speed

    def race(self, plan: Plan, best: tuple[Plan, str], variants: Sequence[str]) -> Speeds:
        """How many times as fast as f32, and as the best, each variant (by ``sparse``) of the candidate is.

        The best is at ``out`` (``keep``), unless it is f32. Raises ``EncastError``.
        """
        paths = [self._f32] if best[0] == F32 else [self._f32, self._out]
        before = len(paths)
        candidates = [self._candidate(plan, sparse) for sparse in variants]
        times = race([*paths, *candidates], self._race_sample, self._threads)
        own = dict(zip(variants, times[before:], strict=True))
        to_f32, to_best = ({name: ratio(base, own[name]) for name in own} for base in (times[0], times[before - 1]))
        return to_f32, to_best

    # Artifacts

    def _load(self, path: Path) -> Engine:
        return engines.load(path, threads=self._threads)

    def keep(self, plan: Plan, sparse: str) -> Path:
        """Sees to it that ``out`` holds that candidate; compiles it unless it is there already."""
        if not self._is_kept(plan, sparse):
            artifacts.replace(self._f32 if plan == F32 else self._candidate(plan, sparse), self._out)
            if plan == F32:
                del self._f32
        return self._out

    def _is_kept(self, plan: Plan, sparse: str) -> bool:
        try:
            opened = artifacts.open(self._out)
            opened.verify()
        except EncastError:
            return False
        card, options = opened.card, self._options
        return (
            card.get("encast_version") == version()
            and card.get("quant") == plan.spec.to_json()
            and card.get("sparse") == sparse
            and card.get("math") == ("exact" if options["exact"] else "fast")
            and (source := card.get("source") or {}).get("files") == self._files
            and source.get("adapter") == options.get("adapter")
            and card.get("task") == options["task"]
        )

    def _candidate(self, plan: Plan, sparse: str) -> Path:
        """The artifact of a candidate; those of other candidates are removed."""
        path = self._scratch / f"{sparse}.encast"
        if self._made != plan:
            for name in ("never", "always"):
                shutil.rmtree(self._scratch / f"{name}.encast", ignore_errors=True)
            self._made = plan
        return path if path.exists() else self._compile(plan.spec, sparse, sparse)

    def _compile(self, spec: QuantSpec, name: str, sparse: str) -> Path:
        path = self._scratch / f"{name}.encast"
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
        return compile(self._source, path, dtype=spec.dtype, quant=spec, sparse=sparse, verify=False, **self._options)
