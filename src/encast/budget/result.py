"""What a search found, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encast.budget.plans import Plan

__all__ = ["Candidate", "Found", "Layer", "Missed"]


@dataclass(frozen=True)
class Candidate:
    """One artifact that was tried.

    ``metrics`` are points of 100; ``drop`` is the share of the f32 metric that is lost (below 0: it is better) and
    ``within`` says whether the budget allows it. ``speed``: how many times as fast as f32 it is; None where that was
    not measured. ``failed``: why it could not be compiled, scored or timed.
    """

    plan: Plan
    sparse: str = "never"
    metrics: Mapping[str, float] | None = None
    drop: float | None = None
    within: bool = False
    speed: float | None = None
    failed: str | None = None

    @property
    def text(self) -> str:
        return f"{self.plan.text}, sparse" if self.sparse == "always" else self.plan.text

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.text,
            **self.plan.to_json(),
            "sparse": self.sparse,
            "metrics": None if self.metrics is None else dict(self.metrics),
            "drop": self.drop,
            "within": self.within,
            "speed": self.speed,
            "failed": self.failed,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Candidate:
        rest = {name: data[name] for name in ("sparse", "metrics", "drop", "within", "speed", "failed")}
        return Candidate(Plan.from_json(data), **rest)


@dataclass(frozen=True)
class Layer:
    """``distance``: how far the outputs move when this layer alone is int8; see ``workshop.distance``.

    ``share``: of the sum over all layers. Both are None where it ``failed``. ``dtype``: in the chosen artifact.
    """

    name: str
    kind: str
    distance: float | None
    share: float | None
    dtype: str
    failed: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Missed:
    """No artifact narrower than f32 keeps the budget: the nearest one, by how much it is over, and why.

    ``over`` is its drop less the drop that is allowed. ``layers`` lose the most, the worst first.
    """

    nearest: Candidate | None
    over: float | None
    layers: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        nearest = None if self.nearest is None else self.nearest.to_json()
        return {"nearest": nearest, "over": self.over, "layers": list(self.layers)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Missed:
        nearest = None if data["nearest"] is None else Candidate.from_json(data["nearest"])
        return Missed(nearest, data["over"], tuple(data["layers"]))


@dataclass(frozen=True)
class Found:
    """``artifact`` holds ``chosen``, the fastest of ``candidates`` (in the order of trial) that keep the budget.

    ``reference``: the metric of f32 on ``data``, whose ``rows`` were all scored. ``layers`` is empty where all of the
    model could be int8. ``missed`` is None unless nothing but f32 keeps the budget.
    """

    artifact: Path
    data: str
    rows: int
    task: str
    metric: str
    max_drop: float
    reference: float
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    layers: tuple[Layer, ...] = ()
    missed: Missed | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "artifact": str(self.artifact),
            "data": self.data,
            "rows": self.rows,
            "task": self.task,
            "metric": self.metric,
            "max_drop": self.max_drop,
            "reference": self.reference,
            "chosen": self.chosen.to_json(),
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "layers": [layer.to_json() for layer in self.layers],
            "missed": None if self.missed is None else self.missed.to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], artifact: Path) -> Found:
        """The inverse of ``to_json``, but for the path."""
        return Found(
            artifact,
            **{name: data[name] for name in ("data", "rows", "task", "metric", "max_drop", "reference")},
            chosen=Candidate.from_json(data["chosen"]),
            candidates=tuple(map(Candidate.from_json, data["candidates"])),
            layers=tuple(Layer(**layer) for layer in data["layers"]),
            missed=None if data["missed"] is None else Missed.from_json(data["missed"]),
        )
