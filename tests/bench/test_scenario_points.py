"""What each scenario measures on machines of several sizes, and the scenarios' YAMLs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from input_specs import inputs
from machines import MadeUp
from scenario_fakes import ONE, machine

import encast.bench
from encast.bench.config import load_jobs
from encast.bench.launcher import Launcher
from encast.bench.models import make_model
from encast.bench.peers.base import load_object
from encast.bench.scenarios.base import Point, Scenario
from encast.bench.scenarios.closed_loop import Latency, LengthReplay
from encast.bench.scenarios.max_throughput import MaxThroughput
from encast.bench.scenarios.open_loop import OpenLoop
from encast.bench.scenarios.scaling import BatchScaling, Scaling
from encast.bench.scenarios.slo_throughput import SloThroughput
from encast.errors import InputError
from encast.measure.workloads import Workload, make_workload

CONF = Path(encast.bench.__file__).parent / "conf"


def config(group: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    return found


def grid(**fields: Any) -> Workload:
    return make_workload({"kind": "grid", **fields}, inputs())


def sizes(points: Any) -> list[tuple[int, int]]:
    return [(point.instances, point.threads) for point in points]


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


OWN = [
    "batch_scaling",
    "cold_start",
    "core_scaling",
    "instance_scaling",
    "length_replay",
    "max_throughput",
    "open_loop",
    "slo_throughput",
]


@pytest.mark.parametrize("name", OWN)
def test_a_yaml_makes_its_scenario(name: str) -> None:
    fields = config("scenario", name)
    assert fields.pop("name") == name
    scenario = load_object(fields.pop("scenario"))(**fields)
    assert isinstance(scenario, Scenario)
    points = scenario.points(grid(batch=8), ONE, machine(4))
    assert points
    for point in points:
        assert isinstance(point, Point)
        assert {"batch", "length", "instances", "threads"} <= set(point.label)
        assert point.batches
    assert len({tuple(point.label.items()) for point in points}) == len(points), "each row has columns of its own"


def test_the_yamls_of_workloads() -> None:
    article = make_workload(config("workload", "article"), inputs())
    assert len(article.parts()) == 72
    production = make_workload(config("workload", "production"), inputs())
    assert [part.label["length"] for part in production.parts()] == [16, 32, 48, 64, 80, 96, 112, 128]
    assert make_workload(config("workload", "fixed"), inputs()).label == {"batch": 1, "length": 128}
    for name in names("workload"):
        fields = (
            {**config("workload", name), "data": None}
            if "data" in config("workload", name)
            else config("workload", name)
        )
        if fields["kind"] != "grid":
            with pytest.raises(InputError, match=r"give workload\.(file|data)="):
                make_workload(fields, inputs())


def test_the_yamls_of_models(tmp_path: Path) -> None:
    """Random ones of the published sizes; made here with a hundredth of the width, which is another matter."""
    published = {"bert-base": (12, 768), "bert-large": (24, 1024), "distilbert": (6, 768), "minilm": (6, 384)}
    for name, (layers, hidden) in published.items():
        fields = {**config("model", name), "data": None}
        assert (fields["layers"], fields["hidden"], fields["inner"]) == (layers, hidden, 4 * hidden)
        small = {**fields, "hidden": fields["heads"] * 2, "inner": 8, "vocab": 50, "positions": 8}
        assert make_model(small, tmp_path).name == name
    assert set(names("model")) == {*published, "all-minilm-l6-v2", "folder"}


def test_core_scaling_doubles_to_all_cores() -> None:
    assert sizes(Scaling(threads=None).points(grid(), ONE, machine(48))) == [(1, n) for n in (1, 2, 4, 8, 16, 32, 48)]
    points = Scaling(threads=[1, 2]).points(grid(length=[32, 128]), ONE, machine(2))
    assert [point.label["length"] for point in points] == [32, 128, 32, 128]
    assert sizes(points) == [(1, 1), (1, 1), (1, 2), (1, 2)], "systems are opened once for each size"


def test_core_scaling_stays_within_a_node_unless_told() -> None:
    within = Launcher("latency", preset="latency")
    assert sizes(Scaling(threads=None).points(grid(), within, machine(48, nodes=2))) == [
        (1, n) for n in (1, 2, 4, 8, 16)
    ]
    with pytest.raises(InputError):
        Scaling(threads=48).points(grid(), within, machine(48, nodes=2))


def test_hardware_threads_come_by_whole_cores() -> None:
    """Four cores of two hardware threads: scaling is over threads that are there, and labels say how many run."""
    smt, wide = Launcher("one", instances=1, cross_node=True, smt=True), machine(4, wide=2)
    assert sizes(Scaling(threads=None).points(grid(), smt, wide)) == [(1, 2), (1, 4), (1, 8)]
    assert sizes(BatchScaling(batch=8).points(grid(), smt, wide)) == [(1, 8), (2, 4), (4, 2)]
    assert sizes(SloThroughput(batch=1).points(grid(), smt, wide)) == [(1, 8), (2, 4), (4, 2)]
    assert sizes(Scaling(threads=2, instances=None).points(grid(), smt, wide)) == [(1, 2), (2, 2), (4, 2)]
    for point in Latency().points(grid(), smt, wide):
        (place,) = smt.place(wide, instances=point.instances, threads=point.threads)
        assert (point.threads, place.threads, sorted(place.cpus)) == (8, 8, list(range(8)))
    for refused in (Scaling(threads=1, instances=None), Scaling(threads=3)):
        with pytest.raises(InputError, match=r"all hardware threads of its cores, here [24]; .*launcher\.smt=false"):
            refused.points(grid(), smt, wide)


def test_a_quota_bounds_the_cores() -> None:
    assert sizes(Scaling(threads=None).points(grid(), ONE, machine(8, quota=2.5))) == [(1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("quota", "instances"), [("50000 100000", 1), ("100000 100000", 1), ("150000 100000", 2), ("210000 100000", 3)]
)
def test_throughput_uses_the_whole_of_a_fractional_quota(quota: str, instances: int) -> None:
    """A point's instances are placed by their number again when it is measured; they must fit then as well."""
    throughput = Launcher("throughput", preset="throughput")
    limited = MadeUp(cores=4, quota=quota).read()
    assert sizes(Latency().points(grid(), throughput, limited)) == [(instances, 1)]
    assert (instances, 1) in sizes(Scaling(instances=None).points(grid(), throughput, limited))
    for scenario in (
        Latency(),
        Scaling(instances=None),
        Scaling(threads=None),
        BatchScaling(),
        SloThroughput(),
        OpenLoop(),
    ):
        for point in scenario.points(grid(batch=8), throughput, limited):
            places = throughput.place(limited, instances=point.instances, threads=point.threads)
            assert [place.threads for place in places] == [point.threads] * point.instances
            assert {place.cpus for place in places} == {(0, 1, 2, 3)}, "a quota bounds threads and not CPUs"


