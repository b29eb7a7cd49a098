"""The journal of a search for a budget: every number that a decision rests on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import encast.journal as journals
from encast.budget.plans import F32, Plan
from encast.errors import InputError

__all__ = ["Distance", "Journal", "Race", "Scores"]


@dataclass(frozen=True)
class Scores:
    """All metrics of a candidate, in points; None where it ``failed``."""

    metrics: Mapping[str, float] | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Distance:
    """Of the outputs with one layer in int8; None where it ``failed``."""

    value: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Race:
    """By ``sparse``: how many times as fast as f32, and as the best before; empty where it ``failed``."""

    to_f32: Mapping[str, float]
    to_best: Mapping[str, float]
    failed: str | None = None


class Journal(journals.Journal):
    """What was measured, by candidate and by layer. A search asks here first, so it takes the same way again."""

    _OWNER = "encast compile --max-drop"

    def __init__(self, path: Path, *, key: Mapping[str, Any], resume: bool, held: ExitStack) -> None:
        self.layers: list[tuple[str, str]] | None = None
        self._scores: dict[Plan, Scores] = {}
        self._distances: dict[str, Distance] = {}
        self._races: dict[Plan, Race] = {}
        super().__init__(path, key=key, resume=resume, held=held)

    def __bool__(self) -> bool:
        # f32 is scored again anyway, for its outputs.
        return any(plan != F32 for plan in self._scores)

    def scores(self, plan: Plan) -> Scores | None:
        return self._scores.get(plan)

    def distance(self, layer: str) -> Distance | None:
        return self._distances.get(layer)

    def race(self, plan: Plan) -> Race | None:
        return self._races.get(plan)

    def add_layers(self, layers: list[tuple[str, str]]) -> None:
        self._add({"layers": layers})

    def add_scores(self, plan: Plan, scores: Scores) -> None:
        metrics = None if scores.metrics is None else dict(scores.metrics)
        self._add({"scored": plan.to_json(), "metrics": metrics, "failed": scores.failed})

    def add_distance(self, layer: str, distance: Distance) -> None:
        self._add({"layer": layer, "distance": distance.value, "failed": distance.failed})

    def add_race(self, plan: Plan, race: Race) -> None:
        speeds = {"to_f32": dict(race.to_f32), "to_best": dict(race.to_best)}
        self._add({"raced": plan.to_json(), **speeds, "failed": race.failed})

    def _add(self, entry: Mapping[str, Any]) -> None:
        self._write(entry)
        # What a search reads back is what it goes on with: the same from memory as from the file.
        self._take(json.loads(json.dumps(entry)))

    def _take(self, entry: Mapping[str, Any]) -> None:
        if "layers" in entry:
            self.layers = [(_text(name), _text(kind)) for name, kind in entry["layers"]]
            return
        failed = None if entry["failed"] is None else _text(entry["failed"])
        if "scored" in entry:
            plan, metrics = Plan.from_json(entry["scored"]), entry["metrics"]
            self._scores[plan] = Scores(_numbers(metrics) if failed is None else None, failed)
        elif "raced" in entry:
            race = Race(_numbers(entry["to_f32"], least=0.0), _numbers(entry["to_best"], least=0.0), failed)
            if failed is None and not race.to_f32.keys() == race.to_best.keys() != set():
                raise InputError("a race has no speed")
            self._races[Plan.from_json(entry["raced"])] = race
        else:
            value = None if failed is not None else _numbers({"distance": entry["distance"]}, least=0.0)["distance"]
            self._distances[_text(entry["layer"])] = Distance(value, failed)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"{value!r} is no text")
    return value


def _numbers(values: Mapping[str, Any], least: float = -math.inf) -> dict[str, float]:
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < least:
            raise InputError(f"{name} is {value!r}")
    return {name: float(value) for name, value in values.items()}
