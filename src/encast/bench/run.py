"""One job: its contenders at every point of its scenario, by turns, and the rows that come of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.bench.agreement import Reference, plain_graph
from encast.bench.cache import content_hash
from encast.bench.config import DEFAULT_LAUNCHER, Job
from encast.bench.contender import ColdStart, Contender
from encast.bench.limit import Limit, Sizes, peak_is_the_machine_s, quickest, settled_peak
from encast.bench.models import make_model
from encast.bench.noise import Noise, NoiseMeter, rounds_suffice, steady_place
from encast.bench.peers.base import BackendSpec, ModelFiles, line_in, load_object
from encast.bench.placement import PlaceMeter
from encast.bench.rows import SCHEMA, Row
from encast.bench.scenarios.base import Label, Point, Scenario, compared_by
from encast.bench.side import Side
from encast.bench.sweep import columns, swept
from encast.bench.timing import Round, take_turns
from encast.bench.worker import WorkerError, prepare
from encast.ceilings import Fingerprint
from encast.ceilings import load as load_ceilings
from encast.errors import EncastError, InputError
from encast.launch import Placement, memory_binding
from encast.machine import Machine, this_machine
from encast.measure.batches import portions
from encast.measure.price import cost_record, parse_price
from encast.measure.statistics import ratio_interval
from encast.measure.workloads import describe, make_workload

__all__ = ["Comparison", "Shared", "make_scenario", "tell_apart"]

Say = Callable[[str], None]


@dataclass
class Shared:
    """What the jobs of a sweep have in common: models, by their configuration, and backends made ready for them."""

    models: dict[str, tuple[ModelFiles, Sizes]] = field(default_factory=dict)
    prepared: dict[str, Mapping[str, Any] | tuple[str, str]] = field(default_factory=dict)
    """By backend and model: the facts of the conversion, or a status and its reason."""
    rows_left: int = 0
    """Of all jobs, to be measured or found impossible."""
    rows_done: int = 0

    def progress(self, count: int) -> str:
        """The place of the next rows among all, ``3 of 48`` or ``3 to 5 of 48``."""
        first, last = self.rows_done + 1, self.rows_done + count
        return f"{first if count == 1 else f'{first} to {last}'} of {max(self.rows_left, last)}"

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
        machine: Machine | None = None,
        shared: Shared | None = None,
    ) -> None:
        """Makes the model below ``cache`` when it is not there. Raises ``EncastError`` for what cannot be measured.

        ``say`` is told what is done, line by line.
        """
        self.job, self._cache, self._say = job, cache, say
        self._machine = machine or this_machine()
        self._price = None if job.price is None else parse_price(job.price)
        self._scenario = make_scenario(job.scenario)
        _refuse_unused(job, self._scenario)
        self._shared = shared or Shared()
        self._model, self._sizes = self._shared.model(job.model, cache)
        self._workload = make_workload(job.workload, self._model.checkpoint)
        with _blamed(job.scenario):
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
        self._peaks: dict[tuple[str, int, int], float] = {}
        self._most: dict[tuple[str, int, int], float] = {}
        self._meters: dict[tuple[int, ...], PlaceMeter] = {}
        self._exports: dict[str, Mapping[str, Any]] = {}
        self._cold: dict[str, ColdStart] = {}
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
        # The first is in every group: the one that the ratios of the rows before are to, also where it wants nothing.
        measured = {row["backend"]["name"] for row in before if row["status"] == "ok"}
        for spec in sorted(self.job.backends, key=lambda spec: spec.name not in measured):
            wanted = [point for point in self.points if self._key(spec, point) not in done]
            if not wanted and (ready or spec.name not in measured):
                continue
            failure = self._prepare(spec) if wanted else None
            if failure is None:
                ready.append(spec)
            else:
                yield [self._row(point, Side(spec, failure=failure)) for point in wanted]
                self._shared.rows_done += len(wanted)
        with _blamed(self.job.scenario):
            yield from self._measured(ready, done)

    def _measured(self, ready: Sequence[BackendSpec], done: set[str]) -> Iterator[list[Row]]:
        for group in _groups(ready, self.job.timing.together):
            for _, points in groupby(self.points, key=lambda point: (point.instances, point.threads)):
                opened: dict[str, Contender] = {}
                try:
                    for point in points:
                        missing_keys = {self._key(spec, point) for spec in group} - done
                        if missing_keys:
                            place = self._shared.progress(len(missing_keys))
                            specs = [group[0], *(spec for spec in group[1:] if self._key(spec, point) in missing_keys)]
                            names = ", ".join(spec.name for spec in specs)
                            label = _label(self._columns(point, *specs))
                            self._say(f"{place}: {self.job.scenario['name']}, {label}: {names}")
                            rows = self._measure(point, specs, opened)
                            yield [row for row in rows if row["key"] in missing_keys]
                            done = done | missing_keys
                            self._shared.rows_done += len(missing_keys)
                finally:
                    with ExitStack() as ends:
                        for contender in opened.values():
                            ends.callback(contender.close)

    def _key(self, spec: BackendSpec, point: Point) -> str:
        job = self.job
        settings = {
            "backend": asdict(spec),
            "model": job.model,
            "workload": job.workload,
            "scenario": job.scenario,
            "launcher": asdict(job.launcher),
            "point": dict(point.label),
        }
        return content_hash(settings)

    def _prepare(self, spec: BackendSpec) -> tuple[str, str] | None:
        """Asks whether the backend is there, and converts the checkpoint for it; returns what is against it."""
        key = content_hash({"backend": asdict(spec), "model": self._model.sha})
        if key not in self._shared.prepared:
            self._say(f"{spec.name}: look for it, convert {self._model.name} unless that has been done")
            self._shared.prepared[key] = self._converted(spec)
        found = self._shared.prepared[key]
        if isinstance(found, tuple):
            return found
        self._exports[spec.name] = found
        return None

    def _converted(self, spec: BackendSpec) -> Mapping[str, Any] | tuple[str, str]:
        threads = len(self._machine.allowed_cores)
        try:
            reason, facts = prepare(spec, self._model, threads, self._cache, self.job.limits)
        except WorkerError as error:
            return error.status, str(error)
        return facts if reason is None else ("unavailable", f"{spec.name}: {reason}")

    def _measure(self, point: Point, specs: Sequence[BackendSpec], opened: dict[str, Contender]) -> list[Row]:
        timing = self.job.timing
        self._reference.prepare(_parts(point))
        sides = [Side(spec, contender=self._contender(spec, point, opened)) for spec in specs]
        for side in sides:
            there = side.contender is not None and side.contender.is_open
            self._say(f"  {side.spec.name}: {'' if there else 'load, '}warm up, check")
            side.ready(point, self._scenario, timing, self._reference)
            self._cold[side.spec.name] = side.cold or self._cold.get(side.spec.name, ColdStart(0, 0, 0))
        racing = [side for side in sides if side.failure is None]
        given = self._places(point)
        cpus = sorted({cpu for place in given for cpu in place.cpus})
        cores = self._cores(given)
        one_of_each = sorted(min(set(core) & set(cpus)) for core in cores)
        bound = one_of_each if all(place.bound for place in given) else ()  # else threads may run on any two
        if racing:
            self._say(f"  rounds by turns: {', '.join(side.spec.name for side in racing)}")
        meter, used = NoiseMeter(cpus, {cpu for core in cores for cpu in core}), _cpu_seconds(racing)
        rounds = take_turns(
            racing,
            lambda number, side: side.round(number, point, self._scenario),
            timing,
            self._meter(bound).read,
            lambda rounds: rounds_suffice(_places_left(rounds, racing), timing.rounds_least),
        )
        noise = meter.read(_cpu_seconds(racing) - used)
        for side in racing:
            if side.failure is None:
                quickest_of = partial(self._quickest, side.spec.dtype, point) if peak_is_the_machine_s() else None
                side.finish(point, self._reference, self._sizes, quickest_of)
        steady = steady_place(_places_left(rounds, racing), timing.rounds_least)
        for index, side in enumerate(racing):
            places = {one.number: one.places[index] for one in rounds if one.number in side.samples}
            side.places = {number: place for number, place in places.items() if steady in (None, place)}
        return [self._row(point, side, sides, noise) for side in sides]

    def _contender(self, spec: BackendSpec, point: Point, opened: dict[str, Contender]) -> Contender:
        if spec.name not in opened:
            launcher = self.job.launcher
            opened[spec.name] = Contender(
                spec,
                self._model,
                self._places(point),
                cache=self._cache,
                environment=launcher.environment,
                memory=self._binding,
                limits=self.job.limits,
            )
        return opened[spec.name]

    def _places(self, point: Point) -> tuple[Placement, ...]:
        return self.job.launcher.place(self._machine, instances=point.instances, threads=point.threads)

    def _cores(self, given: Sequence[Placement]) -> list[Sequence[int]]:
        """All processors of each core of which some are given."""
        cpus = {cpu for place in given for cpu in place.cpus}
        return [core.cpus for core in self._machine.cores if not cpus.isdisjoint(core.cpus)]

    def _load(self, dtype: str, point: Point) -> tuple[str, int, int]:
        """What a peak is of: dtype, threads, and on how many cores they may run at once."""
        threads = point.instances * point.threads
        return dtype, threads, min(threads, len(self._cores(self._places(point))))

    def _meter(self, cpus: Sequence[int]) -> PlaceMeter:
        """One for all points that begin with the same two: it knows what these did before."""
        two = tuple(cpus[:2])
        return self._meters.setdefault(two, PlaceMeter(two))

    def _peak(self, dtype: str, point: Point) -> float:
        """Measured once: rows of one experiment have one limit."""
        load = self._load(dtype, point)
        if load not in self._peaks:
            self._peaks[load] = settled_peak(*load)
        return self._peaks[load]

    def _quickest(self, dtype: str, point: Point, anew: bool) -> float:
        """Operations a second that no instance can exceed: the most that were measured, ``anew`` or before."""
        load = self._load(dtype, point)
        most = self._most.get(load, 0.0)
        if anew or not most:
            most = self._most[load] = max(most, quickest(*load))
        return most / point.instances

    def _row(
        self,
        point: Point,
        side: Side,
        sides: Sequence[Side] = (),
        noise: Noise | None = None,
    ) -> Row:
        spec, scenario = side.spec, self._scenario
        numbers = sorted(side.places)
        samples = [side.samples[number] for number in numbers]
        figures = [scenario.figure(sample) for sample in samples]
        measured = bool(samples) and (side.failure is None or side.failure[0] == "unfair")
        metrics = scenario.summarise(point, samples) if measured else {}
        rate = metrics.get("sequences_per_s")
        cold = self._cold.get(spec.name)
        places = [side.places[number] for number in numbers]
        status, reason = side.failure or ("ok", None)
        row: Row = {
            "schema": SCHEMA,
            "key": self._key(spec, point),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "experiment": self.job.experiment,
            "status": status,
            "reason": reason,
            "backend": {
                "name": spec.name,
                "dtype": spec.dtype,
                "version": side.facts.get("version"),
                "facts": side.facts,
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
            "compared_by": compared_by(scenario),
            "ratio_to": self._ratios(side, sides) if measured else {},
            "agreement": None if side.agreement is None else side.agreement.record(),
            "cold": None if cold is None or side.contender is None else self._cold_record(spec, cold, side),
            "memory": None if side.memory is None else asdict(side.memory),
            "fairness": None if side.fairness is None else side.fairness.record(),
            "noise": noise.record(figures, places, self.job.noise) if noise and measured else None,
            "limit": self._limit(spec, point, rate) if measured and peak_is_the_machine_s() else None,
            # What breaks its latency limit has no price.
            "cost": cost_record(self._price, metrics.get("sequences_per_s_within_slo", rate)),
            "samples": {"figure": figures, "place": places},
            "warm_up": None if side.warm is None else asdict(side.warm),
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
        return {**point.label, **columns(self.swept, [spec.name for spec in specs], shown)}

    def _as_measured(self, row: Row) -> Row:
        """With the columns that the scenario itself gave it."""
        return {**row, "point": {name: value for name, value in row["point"].items() if name not in self.swept}}

    def _ratios(self, side: Side, sides: Sequence[Side]) -> dict[str, Any]:
        """How many times as fast this one is as each of the others, by the rounds that both were in."""
        found = {}
        for other in sides:
            both = sorted(side.places.keys() & other.places.keys())
            if other is side or other.failure is not None or not both:
                continue
            mine = [self._scenario.figure(side.samples[number]) for number in both]
            theirs = [self._scenario.figure(other.samples[number]) for number in both]
            if min(mine) > 0 and min(theirs) > 0:
                found[other.spec.name] = ratio_interval(mine, theirs).record()
        return found

    def _cold_record(self, spec: BackendSpec, cold: ColdStart, side: Side) -> dict[str, float | None]:
        """``side.cold`` is None at a process's later points, whose batches its first call was not of."""
        return {
            "export_s": self._exports.get(spec.name, {}).get("seconds"),
            "import_s": cold.import_s,
            "load_s": cold.load_s,
            "first_call_ms": None if side.cold is None else 1e3 * cold.first_call_s,
        }

    def _limit(self, spec: BackendSpec, point: Point, rate: float | None) -> dict[str, Any]:
        threads = point.instances * point.threads
        limit = Limit.of(
            self._sizes,
            spec.dtype,
            point.batches,
            instances=point.instances,
            split=point.split,
            threads=threads,
            ops_per_second=self._peak(spec.dtype, point),
            ceilings=self._ceilings,
        )
        return limit.record(rate)


