"""Which candidates to try, and which one to choose.

**Whole models.** f32 is the reference. bf16 and int8 are scored and timed. Where int8 keeps the budget, that is all.

**Layers.** Else each layer is measured once: how far the outputs move when it alone is int8. They are ranked by that.

**Mixtures.** int8 with the worst 1, 2, 4, ... layers in f32, until the metric is within the budget; then the fewest, by
halving. Of these, those that turn out to be unneeded become int8 again. Where bf16 was measured to be faster than f32,
the layers that are left are bf16 instead, but for the worst of them, if there must be.

The metric on all rows says what is within. Each candidate that is within runs against the best so far, and takes its
place if it is faster. All that was measured is in the journal before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from encast.budget.journal import Distance, Journal, Race, Scores
from encast.budget.plans import BF16, F32, INT8, Plan
from encast.budget.result import Candidate, Layer, Missed
from encast.errors import EncastError, InputError, ResourceError
from encast.scoring import Scored

__all__ = ["ROUNDING", "Say", "Search", "Shop", "fewest", "keeps"]

ROUNDING = 1e-9
"""Metrics are shares of rows times 100: a drop of 1 % in binary may be a bit more."""
_PAYS = 1.05
"""How many times as fast as f32 bf16 must be for mixtures with it to be tried; less is noise."""
_MOST_DROPS = 12
"""Layers that are tried to be int8 again."""
_NAMED = 5
"""Layers that ``Missed`` names."""

Say = Callable[[str, int, int | None], None]
"""Hears what is done next, its number and how many there are of the kind, None where that is not known."""

T = TypeVar("T")

_VARIANTS = {"never": ("never",), "always": ("always",), "auto": ("never", "always")}
"""By ``sparse``, how the zeros of an int8 candidate are tried."""


def keeps(drop: float, max_drop: float) -> bool:
    """Whether a budget allows a drop."""
    return drop <= max_drop + ROUNDING


class Shop(Protocol):
    """What compiles, scores and times: ``workshop.Workshop``."""

    def score(self, plan: Plan) -> Scored: ...

    def layers(self) -> list[tuple[str, str]]: ...

    def distance(self, layer: str) -> float: ...

    def race(
        self, plan: Plan, best: tuple[Plan, str], variants: Sequence[str]
    ) -> tuple[dict[str, float], dict[str, float]]: ...


class Search:
    """One search. ``keep`` sees to it that the best so far is in its place.

    ``run`` raises ``EncastError`` where f32 cannot be measured, and ``ResourceError`` where the machine cannot go on.
    Any other error of a candidate is noted in it.
    """

    def __init__(
        self,
        shop: Shop,
        journal: Journal,
        *,
        metric: str,
        max_drop: float,
        sparse: str,
        keep: Callable[[Plan, str], object],
        say: Say,
    ) -> None:
        self._shop, self._journal, self._keep, self._say = shop, journal, keep, say
        self._metric, self._max_drop, self._sparse = metric, max_drop, sparse
        self._tried: dict[Plan, list[Candidate]] = {}
        self._layers: list[Layer] = []

    def run(self) -> None:
        scores = self._scores(F32)
        if scores.metrics is None:
            raise InputError(str(scores.failed))
        if self._metric not in scores.metrics:
            raise InputError(f"metric is {self._metric!r}; this task on this data set has {', '.join(scores.metrics)}")
        self.reference = scores.metrics[self._metric]
        if self.reference <= 0:
            raise InputError(
                f"{self._metric} of the f32 model is {self.reference:g}, and no share of that can be lost: give the "
                "data set and the head that belong together, or another metric"
            )
        self.chosen = Candidate(F32, metrics=scores.metrics, drop=0.0, within=True, speed=1.0)
        self._tried[F32] = [self.chosen]
        bf16 = self._try(BF16, timed=True)
        if not self._try(INT8, timed=True)[0].within:
            self._mix(max((one.speed or 0.0 for one in bf16), default=0.0) > _PAYS)

    # Results

    @property
    def candidates(self) -> list[Candidate]:
        return [candidate for those in self._tried.values() for candidate in those]

    @property
    def layers(self) -> list[Layer]:
        """With their dtypes in the chosen artifact, the worst first."""
        wide = dict(self.chosen.plan.wide)
        return [replace(layer, dtype=wide.get(layer.name, self.chosen.plan.dtype)) for layer in self._layers]

    @property
    def missed(self) -> Missed | None:
        narrower = [candidate for candidate in self.candidates if candidate.plan != F32]
        if any(candidate.within for candidate in narrower):
            return None
        known = [candidate for candidate in narrower if candidate.drop is not None]
        nearest = min(known, key=lambda candidate: candidate.drop or 0.0, default=None)
        over = None if nearest is None or nearest.drop is None else nearest.drop - self._max_drop
        return Missed(nearest, over, tuple(layer.name for layer in self._layers[:_NAMED]))

    # Mixtures

    def _mix(self, bf16_pays: bool) -> None:
        self._layers = self._ranked()
        names = [layer.name for layer in self._layers]
        count = fewest(0, len(names), lambda count: self._within(dict.fromkeys(names[:count], "f32")))
        kept = names[:count]
        if count < len(names):
            for name in reversed(kept[:-1][-_MOST_DROPS:]):  # without the last one it was too few
                fewer = [one for one in kept if one != name]
                if self._within(dict.fromkeys(fewer, "f32")):
                    kept = fewer
        if bf16_pays:
            fewest(-1, len(kept), lambda count: self._within(_bf16(kept, count)))

    def _within(self, wide: dict[str, str]) -> bool:
        pairs = [(name, wide[name]) for name, _ in self._journal.layers or () if name in wide]
        return self._try(Plan("int8", tuple(pairs)))[0].within

    def _ranked(self) -> list[Layer]:
        """The layers, the worst first; first of all those with which the model cannot be measured."""
        if self._journal.layers is None:
            known, _ = _attempt(self._shop.layers)  # int8 that cannot even be compiled was noted already
            self._journal.add_layers(known or [])
        found: list[tuple[str, str, Distance]] = []
        layers = self._journal.layers or []
        for number, (name, kind) in enumerate(layers):
            self._say(f"layer {name}", number + 1, len(layers))
            distance = self._journal.distance(name)
            if distance is None:
                value, failed = _attempt(lambda name=name: self._shop.distance(name))  # type: ignore[misc]
                distance = Distance(value, failed)
                self._journal.add_distance(name, distance)
            found.append((name, kind, distance))
        total = sum(distance.value or 0.0 for _, _, distance in found) or 1.0
        made = [
            Layer(name, kind, one.value, None if one.value is None else one.value / total, "int8", one.failed)
            for name, kind, one in found
        ]
        return sorted(made, key=lambda layer: (layer.distance is not None, -(layer.distance or 0.0)))

    # Measuring

    def _try(self, plan: Plan, *, timed: bool = False) -> list[Candidate]:
        """The candidate, dense and sparse, scored and, if it is within the budget or ``timed``, timed."""
        if plan in self._tried:
            return self._tried[plan]
        scores = self._scores(plan)
        variants = _VARIANTS[self._sparse] if plan.dtype == "int8" else ("never",)
        if scores.metrics is None:
            self._tried[plan] = [Candidate(plan, failed=scores.failed)]
            return self._tried[plan]
        drop = (self.reference - scores.metrics[self._metric]) / self.reference
        within = keeps(drop, self._max_drop)
        race = self._race(plan, variants, within) if within or timed else Race({}, {})
        self._tried[plan] = made = [
            Candidate(plan, sparse, scores.metrics, drop, within, race.to_f32.get(sparse), race.failed)
            for sparse in variants
        ]
        if within and (sparse := _faster(race)) is not None:
            self.chosen = next(candidate for candidate in made if candidate.sparse == sparse)
        return made

    def _scores(self, plan: Plan) -> Scores:
        known = self._journal.scores(plan)
        if known is None:
            self._say(f"score {plan.text}", 0, None)
            if plan == F32:
                known = Scores(self._shop.score(plan).metrics)
            else:
                scored, failed = _attempt(lambda: self._shop.score(plan))
                known = Scores(None if scored is None else scored.metrics, failed)
            self._journal.add_scores(plan, known)
        return known

    def _race(self, plan: Plan, variants: Sequence[str], within: bool) -> Race:
        known = self._journal.race(plan)
        if known is None:
            best = (self.chosen.plan, self.chosen.sparse)
            self._say(f"time {plan.text}", 0, None)
            if best[0] != F32:
                self._keep(*best)  # not there any more, perhaps; what fails of that is no fault of this candidate
            speeds, failed = _attempt(lambda: self._shop.race(plan, best, variants))
            known = Race({}, {}, failed) if speeds is None else Race(*speeds)
            if within and (sparse := _faster(known)) is not None:
                # Before the journal says so: whoever resumes finds the best in its place.
                self._keep(plan, sparse)
            self._journal.add_race(plan, known)
        return known


def _faster(race: Race) -> str | None:
    """The fastest variant (by ``sparse``), if it is faster than the best before."""
    sparse = max(race.to_best, key=lambda name: race.to_best[name], default=None)
    return sparse if sparse is not None and race.to_best[sparse] > 1 else None


def _attempt(make: Callable[[], T]) -> tuple[T | None, str | None]:
    """What is made, or why it cannot be. What the machine lacks is no fault of a candidate, and is raised."""
    try:
        return make(), None
    except ResourceError:
        raise
    except EncastError as error:
        return None, str(error)


def fewest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least count above ``low`` for which it holds; it does not for ``low``, and does for ``high``.

    Few are likelier than many: first 1, 2, 4, ... more than ``low``, then by halving.
    """
    step = 1
    while low + step < high:
        if holds(low + step):
            high = low + step
            break
        low, step = low + step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _bf16(kept: Sequence[str], count: int) -> dict[str, str]:
    """The first ``count`` in f32, the others in bf16."""
    return {name: "f32" if number < count else "bf16" for number, name in enumerate(kept)}
