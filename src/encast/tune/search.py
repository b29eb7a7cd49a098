"""Which set-ups to measure, when to stop, and which one to choose.

**Candidates.** Every way of dividing the cores (one group or two, threads of its widest instance) with every size of a
run gets one candidate: the best by the cost model. Those that it puts within a tenth of the best are measured, and a
quarter of them at least.

**Proposals.** Optuna's TPE sampler, which learns from all trials, proposes others, until ten in a row brought nothing
better, or the trials or seconds allowed are over.

**Final.** The best few are measured again by turns, five rounds at a time, after which the better half stays. The
median of the rounds decides: the first of many noisy trials is more likely lucky than best.

Every trial is in the journal before the next begins, so a search goes on from there after an interrupt or a crash.
"""

from __future__ import annotations

import collections
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from encast.backends.groups import Setup
from encast.errors import InputError, ResourceError
from encast.tune.cost_model import CostModel, Probe, card_probe_plan, probe_plan
from encast.tune.journal import Journal
from encast.tune.measurement import Measurement, Trial, median_trial
from encast.tune.slo import Slo
from encast.tune.space import Point, Space

__all__ = ["Evaluator", "Found", "Options", "default_trials", "search"]

_FEWEST_TRIALS = 30
"""Of a search by default, where a quarter of the grid is less: some minutes."""
_FEWEST_CANDIDATES, _CANDIDATE_SHARE = 12, 0.25
_PROMISING = 0.9
"""Candidates by estimates of at least this share of the best one are measured, and so many whatever their estimates: a
probe may have been disturbed too."""
_PATIENCE = 10
_ASKS = 8
"""Proposals of TPE that were measured already before the cost model proposes."""
_FINALISTS, _FINAL_SHARE = 6, 0.75
"""Of the best rate: a neighbour on the machine may have spoilt the only trial of the best set-up."""
_FEWEST_ROUNDS, _ROUNDS = 3, 5
"""Of the finalists in all, and until the better half stays."""
_MOST_FINAL_TRIALS = 55
"""Trials of six finalists, of which three, two and one stay."""
_MOST_FAILURES = 3


