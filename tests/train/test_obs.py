"""Blocks leave by what outputs lose, and the rest makes up for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from checkpoints import TRAINABLE, make_checkpoint
from small_rows import classes

import encast.compress.obs as obs
import encast.compress.surgeon as surgeon
from encast.compress.model import Model, load_model, open_tokenizer
from encast.compress.obs import Moments, remove_blocks
from encast.compress.recipe import FineTune
from encast.compress.state import StateFolder
from encast.compress.surgeon import Surgeon
from encast.compress.tasks import find_task
from encast.compress.train import Trainer
from encast.data.datasets import open_dataset
from encast.errors import InputError
from encast.importers import open_checkpoint
from encast.sparsity import Pattern, magnitude_mask, product_weights

Array = np.ndarray[Any, np.dtype[np.float64]]


def alike(inputs: int, seed: int = 0, tokens: int = 400) -> Array:
    """Inputs ``[tokens, inputs]`` of which a few explain most of the others, as those of trained models."""
    generator = np.random.default_rng(seed)
    causes = generator.standard_normal((tokens, inputs // 3 + 1))
    return causes @ generator.standard_normal((inputs // 3 + 1, inputs)) + 0.3 * generator.standard_normal(
        (tokens, inputs)
    )


def removed(weight: Array, x: Array, stay: int, pattern: str, alive: Array | None = None, reference: Any = None) -> Any:
    parsed = Pattern.parse(pattern)
    grid = (-(-weight.shape[0] // parsed.outputs), -(-weight.shape[1] // parsed.inputs))
    left = torch.ones(grid, dtype=torch.bool) if alive is None else torch.from_numpy(alive)
    cross = (x if reference is None else reference).T @ x / len(x)
    moments = Moments(torch.from_numpy(x.T @ x / len(x)), torch.from_numpy(cross))
    made, chosen = remove_blocks(torch.from_numpy(weight), moments, left, stay, parsed)
    return made.numpy(), chosen.numpy()


def least_squares(weight: Array, gram: Array, columns: list[int]) -> tuple[Array, float]:
    """Weights on these columns alone whose outputs are nearest to the weight's, and the error."""
    made = np.zeros_like(weight)
    made[:, columns] = np.linalg.solve(gram[np.ix_(columns, columns)], (weight @ gram)[:, columns].T).T
    lost = made - weight
    return made, float(np.sum(lost @ gram * lost))


def greedy(weight: Array, gram: Array) -> tuple[list[int], list[float]]:
    """Columns in the order in which each adds least to the error of what is then left, and what it adds."""
    left, order, added = list(range(weight.shape[1])), [], []
    while left:
        before = least_squares(weight, gram, left)[1]
        costs = [least_squares(weight, gram, [one for one in left if one != out])[1] - before for out in left]
        lowest = int(np.argmin(costs))
        order.append(left.pop(lowest))
        added.append(costs[lowest])
    return order, added


def test_it_is_the_greedy_order_over_all_groups() -> None:
    weight = np.random.default_rng(1).standard_normal((16, 14)) * np.repeat([0.3, 1, 1, 3], 4)[:, None]
    x = alike(14)
    made, chosen = removed(weight, x, stay := 25, "4x1")
    gram = x.T @ x / len(x)
    gram += 0.01 * np.mean(np.diag(gram)) * np.eye(14)
    ends: list[tuple[float, int, int, int]] = []
    for group in range(4):
        order, added = greedy(weight[4 * group : 4 * group + 4], gram)
        ends += zip(np.maximum.accumulate(added), range(14), [group] * 14, order, strict=True)
    expected = np.zeros((4, 14), bool)
    for _, _, group, column in sorted(ends)[len(ends) - stay :]:
        expected[group, column] = True
    np.testing.assert_array_equal(chosen, expected)
    assert chosen.sum() == stay
    assert chosen[3].sum() > chosen[0].sum()  # rows that weigh more keep more
    for group in range(4):
        rows = slice(4 * group, 4 * group + 4)
        best, _ = least_squares(weight[rows], gram, list(np.flatnonzero(expected[group])))
        np.testing.assert_allclose(made[rows], best, atol=1e-9)


