"""Known service times give the known answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_specs import inputs
from scenario_fakes import ONE, FakeSystem, constant, exponential, machine

from encast.bench.config import available, load_jobs
from encast.bench.scenarios.base import COLD_START, LATENCY, MEAN_LATENCY, THROUGHPUT, make_scenario
from encast.bench.scenarios.closed_loop import Latency, LengthReplay
from encast.bench.scenarios.cold_start import ColdStartScenario
from encast.bench.scenarios.max_throughput import MaxThroughput, best_rows
from encast.bench.scenarios.open_loop import OpenLoop
from encast.bench.scenarios.scaling import BatchScaling, Scaling, ideal
from encast.bench.scenarios.slo_throughput import SloThroughput
from encast.measure.workloads import Workload, make_workload


def grid(**fields: Any) -> Workload:
    return make_workload({"kind": "grid", **fields}, inputs())


def measured(scenario: Any, system: FakeSystem, point: Any, rounds: int = 5) -> dict[str, Any]:
    samples = []
    for system.round_number in range(rounds):
        samples.append(scenario.round(system.at(point), point))
    json.dumps(samples, allow_nan=False)
    metrics = dict(scenario.summarise(point, samples))
    json.dumps(metrics, allow_nan=False)
    assert scenario.figure(samples[0]) > 0
    return metrics


def test_percentiles_of_a_known_distribution() -> None:
    scenario = Scaling(threads=2)
    (point,) = scenario.points(grid(batch=4, length=32), ONE, machine(2))
    found = measured(scenario, FakeSystem(exponential(2.0)), point, rounds=40)
    assert found["latency_ms"]["mean"] == pytest.approx(2.0, rel=0.05)
    assert found["latency_ms"]["p50"] == pytest.approx(2 * np.log(2), rel=0.05)
    assert found["latency_ms"]["p99"] == pytest.approx(2 * np.log(100), rel=0.1)
    low, high = found["latency_ms_interval"]
    assert low < 2 * np.log(2) < high
    assert found["sequences_per_s"] == pytest.approx(4 / 0.002, rel=0.05)
    assert found["tokens_per_s"] == pytest.approx(32 * found["sequences_per_s"])
    assert found["latency_samples"] > 2995


def test_calls_are_compared_and_sequences_are_counted() -> None:
    scenario = Latency()
    (point,) = scenario.points(grid(batch=8), ONE, machine(2))
    system = FakeSystem(constant(4.0)).at(point)
    samples = [scenario.round(system, point) for _ in range(5)]
    assert scenario.figure(samples[0]) == pytest.approx(1 / 0.004)
    assert scenario.summarise(point, samples)["sequences_per_s"] == pytest.approx(8 / 0.004)


def test_few_calls_have_no_tail() -> None:
    scenario = Scaling(threads=2)
    (point,) = scenario.points(grid(), ONE, machine(2))
    found = measured(scenario, FakeSystem(constant(30.0)), point)
    assert found["latency_ms"]["p99"] is None
    assert found["latency_samples"] == 50
    assert found["latency_samples_needed"]["p99_9"] == 2995


def test_throughput_is_the_sum_over_instances() -> None:
    scenario = Scaling(instances=4)
    (point,) = scenario.points(grid(batch=2), ONE, machine(4))
    system = FakeSystem(lambda instance, call, sequences: (1 + instance) * 1e6)
    found = measured(scenario, system, point)
    assert found["sequences_per_s"] == pytest.approx(2 * (1000 + 500 + 1000 / 3 + 250), rel=0.01)


def test_a_divided_batch_takes_as_long_as_its_slowest_part() -> None:
    """Two instances of half the batch, 1 ms a sequence; one call of each in five is 3 ms late, never both at once."""

    def service(instance: int, call: int, sequences: int) -> float:
        return sequences * 1e6 + (3e6 if rng.random() < 0.2 else 0)

    rng = np.random.default_rng(4)
    scenario = BatchScaling(batch=8, seconds=5)
    whole, halves = scenario.points(grid(length=16), ONE, machine(2))
    one, two = FakeSystem(service), FakeSystem(service)
    first, second = measured(scenario, one, whole), measured(scenario, two, halves)
    assert all(asked["in_step"] for asked in two.asked)
    assert first["latency_ms"]["p50"] == pytest.approx(8.0)
    assert second["latency_ms"]["p50"] == pytest.approx(4.0)
    assert first["latency_ms"]["mean"] == pytest.approx(8 + 0.2 * 3, rel=0.02)
    assert second["latency_ms"]["mean"] == pytest.approx(4 + (1 - 0.8**2) * 3, rel=0.02)
    assert second["sequences_per_s"] == pytest.approx(2 * 4 / 0.0046, rel=0.02), "the sum of what both do"
    assert second["whole_batch_sequences_per_s"] == pytest.approx(8 / (0.004 + (1 - 0.8**2) * 0.003), rel=0.02)
    assert second["whole_batch_tokens_per_s"] == pytest.approx(16 * second["whole_batch_sequences_per_s"])
    assert first["whole_batch_sequences_per_s"] == pytest.approx(first["sequences_per_s"], rel=0.02)


def test_a_divided_batch_is_compared_by_what_is_shown_of_it() -> None:
    """One part takes 1 ms, the other 5: whoever divides so has an answer after 5, although the first could go on."""
    scenario = BatchScaling(batch=8, instances=2)
    (point,) = scenario.points(grid(), ONE, machine(2))
    system = FakeSystem(lambda instance, call, sequences: (1 + 4 * instance) * 1e6).at(point)
    sample = scenario.round(system, point)
    assert scenario.figure(sample) == pytest.approx(1 / 0.005)
    assert sample["sequences_per_s"] == pytest.approx(4 / 0.001 + 4 / 0.005)
    found = scenario.summarise(point, [sample] * 5)
    assert found["latency_ms"]["p50"] == pytest.approx(1e3 / scenario.figure(sample))
    assert found["sequences_per_s"] == pytest.approx(sample["sequences_per_s"])


@pytest.mark.parametrize("name", available("scenario"))
def test_every_scenario_names_what_it_compares_by(name: str) -> None:
    expected = {
        "latency": LATENCY,
        "batch_scaling": LATENCY,
        "open_loop": MEAN_LATENCY,
        "cold_start": COLD_START,
    }
    made: Any = make_scenario(load_jobs([f"scenario={name}"])[0].scenario)
    assert made.compared_by == expected.get(name, THROUGHPUT)


def test_core_and_instance_scaling_beside_the_ideal_line() -> None:
    def row(backend: str, instances: int, rate: float, status: str = "ok") -> dict[str, Any]:
        return {
            "status": status,
            "scenario": "instance_scaling",
            "model": {"name": "m"},
            "backend": {"name": backend},
            "point": {"batch": 1, "instances": instances, "threads": 1},
            "metrics": {"sequences_per_s": rate},
        }

    rows = [row("a", 4, 300.0), row("a", 1, 100.0), row("b", 2, 80.0), row("b", 4, 160.0), row("a", 2, 9.0, "unfair")]
    found = {(one.row["backend"]["name"], one.row["point"]["instances"]): one for one in ideal(rows, "instances")}
    assert {key: (one.ideal_sequences_per_s, one.efficiency) for key, one in found.items()} == {
        ("a", 1): (100.0, 1.0),
        ("a", 4): (400.0, 0.75),
        ("b", 2): (80.0, 1.0),
        ("b", 4): (160.0, 1.0),
    }


def test_a_replay_runs_every_batch_once_a_round() -> None:
    workload = make_workload({"kind": "histogram", "file": "10:30,100:10", "batch": 8}, inputs())
    scenario = LengthReplay(tokens=10**6)
    (point,) = scenario.points(workload, ONE, machine(1))
    system = FakeSystem(lambda instance, call, sequences: sequences * 1e6)
    found = measured(scenario, system, point)
    assert [asked["calls"] for asked in system.asked] == [len(point.batches)] * 5
    assert found["sequences_per_s"] == pytest.approx(1000.0)
    assert found["tokens_per_s"] == pytest.approx(1000 * 1300 / 40)
    assert 0 < found["padding"] < 0.4
    assert (found["sampled_sequences"], found["sequences"]) == (40, 40)
    (part,) = (few := LengthReplay(tokens=1)).points(
        make_workload({"kind": "histogram", "file": "10:30,100:10", "batch": 2}, inputs()), ONE, machine(1)
    )
    found = measured(few, FakeSystem(constant(1.0)), part)
    assert (found["sampled_sequences"], found["sequences"]) == (16, 40)
    assert found["tokens_per_s"] == pytest.approx(2000 * 1300 / 40), "a quarter of the sample is long, as of the file"


def slo_rows(service: Any, **fields: Any) -> tuple[list[dict[str, Any]], FakeSystem]:
    scenario = SloThroughput(**fields)
    system = FakeSystem(service)
    rows = []
    for point in scenario.points(grid(length=64), ONE, machine(2)):
        system.service = service(point)
        metrics = measured(scenario, system, point)
        rows.append(
            {
                "status": "ok",
                "scenario": "slo_throughput",
                "model": {"name": "m"},
                "backend": {"name": "fake"},
                "point": dict(point.label),
                "metrics": metrics,
            }
        )
    return rows, system


def test_the_most_throughput_within_the_limit() -> None:
    """A sequence takes 4 ms on one core and 2.4 on two: 8 sequences keep 20 ms on two cores, 4 do on one."""

    def service(point: Any) -> Any:
        each = {1: 4e6, 2: 2.4e6}[point.threads]
        return lambda instance, call, sequences: sequences * each

    rows, _ = slo_rows(service, limit_ms=20.0, batch=[1, 2, 4, 8, 16])
    met = {(row["point"]["threads"], row["point"]["batch"]): row["metrics"]["slo"]["met"] for row in rows}
    kept = [(2, 1), (2, 2), (2, 4), (2, 8), (1, 1), (1, 2), (1, 4)]
    assert met == {key: key in kept for key in met}
    (best,) = best_rows(rows)
    assert (best["point"]["instances"], best["point"]["threads"]) == (2, 1)
    assert best["metrics"]["sequences_per_s_within_slo"] == pytest.approx(500.0)


def test_the_most_throughput_at_any_latency() -> None:
    """The larger batch takes less each, and two instances of one core do more than one of two."""
    scenario = MaxThroughput(batch=[1, 8, 32])
    rows = []
    for length in (16, 64):
        for point in scenario.points(grid(length=length), ONE, machine(2)):
            each = {1: 4e6, 2: 2.4e6}[point.threads] * {1: 1.2, 8: 1.0, 32: 1.1}[point.label["batch"]] * length / 16
            system = FakeSystem(lambda instance, call, sequences, each=each: sequences * each)
            metrics = measured(scenario, system, point)
            row = {"status": "ok", "scenario": "max_throughput", "model": {"name": "m"}, "backend": {"name": "fake"}}
            rows.append({**row, "point": dict(point.label), "metrics": metrics})
    failed = {**rows[0], "status": "unfair"}
    best = best_rows([failed, *rows])
    assert [row["point"] for row in best] == [
        {"batch": 8, "length": length, "instances": 2, "threads": 1} for length in (16, 64)
    ]
    assert [row["metrics"]["sequences_per_s"] for row in best] == pytest.approx([500.0, 125.0])


def test_a_tail_breaks_the_limit_although_the_median_keeps_it() -> None:
    rng = np.random.default_rng(0)

    def service(point: Any) -> Any:
        return lambda instance, call, sequences: 12e6 if rng.random() < 0.03 else 2e6

    rows, _ = slo_rows(service, limit_ms=10.0, batch=1, instances=1)
    slo = rows[0]["metrics"]["slo"]
    assert rows[0]["metrics"]["latency_ms"]["p50"] < 10 < slo["latency_ms"]
    assert slo == {"limit_ms": 10.0, "percentile": "p99", "latency_ms": pytest.approx(12.0), "met": False}
    assert rows[0]["metrics"]["sequences_per_s_within_slo"] is None
    assert best_rows(rows) == rows, "without one that keeps the limit, the least latency"


def test_five_rounds_tell_whether_the_limit_is_kept() -> None:
    for milliseconds, kept in ((49.0, True), (51.0, False)):
        rows, system = slo_rows(lambda point, each=milliseconds: constant(each), limit_ms=50.0, batch=1, instances=1)
        assert rows[0]["metrics"]["slo"]["met"] is kept
        assert system.asked[0]["seconds"] == pytest.approx(299 * 0.05 / 5)


def test_too_few_calls_say_nothing_about_a_limit() -> None:
    scenario = SloThroughput(limit_ms=50.0, batch=1)
    point = scenario.points(grid(), ONE, machine(1))[0]
    found = scenario.summarise(point, [{"ns": [[45_000_000] * 20], "sequences_per_s": 22.0}] * 5)
    assert found["slo"]["met"] is None
    assert found["sequences_per_s_within_slo"] is None
    late = scenario.summarise(point, [{"ns": [[55_000_000] * 20], "sequences_per_s": 18.0}] * 5)
    assert late["slo"]["met"] is False, "the median is above it already"


def test_cold_starts_are_new_processes() -> None:
    scenario = ColdStartScenario()
    (point,) = scenario.points(grid(length=16), ONE, machine(2))
    system = FakeSystem(constant(1.0))
    found = measured(scenario, system, point, rounds=6)
    assert found["cold_start_s"]["import"] == 1.0
    assert found["cold_start_s"]["first_call"] == 0.5
    assert found["cold_start_s"]["total"] == 1.5 + found["cold_start_s"]["load"]
    assert found["starts"] == 6
    assert system.bound == list(point.batches), "bound anew, so that its outputs can be compared"


def test_systems_of_an_open_loop_get_the_same_arrivals() -> None:
    scenario = OpenLoop(rate=500, seconds=0.5)
    (point,) = scenario.points(grid(), ONE, machine(2))
    a, b = FakeSystem(constant(1.0), "a"), FakeSystem(constant(1.5), "b")
    for number, (first, second) in enumerate(((a, b), (b, a), (a, b))):
        a.round_number = b.round_number = number
        scenario.round(first.at(point), point)
        scenario.round(second.at(point), point)
    assert a.streams == b.streams
    assert len({tuple(stream) for stream in a.streams}) == 3, "each round has arrivals of its own"


def test_a_resumed_open_loop_has_the_rates_of_before() -> None:
    scenario, resumed = OpenLoop(load=[0.5, 0.8], seconds=1), OpenLoop(load=[0.5, 0.8], seconds=1)
    half, most = scenario.points(grid(), ONE, machine(2))
    before, after = FakeSystem(constant(1.0), "first"), FakeSystem(constant(0.3), "second")
    metrics = measured(scenario, before, half, 3)
    assert metrics["capacity_per_s"] == pytest.approx(1000)
    row = {"metrics": metrics, "point": {"instances": 1, "threads": 2, **half.label}}
    failed = {"metrics": {}, "point": {}}
    resumed.recall(json.loads(json.dumps([failed, row])))
    measured(resumed, after, half, 3)
    assert after.streams == before.streams
    measured(scenario, before, most, 1)
    measured(resumed, after, most, 1)
    assert after.streams[-1] == before.streams[-1]
    assert not any(asked["seconds"] for asked in after.asked), "its own capacity is asked for by nobody"


def test_an_open_loop_counts_from_the_due_time() -> None:
    """M/M/1 at load 0.8: five times the service on average, although each service is as quick as ever."""
    scenario = OpenLoop(rate=800, seconds=20)
    (point,) = scenario.points(grid(), ONE, machine(2))
    found = measured(scenario, FakeSystem(exponential(1.0)), point, rounds=10)
    assert found["latency_ms"]["mean"] == pytest.approx(5.0, rel=0.2)
    assert found["service_ms"]["mean"] == pytest.approx(1.0, rel=0.05)
    assert found["wait_ms"]["mean"] == pytest.approx(4.0, rel=0.25)
    assert found["utilisation"] == pytest.approx(0.8, rel=0.05)
    assert not found["saturated"]
    assert found["sequences_per_s"] == pytest.approx(800, rel=0.05)


def test_more_than_can_be_answered_is_said_so() -> None:
    scenario = OpenLoop(rate=2000, seconds=1)
    (point,) = scenario.points(grid(), ONE, machine(2))
    found = measured(scenario, FakeSystem(constant(1.0)), point)
    assert found["saturated"]
    assert found["sequences_per_s"] == pytest.approx(1000, rel=0.05)
    assert found["offered_per_s"] == pytest.approx(2000, rel=0.1)


def test_loads_are_shares_of_what_the_first_system_can_do() -> None:
    scenario = OpenLoop(load=[0.5, 0.8], seconds=20)
    half, most = scenario.points(grid(), ONE, machine(2))
    first, second = FakeSystem(constant(1.0), "first"), FakeSystem(constant(0.1), "second")
    assert measured(scenario, first, half, 3)["offered_per_s"] == pytest.approx(500, rel=0.05)
    assert measured(scenario, second, half, 3)["offered_per_s"] == pytest.approx(500, rel=0.05)
    assert measured(scenario, second, most, 3)["offered_per_s"] == pytest.approx(800, rel=0.05)


def test_a_trace_is_replayed_as_recorded(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("".join(f"{number / 10}\n" for number in range(100)))
    scenario = OpenLoop(trace=str(tmp_path / "trace"), speed=2.0, seconds=1.0)
    (point,) = scenario.points(grid(), ONE, machine(2))
    system = FakeSystem(constant(1.0)).at(point)
    for system.round_number in range(2):
        scenario.round(system, point)
    assert system.streams[0] == [number * 50_000_000 for number in range(20)]
    assert system.streams[1] == system.streams[0]


def test_a_trace_is_replayed_from_begin_to_end_and_the_row_says_how_much(tmp_path: Path) -> None:
    """An hour of two arrivals a second, and a busy one in its middle: rounds that took its begin alone miss that."""
    times = sorted([*(number / 2 for number in range(7200)), *(2048 + number / 100 for number in range(1, 99))])
    (tmp_path / "trace").write_text("".join(f"{time}\n" for time in times))
    scenario = OpenLoop(trace=str(tmp_path / "trace"), speed=2.0, seconds=0.5)
    (point,) = scenario.points(grid(), ONE, machine(2))
    system = FakeSystem(constant(1.0))
    few = measured(scenario, system, point, rounds=8)
    assert max(map(len, system.streams)) == 100
    of_all = {"trace_arrivals": 7298}
    assert {name: few[name] for name in few if name.startswith(("replayed", "trace"))} == {
        "replayed_arrivals": 114, **of_all
    }  # fmt: skip
    every = measured(scenario, FakeSystem(constant(1.0)), point, rounds=3605)
    assert every["replayed_arrivals"] == every["trace_arrivals"], "what comes again counts once"
    drawn = OpenLoop(rate=500)
    (point,) = drawn.points(grid(), ONE, machine(2))
    assert not [name for name in measured(drawn, system, point) if "replayed" in name]
