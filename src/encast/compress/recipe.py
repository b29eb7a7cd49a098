"""Recipes: the stages of a compression, read from YAML and checked as a whole before anything runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import yaml  # type: ignore[import-untyped]
from msgspec import Meta, Struct

from encast.compress.schedules import LEARNING_RATES, SPARSITIES
from encast.compress.scores import SCORES
from encast.errors import InputError
from encast.sparsity import Pattern

__all__ = [
    "RECIPES",
    "Distil",
    "FineTune",
    "Prune",
    "Quantise",
    "Recipe",
    "Stage",
    "Teacher",
    "Training",
    "load_recipe",
    "parse_recipe",
]

RECIPES = Path(__file__).parent / "recipes"
"""The recipes that encast has by name."""

_LARGEST_FILE = 1 << 20
_LONGEST_NAME = 200

Count = Annotated[int, Meta(ge=1, le=10**9)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Positive = Annotated[float, Meta(gt=0.0, lt=1e300)]
Weight = Annotated[float, Meta(ge=0.0, lt=1e300)]
Temperature = Annotated[float, Meta(ge=0.01, le=1000.0)]


class _Checked(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="kebab"):
    """Fields of YAML: unknown names, wrong types and values out of range are errors that say where."""


class Training(_Checked, frozen=True, kw_only=True):
    """What every stage that trains can be told.

    ``epochs``: passes over the training rows; 0 trains nothing. ``max_steps``: of the optimiser, where that is fewer.
    ``batch_size``: rows of an optimiser's step, run in
    ``accumulate`` parts. ``learning_rate``: its peak for AdamW, reached after the share ``warmup`` of all steps, then
    as ``decay`` says. ``weight_decay``: of matrices, not of biases and norms. ``clip``: the largest norm of the
    gradient; 0 clips nothing. ``max_length``: tokens after which a row is cut (questions and contexts: the length of a
    window); None: what the model allows. ``stride``: tokens that neighbouring windows share; None: 128, or half of a
    window where that is less. ``precision``: "auto"
    as ``precision.choose_precision`` says. ``dropout``: None as the checkpoint's config has it. ``evaluations``: of the
    dev rows in an epoch. ``patience``: evaluations without a better one after which the stage ends; 0: never. The
    weights of the best evaluation are kept. ``lock``: zeros that the products' weights have when the stage begins stay
    zeros. ``freeze_embeddings``: the embedding tables are not trained.
    """

    epochs: Annotated[float, Meta(ge=0.0, le=10_000.0)] = 3.0
    max_steps: Count | None = None
    batch_size: Count = 32
    accumulate: Count = 1
    learning_rate: Positive = 5e-5
    warmup: Share = 0.1
    decay: str = "linear"
    weight_decay: Weight = 0.01
    clip: Weight = 1.0
    max_length: Annotated[int, Meta(ge=8, le=1 << 20)] | None = None
    stride: Annotated[int, Meta(ge=0)] | None = None
    precision: Literal["auto", "f32", "bf16"] = "auto"
    dropout: Annotated[float, Meta(ge=0.0, lt=1.0)] | None = None
    evaluations: Annotated[int, Meta(ge=0, le=1000)] = 1
    patience: Annotated[int, Meta(ge=0)] = 0
    lock: bool = True
    freeze_embeddings: bool = False

    def check(self) -> None:
        """Raises ``ValueError`` for fields that do not go together."""
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch-size {self.batch_size} is no multiple of accumulate {self.accumulate}")
        if self.decay not in LEARNING_RATES:
            raise ValueError(f"decay is {self.decay!r}; one of {', '.join(LEARNING_RATES)} is needed")
        if self.patience and not self.evaluations:
            raise ValueError("patience counts evaluations, and evaluations is 0; give 1 or more")


class Teacher(_Checked, frozen=True, kw_only=True):
    """A model whose answers are learned (Hinton et al., 2015, arXiv:1503.02531).

    ``teacher``: the name of a stage before, or a checkpoint of the same task. The loss is ``hard`` times that of the
    labels, plus ``soft`` times the divergence from the teacher's answers at ``temperature``, times its square, plus
    ``hidden`` times the mean square difference of hidden states (of evenly spaced layers of the teacher), plus
    ``attention`` times the divergence of the attention's weights. ``cache``: the teacher's answers are kept on disk
    rather than computed each epoch.
    """

    teacher: str
    temperature: Temperature = 2.0
    hard: Weight = 0.0
    soft: Weight = 1.0
    hidden: Weight = 0.0
    attention: Weight = 0.0
    cache: bool = True

    def check(self) -> None:
        if self.hard + self.soft + self.hidden + self.attention == 0:
            raise ValueError("hard, soft, hidden and attention are all 0: there is no loss; give one of them a weight")


class FineTune(Training, tag_field="kind", tag="fine-tune", frozen=True, kw_only=True):
    """Trains the model for the task, on labels."""

    name: str | None = None


class Prune(Training, tag_field="kind", tag="prune", frozen=True, kw_only=True):
    """Zeros blocks of the encoder's products while it trains, then trains on with their pattern locked.

    ``pattern``: of the zeros, as ``Pattern.parse`` reads it. ``score``: which blocks go first (``scores.py``).
    ``schedule``: how the share of zeros grows from ``initial`` to ``sparsity`` (``schedules.py``), between the shares
    ``begin`` and ``end`` of the steps, every ``every`` steps. ``scope``: "layer": each weight loses the same share;
    "global": blocks of all weights compete. ``keep``: patterns of tensors that stay dense. ``distil``: learn from a
    teacher meanwhile.
    """

    name: str | None = None
    pattern: str = "4x1"
    sparsity: Annotated[float, Meta(gt=0.0, lt=1.0)]
    initial: Share = 0.0
    score: str = "magnitude"
    schedule: str = "cubic"
    begin: Share = 0.0
    end: Share = 0.5
    every: Count = 10
    scope: Literal["layer", "global"] = "layer"
    keep: tuple[str, ...] = ()
    distil: Teacher | None = None

    def check(self) -> None:
        Training.check(self)
        Pattern.parse(self.pattern)
        if self.score not in SCORES:
            raise ValueError(f"score is {self.score!r}; one of {', '.join(SCORES)} is needed")
        if self.schedule not in SPARSITIES:
            raise ValueError(f"schedule is {self.schedule!r}; one of {', '.join(SPARSITIES)} is needed")
        if SCORES[self.score].by_outputs and (self.schedule != "one-shot" or self.scope != "layer"):
            raise ValueError(
                f"score {self.score} needs schedule one-shot and scope layer; several prune stages make zeros in steps"
            )
        if not self.initial <= self.sparsity:
            raise ValueError(f"initial {self.initial:g} is above sparsity {self.sparsity:g}")
        if not self.begin <= self.end:
            raise ValueError(f"begin {self.begin:g} is after end {self.end:g}")
        if self.distil is not None:
            self.distil.check()


class Distil(Training, tag_field="kind", tag="distil", frozen=True, kw_only=True):
    """Learns a teacher's answers; in YAML the fields of ``Teacher`` stand among those of the stage.

    ``layers``: which layers of the model stay, counted from 0, or how many, evenly spaced from the first to the last;
    None: all.
    """

    name: str | None = None
    distil: Teacher
    layers: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)] | Count | None = None

    def check(self) -> None:
        Training.check(self)
        self.distil.check()
        if isinstance(self.layers, list) and sorted(set(self.layers)) != self.layers:
            raise ValueError(f"layers is {self.layers}; rising numbers are needed")


class Quantise(_Checked, tag_field="kind", tag="quantise", frozen=True, kw_only=True):
    """Compiles. ``sparse``: whether products leave out zeros; "auto" measures both.

    ``max_drop``: the accuracy budget, the share of ``metric`` (default: the run's) that may be lost of what the first
    stage's checkpoint has in f32. It is spent on sparsity and on narrow layers together: the fastest artifact of all
    checkpoints within it is taken. None: the last checkpoint's, in ``dtype``.
    """

    name: str | None = None
    dtype: Literal["int8", "bf16", "f32"] = "int8"
    sparse: Literal["auto", "never", "always"] = "auto"
    max_drop: Annotated[float, Meta(ge=0.0, lt=1.0)] | None = None
    metric: str | None = None

    def check(self) -> None:
        if self.dtype != "int8" and self.max_drop is not None:
            raise ValueError(f"max-drop chooses what int8 keeps wider; dtype is {self.dtype!r}, leave one of them out")
        if self.dtype != "int8" and self.sparse == "always":
            raise ValueError(f"sparse products are int8; dtype is {self.dtype!r}, leave one of them out")


_TEACHER = Teacher.__struct_encode_fields__
Stage = FineTune | Prune | Distil | Quantise


class Recipe(_Checked, frozen=True, kw_only=True):
    """``stages`` run one after the other, each from the checkpoint that the one before made."""

    KINDS: ClassVar[tuple[str, ...]] = ("fine-tune", "prune", "distil", "quantise")

    stages: Annotated[list[Stage], Meta(min_length=1, max_length=100)]
    description: str = ""

    def names(self) -> list[str]:
        """What each stage is called: its name, or its kind."""
        return [stage.name or stage.__struct_config__.tag for stage in self.stages]  # type: ignore[misc]

    def within(self, max_drop: float) -> Recipe:
        """The same with an accuracy budget; raises ``InputError`` where it cannot have one."""
        if not 0 <= max_drop < 1:
            raise InputError(f"max-drop is {max_drop:g}; a share from 0 to below 1 is needed: 0.01 is 1 %")
        *stages, last = self.stages
        if not isinstance(last, Quantise):
            stages, last = self.stages, Quantise()
        made = Recipe(stages=[*stages, msgspec.structs.replace(last, max_drop=max_drop)], description=self.description)
        _check(made, "--max-drop")
        return made


def load_recipe(source: str | os.PathLike[str]) -> Recipe:
    """A recipe by its name, or from a YAML file; raises ``InputError`` that says where it is wrong."""
    path = Path(source)
    known = sorted(one.stem for one in RECIPES.glob("*.yaml"))
    if os.fspath(source) in known:
        path = RECIPES / f"{source}.yaml"
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise InputError(f"{path}: larger than {_LARGEST_FILE} bytes, which no recipe is")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"recipe {os.fspath(source)!r}: {reason}; give a YAML file, or one of {', '.join(known)}"
        ) from None
    return parse_recipe(text, str(path))


def parse_recipe(text: str, where: str) -> Recipe:
    """The recipe in a text of YAML; ``where`` stands in messages. Raises ``InputError``."""
    try:
        data = _Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError(f"{where}: not YAML ({' '.join(str(error).split())[:300]})") from None
    try:
        recipe = msgspec.convert(_tagged(data), Recipe, strict=False)  # YAML 1.1 reads 5e-5 as a text
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {error}; see docs/compression.md for the form of a recipe") from None
    _check(recipe, where)
    return recipe


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A key that stands twice is an error, as YAML has it; PyYAML takes the last one."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else key  # others are no keys of a dict
            if name in seen and name != "<<":
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name!r} stands twice, leave one of them out", problem_mark=key.start_mark
                )
            seen.add(name)
        return node


def _tagged(data: Any) -> Any:
    """``- prune: {...}`` as the union of stages has it: ``{"kind": "prune", ...}``."""
    if not isinstance(data, dict) or not isinstance(data.get("stages"), list):
        return data
    stages = []
    for number, entry in enumerate(data["stages"]):
        if isinstance(entry, str):
            entry = {entry: None}
        if not isinstance(entry, dict) or len(entry) != 1:
            raise msgspec.ValidationError(f"Expected one kind of stage with its fields - at `$.stages[{number}]`")
        ((kind, fields),) = entry.items()
        if kind not in Recipe.KINDS:
            raise msgspec.ValidationError(
                f"Unknown stage {str(kind)[:40]!r}, {', '.join(Recipe.KINDS)} are known - at `$.stages[{number}]`"
            )
        place = f"at `$.stages[{number}].{kind}`"
        fields = {} if fields is None else fields
        if not isinstance(fields, dict):
            raise msgspec.ValidationError(f"Expected fields - {place}")
        if "kind" in fields:
            raise msgspec.ValidationError(f"Object contains unknown field `kind` - {place}")
        if kind == "distil":
            if "distil" in fields:
                raise msgspec.ValidationError(
                    "Object contains unknown field `distil`: the stage's own fields are those of distil "
                    f"({', '.join(_TEACHER)}), put them beside the others - {place}"
                )
            own = {name: value for name, value in fields.items() if name in _TEACHER}
            fields = {name: value for name, value in fields.items() if name not in own} | {"distil": own}
        stages.append({**fields, "kind": kind})
    return {**data, "stages": stages}


def _check(recipe: Recipe, where: str) -> None:
    seen: list[str] = []
    for number, (stage, name) in enumerate(zip(recipe.stages, recipe.names(), strict=True)):
        place = f"{where}: stages[{number}] ({name})"
        if (
            not name
            or name in seen
            or not all(letter.isalnum() or letter in "-_." for letter in name)
            or name[0] == "."
        ):
            raise InputError(f"{place}: a stage's name has letters, digits, -, _ and ., and is there once; give `name`")
        if len(name.encode()) > _LONGEST_NAME:  # found out otherwise when its turn comes, after those before it
            raise InputError(
                f"{where}: stages[{number}] ({name[:20]}...): a stage's name is a folder's, which has {_LONGEST_NAME} "
                "bytes at most; give a shorter one"
            )
        if isinstance(stage, Quantise) and number + 1 != len(recipe.stages):
            raise InputError(f"{place}: makes an artifact, from which nothing is trained; put it last")
        try:
            stage.check()
        except ValueError as error:
            raise InputError(f"{place}: {error}") from None
        distil = stage.distil if isinstance(stage, (Prune, Distil)) else None
        if distil is not None and distil.teacher in recipe.names()[number:]:
            raise InputError(f"{place}: its teacher {distil.teacher!r} is no stage before it; name one that is")
        seen.append(name)
