"""Which set-up to measure next, when to stop, and which one to choose.

**Order.** The best estimates of the cost model come first, one for every kind of set-up. Then the set-up of greatest
expected improvement by ``surrogate``, which has a model of the machine, and, after the first trials, by turns with it
what Optuna's TPE sampler proposes, which needs none. Where that was measured already, the other decides.

**Stop.** When with a probability of 95 % no set-up is better than the best by more than 3 %: what was measured leaves
too little room (the probabilistic regret bound of Wilson, "Stopping Bayesian Optimization with Probabilistic Regret
Bounds", 2024). The surrogate is a model too, so this must hold for some trials in a row, one of them TPE's. Then what
lies next to the better set-ups is measured where the surrogate would have to be wrong by less than four deviations, and
it must hold still. Otherwise at the number of trials or seconds allowed.

**Choice.** The best few are measured anew, by turns in one neighbourhood of time, round after round, until none of them
is likely to be better than the leader by those 3 %: the first of many noisy trials is more likely lucky than best, and
how many more it takes depends on how noisy they are.

Every trial is in Optuna's journal before the next begins, so a search goes on from there after an interrupt or a crash.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from encast.backends.groups import Setup
from encast.errors import InputError, ResourceError
from encast.tune.cost_model import CostModel, Probe, probe_plan
from encast.tune.finals import median, score, still_open, unspoilt
from encast.tune.journal import open_study
from encast.tune.measurement import Measurement, Trial
from encast.tune.slo import Slo
from encast.tune.space import Point, Space
from encast.tune.surrogate import Belief, Hyperparameters, believe

__all__ = ["Evaluator", "Found", "Options", "default_trials", "search"]

STOP_MARGIN, STOP_CHANCE = 0.03, 0.05

_SEEDS = 8
_FINALISTS = 6
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 20
_FEWEST_FINALS = 4
"""Trials: two finalists, two rounds."""
_FINAL_MARGIN = 0.06
"""Set-ups believed to be worse than the best by more than this are no finalists."""

_FEWEST_TRIALS = 8
_SURE_TRIALS = 4
"""In a row after which the rule to stop must hold: among them one of TPE, which may know better."""
_TRIALS_A_FEATURE = 10
"""Before which the surrogate's certainty is not believed: what a Gaussian process needs to know its own length scales
(Loeppky, Sacks and Welch, "Choosing the Sample Size of a Computer Experiment", Technometrics 51, 2009)."""
_MOST_NEIGHBOURS = 0.05
"""Of the grid: of a small one the trials before have seen much."""
_MOST_REPEATS = 3
"""Trials of one set-up before the finals."""
_NEAR, _NEAR_MARGIN, _DOUBT = 1.8, 0.15, 4.0
"""How far neighbours are, in steps: as far as twice the instances of half the threads. By how much the set-ups whose
neighbours are looked at may be worse than the best. And by how many deviations the surrogate may be wrong about one."""
_TPE_EVERY = 4
_TPE_TRIALS = 10
"""Before which it knows no more than chance: Optuna's own default."""
_FIT_EVERY = 4
_ASKS = 8
"""Proposals of TPE that were measured already before the other proposer decides."""

_STEPS_A_DOUBLING, _MOST_STEPS = 2.0, 4.0
"""Of how long a full run is for the promise: far from the limit on either side nothing changes any more."""

_MOST_FAILURES = 3


class Evaluator(Protocol):
    """What measures: the machine, or in tests a recorded one."""

    def probe(self, tokens: int, threads: int, instances: int) -> float:
        """Seconds of a run of about ``tokens`` tokens, by each of ``instances`` of ``threads`` threads at once.

        Raises ``EncastError`` when it cannot run.
        """
        ...

    def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
        """A measurement of each under the workload, by turns in one neighbourhood of time; it says what cannot run."""
        ...


@dataclass(frozen=True)
class Options:
    """``trials`` and ``seconds`` bound the measurements; ``journal`` keeps them (None: memory only).

    ``key`` says what they are measurements of: to resume, it must be the same. ``say`` hears of every trial, first of
    those that the journal had.
    """

    trials: int
    seconds: float = math.inf
    seed: int = 0
    journal: Path | None = None
    key: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    say: Callable[[Trial, int], None] = lambda trial, number: None

    def with_listener(self, say: Callable[[Trial, int], None]) -> Options:
        return replace(self, say=say)


