"""Does `encast tune` find what measuring every set-up finds, and with how many trials?

    python benchmarks/tune_against_grid.py model.encast --workload 8:40,16:30,128:20 --slo p99=20ms --work /tmp/grid

Three stages, each of which goes on where an earlier call stopped: every set-up of the grid is measured once, in random
order; the search runs with a quarter of that number of trials; and its choice is measured against the best few of the
grid, by turns, until the interval of its worst ratio is narrower than 3 %. Bar: the choice reaches 97 % of the best of
them with at most a quarter of the grid's trials; the seconds are told. With --seconds a call ends after that long, so
that a shared machine can be had in short turns: repeat it until it prints the result.
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
from encast.machine import usable_cores
from encast.measure.statistics import median_interval, ratio_interval
from encast.tune.configuration import artifact_sha, machine_fingerprint
from encast.tune.evaluate import METHOD, LiveEvaluator
from encast.tune.measurement import Trial
from encast.tune.requests import read_requests
from encast.tune.search import Evaluator, Options, search
from encast.tune.slo import Slo
from encast.tune.space import Space, make_space

BAR_SHARE = 0.97
BAR_TRIALS = 0.25
BEST_OF_GRID = 3
FEWEST_ROUNDS = 5
WIDTH = 0.03


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
    parser.add_argument("--rounds", type=int, default=20, help="at most, of the comparison (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    end = time.monotonic() + args.seconds
    args.work.mkdir(parents=True, exist_ok=True)
    slo = Slo.parse(args.slo)
    opened = artifacts.open(args.artifact)
    requests = read_requests(args.workload, opened)
    conditions = {
        "method of measuring": METHOD,
        "artifact": artifact_sha(opened),
        "machine": machine_fingerprint(),
        "cores": len(usable_cores()),
        "workload": requests.sha,
        "slo": None if slo is None else slo.to_json(),
        "seed": args.seed,
    }
    keep(conditions, args.work)
    cores = len(usable_cores())
    space = make_space(cores, requests.lengths)
    name = next((name for name in opened.graph.outputs if name != "last_hidden_state"), "last_hidden_state")
    selects = opened.graph.type_of(opened.graph.outputs[name]).shape[0] == "selected"
    with LiveEvaluator(
        args.artifact, requests.batch, output=name, selects=selects, slo=slo, seed=args.seed
    ) as evaluator:
        grid = measured_grid(Lines(args.work / "grid.jsonl"), list(space.setups), evaluator, end, args.seed)
        if grid is None:
            return
        tuned = tuned_choice(args.work, conditions, space, evaluator, requests.lengths, slo, end)
        if tuned is None:
            return
        by_turns = compared(Lines(args.work / "by_turns.jsonl"), grid, tuned, evaluator, args.rounds, end)
        if by_turns is not None:
            report(grid, tuned, by_turns)


def keep(conditions: dict[str, Any], work: Path) -> None:
    """Writes those of the first call; ends the program when a later one has others."""
    path = work / "conditions.json"
    if not path.exists():
        if any(work.iterdir()):
            raise SystemExit(f"{work} holds files, but no conditions.json that says of what; give another --work")
        path.write_text(json.dumps(conditions, indent=1), encoding="utf-8")
    before = json.loads(path.read_text(encoding="utf-8"))
    for name, value in conditions.items():
        if before.get(name) != value:
            raise SystemExit(
                f"{work} holds trials of other conditions: their {name} is {before.get(name)!r}, now it is {value!r}; "
                "give another --work, or what the first call was given"
            )


def measured_grid(lines: Lines, setups: list[Setup], evaluator: Evaluator, end: float, seed: int) -> Lines | None:
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
    work: Path,
    conditions: dict[str, Any],
    space: Space,
    evaluator: Evaluator,
    lengths: list[int],
    slo: Slo | None,
    end: float,
) -> dict[str, Any] | None:
    """The search's result, kept in a file; None when the time was over before its end."""
    path, journal = work / "tuned.json", work / "tuned.journal"
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    began = time.monotonic()
    options = Options(
        trials=int(len(space.setups) * BAR_TRIALS),
        seconds=end - began,
        seed=conditions["seed"],
        journal=journal,
        key=conditions,
        resume=journal.exists(),
    )
    found = search(space, evaluator, lengths, slo, options)
    spent_path = work / "tuned.seconds"
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
    lines: Lines, grid: Lines, tuned: dict[str, Any], evaluator: Evaluator, rounds: int, end: float
) -> Lines | None:
    chosen = Trial.from_json(tuned["chosen"]).setup
    ranked = sorted(grid.trials, key=lambda trial: -trial.measurement.rate)
    setups = [chosen, *[trial.setup for trial in ranked if trial.setup != chosen][:BEST_OF_GRID]]
    done = min(len(lines.rates(setup)) for setup in setups)
    for number in range(done, rounds):
        if number >= FEWEST_ROUNDS and settled([lines.rates(setup) for setup in setups]):
            break
        if time.monotonic() >= end:
            print(f"comparison: {number} of {rounds} rounds; call again")
            return None
        # A B C D, D C B A, ...: what drifts within a round helps nobody.
        order = setups if number % 2 == 0 else setups[::-1]
        trials = [Trial(setup, one, "comparison") for setup, one in zip(order, evaluator.measure(order), strict=True)]
        for trial in trials:
            if trial.measurement.rate <= 0:
                why = trial.measurement.failed or "the latency limit was broken at every rate"
                print(f"comparison: round {number + 1} is lost, {trial.setup.text}: {why}; call again")
                return None
        for trial in trials:
            lines.add(trial)
    return lines


def settled(rates: list[list[float]]) -> bool:
    """Whether the worst ratio of the first to another one is known well enough."""
    worst = min((ratio_interval(rates[0], others) for others in rates[1:]), key=lambda ratio: ratio.ratio)
    return worst.low is not None and worst.high is not None and worst.high - worst.low < WIDTH


def report(grid: Lines, tuned: dict[str, Any], by_turns: Lines) -> None:
    chosen = Trial.from_json(tuned["chosen"]).setup
    mine = by_turns.rates(chosen)
    print(f"| set-up | texts/s in the grid | texts/s by turns, 95 % | chosen / it, 95 % |\n{'| --- ' * 4}|")
    worst = 1.0
    for setup in dict.fromkeys(trial.setup for trial in by_turns.trials):
        rates = by_turns.rates(setup)
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
