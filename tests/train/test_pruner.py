"""Zeros while a model trains: how many, where, and that they stay."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from encast.compress.pruner import Lock, Pruner
from encast.compress.recipe import Prune, parse_recipe
from encast.sparsity import Pattern, magnitude_mask

SHAPES = {"a": (24, 20), "b": (30, 17), "c": (8, 64)}


def stage(text: str) -> Prune:
    (made,) = parse_recipe(f"stages: [prune: {{{text}}}]", "here").stages
    assert isinstance(made, Prune)
    return made


def weights(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(*shape, generator=generator) * (1 + index))
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def zeros(weight: torch.Tensor) -> float:
    return float((weight == 0).float().mean())


@pytest.mark.parametrize("pattern", ["4x1", "1x4", "2x3", "1x1"])
def test_one_shot_zeros_what_encast_prune_zeros(pattern: str) -> None:
    own = weights()
    before = {name: weight.detach().numpy().copy() for name, weight in own.items()}
    pruner = Pruner(own, stage(f"sparsity: 0.7, pattern: {pattern}, schedule: one-shot, begin: 0, end: 0"))
    pruner.after_step(0, 10)
    for name, weight in own.items():
        expected = before[name] * magnitude_mask(before[name], Pattern.parse(pattern), 0.7)
        np.testing.assert_array_equal(weight.detach().numpy(), expected)
    assert pruner.done(0, 10)


def test_zeros_grow_by_the_schedule_and_never_shrink() -> None:
    own = weights()
    pruner = Pruner(own, stage("sparsity: 0.8, initial: 0.1, every: 1, end: 0.5"))
    held = {name: torch.zeros(SHAPES[name], dtype=torch.bool) for name in own}
    shares = []
    for step in range(100):
        with torch.no_grad():
            for weight in own.values():
                weight.add_(torch.randn_like(weight) * 0.5)  # the optimiser writes into zeros too
        pruner.after_step(step, 100)
        for name, weight in own.items():
            assert bool((weight[held[name]] == 0).all())
            held[name] = weight.detach() == 0
        shares.append(zeros(own["a"]))
        assert pruner.done(step, 100) == (step >= 49)
    assert shares == sorted(shares)
    assert shares[0] < 0.2
    assert shares[24] == pytest.approx(0.8 - 0.7 * (1 - 0.5) ** 3, abs=0.02)
    for weight in own.values():
        assert zeros(weight) == pytest.approx(0.8, abs=0.02)


def test_global_scope_takes_from_the_small_weights() -> None:
    own = weights()  # "a" has the smallest magnitudes, "c" the largest
    Pruner(own, stage("sparsity: 0.5, schedule: one-shot, scope: global, end: 0")).after_step(0, 1)
    total = sum(int((weight == 0).sum()) for weight in own.values()) / sum(map(np.prod, SHAPES.values()))
    assert total == pytest.approx(0.5, abs=0.02)
    assert zeros(own["a"]) > 0.6 > 0.4 > zeros(own["c"])


@pytest.mark.parametrize(("score", "sign"), [("movement", -1.0), ("snip-momentum", 1.0)])
def test_scores_of_gradients_decide(score: str, sign: float) -> None:
    own = {"a": torch.nn.Parameter(torch.ones(8, 8))}
    pruner = Pruner(own, stage(f"sparsity: 0.5, pattern: 4x1, schedule: one-shot, score: {score}, begin: 1, end: 1"))
    gradient = sign * torch.arange(64.0).reshape(8, 8)
    for step in range(4):
        own["a"].grad = gradient.clone()
        pruner.before_step()
        pruner.after_step(step, 4)
    # Growing to the right and down: the left and upper blocks have the smallest scores.
    means = (sign * gradient).reshape(2, 4, 8).mean(1)
    smallest = torch.argsort(means.flatten())[:8]
    assert sorted((own["a"].reshape(2, 4, 8).abs().sum(1).flatten() == 0).nonzero().flatten().tolist()) == sorted(
        smallest.tolist()
    )


def test_a_lock_holds_the_zeros_it_finds() -> None:
    own = weights()
    with torch.no_grad():
        own["a"][:, 3] = 0
        own["b"][4:8, 5] = 0
    lock = Lock(own)
    assert set(lock.masks) == {"a", "b"}
    with torch.no_grad():
        for weight in own.values():
            weight.add_(1.0)
    lock.after_step(0, 1)
    assert bool((own["a"][:, 3] == 0).all())
    assert bool((own["b"][4:8, 5] == 0).all())
    assert zeros(own["c"]) == 0


def test_a_state_goes_on_where_it_was() -> None:
    first, second = weights(), weights()
    text = "sparsity: 0.8, every: 3, score: movement"
    one = Pruner(first, stage(text))
    other = Pruner(second, stage(text))
    generator = torch.Generator().manual_seed(1)
    gradients = [{name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(40)]

    def go(pruner: Pruner, own: dict[str, torch.nn.Parameter], steps: range) -> None:
        for step in steps:
            for name, weight in own.items():
                weight.grad = gradients[step][name]
            pruner.before_step()
            with torch.no_grad():
                for weight in own.values():
                    weight.sub_(weight.grad, alpha=0.01)
            pruner.after_step(step, 40)

    go(one, first, range(40))
    go(other, second, range(17))
    state = {name: value.clone() for name, value in other.state().items()}
    third = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in second.items()}
    again = Pruner(third, stage(text))
    again.restore(state)
    go(again, third, range(17, 40))
    for name in SHAPES:
        assert torch.equal(first[name], third[name])


def test_without_steps_finish_makes_the_zeros() -> None:
    own = weights()
    Pruner(own, stage("sparsity: 0.75, epochs: 0")).finish()
    assert zeros(own["c"]) == 0.75
