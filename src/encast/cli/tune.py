"""``encast tune``: finds how many instances on how many cores, or which batches on cards, serve a workload best."""

from __future__ import annotations

import json as json_module
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from encast import artifact as artifacts
from encast.cli.interrupts import sigterm_interrupts
from encast.cli.progress import Progress
from encast.cli.tune_place import Place, on_cards, on_cores
from encast.data import FORMATS
from encast.errors import InputError, ResourceError, need_modules

if TYPE_CHECKING:
    from encast.measure.price import Price
    from encast.tune.measurement import Trial
    from encast.tune.search import Found
    from encast.tune.slo import Slo

__all__ = ["tune_command"]


@sigterm_interrupts()
def tune_command(
    artifact: Annotated[Path, typer.Argument(help="A compiled artifact (NAME.encast).")],
    workload: Annotated[
        str,
        typer.Option(
            metavar="FILE|HISTOGRAM",
            help="A file of texts as `encast run` reads it; LENGTH:COUNT,... or a JSON, CSV or TSV file of such pairs.",
        ),
    ],
    slo: Annotated[
        str,
        typer.Option(help="The latency limit: a percentile and its bound (p99=10ms); none: most throughput."),
    ] = "none",
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="CARD", help="cuda, or cuda:0, cuda:1, ...: an instance on each card; default: the CPU."),
    ] = None,
    card_dtype: Annotated[
        str | None,
        typer.Option(help="Of --device: what values are stored and multiplied in, f32, f16, bf16, f8 or f16-acc16."),
    ] = None,
    price: Annotated[
        str | None, typer.Option(help="Of this machine: dollars an hour (0.17/h), or a name of the table of prices.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="The most measurements; default: a quarter of all set-ups, at least 30."),
    ] = None,
    time: Annotated[
        float | None, typer.Option(min=1.0, help="The most seconds to search; the trial under way is finished.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a search that was interrupted or out of time.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The configuration file; default: NAME.tuned.json beside the artifact, NAME.tuned-card.json for cards."
        ),
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="The column of the text (question, query).")] = None,
    pair_column: Annotated[str | None, typer.Option(help="The column of the second text, if there is one.")] = None,
    input_format: Annotated[
        str, typer.Option(help=f"Of texts: {', '.join(FORMATS)}; auto: by the name of the file, else text.")
    ] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, samples and the search.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the configuration as one JSON document.")] = False,
) -> None:
    """Find the instances, threads, batch and dispatch by length that serve a workload best on this machine.

    Under --slo that is the most texts a second of which the percentile stays within its limit while they arrive at
    random; without, the most texts a second. The result is a file for encast.load(..., config=FILE), with the set-ups
    that no other beats in throughput, latency, memory and cost at once. With --device it finds the tokens of a batch,
    and encast serve --device ... --config FILE takes the file.
    """
    need_modules("bench", "optuna", "psutil", "scipy")
    # Here, so that --help needs none of them.
    from encast.artifact import artifact_sha
    from encast.backends.devices import check_cards
    from encast.measure.price import parse_price
    from encast.tune.configuration import Configuration
    from encast.tune.evaluate import METHOD
    from encast.tune.requests import read_requests
    from encast.tune.search import Options, default_trials, search
    from encast.tune.slo import Slo

    if device is not None:
        check_cards(device, card_dtype, "--device")
        need_modules("cuda", "torch")
    elif card_dtype is not None:
        raise InputError("--card-dtype is for cards; give --device too")
    limit = Slo.parse(slo)
    paid = None if price is None else parse_price(price)
    target = out or Path(
        f"{artifact.resolve()}".removesuffix(".encast") + (".tuned-card.json" if device else ".tuned.json")
    )
    _need_writable(target)
    opened = artifacts.open(artifact)
    requests = read_requests(
        workload, opened, column=text_column, pair_column=pair_column, format=input_format, seed=seed
    )
    output, selects = _output(opened)
    sha = artifact_sha(opened)
    with ExitStack() as stack:
        measuring: dict[str, Any] = {"output": output, "selects": selects, "slo": limit, "seed": seed}
        place = (
            on_cores(artifact, requests, measuring)
            if device is None
            else on_cards(artifact, requests, measuring, device, card_dtype)
        )
        space, evaluator = place.space, stack.enter_context(place.evaluator)
        progress = stack.enter_context(Progress("trials", quiet=json))
        options = Options(
            trials=trials or default_trials(space),
            seconds=math.inf if time is None else time,
            seed=seed,
            journal=target.with_name(target.name + ".journal"),
            key={
                "method of measuring": METHOD,
                "artifact": sha,
                **place.key,
                "workload": requests.sha,
                "slo": None if limit is None else limit.to_json(),
            },
            resume=resume,
        )
        if not json:
            print(
                f"encast: {len(space.setups)} set-ups, at most {_trials(options.trials)}; first some runs are timed "
                f"for the cost model, which may take {place.first}",
                file=sys.stderr,
            )
        report = _Report(progress, options.trials, place, quiet=json)
        found = search(space, evaluator, requests.lengths, limit, replace(options, say=report.heard))
    rows = _Rows(found.trials, None if limit is None else limit.name, paid, place)
    configuration = Configuration(
        chosen=found.chosen.setup,
        artifact_sha=sha,
        machine=place.machine,
        cards=place.cards,
        slo=limit,
        workload=requests.describe(),
        front=tuple(rows.front),
        trials=tuple(rows.all),
    )
    configuration.write(target)
    if found.interrupted:
        of = _trials(len(found.trials))
        best = (
            f"the best of {of}"
            if found.chosen.measurement.rate > 0
            else f"of {of} none keeps the latency limit, the nearest"
        )
        raise KeyboardInterrupt(f"{best} is in {target}; --resume goes on")
    assert options.journal is not None
    if not found.cut:
        # A finished search is in the file; its journal would only stand in the way of the next one.
        options.journal.unlink(missing_ok=True)
    if json:
        print(json_module.dumps({"file": str(target), "stopped": found.stopped, **configuration.to_json()}))
    else:
        for line in _lines(found, rows, limit, place, target):
            print(line)
    if found.chosen.measurement.rate == 0:
        raise InputError(
            f"no set-up keeps the latency limit ({limit}) at any rate; the nearest, "
            f"{place.words(found.chosen.setup)}, is at {found.chosen.measurement.excess:.1f} times the "
            "limit: give a longer limit, shorter texts or a smaller model"
        )