@contextmanager
def _blamed(config: Mapping[str, Any]) -> Iterator[None]:
    """An error that arises in the file that the user's YAML names is theirs to mend, and no defect of encast."""
    try:
        yield
    except EncastError:
        raise
    except Exception as error:
        where = line_in(str(config["scenario"]).rpartition(":")[0], error)
        if where is None:
            raise
        raise InputError(f"{where}: {type(error).__name__}: {error}; correct scenario {config['name']}") from None


def make_scenario(config: Mapping[str, Any]) -> Scenario:
    """The scenario that a YAML describes; raises ``InputError`` for what is none, and for fields it does not take."""
    target = config.get("scenario")
    if not isinstance(target, str):
        raise InputError(f"scenario {config.get('name')}: its YAML needs scenario, module:Class")
    options = {name: value for name, value in config.items() if name not in ("name", "scenario")}
    try:
        cls = load_object(target)
        signature(cls).bind(**options)
    except TypeError as error:
        raise InputError(f"scenario {config.get('name')}: {error}; correct its YAML") from None
    with _blamed(config):
        made = cls(**options)
    if not isinstance(made, Scenario):
        raise InputError(f"{target} is no scenario; it needs points, round, figure and summarise")
    return made


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


def tell_apart(comparisons: Sequence[Comparison]) -> None:
    """Has the rows of one experiment's jobs say what it sweeps over, where their names and points do not."""
    jobs, models, workloads = zip(*((one.job, one._model.sha, one._workload.name) for one in comparisons), strict=True)
    fields = swept(jobs, models, workloads)
    for comparison, own in zip(comparisons, fields, strict=True):
        comparison.swept = own


def _cpu_seconds(sides: Sequence[Side]) -> float:
    """Processor time of all contenders and of this process."""
    return time.process_time() + sum(side.contender.cpu_seconds() for side in sides if side.contender is not None)


def _places_left(rounds: Sequence[Round], sides: Sequence[Side]) -> list[dict[int, str]]:
    """Of every round, where those were that have not failed until now."""
    left = {index for index, side in enumerate(sides) if side.failure is None}
    return [{index: place for index, place in one.places.items() if index in left} for one in rounds]


def _parts(point: Point) -> list[Batch]:
    """What instances are given at once. Raises ``InputError`` for a batch that cannot be divided over them."""
    if not point.split:
        return list(point.batches)
    return [part for batch in point.batches for part in portions(batch, point.instances)]


def _label(label: Label) -> str:
    return ", ".join(f"{name} {value}" for name, value in label.items())


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
