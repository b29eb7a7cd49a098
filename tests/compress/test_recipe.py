"""Recipes: what stands in them, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from encast.compress.recipe import RECIPES, Distil, FineTune, Prune, Quantise, load_recipe, parse_recipe
from encast.errors import InputError


def test_every_kind_of_stage(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        """
description: all of them
stages:
  - fine-tune: {epochs: 2, learning-rate: 3.0e-5, batch-size: 8, accumulate: 2}
  - prune: {sparsity: 0.8, pattern: 1x4, schedule: linear, distil: {teacher: fine-tune, hard: 0.5}}
  - distil: {name: small, teacher: prune, temperature: 4, layers: [0, 2], epochs: 1}
  - quantise
"""
    )
    recipe = load_recipe(file)
    first, second, third, last = recipe.stages
    assert isinstance(first, FineTune)
    assert (first.epochs, first.learning_rate, first.batch_size, first.accumulate) == (2.0, 3e-5, 8, 2)
    assert isinstance(second, Prune)
    assert second.distil is not None
    assert (second.pattern, second.distil.teacher, second.distil.hard, second.distil.soft) == (
        "1x4",
        "fine-tune",
        0.5,
        1,
    )
    assert isinstance(third, Distil)
    assert (third.distil.teacher, third.distil.temperature, third.layers, third.epochs) == ("prune", 4.0, [0, 2], 1.0)
    assert isinstance(last, Quantise)
    assert recipe.names() == ["fine-tune", "prune", "small", "quantise"]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_that_come_with_encast(path: Path) -> None:
    recipe = load_recipe(path.stem)
    assert recipe.description
    assert isinstance(recipe.stages[-1], Quantise)
    if path.stem.startswith("sparse"):
        prunes = [stage for stage in recipe.stages if isinstance(stage, Prune)]
        assert prunes[-1].name == path.stem
        assert [f"sparse{prune.sparsity * 100:.0f}" for prune in prunes] == [prune.name for prune in prunes]
        assert [prune.sparsity for prune in prunes] == sorted(prune.sparsity for prune in prunes)
        assert {prune.pattern for prune in prunes} == {"4x1"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "object"),
        ("stages: []", "length"),
        ("stages: {prune: {}}", "array"),
        ("stages: [1]", "one kind of stage"),
        ("stages: [{prune: {sparsity: 0.8}, distil: {}}]", "one kind of stage"),
        ("stages: [{shrink: {}}]", "fine-tune, prune, distil, quantise"),
        ("stages: [{prune: {}}]", "sparsity"),
        ("stages: [{prune: {sparsity: 80}}]", "sparsity"),
        ("stages: [{prune: {sparsity: 0.8, patern: 4x1}}]", "patern"),
        ("stages: [{prune: {sparsity: 0.8, pattern: 4by1}}]", "4by1"),
        ("stages: [{prune: {sparsity: 0.8, score: hessian}}]", "magnitude, movement, snip-momentum, obs"),
        ("stages: [{prune: {sparsity: 0.8, score: obs}}]", "score obs needs schedule one-shot and scope layer"),
        ("stages: [{prune: {sparsity: 0.8, score: obs, schedule: one-shot, scope: global}}]", "scope layer"),
        ("stages: [{prune: {sparsity: 0.8, schedule: square}}]", "cubic, linear, one-shot"),
        ("stages: [{prune: {sparsity: 0.5, initial: 0.6}}]", "initial 0.6 is above"),
        ("stages: [{prune: {sparsity: 0.5, begin: 0.6, end: 0.2}}]", "after end"),
        ("stages: [{prune: {sparsity: 0.5, distil: {teacher: x, soft: 0}}}]", "no loss"),
        ("stages: [{prune: {sparsity: 0.5, distil: {teacher: x, temperature: 1.0e-3}}}]", "temperature"),
        ("stages: [{prune: {sparsity: 0.5, distil: {teacher: x, temperature: 1.0e+4}}}]", "temperature"),
        ("stages: [{distil: {}}]", "teacher"),
        ("stages: [{distil: {teacher: x, distil: {hidden: 3}}}]", "field `distil`: the stage's own fields are"),
        ("stages: [{distil: {teacher: x, kind: prune}}]", "unknown field `kind` - at `$.stages[0].distil`"),
        ("stages: [{fine-tune: {kind: fine-tune}}]", "unknown field `kind` - at `$.stages[0].fine-tune`"),
        ("stages: [{distil: {teacher: x, layers: [2, 0]}}]", "rising"),
        ("stages: [{distil: {teacher: x, layers: []}}]", "layers"),
        ("stages: [{fine-tune: {epochs: many}}]", "epochs"),
        ("stages: [{fine-tune: {epochs: .nan}}]", "epochs"),
        ("stages: [{fine-tune: {learning-rate: .inf}}]", "learning-rate"),
        ("stages: [{fine-tune: {learning-rate: 0}}]", "learning-rate"),
        ("stages: [{fine-tune: {batch-size: 10, accumulate: 4}}]", "multiple"),
        ("stages: [{fine-tune: {decay: steep}}]", "linear, cosine, constant"),
        ("stages: [{fine-tune: {patience: 2, evaluations: 0}}]", "patience"),
        ("stages: [fine-tune, fine-tune]", "once"),
        ("stages: [{fine-tune: {name: ../up}}]", "letters"),
        ("stages: [{fine-tune: {name: .work}}]", "letters"),
        ("stages: [{fine-tune: {name: %s}}]" % ("x" * 201), "200 bytes at most"),
        ("stages: [quantise, fine-tune]", "put it last"),
        ("stages: [{quantise: {dtype: bf16, max-drop: 0.01}}]", "max-drop"),
        ("stages: [{quantise: {dtype: bf16, sparse: always}}]", "sparse products are int8; dtype is 'bf16'"),
        ("stages: [{quantise: {dtype: f32, sparse: always}}]", "sparse products are int8; dtype is 'f32'"),
        ("stages: [{quantise: {dtype: int4}}]", "dtype"),
        ("stages: [&a [*a]]", "one kind of stage"),
        ("stages: !!python/object/apply:os.system [ls]", "not YAML"),
        ("stages: [", "not YAML"),
        ("stages: [{prune: {sparsity: 0.5, sparsity: 0.8}}]", "the key 'sparsity' stands twice, leave one of them out"),
        ("stages: [fine-tune]\n'stages': [quantise]", "the key 'stages' stands twice"),
        ("stages: [fine-tune]\nseed: 3", "seed"),
    ],
)
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=r"^here: ") as caught:
        parse_recipe(text, "here")
    assert said in str(caught.value)


def test_a_number_as_people_write_it() -> None:
    (stage,) = parse_recipe("stages: [{fine-tune: {learning-rate: 5e-5}}]", "here").stages
    assert isinstance(stage, FineTune)
    assert stage.learning_rate == 5e-5


def test_a_key_may_stand_beside_fields_that_it_replaces() -> None:
    text = "stages: [{fine-tune: &one {epochs: 1, batch-size: 8}}, {prune: {<<: *one, epochs: 2, sparsity: 0.5}}]"
    _, stage = parse_recipe(text, "here").stages
    assert isinstance(stage, Prune)
    assert (stage.epochs, stage.batch_size) == (2.0, 8)


def test_a_file_that_is_not_there_lists_the_recipes() -> None:
    with pytest.raises(InputError, match=r"fine-tune, sparse70, sparse80"):
        load_recipe("sparse81")


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(InputError, match="larger than"):
        load_recipe(tmp_path / "r.yaml")
