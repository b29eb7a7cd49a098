"""One job: its systems at every point of its scenario, in interleaved rounds, and the rows that come of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.bench.agreement import Reference, plain_graph
from encast.bench.cache import content_hash
from encast.bench.config import DEFAULT_LAUNCHER, GROUPS, Job, settings
from encast.bench.models import make_model
from encast.bench.noise import NoiseMeter
from encast.bench.peers.base import BackendSpec, ModelFiles
from encast.bench.roofline import WEIGHT_BYTES, Sizes, card_limit, most, peak_is_known, roofline
from encast.bench.rows import SCHEMA, Row
from encast.bench.run import Run
from encast.bench.scenarios.base import Label, Point, Scenario, blamed, make_scenario
from encast.bench.system import System
from encast.bench.timing import interleave
from encast.bench.worker import WorkerError, prepare
from encast.ceilings import Fingerprint
from encast.ceilings import load as load_ceilings
from encast.ceilings.card import find_card
from encast.errors import InputError
from encast.launch import Placement, memory_binding
from encast.machine import this_machine
from encast.measure.batches import portions
from encast.measure.price import cost_record, parse_price
from encast.measure.statistics import ratio_interval
from encast.measure.workloads import describe, make_workload

__all__ = ["Comparison", "Shared", "tell_apart"]


Say = Callable[[str], None]
"""Is told what is done, line by line."""


@dataclass
class Shared:
    """What the jobs of a sweep have in common: models, by their configuration, and backends made ready for them."""

    models: dict[str, tuple[ModelFiles, Sizes]] = field(default_factory=dict)
    prepared: dict[str, Mapping[str, Any] | tuple[str, str]] = field(default_factory=dict)
    """By backend and model: the facts of the conversion, or a status and its reason."""
    experiment: str | None = None
    """The name that rows have where the job gives none."""
    rows_left: int = 0
    """Of all jobs, to be measured or found impossible."""

    def model(self, config: Mapping[str, Any], cache: Path) -> tuple[ModelFiles, Sizes]:
        key = content_hash(config)
        if key not in self.models:
            model = make_model(config, cache)
            self.models[key] = model, Sizes.of(plain_graph(model.checkpoint))
        return self.models[key]


class Comparison:
    """A job whose model, workload and points are known. ``rows`` measures it."""

    def __init__(
        self,
        job: Job,
        *,
        cache: Path,
        say: Say = lambda text: None,
        shared: Shared | None = None,
    ) -> None:
        """Makes the model below ``cache`` when it is not there. Raises ``EncastError`` for what cannot be measured."""
        self.job, self._cache, self._say = job, cache, say
        self.settings = settings(job.record())
        self._machine = this_machine()
        self._price = None if job.price is None else parse_price(job.price)
        self._scenario = make_scenario(job.scenario)
        _refuse_unused(job, self._scenario)
        self._shared = shared or Shared()
        self._model, self._sizes = self._shared.model(job.model, cache)
        self._workload = make_workload(job.workload, self._model.checkpoint)
        with blamed(job.scenario):
            self.points = list(self._scenario.points(self._workload, job.launcher, self._machine) or ())
        if not self.points or not all(isinstance(point, Point) for point in self.points):
            raise InputError(
                f"scenario {job.scenario['name']}: its `points` must return a Point at least, and no others"
            )
        # What cannot be for any backend is refused before the first is measured.
        job.launcher.environment(self._places(self.points[0])[0])
        for point in self.points:
            _parts(point)
        self._reference = Reference(self._model, cache)
        self._binding = memory_binding(self._machine)
        self._ceilings = load_ceilings(self._machine)
        self._exports: dict[str, Mapping[str, Any]] = {}
        self.swept: Label = {}
        """Fields that tell the job from others of its experiment, see ``tell_apart``."""

    def keys(self) -> list[str]:
        """Of all rows that ``rows`` makes."""
        return [self._key(spec, point) for point in self.points for spec in self.job.backends]

    def left(self, known: Sequence[Row]) -> int:
        """How many rows ``rows`` makes where those are there."""
        return len(set(self.keys()) - _settled(known))

    def rows(self, known: Sequence[Row]) -> Generator[list[Row], None, None]:
        """The rows of one point after the other, without those that are ``known``.

        Those of a backend that was unavailable are made again: it may have been installed.
        """
        if not self.left(known):
            return
        own = set(self.keys())
        before = [row for row in known if row["key"] in own]
        done = _settled(before)
        if before and (recall := getattr(self._scenario, "recall", None)) is not None:
            recall([self._as_measured(row) for row in before])
        ready: list[BackendSpec] = []
        # The baseline is in every group: what the ratios of the rows before are to, also where it wants nothing.
        measured = {row["backend"]["name"] for row in before if row["status"] == "ok"}
        for spec in sorted(self.job.backends, key=lambda spec: spec.name not in measured):
            wanted = [point for point in self.points if self._key(spec, point) not in done]
            if not wanted and (ready or spec.name not in measured):
                continue
            failure = self._prepare(spec) if wanted else None
            if failure is None:
                ready.append(spec)
            else:
                yield [self._row(point, Run(spec, failure=failure)) for point in wanted]
                self._shared.rows_left -= len(wanted)
        with blamed(self.job.scenario):
            for group in _groups(ready, self.job.timing.together):
                for _, points in groupby(self.points, key=lambda point: (point.instances, point.threads)):
                    yield from self._measure_points(list(points), group, done)

    def _measure_points(
        self, points: Sequence[Point], group: Sequence[BackendSpec], done: set[str]
    ) -> Iterator[list[Row]]:
        """Of points of one placement, at which a system stays open."""
        opened: dict[str, System] = {}
        with ExitStack() as ends:
            for point in points:
                missing = {self._key(spec, point) for spec in group} - done
                if not missing:
                    continue
                specs = [group[0], *(spec for spec in group[1:] if self._key(spec, point) in missing)]
                label = ", ".join(f"{name} {value}" for name, value in self._columns(point, *specs).items())
                names = ", ".join(spec.name for spec in specs)
                self._say(f"{self._shared.rows_left} rows left: {self.job.scenario['name']}, {label}: {names}")
                for spec in specs:
                    if spec.name not in opened:
                        opened[spec.name] = System(
                            spec,
                            self._model,
                            self._places(point),
                            cache=self._cache,
                            environment=self.job.launcher.environment,
                            memory=self._binding,
                            limits=self.job.limits,
                        )
                        ends.callback(opened[spec.name].close)
                rows = self._measure(point, [Run(spec, opened[spec.name]) for spec in specs])
                yield [row for row in rows if row["key"] in missing]
                done |= missing
                self._shared.rows_left -= len(missing)

    def _key(self, spec: BackendSpec, point: Point) -> str:
        backend = {"name": spec.name, **self.settings["backend"][spec.name]}
        return content_hash({**self.settings, "backend": backend, "point": dict(point.label)})

    def _prepare(self, spec: BackendSpec) -> tuple[str, str] | None:
        """Asks whether the backend is there, and converts the checkpoint for it; returns what is against it."""
        key = content_hash({"backend": asdict(spec), "model": self._model.sha})
        if key not in self._shared.prepared:
            self._say(f"{spec.name}: look for it, convert {self._model.name} unless that has been done")
            threads = len(self._machine.allowed_cores)
            try:
                reason, facts = prepare(spec, self._model, threads, self._cache, self.job.limits)
                unavailable = ("unavailable", f"{spec.name}: {reason}")
                self._shared.prepared[key] = facts if reason is None else unavailable
            except WorkerError as error:
                self._shared.prepared[key] = error.status, str(error)
        found = self._shared.prepared[key]
        if isinstance(found, tuple):
            return found
        self._exports[spec.name] = found
        return None

    def _measure(self, point: Point, runs: Sequence[Run]) -> list[Row]:
        timing = self.job.timing
        self._reference.prepare(_parts(point))
        for run in runs:
            there = run.system is not None and run.system.is_open
            self._say(f"  {run.spec.name}: {'' if there else 'load, '}warm up, check")
            run.ready(point, timing, self._reference)
        racing = [run for run in runs if run.failure is None]
        if racing:
            self._say(f"  interleaved rounds: {', '.join(run.spec.name for run in racing)}")
        cpus = {cpu for place in self._places(point) for cpu in place.cpus}
        siblings = {cpu for core in self._cores(point) for cpu in core}
        meter, used = NoiseMeter(cpus, siblings), _cpu_seconds(racing)
        interleave(racing, lambda number, run: run.round(number, point, self._scenario), timing.seconds)
        meter.stop(_cpu_seconds(racing) - used)
        for run in racing:
            if run.failure is None:
                run.finish(point, self._reference, partial(self._least_ns, point))
        return [self._row(point, run, runs, meter) for run in runs]

    def _places(self, point: Point) -> tuple[Placement, ...]:
        return self.job.launcher.place(self._machine, instances=point.instances, threads=point.threads)

    def _cores(self, point: Point) -> list[Sequence[int]]:
        """All processors of each core of which some are given."""
        cpus = {cpu for place in self._places(point) for cpu in place.cpus}
        return [core.cpus for core in self._machine.cores if not cpus.isdisjoint(core.cpus)]

    def _least_ns(self, point: Point, system: System, again: bool) -> float | None:
        """See ``fairness.least_time``."""
        if not self._limited(system.backend):
            return None
        threads = point.instances * point.threads
        quickest = most(system.backend.dtype, threads, min(threads, len(self._cores(point))), again)
        return 1e9 * point.instances * min(self._sizes.operations(part) for part in system.parts) / quickest

    @staticmethod
    def _limited(spec: BackendSpec) -> bool:
        """Whether the processors' peak bounds it."""
        return spec.dtype in WEIGHT_BYTES and not spec.on_card and peak_is_known()

    def _limit(self, point: Point, run: Run, rate: float | None) -> dict[str, Any] | None:
        if self._limited(run.spec):
            return roofline(self._sizes, run.spec.dtype, point, self._ceilings, rate)
        card = run.facts.get("card") if run.spec.on_card else None
        kept = None if card is None else find_card(str(card))[0]
        return None if kept is None else card_limit(self._sizes, run.spec.dtype, point, kept, rate)

    def _row(self, point: Point, run: Run, runs: Sequence[Run] = (), noise: NoiseMeter | None = None) -> Row:
        spec, scenario = run.spec, self._scenario
        samples = [run.samples[number] for number in sorted(run.samples)]
        figures = [scenario.figure(sample) for sample in samples]
        metrics = scenario.summarise(point, samples) if run.measured else {}
        rate = metrics.get("sequences_per_s")
        status, reason = run.failure or ("ok", None)
        row: Row = {
            "schema": SCHEMA,
            "key": self._key(spec, point),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "experiment": self.job.experiment or self._shared.experiment,
            "status": status,
            "reason": reason,
            "backend": {
                "name": spec.name,
                "dtype": spec.dtype,
                "version": run.facts.get("version"),
                "facts": run.facts,
            },
            "model": {
                "name": self._model.name,
                "sha": self._model.sha,
                "hidden": self._sizes.hidden,
                "layers": self._sizes.layers,
            },
            "workload": describe(self._workload.name, point.batches),
            "scenario": self.job.scenario["name"],
            "launcher": self.job.launcher.name,
            "point": {"instances": point.instances, "threads": point.threads, **self._columns(point, spec)},
            "metrics": metrics,
            "compared_by": getattr(scenario, "compared_by", "the scenario's own figure"),
            "ratio_to": self._ratios(run, runs) if run.measured else {},
            "agreement": None if run.agreement is None else run.agreement.record(),
            "cold": self._cold(run),
            "memory": run.memory,
            "fairness": None if run.fairness is None else asdict(run.fairness),
            "noise": noise.record(figures) if noise and run.measured else None,
            "limit": self._limit(point, run, rate) if run.measured else None,
            # What breaks its latency limit has no price.
            "cost": cost_record(self._price, metrics.get("sequences_per_s_within_slo", rate)),
            "samples": {"figure": figures},
            "warm_up": run.warm,
            "machine": {
                "processor": self._machine.processor,
                "cores": len(self._machine.allowed_cores),
                "threads_per_core": self._machine.threads_per_core,
                "virtual": self._machine.virtual,
                "fingerprint": Fingerprint.here(self._machine).digest,
            },
        }
        return dict(_plain(row))

    def _columns(self, point: Point, *specs: BackendSpec) -> Label:
        """What tells rows of the point from others: its label, and what the experiment sweeps over."""
        shown = {"instances", "threads", *point.label}
        own = tuple(f"backend.{spec.name}." for spec in specs)
        fields = {
            name: value
            for name, value in self.swept.items()
            if (name.startswith(own) if name.startswith("backend.") else name.partition(".")[2] not in shown)
        }
        return {**point.label, **fields}

    def _as_measured(self, row: Row) -> Row:
        """With the columns that the scenario itself gave it."""
        return {**row, "point": {name: value for name, value in row["point"].items() if name not in self.swept}}

    def _ratios(self, run: Run, runs: Sequence[Run]) -> dict[str, Any]:
        """How many times as fast this one is as each of the others, by the rounds that both were in."""
        found = {}
        for other in runs:
            both = sorted(run.samples.keys() & other.samples.keys())
            if other is run or other.failure is not None or not both:
                continue
            mine, theirs = ([self._scenario.figure(one.samples[number]) for number in both] for one in (run, other))
            if min(mine) > 0 and min(theirs) > 0:
                found[other.spec.name] = ratio_interval(mine, theirs).record()
        return found

    def _cold(self, run: Run) -> dict[str, float | None] | None:
        if run.cold is None:
            return None
        return {
            "export_s": self._exports.get(run.spec.name, {}).get("seconds"),
            "import_s": run.cold.import_s,
            "load_s": run.cold.load_s,
            "first_call_ms": None if run.cold.first_call_s is None else 1e3 * run.cold.first_call_s,
        }