def test_instances_of_so_many_cores() -> None:
    throughput = Launcher("throughput", preset="throughput")
    points = Scaling(threads=4, instances=None).points(grid(), throughput, machine(24))
    assert sizes(points) == [(1, 4), (2, 4), (4, 4), (6, 4)]
    with pytest.raises(InputError, match=r"4 cores does not fit: there are 2 cores"):
        Scaling(threads=4, instances=None).points(grid(), throughput, machine(2))


def test_batch_scaling_divides_batch_and_cores() -> None:
    points = BatchScaling(batch=8).points(grid(length=128), ONE, machine(48))
    assert sizes(points) == [(1, 48), (2, 24), (4, 12), (8, 6)]
    assert all(point.split and point.batches[0].seqs == 8 for point in points)
    assert [point.label["batch"] for point in points] == [8] * 4
    assert sizes(BatchScaling(batch=6, instances=[3]).points(grid(), ONE, machine(12))) == [(3, 4)]
    with pytest.raises(InputError, match=r"instances=5 does not divide 12 cores.*1, 2, 3, 6 do"):
        BatchScaling(batch=6, instances=5).points(grid(), ONE, machine(12))
    assert len(BatchScaling(batch=[4, 8]).points(grid(batch=[1, 2]), ONE, machine(2))) == 4


