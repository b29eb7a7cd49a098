"""Does `encast tune` find what measuring every set-up finds, and with how many trials?

    python benchmarks/tune_against_grid.py model.encast --workload 8:40,16:30,128:20 --slo p99=20ms --work /tmp/grid

Three stages, each of which goes on where an earlier call stopped: every set-up of the grid is measured once, in random
order; the search runs with a quarter of that number of trials; and its choice is measured against the best few of the
grid, by turns, over some rounds. Bar: the choice reaches 97 % of the best of them, and
neither trials nor seconds of the search are more than a quarter of the grid's. With --seconds a call ends after that
long, so that a shared machine can be had in short turns: repeat it until it prints the result.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from encast import artifact as artifacts
from encast.backends.groups import Setup
from encast.bench.statistics import median_interval, ratio_interval
from encast.machine import usable_cores
from encast.tune.evaluate import LiveEvaluator, Pace
from encast.tune.measurement import Trial
from encast.tune.requests import read_requests
from encast.tune.search import Options, search
from encast.tune.slo import Slo
from encast.tune.space import make_space

BAR_SHARE = 0.97
BAR_TRIALS = 0.25
BEST_OF_GRID = 3


class Lines:
    """Trials in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.trials = [Trial.from_json(json.loads(line)) for line in text.splitlines()]

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(trial.to_json()) + "\n")

    @property
    def seconds(self) -> float:
        return sum(trial.measurement.seconds for trial in self.trials)

    def rates(self, setup: Setup) -> list[float]:
        return [trial.measurement.rate for trial in self.trials if trial.setup == setup]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--slo", default="none")
    parser.add_argument("--work", type=Path, required=True, help="the folder for what was measured")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this call")
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    end = time.monotonic() + args.seconds
    args.work.mkdir(parents=True, exist_ok=True)
    slo = Slo.parse(args.slo)
    opened = artifacts.open(args.artifact)
    requests = read_requests(args.workload, opened)
    cores = len(usable_cores())
    space = make_space(cores, requests.lengths)
    name = next((name for name in opened.graph.outputs if name != "last_hidden_state"), "last_hidden_state")
    selects = opened.graph.type_of(opened.graph.outputs[name]).shape[0] == "selected"
    pace = Pace.of_grid(len(space.setups))
    with LiveEvaluator(
        args.artifact, requests.batch, output=name, selects=selects, cores=cores, slo=slo, pace=pace, seed=args.seed
    ) as evaluator:
        grid = measured_grid(Lines(args.work / "grid.jsonl"), list(space.setups), evaluator, end, args.seed)
        if grid is None:
            return
        tuned = tuned_choice(args, space, evaluator, requests.lengths, slo, end)
        if tuned is None:
            return
        finals = compared(Lines(args.work / "finals.jsonl"), grid, tuned, evaluator, args.rounds, end)
        if finals is not None:
            report(grid, tuned, finals)


def measured_grid(lines: Lines, setups: list[Setup], evaluator: LiveEvaluator, end: float, seed: int) -> Lines | None:
    done = {trial.setup for trial in lines.trials}
    order = [setups[index] for index in np.random.default_rng(seed).permutation(len(setups))]
    for setup in order:
        if setup in done:
            continue
        if time.monotonic() >= end:
            print(f"grid: {len(lines.trials)} of {len(setups)}; call again")
            return None
        (measurement,) = evaluator.measure([setup])
        lines.add(Trial(setup, measurement, "grid"))
    return lines


def tuned_choice(
    args: argparse.Namespace, space: Any, evaluator: LiveEvaluator, lengths: list[int], slo: Slo | None, end: float
) -> dict[str, Any] | None:
    """The search's result, kept in a file; None when the time was over before its end."""
    path, journal = args.work / "tuned.json", args.work / "tuned.journal"
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    began = time.monotonic()
    options = Options(
        trials=int(len(space.setups) * BAR_TRIALS),
        seconds=end - began,
        seed=args.seed,
        journal=journal,
        key={"slo": args.slo, "workload": args.workload},
        resume=journal.exists(),
    )
    found = search(space, evaluator, lengths, slo, options)
    spent_path = args.work / "tuned.seconds"
    spent = float(spent_path.read_text()) if spent_path.exists() else 0.0
    spent += time.monotonic() - began
    spent_path.write_text(str(spent))
    if found.cut or found.interrupted:
        print(f"search: {len(found.trials)} trials; call again")
        return None
    result = {
        "chosen": found.chosen.to_json(),
        "trials": len(found.trials),
        "most": options.trials,
        "grid": len(space.setups),
        "seconds": spent,
        "stopped": found.stopped,
    }
    path.write_text(json.dumps(result), encoding="utf-8")
    return result


def compared(
    lines: Lines, grid: Lines, tuned: dict[str, Any], evaluator: LiveEvaluator, rounds: int, end: float
) -> Lines | None:
    chosen = Trial.from_json(tuned["chosen"]).setup
    ranked = sorted(grid.trials, key=lambda trial: -trial.measurement.rate)
    setups = [chosen, *[trial.setup for trial in ranked if trial.setup != chosen][:BEST_OF_GRID]]
    done = min(len(lines.rates(setup)) for setup in setups)
    for number in range(done, rounds):
        if time.monotonic() >= end:
            print(f"comparison: {number} of {rounds} rounds; call again")
            return None
        # A B C D, D C B A, ...: what drifts within a round helps nobody.
        order = setups if number % 2 == 0 else setups[::-1]
        for setup, measurement in zip(order, evaluator.measure(order), strict=True):
            lines.add(Trial(setup, measurement, "comparison"))
    return lines


def report(grid: Lines, tuned: dict[str, Any], finals: Lines) -> None:
    chosen = Trial.from_json(tuned["chosen"]).setup
    mine = finals.rates(chosen)
    print(f"| set-up | texts/s in the grid | texts/s by turns, 95 % | chosen / it, 95 % |\n{'| --- ' * 4}|")
    worst = 1.0
    for setup in dict.fromkeys(trial.setup for trial in finals.trials):
        rates = finals.rates(setup)
        low, high = median_interval(rates) or (float("nan"), float("nan"))
        ratio = ratio_interval(mine, rates)
        worst = min(worst, ratio.ratio)
        seen = grid.rates(setup)
        print(
            f"| {setup.text}{' (chosen)' if setup == chosen else ''} | {float(np.median(seen)):.0f} | "
            f"{float(np.median(rates)):.0f} ({low:.0f} to {high:.0f}) | {ratio.ratio:.3f} "
            + (f"({ratio.low:.3f} to {ratio.high:.3f}) |" if ratio.low is not None else "|")
        )
    share, trials = worst, tuned["trials"] / tuned["grid"]
    print(
        f"\nthe choice has {share:.1%} of the best by turns ({'met' if share >= BAR_SHARE else 'missed'}: "
        f"{BAR_SHARE:.0%}); {tuned['trials']} trials of {tuned['grid']} set-ups, {trials:.0%} "
        f"({'met' if trials <= BAR_TRIALS else 'missed'}: {BAR_TRIALS:.0%}); {tuned['seconds']:.0f} s against "
        f"{grid.seconds:.0f} s of the grid, {tuned['seconds'] / grid.seconds:.0%}; {tuned['stopped']}"
    )


if __name__ == "__main__":
    main()