def tell_apart(comparisons: Sequence[Comparison]) -> None:
    """Has the rows of one experiment's jobs say in which given fields they differ, where no column says it.

    What follows from all jobs of a command line is the same when it is resumed.
    """
    values: dict[str, set[str]] = {}
    for comparison in comparisons:
        for name, value in comparison.job.given.items():
            values.setdefault(name, set()).add(_text(value))
    for comparison in comparisons:
        comparison.swept = {
            name: value if isinstance(value, (str, int, float)) and not isinstance(value, bool) else _text(value)
            for name, value in comparison.job.given.items()
            if name.partition(".")[0] in GROUPS and name not in GROUPS
            if len(values[name]) > 1 or any(name not in other.job.given for other in comparisons)
        }


def _text(value: Any) -> str:
    return json.dumps(value, default=str)


def _refuse_unused(job: Job, scenario: Scenario) -> None:
    """Raises ``InputError`` for what was given and would change nothing."""
    instead: Mapping[str, str] = getattr(scenario, "instead", {})
    given = {field: field for field in job.given}
    if "launcher" in job.given and job.launcher.name != DEFAULT_LAUNCHER:
        # Each field that its YAML sets was given by its name.
        said = {f"launcher.{own}" for own, value in asdict(job.launcher).items() if value is not None}
        given = {**dict.fromkeys(said, f"launcher={job.launcher.name}"), **given}
    for name, what in given.items():
        if name in instead:
            raise InputError(
                f"{what}: scenario={job.scenario['name']} does not use {name}; leave it out, since what counts "
                f"instead is {instead[name]}"
            )


def _settled(rows: Sequence[Row]) -> set[str]:
    """The keys of rows that need not be made again."""
    return {str(row["key"]) for row in rows if row["status"] != "unavailable"}


def _groups(specs: Sequence[BackendSpec], together: int) -> Iterator[list[BackendSpec]]:
    """As many as may be open at once; the first is in each group, so that all have a ratio to it."""
    if len(specs) <= together:
        if specs:
            yield list(specs)
        return
    size = max(1, together - 1)
    for begin in range(1, len(specs), size):
        yield [specs[0], *specs[begin : begin + size]]


def _cpu_seconds(runs: Sequence[Run]) -> float:
    """Processor time of all systems and of this process."""
    return time.process_time() + sum(run.system.cpu_seconds() for run in runs if run.system is not None)


def _parts(point: Point) -> list[Batch]:
    """What instances are given at once. Raises ``InputError`` for a batch that cannot be divided over them."""
    if not point.split:
        return list(point.batches)
    return [part for batch in point.batches for part in portions(batch, point.instances)]


def _plain(value: Any) -> Any:
    """JSON of NumPy's scalars and of tuples; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