@pytest.mark.parametrize("pattern", ["4x1", "1x4", "2x3", "1x1"])
@pytest.mark.parametrize("shape", [(24, 40), (30, 67)])
def test_outputs_lose_less_than_by_magnitude(pattern: str, shape: tuple[int, int]) -> None:
    weight = np.random.default_rng(2).standard_normal(shape)
    x = alike(shape[1])
    parsed = Pattern.parse(pattern)
    blocks = -(-shape[0] // parsed.outputs) * -(-shape[1] // parsed.inputs)
    stay = blocks - int(0.6 * blocks + 0.5)
    made, chosen = removed(weight, x, stay, pattern)
    assert chosen.sum() == stay
    spread = np.repeat(np.repeat(chosen, parsed.outputs, 0), parsed.inputs, 1)[: shape[0], : shape[1]]
    assert not made[~spread].any()
    largest = weight * magnitude_mask(weight.astype(np.float32), parsed, 0.6)
    error, other = (float(np.mean((x @ (one - weight).T) ** 2)) for one in (made, largest))
    assert error < 0.4 * other


def test_of_two_inputs_that_are_alike_one_stays() -> None:
    generator = np.random.default_rng(7)
    causes = generator.standard_normal((2000, 48))
    x = np.concatenate([causes, causes + 0.03 * generator.standard_normal(causes.shape)], 1)
    weight = generator.standard_normal((32, 96))
    made, _ = removed(weight, x, 8 * 48, "4x1")
    assert np.mean((x @ (made - weight).T) ** 2) < 0.002 * np.mean((x @ weight.T) ** 2)


def test_parts_of_a_weight_are_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = np.random.default_rng(8).standard_normal((40, 60)), alike(60)
    whole, chosen = removed(weight, x, 150, "4x1")
    _, first = removed(weight, x, 400, "4x1")
    again, _ = removed(weight, x, 150, "4x1", alive=first)
    monkeypatch.setattr(obs, "_BATCH_BYTES", 1)
    parts, others = removed(weight, x, 150, "4x1")
    np.testing.assert_array_equal(chosen, others)
    np.testing.assert_allclose(parts, whole, atol=1e-9)
    # Where groups have different numbers of blocks, how many leave at a time depends on the part.
    parts, _ = removed(weight, x, 150, "4x1", alive=first)
    error, other = (float(np.mean((x @ (one - weight).T) ** 2)) for one in (parts, again))
    assert error == pytest.approx(other, rel=0.1)


def test_what_has_left_does_not_come_back() -> None:
    weight, x = np.random.default_rng(3).standard_normal((16, 40)), alike(40)
    _, first = removed(weight, x, 90, "4x1")
    made, second = removed(weight, x, 40, "4x1", alive=first)
    assert second.sum() == 40
    assert not (second & ~first).any()
    assert not made[~np.repeat(second, 4, 0)].any()


def test_all_that_may_stay_stays() -> None:
    weight, x = np.random.default_rng(4).standard_normal((8, 20)), alike(20)
    made, chosen = removed(weight, x, 40, "4x1")
    assert chosen.all()
    np.testing.assert_allclose(made, weight, atol=1e-9)
    made, chosen = removed(weight, x, 0, "4x1")
    assert not chosen.any()
    assert not made.any()


def test_it_makes_up_for_inputs_that_are_not_the_references() -> None:
    weight, x = np.random.default_rng(5).standard_normal((8, 20)), alike(20)
    worse = x * np.linspace(0.5, 2.0, 20)
    made, _ = removed(weight, worse, 40, "4x1", reference=x)
    wanted = x @ weight.T
    assert np.mean((worse @ made.T - wanted) ** 2) < 0.01 * np.mean((worse @ weight.T - wanted) ** 2)


def test_an_input_that_is_always_zero() -> None:
    weight, x = np.random.default_rng(6).standard_normal((8, 20)), alike(20)
    x[:, 7] = 0.0
    made, chosen = removed(weight, x, 20, "4x1")
    assert np.isfinite(made).all()
    assert not chosen[:, 7].any()


# A whole model


@pytest.fixture
def model(encoder: Path, write_rows: Callable[..., Path]) -> Model:
    return open_model(encoder, write_rows)


def open_model(source: Path, write_rows: Callable[..., Path]) -> Model:
    data = open_dataset(write_rows("data", classes(40, 1), classes(10, 2)) / "train.jsonl")
    return load_model(open_checkpoint(source), find_task("classify", data)(data, 64, 0), seed=0)


def batches(tokens: int = 0, padding: int = 0) -> list[Any]:
    """Four batches of 8 rows of 12 tokens, and padding behind them."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(4):
        ids = torch.randint(5, 30, (8, 12 + padding), generator=generator)
        mask = torch.ones(8, 12 + padding, dtype=torch.bool)
        mask[:, 12:] = False
        made.append((ids, torch.zeros_like(ids), mask))
    return made


def products(model: Model) -> dict[str, Any]:
    own = model.parameters()
    names = product_weights(model.checkpoint, names=own)
    return {name: torch.ones(own[name].shape[0] // 4, own[name].shape[1], dtype=torch.bool) for name in names}


def as_it_was(model: Model) -> bool:
    """Whether no hook and no other forward was left behind."""
    return not any(
        module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module)
        for module in model.module.modules()
    )


def answers(model: Model) -> Any:
    with torch.no_grad():
        return torch.cat([model(*batch).answers for batch in batches()])


@pytest.mark.parametrize("arch", TRAINABLE)
def test_answers_stay_nearer_than_by_magnitude(tmp_path: Path, write_rows: Callable[..., Path], arch: str) -> None:
    source = make_checkpoint(tmp_path / arch, arch, "features", layers=2, hidden=32, heads=2)
    model = open_model(source, write_rows)
    model.module.eval()
    before, alive, own = answers(model), products(model), model.parameters()
    kept = {name: own[name].detach().clone() for name in alive}
    done: list[tuple[int, int]] = []
    chosen = Surgeon(model, batches, lambda *counts: done.append(counts))(alive, 0.5, Pattern.parse("4x1"))
    assert set(chosen) == set(alive)
    assert done == [(count, len(alive)) for count in range(1, len(alive) + 1)]
    for name, stays in chosen.items():
        assert float(stays.float().mean()) == pytest.approx(0.5, abs=0.01)
        assert not bool(own[name][~stays.repeat_interleave(4, 0)].any())
    error = float((answers(model) - before).square().mean())
    with torch.no_grad():
        for name, weight in kept.items():
            stays = torch.from_numpy(magnitude_mask(weight.numpy(), Pattern.parse("4x1"), 0.5))
            own[name].copy_(weight * stays)
    assert error < 0.7 * float((answers(model) - before).square().mean())
    assert as_it_was(model)


@pytest.mark.parametrize(("arch", "layer"), [("bert", "bert.encoder.layer"), ("modernbert", "model.layers")])
def test_layers_that_are_skipped_change_nothing(
    tmp_path: Path, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, arch: str, layer: str
) -> None:
    model = open_model(make_checkpoint(tmp_path / arch, arch, "features", layers=2, hidden=32, heads=2), write_rows)
    before = {name: weight.detach().clone() for name, weight in model.parameters().items()}
    assert {surgeon._layer(name) for name in products(model)} == {f"{layer}.0", f"{layer}.1"}
    made = []
    for layer_of in (surgeon._layer, lambda name: None):
        monkeypatch.setattr(surgeon, "_layer", layer_of)
        model.module.load_state_dict(before, strict=False)
        Surgeon(model, batches, lambda *_: None)(products(model), 0.5, Pattern.parse("4x1"))
        made.append({name: weight.detach().clone() for name, weight in model.parameters().items()})
        answers(model)  # all layers run again
    assert all(torch.equal(made[0][name], made[1][name]) for name in before)
    assert any(not torch.equal(made[0][name], before[name]) for name in before)


def test_padding_does_not_count(encoder: Path, model: Model) -> None:
    own = {name: weight.detach().clone() for name, weight in model.parameters().items()}
    model.module.train()
    Surgeon(model, batches, lambda *_: None)(products(model), 0.5, Pattern.parse("4x1"))
    assert model.module.training
    first = {name: weight.detach().clone() for name, weight in model.parameters().items()}
    model.module.load_state_dict(own, strict=False)
    plain = batches()
    padded = [
        (torch.nn.functional.pad(ids, (0, 9), value=7), torch.nn.functional.pad(types, (0, 9)), mask)
        for (ids, types, _), (_, _, mask) in zip(plain, batches(padding=9), strict=True)
    ]
    Surgeon(model, lambda tokens: padded, lambda *_: None)(products(model), 0.5, Pattern.parse("4x1"))
    for name, weight in model.parameters().items():
        np.testing.assert_allclose(weight.detach().numpy(), first[name].numpy(), rtol=1e-3, atol=1e-4, err_msg=name)


def test_calibration_rows(encoder: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    data = open_dataset(write_rows("rows", classes(3000, 1), classes(10, 2)) / "train.jsonl")
    checkpoint = open_checkpoint(encoder)
    task = find_task("classify", data)(data, 64, 0)
    examples = list(task.examples(data.rows, open_tokenizer(checkpoint, 64)))
    model = load_model(checkpoint, task, seed=0)

    def chosen(seed: int, tokens: int) -> list[Any]:
        state = StateFolder(tmp_path)
        trainer = Trainer(model, FineTune(), examples, products=[], state=state, seed=seed)
        return [batch[2] for batch in trainer._calibration(tokens)]

    masks = chosen(0, 5000)
    assert 5000 <= sum(int(mask.sum()) for mask in masks) < 5000 + 64
    assert max(mask.numel() for mask in masks) <= 2048
    assert sum(mask.numel() for mask in masks) < 1.25 * 5000  # rows of like lengths lie together
    assert all(torch.equal(a, b) for a, b in zip(masks, chosen(0, 5000), strict=True))
    assert [len(mask) for mask in chosen(1, 5000)] != [len(mask) for mask in masks]
    assert sum(len(mask) for mask in chosen(0, 10**9)) == 3000


def test_a_model_that_diverged(model: Model) -> None:
    norm = "bert.encoder.layer.0.output.LayerNorm.weight"
    with torch.no_grad():
        model.parameters()[norm].fill_(torch.inf)
    with pytest.raises(InputError, match=r"layer.1.attention.*not finite.*lower learning-rate where training diverged"):
        Surgeon(model, batches, lambda *_: None)(products(model), 0.5, Pattern.parse("4x1"))
    assert as_it_was(model)


def test_a_product_that_no_row_reaches(model: Model) -> None:
    alive = products(model)
    model.module.bert.encoder.layer[1].intermediate.forward = lambda x: torch.zeros(*x.shape[:2], 64)
    with pytest.raises(InputError, match=r"layer.1.intermediate.dense.weight: no row of the training set reaches it"):
        Surgeon(model, batches, lambda *_: None)(alive, 0.5, Pattern.parse("4x1"))
