"""A plan as this package reads it: the steps, what they read, and where that lives.

The text is the one that lowering has just made and the core has accepted (``core/runtime/plan.h`` has the grammar), so
nothing is checked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = ["PlanText", "StepText", "ValueText", "WeightText", "parse_plan"]

_ELEMENT_BYTES = {"f32": 4, "i32": 4, "bf16": 2, "s8": 1, "q8": 1}
_PANEL = 64
_INNER = {"f32": 1, "bf16": 2, "s8": 4}  # the multiple to which panels pad k


@dataclass(frozen=True)
class WeightText:
    dtype: str
    layout: str
    rows: int
    cols: int

    @property
    def nbytes(self) -> int:
        """As stored: panels and padded vectors with their padding."""
        rows, cols = self.rows, self.cols
        if self.layout == "panels":
            rows, cols = _rounded(rows, _PANEL), _rounded(cols, _INNER[self.dtype])
        elif self.layout == "padded":
            cols = _rounded(cols, _PANEL)
        return rows * cols * _ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class ValueText:
    """``rows``: tokens, seqs or selected. ``place``: ``block`` (a thread's own memory), ``arena`` or ``caller``."""

    dtype: str
    rows: str
    cols: int
    place: str

    @property
    def row_bytes(self) -> int:
        """Of one row without its padding; a q8 row with its scale and its zero point."""
        return self.cols * _ELEMENT_BYTES[self.dtype] + (8 if self.dtype == "q8" else 0)


@dataclass(frozen=True)
class StepText:
    index: int
    kind: str
    name: str
    keys: Mapping[str, str]


@dataclass(frozen=True)
class PlanText:
    limits: Mapping[str, int]
    weights: Mapping[str, WeightText]
    values: Mapping[str, ValueText]
    steps: tuple[StepText, ...]
    outputs: Mapping[str, str]

    def value(self, step: StepText, key: str) -> ValueText | None:
        return self.values.get(step.keys.get(key, ""))

    def weight(self, step: StepText, key: str) -> WeightText | None:
        return self.weights.get(step.keys.get(key, ""))

    def made(self, step: StepText) -> ValueText:
        """What the step makes; every kind has an ``out``."""
        return self.values[step.keys["out"]]

    def needed(self, output: str) -> tuple[StepText, ...]:
        """The steps that run for an output, in order."""
        wanted = {self.outputs[output]}
        steps: list[StepText] = []
        for step in reversed(self.steps):
            if wanted & {step.keys[key] for key in ("out", "also") if key in step.keys}:
                wanted |= {step.keys[key] for key in ("x", "other") if key in step.keys}
                steps.append(step)
        return tuple(reversed(steps))


def parse_plan(text: str) -> PlanText:
    """The plan of a text that ``lower`` made."""
    limits: dict[str, int] = {}
    weights: dict[str, WeightText] = {}
    values: dict[str, ValueText] = {}
    steps: list[StepText] = []
    outputs: dict[str, str] = {}
    for line in text.splitlines():
        kind, *words = line.split(" ")
        if kind == "limits":
            limits = {key: int(number) for key, number in map(_pair, words)}
        elif kind == "weight":
            name, dtype, layout, rows, cols, _ = words
            weights[name] = WeightText(dtype, layout, int(rows), int(cols))
        elif kind == "value":
            name, dtype, symbol, cols, at = words
            place = "caller" if at == "@-" else "block" if at.startswith("@+") else "arena"
            values[name] = ValueText(dtype, symbol, int(cols), place)
        elif kind == "step":
            keys = dict(map(_pair, words[1:]))
            steps.append(StepText(len(steps), words[0], keys.get("name", ""), keys))
        elif kind == "output":
            outputs[words[0]] = words[1]
    if limits["head_tokens"]:
        # What attention reads is made in a thread's own memory by the product of the same stage.
        for step in steps:
            if step.kind == "attention":
                values[step.keys["x"]] = replace(values[step.keys["x"]], place="block")
    return PlanText(limits, weights, values, tuple(steps), outputs)


def _pair(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