class Evaluator(Protocol):
    """What measures: the machine, or in tests a recorded one."""

    def probe(self, tokens: int, threads: int, instances: int) -> float:
        """Seconds of a run of about ``tokens`` tokens, by each of ``instances`` of ``threads`` threads at once.

        Raises ``EncastError`` when it cannot run.
        """
        ...

    def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
        """A measurement of each under the workload, by turns; it says what cannot run."""
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
    """A quarter of the full grid, or some minutes' worth: where the search has not ended by itself before."""
    return max(_FEWEST_TRIALS, len(space.setups) // 4)


def search(space: Space, evaluator: Evaluator, lengths: Sequence[int], slo: Slo | None, options: Options) -> Found:
    """The best set-up of the space for texts of these lengths, as far as the trials allow.

    An interrupt ends the search with what was found so far (``Found.interrupted``), or is raised when no set-up was
    measured yet; the journal stays when there is anything in it to go on from.
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
        self.choices, self.study = _study(space, options.seed)
        self.journal = Journal(options.journal, space.setups, key=options.key, resume=options.resume, held=held)
        self.trials = self.journal.trials
        for trial in self.trials:
            self._learn(trial)
        for number, trial in enumerate(self.trials, 1):
            options.say(trial, number)
        self.began = time.monotonic()
        self.cut = False

    def run(self) -> Found:
        try:
            ranked = self._ranked()
            reserve = min(_MOST_FINAL_TRIALS, self.options.trials // 3)
            stopped = self._explore(ranked, self.options.trials - (reserve if reserve >= 2 * _FEWEST_ROUNDS else 0))
            if not self._ran():
                self.journal.remove()  # to go on from it would be to fail at once
                raise ResourceError(f"no set-up could be measured: {self.trials[-1].measurement.failed}")
            chosen = self._final()
            if self.cut:
                stopped = f"the {self.options.seconds:g} seconds were over"
            return Found(tuple(self.trials), chosen, stopped, cut=self.cut)
        except KeyboardInterrupt:
            if self._ran():
                return Found(tuple(self.trials), self._best()[0], "interrupted", interrupted=True)
            if self.journal.path is not None and self.journal:
                raise KeyboardInterrupt(f"{self.journal.path} has what was measured; --resume goes on") from None
            raise
        finally:
            if not self.journal:
                self.journal.remove()

    # What to measure

    def _ranked(self) -> dict[Setup, float]:
        """Every set-up with its estimated rate, best first."""
        space = self.space
        plan = (
            card_probe_plan(space.cores, self.lengths, space.batch_tokens[-1])
            if space.on_cards
            else probe_plan(space.cores, self.lengths)
        )
        names = [",".join(map(str, point)) for point in plan]
        for name, point in zip(names, plan, strict=True):
            if name not in self.journal.probes:
                self.journal.add_probe(name, self.evaluator.probe(*point))
        probes = [Probe(*point, self.journal.probes[name]) for name, point in zip(names, plan, strict=True)]
        model = CostModel(probes, space.cores, self.lengths)
        rates = {setup: model.rate(setup, self.slo) for setup in space.setups}
        return dict(sorted(rates.items(), key=lambda item: -item[1]))

    def _candidates(self, ranked: Mapping[Setup, float]) -> list[Setup]:
        """Set-ups to begin with, first one of every way of dividing the cores."""
        best: dict[tuple[object, ...], Setup] = {}
        for setup in ranked:
            point = self.space.setups[setup]
            best.setdefault((point.kind, point.wide, point.batch_tokens), setup)
        least = max(ranked.values()) * _PROMISING
        fewest = max(_FEWEST_CANDIDATES, round(len(best) * _CANDIDATE_SHARE))
        turns: collections.Counter[tuple[object, ...]] = collections.Counter()
        order: list[tuple[int, Setup]] = []
        for number, ((kind, wide, _), setup) in enumerate(best.items()):
            if number < fewest or ranked[setup] >= least:
                order.append((turns[kind, wide], setup))
                turns[kind, wide] += 1
        return [setup for _, setup in sorted(order, key=lambda one: one[0])]

    def _explore(self, ranked: Mapping[Setup, float], most: int) -> str:
        """Trials until proposals bring nothing better or until there are ``most``; why it ended."""
        candidates = iter(self._candidates(ranked))
        # On cards the largest batches come first, which the memory may not hold; the smallest may run all the same.
        failures = len(ranked) if self.space.on_cards else _MOST_FAILURES
        since = 0
        while len(self.trials) < most:
            # One at least: a search that measured nothing has nothing to say.
            if self._out_of_time() if self._ran() else len(self.trials) >= failures:
                break
            measured = {trial.setup: trial for trial in self.trials}
            if len(measured) == len(ranked):
                return "every set-up was measured"
            if since == _PATIENCE:
                return f"the last {_PATIENCE} proposals were no better"
            if (setup := next((one for one in candidates if one not in measured), None)) is not None:
                self._measure([setup], "cost model")
                continue
            best = max(trial.measurement.score for trial in self.trials)
            proposed = self._proposed(measured)
            setup = proposed or next(one for one in ranked if one not in measured)
            self._measure([setup], "tpe" if proposed else "cost model")
            since = 0 if self.trials[-1].measurement.score > best else since + 1
        return f"no more than {self.options.trials} were allowed"

    def _proposed(self, measured: Mapping[Setup, Trial]) -> Setup | None:
        """A set-up that was not measured yet, by TPE; None when it knows none."""
        for _ in range(_ASKS):
            asked = self.study.ask(self.choices)
            setup = self.space.setup(self.space.nearest(Point(**asked.params)))
            assert setup is not None
            if setup not in measured:
                return setup
            self.study.tell(asked, measured[setup].measurement.score)
        return None

    # Measuring

    def _measure(self, setups: Sequence[Setup], source: str) -> None:
        """Measures and records; a set-up that cannot run is recorded with the reason."""
        for setup, measurement in zip(setups, self.evaluator.measure(setups), strict=True):
            trial = Trial(setup, measurement, source)
            self.journal.add_trial(trial)
            self._learn(trial)
            self.options.say(trial, len(self.trials))

    def _learn(self, trial: Trial) -> None:
        from optuna.trial import create_trial

        point = self.space.setups[trial.setup]._asdict()
        self.study.add_trial(create_trial(params=point, distributions=self.choices, value=trial.measurement.score))

    def _final(self) -> Trial:
        """The best few once more, by turns; after every few rounds the better half stays."""
        ranking = self._best()
        room, least = self.options.trials - len(self.trials), ranking[0].measurement.rate * _FINAL_SHARE
        near = [trial.setup for trial in ranking if trial.measurement.rate >= least > 0]
        left = near[: min(_FINALISTS, room // _FEWEST_ROUNDS)]
        rounds: dict[Setup, list[Trial]] = {setup: [] for setup in left}
        number = 0
        while len(left) > 1 and len(self.trials) + len(left) <= self.options.trials and not self._out_of_time():
            self._measure(left, "final")
            for trial in self.trials[-len(left) :]:
                if trial.measurement.failed is None:
                    rounds[trial.setup].append(trial)
            number += 1
            # What failed may run alone, but has too few rounds to be compared by.
            left = [setup for setup in left if len(rounds[setup]) == number]
            if number % _ROUNDS == 0:
                left.sort(key=lambda setup: -median_trial(rounds[setup]).measurement.score)
                left = left[: math.ceil(len(left) / 2)]
        medians = [median_trial(rounds[setup]) for setup in left or rounds if rounds[setup]]
        won = max(medians, key=lambda trial: trial.measurement.score, default=ranking[0])
        return won if won.measurement.rate > 0 else ranking[0]

    def _best(self) -> list[Trial]:
        """The median trial of every set-up that ran, best first."""
        trials: dict[Setup, list[Trial]] = collections.defaultdict(list)
        for trial in self._ran():
            trials[trial.setup].append(trial)
        return sorted(map(median_trial, trials.values()), key=lambda trial: -trial.measurement.score)

    def _ran(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.measurement.failed is None]

    def _out_of_time(self) -> bool:
        """Whether the trials that would be next are cut."""
        self.cut = time.monotonic() - self.began >= self.options.seconds
        return self.cut


def _study(space: Space, seed: int) -> tuple[dict[str, Any], Any]:
    """The distributions of a point's coordinates, and Optuna's study of them."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=1)
    choices = {name: optuna.distributions.CategoricalDistribution(those) for name, those in space.choices.items()}
    return choices, optuna.create_study(sampler=sampler, direction="maximize")