@pytest.mark.parametrize("scenario", [SloThroughput, MaxThroughput])
def test_scenarios_of_a_best_set_up_try_every_split(scenario: type[MaxThroughput]) -> None:
    points = scenario(batch=[4, 1]).points(grid(length=[16, 32]), ONE, machine(4))
    assert [(point.instances, point.threads, point.label["length"], point.label["batch"]) for point in points] == [
        (*split, length, batch) for split in ((1, 4), (2, 2), (4, 1)) for length in (16, 32) for batch in (1, 4)
    ]


def test_a_replay_is_a_sample_of_whole_batches() -> None:
    workload = make_workload({"kind": "histogram", "file": "10:50,100:50", "batch": 5}, inputs())
    (point,) = LengthReplay(tokens=2800).points(workload, ONE, machine(2))
    assert {batch.seqs for batch in point.batches} == {5}
    assert sorted(batch.tokens for batch in point.batches) == [50] * 5 + [500] * 5, "half are short, as in the file"
    (point,) = LengthReplay(tokens=1).points(workload, ONE, machine(2))
    assert sorted(batch.tokens for batch in point.batches) == [50] * 4 + [500] * 4
    (point,) = LengthReplay(batch_tokens=200, tokens=10**6).points(workload, ONE, machine(2))
    assert sum(batch.tokens for batch in point.batches) == 50 * 110
    assert max(batch.tokens for batch in point.batches) <= 200
    assert point.label == {"lengths": "10:50,100:50", "batch_tokens": 200, "instances": 1, "threads": 2}


def test_rates_of_an_open_loop(tmp_path: Path) -> None:
    def labels(scenario: OpenLoop, workload: Workload) -> list[dict[str, Any]]:
        return [dict(point.label) for point in scenario.points(workload, ONE, machine(2))]

    place = {"instances": 1, "threads": 2}
    assert labels(OpenLoop(load=0.5), grid(batch=[1, 8], length=16)) == [
        {"batch": 1, "length": 16, "arrivals": "poisson", "load": 0.5, **place}
    ]
    assert [label["rate"] for label in labels(OpenLoop(rate=[10, 20]), grid())] == [10, 20]
    (tmp_path / "trace").write_text("1\n2\n")
    assert labels(OpenLoop(trace=str(tmp_path / "trace")), grid())[0]["arrivals"] == "trace"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Scaling(threads=0), r"scenario\.threads"),
        (lambda: Scaling(seconds=0), r"scenario\.seconds"),
        (lambda: SloThroughput(limit_ms="10"), r"scenario\.limit_ms"),
        (lambda: SloThroughput(percent=100), r"scenario\.percent"),
        (
            lambda: SloThroughput(limit_ms=10_000, percent=99.99),
            r"percent=99\.99: the percentile needs 29,956 calls, .* 59,912 s of each of 5 rounds, .* most 60 s",
        ),
        (lambda: SloThroughput(batch=[]), r"scenario\.batch"),
        (lambda: MaxThroughput(batch=0), r"scenario\.batch"),
        (lambda: MaxThroughput(instances=9).points(grid(), ONE, machine(4)), r"none of scenario.instances=\(9,\) fits"),
        (lambda: OpenLoop(rate=-1), r"scenario\.rate"),
        (lambda: OpenLoop(seconds=[1, 2]), r"scenario\.seconds .*give one number"),
        (lambda: OpenLoop(trace="/nowhere"), "nowhere"),
    ],
)
def test_what_no_scenario_takes(make: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        make()


def test_one_folder_of_data_for_models_and_workloads(tmp_path: Path) -> None:
    (job,) = load_jobs(["backend=encast-f32", "workload=nq-queries", f"data={tmp_path}"])
    assert (job.workload["data"], job.model["data"]) == (str(tmp_path), str(tmp_path))
    (job,) = load_jobs(["backend=encast-f32", "workload=nq-queries", "workload.data=/elsewhere"])
    assert (job.workload["data"], job.model["data"]) == ("/elsewhere", None)