class _Report:
    """Says on stderr what was tried, when it is better than all before."""

    def __init__(self, progress: Progress, most: int, place: Place, *, quiet: bool) -> None:
        self._progress, self._most, self._place, self._quiet = progress, most, place, quiet
        self._best = -math.inf

    def heard(self, trial: Trial, number: int) -> None:
        score, rate = trial.measurement.score, trial.measurement.rate
        if not self._quiet and trial.measurement.failed is not None:
            print(f"encast: trial {number}: {trial.measurement.failed}", file=sys.stderr)
        elif score > self._best and rate > 0:
            self._best = score
            if not self._quiet:
                print(
                    f"encast: best so far, trial {number}: {rate:,.0f} texts/s with {self._place.words(trial.setup)}",
                    file=sys.stderr,
                )
        self._progress.update(number, number / self._most)


class _Rows:
    """The trials and the front as the file has them."""

    def __init__(self, trials: Sequence[Trial], percent: str | None, price: Price | None, place: Place) -> None:
        from encast.measure.price import cost_record
        from encast.tune.measurement import pareto_front

        def row(trial: Trial) -> dict[str, Any]:
            cost = cost_record(price, trial.measurement.rate)
            return place.row(trial.to_json(None if cost is None else cost["usd_per_million"]))

        self.percent = percent or "p99"
        self.all = [row(trial) for trial in trials]
        self.front_trials = pareto_front(trials, self.percent)
        self.front = [row(trial) for trial in self.front_trials]


def _lines(found: Found, rows: _Rows, limit: Slo | None, place: Place, target: Path) -> list[str]:
    measured = found.chosen.measurement
    goal = "throughput" if limit is None else f"the most with {limit}"
    noisy = sum(trial.measurement.noise is not None for trial in found.trials)
    ended = f"{_trials(len(found.trials))} of {len(place.space.setups)} set-ups; {found.stopped}"
    if found.cut:
        ended += "; --resume goes on"
    lines = [f"{place.words(found.chosen.setup)}: {measured.rate:,.0f} texts/s, {goal}"]
    if measured.rate == 0:
        return [ended, f"the nearest is written to {target}"]
    lines += ["", f"{'texts/s':>9} {rows.percent + ' ms':>9} {'MB':>7} {'$/million':>10}  set-up"]
    for trial, row in zip(rows.front_trials, rows.front, strict=True):
        latency, memory, cost = row["latency_ms"].get(rows.percent), row["memory_bytes"], row["usd_per_million"]
        shown = (
            "-" if latency is None else f"{latency:.2f}",
            "-" if memory is None else f"{memory / 1e6:.0f}",
            "-" if cost is None else f"{cost:.3f}",
        )
        lines.append(
            f"{row['sequences_per_s']:>9,.0f} {shown[0]:>9} {shown[1]:>7} {shown[2]:>10}  {place.words(trial.setup)}"
        )
    lines += ["", f"set-up: {place.legend}"]
    lines += [ended]
    if noisy:
        lines.append(f"the machine was noisy during {noisy} of them")
    return [*lines, f"written to {target}: {place.usage(target)}"]


def _trials(count: int) -> str:
    return f"{count} trial{'s' if count != 1 else ''}"


def _output(opened: artifacts.Artifact) -> tuple[str, bool]:
    """The output that the head gives, and whether its rows are selected tokens."""
    outputs = opened.graph.outputs
    name = next((name for name in outputs if name != "last_hidden_state"), "last_hidden_state")
    return name, opened.graph.type_of(outputs[name]).shape[0] == "selected"


def _need_writable(target: Path) -> None:
    """Tried before minutes of measuring."""
    from encast.data.output import OutputFile

    if target.is_dir():
        raise ResourceError(f"{target} is a folder; name a file with --out")
    OutputFile(target, "--out").discard()
