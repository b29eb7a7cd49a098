"""What a search decides, on machines and models that are made up."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from encast.budget.journal import Journal
from encast.budget.plans import BF16, F32, INT8, Plan
from encast.budget.search import Search, fewest
from encast.errors import ArtifactError, EncastError, InputError, ResourceError
from encast.scoring import Scored

LAYERS = [(f"layer.{number}", "attention" if number % 3 == 1 else "product") for number in range(9)]
NAMES = [name for name, _ in LAYERS]


class Model:
    """``losses``: points that a layer costs by its dtype; ``speeds``: of a layer by its dtype; ``broken`` candidates.

    It counts its calls, and raises ``stop`` at the one with that number.
    """

    def __init__(
        self,
        losses: Mapping[str, Mapping[str, float]],
        *,
        speeds: Mapping[str, float] | None = None,
        sparse: float = 0.5,
        broken: Callable[[Plan], EncastError | None] = lambda plan: None,
        stop: tuple[int, BaseException] | None = None,
    ) -> None:
        self.losses, self.broken, self.stop, self.sparse = losses, broken, stop, sparse
        self.speeds = {"f32": 1.0, "bf16": 0.9, "int8": 3.0, **(speeds or {})}
        self.calls: list[tuple[Any, ...]] = []

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if self.stop is not None and len(self.calls) == self.stop[0]:
            raise self.stop[1]

    def score(self, plan: Plan) -> Scored:
        self._call("score", plan)
        if (error := self.broken(plan)) is not None:
            raise error
        wide = dict(plan.wide)
        lost = sum(self.losses.get(name, {}).get(wide.get(name, plan.dtype), 0.0) for name in NAMES)
        return Scored("classify", 100, {"accuracy": 80.0 - lost, "mcc": 40.0 - lost}, None)

    def layers(self) -> list[tuple[str, str]]:
        self._call("layers")
        return LAYERS

    def distance(self, layer: str) -> float:
        self._call("distance", layer)
        if self.losses.get(layer, {}).get("int8") == float("inf"):
            raise InputError("the answers are not finite numbers")
        return self.losses.get(layer, {}).get("int8", 0.0) ** 2 + 0.001

    def race(self, plan: Plan, best: tuple[Plan, str], variants: Sequence[str]) -> tuple[dict[str, float], ...]:
        self._call("race", plan, best)
        own = {sparse: self._speed(plan, sparse) for sparse in variants}
        return own, {sparse: speed / self._speed(*best) for sparse, speed in own.items()}

    def _speed(self, plan: Plan, sparse: str) -> float:
        wide = dict(plan.wide)
        seconds = sum(1 / self.speeds[wide.get(name, plan.dtype)] for name in NAMES)
        return len(NAMES) / seconds * (self.sparse if sparse == "always" else 1.0)


def run(
    model: Any, journal: Path, *, max_drop: float = 0.01, resume: bool = False, metric: str = "accuracy", **options: Any
) -> tuple[Search, list[tuple[Plan, str]]]:
    kept: list[tuple[Plan, str]] = []
    with ExitStack() as held:
        search = Search(
            model,
            Journal(journal, key={"model": "m"}, resume=resume, held=held),
            metric=metric,
            max_drop=max_drop,
            sparse=options.get("sparse", "never"),
            keep=lambda *one: kept.append(one),
            say=lambda step, done, total: None,
        )
        search.run()
    return search, kept


def outcome(search: Search) -> list[Any]:
    return [search.reference, search.chosen, search.candidates, search.layers, search.missed]


def costly(**by_number: float) -> dict[str, dict[str, float]]:
    """``_3=5.0``: layer 3 costs 5 points in int8; all others a hundredth of one."""
    costs = {name: {"int8": 0.01} for name in NAMES}
    return {**costs, **{f"layer.{name[1:]}": {"int8": points} for name, points in by_number.items()}}


def test_int8_within_the_budget_is_chosen_and_no_layer_is_measured(tmp_path: Path) -> None:
    model = Model(costly())
    search, kept = run(model, tmp_path / "j")
    assert search.chosen.plan == INT8
    assert search.chosen.speed == pytest.approx(3.0)
    assert kept == [(INT8, "never")]
    assert [candidate.plan for candidate in search.candidates] == [F32, BF16, INT8]
    assert search.layers == []
    assert search.missed is None
    assert not [call for call in model.calls if call[0] in ("layers", "distance")]


@pytest.mark.parametrize("guilty", [(0,), (8,), (2, 5), (0, 1, 7), tuple(range(9))])
def test_the_guilty_layers_and_no_others_stay_wide(guilty: tuple[int, ...], tmp_path: Path) -> None:
    search, kept = run(Model(costly(**{f"_{number}": 2.0 + number for number in guilty})), tmp_path / "j")
    wide = {f"layer.{number}" for number in guilty}
    if len(guilty) < len(NAMES):
        assert dict(search.chosen.plan.wide) == dict.fromkeys(wide, "f32")
        assert kept[-1] == (search.chosen.plan, "never")
        assert search.missed is None
    else:
        assert search.chosen.plan == BF16 or search.chosen.plan == F32
    assert {layer.name for layer in search.layers[: len(wide)]} == wide
    shares = [layer.share or 0.0 for layer in search.layers]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1.0)
    assert [layer.dtype for layer in search.layers if layer.name in wide] == ["f32"] * len(wide)


def test_layers_that_move_the_outputs_and_cost_nothing_become_int8_again(tmp_path: Path) -> None:
    class Loud(Model):
        def distance(self, layer: str) -> float:
            return 50.0 if layer in ("layer.4", "layer.8") else super().distance(layer)

    search, _ = run(Loud(costly(_2=3.0, _6=4.0)), tmp_path / "j")
    assert [layer.name for layer in search.layers[:2]] == ["layer.4", "layer.8"]
    assert dict(search.chosen.plan.wide) == {"layer.2": "f32", "layer.6": "f32"}
    wider = Plan("int8", tuple((f"layer.{number}", "f32") for number in (2, 4, 6, 8)))
    assert wider in [candidate.plan for candidate in search.candidates]


def test_bf16_takes_the_place_of_f32_where_it_is_faster_and_enough(tmp_path: Path) -> None:
    losses = {**costly(_2=3.0, _6=4.0), "layer.1": {"bf16": 2.0}}
    search, _ = run(Model(losses, speeds={"bf16": 2.0}), tmp_path / "fast")
    assert dict(search.chosen.plan.wide) == {"layer.2": "bf16", "layer.6": "bf16"}
    search, _ = run(Model(losses, speeds={"bf16": 1.01}), tmp_path / "slow")
    assert dict(search.chosen.plan.wide) == {"layer.2": "f32", "layer.6": "f32"}
    losses["layer.6"] = {"int8": 4.0, "bf16": 4.0}
    search, _ = run(Model(losses, speeds={"bf16": 2.0}), tmp_path / "partly")
    assert dict(search.chosen.plan.wide) == {"layer.2": "bf16", "layer.6": "f32"}


def test_the_faster_of_dense_and_sparse_is_taken(tmp_path: Path) -> None:
    search, kept = run(Model(costly(_2=3.0), sparse=1.5), tmp_path / "fast", sparse="auto")
    assert search.chosen.sparse == "always"
    assert kept[-1] == (search.chosen.plan, "always")
    pair = [candidate for candidate in search.candidates if candidate.plan == search.chosen.plan]
    assert [candidate.sparse for candidate in pair] == ["never", "always"]
    assert pair[0].metrics == pair[1].metrics
    assert [candidate.sparse for candidate in search.candidates if candidate.plan == BF16] == ["never"]
    assert run(Model(costly(_2=3.0), sparse=0.9), tmp_path / "slow", sparse="auto")[0].chosen.sparse == "never"
    asked, _ = run(Model(costly(_2=3.0), sparse=0.9), tmp_path / "always", sparse="always")
    assert {candidate.sparse for candidate in asked.candidates if candidate.plan.dtype == "int8"} == {"always"}


def test_an_impossible_budget_says_by_how_much_it_is_missed_and_where(tmp_path: Path) -> None:
    losses = {name: {"int8": 2.0 + number, "bf16": 1.0} for number, name in enumerate(NAMES)}
    search, kept = run(Model(losses), tmp_path / "j")
    assert search.chosen.plan == F32
    assert not kept
    assert search.missed is not None
    assert search.missed.nearest is not None
    assert len(search.missed.nearest.plan.wide) == len(NAMES) - 1, "all but the one that costs the least"
    assert search.missed.over == pytest.approx(2 / 80 - 0.01)
    assert search.missed.layers == ("layer.8", "layer.7", "layer.6", "layer.5", "layer.4")


def test_a_slow_candidate_within_the_budget_is_not_chosen(tmp_path: Path) -> None:
    search, kept = run(Model(costly(), speeds={"int8": 0.8}), tmp_path / "j")
    assert search.chosen.plan == F32
    assert search.missed is None, "int8 keeps the budget, it is only slower"
    assert not kept


class TestFailures:
    def test_a_failing_candidate_is_noted_and_passed_over(self, tmp_path: Path) -> None:
        # The first mixture that would do cannot be compiled.
        first = Plan("int8", (("layer.6", "f32"),))
        broken = {first: ArtifactError("broken here"), BF16: InputError("no bf16")}
        model = Model(costly(_6=4.0), broken=broken.get)
        search, _ = run(model, tmp_path / "j")
        failed = {candidate.plan: candidate.failed for candidate in search.candidates if candidate.failed}
        assert failed == {first: "broken here", BF16: "no bf16"}
        assert search.chosen.plan.dtype == "int8"
        assert dict(search.chosen.plan.wide).keys() > {"layer.6"}
        resumed, _ = run(Model({}, stop=(1, AssertionError("nothing is left"))), tmp_path / "j", resume=True)
        assert outcome(resumed) == outcome(search)

    def test_a_failing_race_leaves_the_candidate_out(self, tmp_path: Path) -> None:
        class Slow(Model):
            def race(self, plan: Plan, *rest: Any) -> tuple[dict[str, float], ...]:
                if plan == INT8:
                    raise InputError("too slow to time")
                return super().race(plan, *rest)

        search, _ = run(Slow(costly()), tmp_path / "j")
        assert search.chosen.plan == F32
        assert [one.failed for one in search.candidates if one.plan == INT8] == ["too slow to time"]

    def test_a_layer_that_fails_alone_is_the_first_to_be_wide(self, tmp_path: Path) -> None:
        losses = {**costly(_3=5.0), "layer.7": {"int8": float("inf")}}
        model = Model(losses, broken=lambda plan: _not_finite(plan))
        search, _ = run(model, tmp_path / "j")
        assert search.layers[0].name == "layer.7"
        assert (search.layers[0].share, search.layers[0].failed) == (None, "the answers are not finite numbers")
        assert dict(search.chosen.plan.wide) == {"layer.3": "f32", "layer.7": "f32"}

    def test_what_the_machine_lacks_ends_the_search_which_goes_on_later(self, tmp_path: Path) -> None:
        full = ResourceError("the disk is full")
        with pytest.raises(ResourceError, match="the disk is full"):
            run(Model(costly(_2=3.0), stop=(9, full)), tmp_path / "j")
        search, _ = run(Model(costly(_2=3.0)), tmp_path / "j", resume=True)
        assert outcome(search) == outcome(run(Model(costly(_2=3.0)), tmp_path / "whole")[0])

    @pytest.mark.parametrize(
        ("metric", "lost", "said"),
        [("f2", 0.0, "metric is 'f2'; this task on this data set has accuracy, mcc"), ("mcc", 40.0, "mcc of the f32")],
    )
    def test_a_metric_that_gives_no_budget(self, metric: str, lost: float, said: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=said):
            run(Model({"layer.0": {"f32": lost}}), tmp_path / "j", metric=metric)


def _not_finite(plan: Plan) -> EncastError | None:
    narrow = plan.dtype == "int8" and "layer.7" not in dict(plan.wide)
    return InputError("the answers are not finite numbers") if narrow else None


class TestResume:
    @pytest.fixture
    def losses(self) -> dict[str, dict[str, float]]:
        return costly(_2=3.0, _6=4.0)

    def test_ended_at_any_call_it_goes_on_to_the_same_answer(
        self, losses: dict[str, dict[str, float]], tmp_path: Path
    ) -> None:
        whole = Model(losses, speeds={"bf16": 2.0})
        wanted = outcome(run(whole, tmp_path / "whole")[0])
        for number in range(1, len(whole.calls) + 1):
            journal = tmp_path / f"{number}"
            with pytest.raises(KeyboardInterrupt):
                run(Model(losses, speeds={"bf16": 2.0}, stop=(number, KeyboardInterrupt())), journal)
            rest = Model(losses, speeds={"bf16": 2.0})
            assert outcome(run(rest, journal, resume=True)[0]) == wanted
            assert rest.calls == whole.calls[number - 1 :], "nothing is measured twice"

    def test_other_speeds_after_a_resume_change_nothing(
        self, losses: dict[str, dict[str, float]], tmp_path: Path
    ) -> None:
        first, _ = run(Model(losses), tmp_path / "j")
        other = Model(costly(), speeds={"int8": 0.1})
        again, kept = run(other, tmp_path / "j", resume=True)
        assert outcome(again) == outcome(first)
        assert not other.calls
        assert not kept

    def test_a_line_that_was_cut_off_is_measured_again(
        self, losses: dict[str, dict[str, float]], tmp_path: Path
    ) -> None:
        wanted = outcome(run(Model(losses), tmp_path / "j")[0])
        data = (tmp_path / "j").read_bytes()
        for size in range(0, len(data), 97):
            (tmp_path / "j").write_bytes(data[:size])
            assert outcome(run(Model(losses), tmp_path / "j", resume=True)[0]) == wanted
            assert (tmp_path / "j").read_bytes() == data

    @pytest.mark.parametrize(
        ("entry", "said"),
        [
            ({"scored": {"dtype": "int9", "wide": []}, "metrics": {"accuracy": 1.0}, "failed": None}, "dtype"),
            ({"scored": {"dtype": "int8", "wide": []}, "metrics": {"accuracy": "1"}, "failed": None}, "accuracy is"),
            ({"scored": {"dtype": "int8", "wide": []}, "metrics": None, "failed": None}, "AttributeError"),
            ({"scored": {"dtype": "int8", "wide": [[1, "f32"]]}, "metrics": {}, "failed": None}, "pairs of a name"),
            ({"layer": "layer.1", "distance": -1.0, "failed": None}, "distance is -1.0"),
            ({"layer": 3, "distance": 1.0, "failed": None}, "3 is no text"),
            ({"raced": {"dtype": "int8", "wide": []}, "to_f32": {}, "to_best": {}, "failed": None}, "no speed"),
            ({"layers": [["a"]]}, "ValueError"),
            ({"trial": {}}, "KeyError"),
            (7, "TypeError"),
        ],
    )
    def test_a_damaged_line_is_refused_by_its_number(self, entry: Any, said: str, tmp_path: Path) -> None:
        run(Model(costly()), tmp_path / "j")
        lines = (tmp_path / "j").read_text().splitlines()
        damaged = "\n".join([*lines[:3], json.dumps(entry), *lines[3:], ""])
        (tmp_path / "j").write_text(damaged)
        with pytest.raises(InputError, match=rf"j is no journal of `encast compile --max-drop` \(line 4, .*{said}"):
            run(Model(costly()), tmp_path / "j", resume=True)
        assert (tmp_path / "j").read_text() == damaged


@pytest.mark.parametrize("count", range(1, 10))
def test_the_fewest_of_the_ranking_are_found_whatever_their_number(count: int, tmp_path: Path) -> None:
    """Each layer alone is harmless enough; what counts is how many are int8."""

    class Many(Model):
        def score(self, plan: Plan) -> Scored:
            self._call("score", plan)
            left = sum(name not in dict(plan.wide) for name in NAMES) if plan.dtype == "int8" else 0
            lost = 10.0 if left > len(NAMES) - count else 0.0
            return Scored("classify", 100, {"accuracy": 80.0 - lost}, None)

    search, _ = run(Many(costly()), tmp_path / "j")
    assert len(search.chosen.plan.wide) == (count if count < len(NAMES) else 0)
    tried = [candidate.plan for candidate in search.candidates]
    assert len(tried) == len(set(tried))
    assert all(a.plan != b.plan for a, b in itertools.pairwise(search.candidates))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 2), (-1, 0), (-1, 7), (0, 1000)])
def test_fewest_is_the_least_and_asks_little(low: int, high: int) -> None:
    for least in range(low + 1, high + 1):
        asked: list[int] = []

        def holds(count: int, least: int = least, asked: list[int] = asked) -> bool:
            asked.append(count)
            return count >= least

        assert fewest(low, high, holds) == least
        assert len(asked) <= 2 * (high - low).bit_length()
        assert all(low < count < high for count in asked), "what is known is not asked"