@dataclass(frozen=True)
class Found:
    """The trials in their order, the chosen set-up with its measurement, and why the search ended.

    ``cut``: the seconds were over before it had explored and decided, so that its journal may be resumed.
    """

    trials: tuple[Trial, ...]
    chosen: Trial
    stopped: str
    interrupted: bool = False
    cut: bool = False


def default_trials(space: Space) -> int:
    """A quarter of the full grid: where the rule to stop has not ended the search by then."""
    return max(_FEWEST_TRIALS, len(space.setups) // 4)


def search(space: Space, evaluator: Evaluator, lengths: Sequence[int], slo: Slo | None, options: Options) -> Found:
    """The best set-up of the space for texts of these lengths, as far as the trials allow.

    An interrupt ends the search with what was found so far (``Found.interrupted``), or is raised when that is nothing.
    Raises ``InputError`` for a journal that belongs to something else or is there without ``resume``, ``ResourceError``
    for one that cannot be written and when no set-up can be measured, and the evaluator's error.
    """
    if options.trials < 1:
        raise InputError(f"trials is {options.trials}; give at least 1")
    with ExitStack() as held:
        return _Search(space, evaluator, lengths, slo, options, held).run()


class _Search:
    def __init__(
        self,
        space: Space,
        evaluator: Evaluator,
        lengths: Sequence[int],
        slo: Slo | None,
        options: Options,
        held: ExitStack,
    ) -> None:
        self.space, self.evaluator, self.lengths, self.slo, self.options = space, evaluator, lengths, slo, options
        self.setups = list(space.setups)
        self.index = {setup: number for number, setup in enumerate(self.setups)}
        features = np.array([space.features(setup) for setup in self.setups])
        self.features: np.ndarray[Any, np.dtype[np.float64]] = features
        self.steps = features.shape[1]
        self.study, self.trials = open_study(
            options.journal, self.setups, seed=options.seed, key=options.key, resume=options.resume, held=held
        )
        for number, trial in enumerate(self.trials, 1):
            options.say(trial, number)
        self.began = time.monotonic()
        self.cut = False
        self.hyperparameters: Hyperparameters | None = None
        self.prior: np.ndarray[Any, np.dtype[np.float64]] = np.zeros(len(self.setups))

    def run(self) -> Found:
        try:
            self.prior = self._estimates()
            most = self.options.trials
            reserve = min(_FINALISTS * _MOST_ROUNDS, most // 5)
            stopped = self._explore(most - (reserve if reserve >= _FEWEST_FINALS else 0))
            if not self._ran():
                raise ResourceError(f"no set-up could be measured: {self.trials[-1].measurement.failed}")
            chosen = self._decide()
            if self.cut:
                stopped = f"the {self.options.seconds:g} seconds were over"
            return Found(tuple(self.trials), chosen, stopped, cut=self.cut)
        except KeyboardInterrupt:
            if self._ran():
                return Found(tuple(self.trials), self._best(), "interrupted", interrupted=True)
            raise
        finally:
            if not self._ran() and self.options.journal is not None:
                # Nothing to go on from.
                self.options.journal.unlink(missing_ok=True)

    # What to measure

    def _estimates(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The logarithm of every set-up's rate by the cost model."""
        plan = probe_plan(self.space.cores, self.lengths)
        known: dict[str, float] = dict(self.study.user_attrs.get("probes", {}))
        for point in plan:
            name = ",".join(map(str, point))
            if name not in known:
                known[name] = self.evaluator.probe(*point)
                self.study.set_user_attr("probes", known)
        probes = [Probe(*point, known[",".join(map(str, point))]) for point in plan]
        model = CostModel(probes, self.space.cores, self.lengths)
        rates = np.array([model.rate(setup, self.slo) for setup in self.setups])
        if self.slo is not None:
            # Whether a full run keeps the promise decides what happens after a burst, which the formulas get wrong by
            # more than all else: set-ups on the same side of it err alike.
            runs = np.array([model.longest_run(setup) for setup in self.setups])
            over = np.clip(_STEPS_A_DOUBLING * np.log2(runs / (self.slo.limit_ms / 1e3)), -_MOST_STEPS, _MOST_STEPS)
            self.features = np.column_stack([self.features, over])
        # What is far below the best needs no order among itself.
        estimates: np.ndarray[Any, np.dtype[np.float64]] = np.log(np.maximum(rates, rates.max() * 1e-3))
        return estimates

    def _explore(self, most: int) -> str:
        """Trials until nothing better is likely or until there are ``most``; why it ended."""
        seeds = [setup for setup in self._seeds(min(_SEEDS, max(2, most // 2))) if setup not in self._measured()]
        turn = sure = 0
        neighbours = int(len(self.setups) * _MOST_NEIGHBOURS)
        while len(self.trials) < most:
            # One at least: a search that measured nothing has nothing to say.
            if self._out_of_time() if self._ran() else len(self.trials) >= _MOST_FAILURES:
                break
            if seeds:
                self._measure([seeds.pop(0)], "cost model")
                continue
            belief, best = self._belief()
            gains = belief.expected_improvement(best)
            gains[[self.index[setup] for setup in self._known()]] = -1.0
            if gains.max() < 0:
                return "every set-up was measured"
            near = self._neighbour(belief, best) if sure >= _SURE_TRIALS and neighbours > 0 else None
            if near is not None:
                neighbours -= 1
                self._measure([near], "neighbour")
                continue
            if len(self.trials) >= _TRIALS_A_FEATURE * self.features.shape[1]:
                sure = sure + 1 if belief.chance_of_better(best, STOP_MARGIN) < STOP_CHANCE else 0
            if sure > _SURE_TRIALS:
                return f"nothing is likely to be better by {STOP_MARGIN:.0%}"
            turn += 1
            some = len(self.trials) >= _TPE_TRIALS and turn % _TPE_EVERY == 0
            proposed = self._ask_tpe() if some else None
            if proposed is None:
                self._measure([self.setups[int(gains.argmax())]], "expected improvement")
            else:
                self._measure([proposed], "tpe")
        return f"no more than {self.options.trials} were allowed"

    def _seeds(self, count: int) -> list[Setup]:
        """Set-ups that the cost model thinks well of, far from each other.

        Each is the best by mean plus deviation when those before it are taken for what they were estimated at
        (Desautels, Krause and Burdick, "Parallelizing Exploration-Exploitation Tradeoffs in Gaussian Process Bandit
        Optimization", 2014): what is near to one of them could only say the same once more.
        """
        chosen: list[int] = [int(self.prior.argmax())]
        while len(chosen) < min(count, len(self.setups)):
            belief = believe(self.features, self.prior, chosen, self.prior[chosen], fit=False)
            hopes = belief.mean + belief.deviation
            hopes[chosen] = -np.inf
            chosen.append(int(hopes.argmax()))
        return [self.setups[number] for number in chosen]

    def _ask_tpe(self) -> Setup | None:
        """A set-up that was not measured yet, by TPE; None when it knows none."""
        for _ in range(_ASKS):
            trial = self.study.ask()
            setup = self._suggested(trial)
            self._give_up(trial)
            if setup not in self._measured():
                return setup
        return None

    def _suggested(self, trial: Any) -> Setup:
        point = Point(**{name: trial.suggest_categorical(name, those) for name, those in self.space.choices.items()})
        setup = self.space.setup(self.space.nearest(point))
        assert setup is not None
        return setup

    def _give_up(self, trial: Any) -> None:
        import optuna

        self.study.tell(trial, state=optuna.trial.TrialState.FAIL)

    # Measuring

    def _measure(self, setups: Sequence[Setup], source: str) -> None:
        """Measures and records; a set-up that cannot run is recorded with the reason."""
        trials = []
        for setup in setups:
            self.study.enqueue_trial(self.space.setups[setup]._asdict())
            trials.append(self.study.ask())
            self._suggested(trials[-1])
        try:
            measured = self.evaluator.measure(setups)
        except BaseException:
            for trial in trials:
                self._give_up(trial)
            raise
        for setup, trial, measurement in zip(setups, trials, measured, strict=True):
            done = Trial(setup, measurement, source)
            trial.set_user_attr("trial", done.to_json())
            self.study.tell(trial, measurement.score)
            self.trials.append(done)
            self.options.say(done, len(self.trials))

    def _decide(self) -> Trial:
        """The winner among the finalists, measured anew by turns until none is likely to be better by the margin."""
        finalists = self._finalists()
        rounds: dict[Setup, list[Trial]] = {setup: [] for setup in finalists}
        for number in range(1, _MOST_ROUNDS + 1):
            if len(finalists) < 2 or len(self.trials) + len(finalists) > self.options.trials or self._out_of_time():
                break
            self._measure(finalists, "final")
            for trial in self.trials[-len(finalists) :]:
                if trial.measurement.failed is None:
                    rounds[trial.setup].append(trial)
            # What failed may run alone, but has too few trials now to be compared by.
            finalists = [setup for setup in finalists if len(rounds[setup]) == number]
            if number >= _FEWEST_ROUNDS and finalists:
                finalists = still_open([rounds[setup] for setup in finalists], STOP_MARGIN)
        judged = [setup for setup in finalists or rounds if rounds[setup]]
        if not judged:
            return self._best()
        won = median(rounds[max(judged, key=lambda setup: score(rounds[setup]))])
        return won if won.measurement.rate > 0 else self._best()

    def _neighbour(self, belief: Belief, best: int) -> Setup | None:
        """The most hopeful set-up that was not measured near one of the better ones; None when there is no hope."""
        good = [self.index[setup] for setup in self._near_best(belief, best, _NEAR_MARGIN)]
        at = self.features[:, : self.steps]
        apart = ((at[:, None, :] - at[None, good, :]) ** 2).sum(axis=2).min(axis=1)
        hopes = belief.mean + _DOUBT * belief.deviation
        hopes[apart > _NEAR**2] = -np.inf
        hopes[[self.index[setup] for setup in self._measured()]] = -np.inf
        return self.setups[int(hopes.argmax())] if hopes.max() > belief.mean[best] + math.log1p(STOP_MARGIN) else None

    def _finalists(self) -> list[Setup]:
        if not self._usable():
            return []
        belief, best = self._belief()
        room = (self.options.trials - len(self.trials)) // 2
        return self._near_best(belief, best, _FINAL_MARGIN)[: max(0, min(_FINALISTS, room))]

    def _near_best(self, belief: Belief, best: int, margin: float) -> list[Setup]:
        """The measured set-ups that are believed to be worse than the best by less than the margin, best first."""
        near = [
            setup
            for setup in {trial.setup: None for trial in self._usable()}
            if belief.mean[self.index[setup]] > belief.mean[best] - margin
        ]
        return sorted(near, key=lambda setup: -belief.mean[self.index[setup]])

    def _best(self) -> Trial:
        """Of what was measured, that of which most is believed; by its median trial."""
        usable = self._usable()
        if not usable:
            return max(self._ran(), key=lambda trial: trial.measurement.score)
        best = self.setups[self._belief()[1]]
        return median([trial for trial in usable if trial.setup == best])

    def _belief(self) -> tuple[Belief, int]:
        """What to think of every set-up, and the index of the best measured one."""
        measured = unspoilt(self._ran())
        if not measured:
            return believe(self.features, self.prior, [], np.empty(0)), int(self.prior.argmax())
        rates = [trial.measurement.rate for trial in measured]
        # A promise that is not kept at any rate: lower the further it is missed, and lower than all that keep it.
        floor = min((rate for rate in rates if rate > 0), default=math.exp(float(self.prior.max()))) / 2
        values = np.log(
            [
                rate if rate > 0 else floor / max(1.0, trial.measurement.excess)
                for rate, trial in zip(rates, measured, strict=True)
            ]
        )
        belief = believe(
            self.features,
            self.prior,
            [self.index[trial.setup] for trial in measured],
            values,
            start=self.hyperparameters,
            fit=len(measured) < _SEEDS + _FIT_EVERY or len(measured) % _FIT_EVERY == 0,
        )
        self.hyperparameters = belief.hyperparameters
        kept = [self.index[trial.setup] for trial in self._usable() or measured]
        return belief, max(kept, key=lambda number: float(belief.mean[number]))

    def _ran(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.measurement.failed is None]

    def _usable(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.measurement.rate > 0]

    def _measured(self) -> set[Setup]:
        return {trial.setup for trial in self.trials}

    def _known(self) -> set[Setup]:
        """Those of which one more trial would say little: what cannot run, and what the finals may tell apart."""
        often = collections.Counter(trial.setup for trial in self.trials)
        broken = {trial.setup for trial in self.trials if trial.measurement.failed is not None}
        return broken | {setup for setup, count in often.items() if count >= _MOST_REPEATS}

    def _out_of_time(self) -> bool:
        """Whether the trials that would be next are cut."""
        self.cut = time.monotonic() - self.began >= self.options.seconds
        return self.cut
