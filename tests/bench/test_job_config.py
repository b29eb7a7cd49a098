"""Overrides become jobs, and whatever there is not is refused with a list of what there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import TINY, backends

from encast.bench.comparison import Comparison
from encast.bench.config import DEFAULT_LAUNCHER, GROUPS, STUDY, available, load_jobs
from encast.bench.peers.base import load_peer
from encast.bench.peers.openvino import _STATIC_SHAPES
from encast.bench.scenarios.base import make_scenario
from encast.errors import InputError


def test_nothing_given_is_a_job() -> None:
    (job,) = load_jobs([])
    assert [spec.name for spec in job.backends] == ["encast-int8"]
    assert job.scenario["name"] == "latency"
    assert job.launcher.name == "one"
    assert job.backends[0].options == {"exact": False, "pin": True}


@pytest.mark.parametrize("given", ["encast-f32,encast-int8", "[encast-f32,encast-int8]"])
def test_backends_are_compared_in_one_job(given: str) -> None:
    for multirun in (False, True):
        (job,) = load_jobs([f"backend={given}"], multirun=multirun)
        assert [spec.name for spec in job.backends] == ["encast-f32", "encast-int8"]


def test_a_multirun_is_every_combination() -> None:
    jobs = load_jobs(
        ["backend=encast-f32,encast-int8", "workload.length=32,128", "scenario=latency,throughput"], multirun=True
    )
    assert [(job.workload["length"], job.scenario["name"]) for job in jobs] == [
        (32, "latency"),
        (32, "throughput"),
        (128, "latency"),
        (128, "throughput"),
    ]
    assert all(len(job.backends) == 2 for job in jobs)
    lengths = [job.workload["length"] for job in load_jobs(["workload.length=range(16,64,16)"], multirun=True)]
    assert lengths == [16, 32, 48]


def test_every_value_can_be_set() -> None:
    (job,) = load_jobs(
        [
            "backend=encast-f32,encast-int8",
            "backend.encast-int8.pin=false",
            "timing.seconds=3",
            "limits.call_seconds=1.5",
            "launcher=throughput",
            "launcher.core_list=0-1",
            "workload.length=[16,32]",
            "price=0.17/h",
            "experiment=mine",
        ]
    )
    assert [spec.options["pin"] for spec in job.backends] == [True, False]
    assert job.timing.seconds == 3.0
    assert job.limits.call_seconds == 1.5
    assert (job.launcher.preset, job.launcher.core_list) == ("throughput", "0-1")
    assert job.workload["length"] == [16, 32]
    assert (job.price, job.experiment) == ("0.17/h", "mine")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["backend=nothing"], "there is no backend 'nothing'; there are "),
        (["scenario=nothing"], "there is no scenario 'nothing'; there are batch_scaling,"),
        (["model=nothing"], "there is no model 'nothing'; there are all-minilm-l6-v2,"),
        (["launcher=nothing"], "there is no launcher 'nothing'; there are instances, latency, one, throughput"),
        (["workload=3"], "there is no workload '3'; there are article,"),
        (["workload.lenght=3"], "there is no field 'workload.lenght'; workload has name, kind, batch, length,"),
        (["zork=3"], "there is no field 'zork'; the configuration has"),
        (["bogus=1"], ", limits, backend, study"),
        (["timing.seconds.more=3"], "timing.seconds has no fields of its own"),
        (["timing=3"], "timing has fields of its own; set one of timing.seconds,"),
        (["backend.encast-int8.zork=3"], "backend.encast-int8 has name, peer, dtype, exact, pin"),
        (["backend.encast-f32.pin=false"], "backend has encast-int8"),
        (["timing.seconds=soon"], "timing.seconds is 'soon'; a number above 0 is needed"),
        (["timing.together=1.5"], "timing.together is 1.5; a whole number above 0 is needed"),
        (["timing.together=true"], "timing.together is True; a whole number above 0 is needed"),
        (["workload=texts", "workload.file=-"], "workload.file is standard input, which can be read once: by one job"),
        (["limits.growth_mib=-1"], "limits.growth_mib is -1; a number above 0 is needed"),
        (["launcher.smt=maybe"], "launcher.smt is 'maybe'; true or false is needed"),
        (["backend.encast-int8.dtype=int3"], "backend.encast-int8.dtype is 'int3'; one of f32, bf16, int8 is needed"),
        (["+new=3"], "fields can be set, not added, removed or moved"),
        (["~timing"], "fields can be set, not added, removed or moved"),
        (["backend@other=encast-int8"], "fields can be set, not added, removed or moved"),
        (["hydra.run.dir=x"], "Hydra's own settings are fixed"),
        (["nonsense"], "'nonsense' is no override (missing EQUAL"),
        (["workload.length=[1"], "is no override"),
        (["workload.length=32,64"], "add --multirun, or write a list, workload.length=[...]"),
        (["scenario=latency,throughput"], "several values make several jobs; add --multirun"),
        (["model=glob(*)"], "'model=glob(*)': give the values"),
        (["backend=[]"], "backend=[] names no backend"),
        (["backend=encast-int8,encast-int8"], "backend 'encast-int8' is named twice"),
    ],
)
def test_what_there_is_not_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(InputError) as caught:
        load_jobs(overrides, multirun=overrides == ["model=glob(*)"])
    assert said in str(caught.value)


def test_a_sweep_is_checked_as_a_whole() -> None:
    with pytest.raises(InputError, match="there is no scenario 'nothing'"):
        load_jobs(["scenario=latency,nothing"], multirun=True)


def test_groups_of_one_s_own(tmp_path: Path) -> None:
    backends(tmp_path, mine="Honest")
    (job,) = load_jobs(["backend=mine,encast-f32", "backend.mine.milliseconds=5"], folders=[tmp_path])
    mine = job.backends[0]
    assert (mine.name, mine.dtype, mine.python) == ("mine", "f32", None)
    assert mine.options == {"milliseconds": 5}
    assert "mine" in available("backend", [tmp_path])
    with pytest.raises(InputError, match=r"there are .*mine"):
        load_jobs(["backend=other"], folders=[tmp_path])
    with pytest.raises(InputError, match="holds none of the folders study, backend"):
        load_jobs([], folders=[tmp_path / "backend"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: broken\ndtype: f32\n", "backend broken: its YAML needs peer"),
        ("name: broken\npeer: a:B\ndtype: [\n", "+backend=broken"),
        ("name: broken\npeer: a:B\ndtype: ${nothing}\n", "Interpolation key 'nothing' not found"),
    ],
)
def test_a_broken_yaml_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend" / "broken.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_jobs(["backend=broken"], folders=[tmp_path])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("group", [STUDY, *GROUPS])
def test_every_yaml_says_what_it_is(group: str) -> None:
    for name, text in available(group).items():
        assert text, f"{group}/{name}.yaml: begin it with a line of comment; --list shows it"


@pytest.mark.parametrize("name", available("backend"))
def test_every_backend_is_a_peer(name: str) -> None:
    (job,) = load_jobs([f"backend={name}"])
    spec = job.backends[0]
    assert spec.name == name
    assert spec.dtype in load_peer(spec.peer).dtypes


@pytest.mark.parametrize("name", available("scenario"))
def test_every_scenario_can_be_made(name: str) -> None:
    (job,) = load_jobs([f"scenario={name}"])
    assert job.scenario["name"] == name
    make_scenario(job.scenario)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["scenario=batch_scaling", "workload.batch=4"], "workload.batch: scenario=batch_scaling does not use"),
        (["scenario=slo_throughput", "workload.batch=4"], "what counts instead is scenario.batch=N"),
        (
            ["scenario=instance_scaling", "launcher=instances", "launcher.instances=2"],
            "instead is scenario.instances=N",
        ),
        (
            ["scenario=core_scaling", "launcher=instances", "launcher.cores_per_instance=2"],
            "what counts instead is scenario.threads=N",
        ),
        (["scenario=open_loop", "workload.batch=4"], "each request is one sequence"),
        (["scenario=length_replay", "scenario.batch_tokens=64", "workload.batch=4"], "is scenario.batch_tokens"),
        (["study=batch-scaling", "workload.batch=4"], "does not use workload.batch"),
    ],
)
def test_what_a_scenario_does_not_use_is_refused(given: list[str], said: str, tmp_path: Path) -> None:
    (job,) = load_jobs(given)
    with pytest.raises(InputError) as caught:
        Comparison(job, cache=tmp_path)
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir()), "it is refused before anything is made"


def test_what_a_scenario_uses_is_not_refused(tmp_path: Path) -> None:
    for given in (
        ["scenario=slo_throughput", "launcher=one", "scenario.batch=2"],
        ["scenario=throughput", "launcher=throughput", "workload.batch=2"],
        ["scenario=slo_throughput", "launcher=throughput", "scenario.batch=2"],
        ["scenario=length_replay", "workload.batch=2"],
        ["scenario=core_scaling", "launcher.core_list=0", "workload.batch=2"],
    ):
        (job,) = load_jobs([*TINY, *given])
        assert Comparison(job, cache=tmp_path).points


def test_a_launcher_says_how_many() -> None:
    with pytest.raises(InputError, match=r"launcher=instances does not say how many instances; give launcher.inst"):
        load_jobs(["launcher=instances"])
    (job,) = load_jobs(["launcher=instances", "launcher.cores_per_instance=1"])
    assert job.launcher.cores_per_instance == 1


def test_the_default_launcher_is_the_configuration_s() -> None:
    assert load_jobs([])[0].launcher.name == DEFAULT_LAUNCHER


def test_a_scenario_that_is_none() -> None:
    with pytest.raises(InputError, match="needs scenario, module:Class"):
        make_scenario({"name": "odd"})
    with pytest.raises(InputError, match="is no scenario; it needs points, round, figure and summarise"):
        make_scenario({"name": "odd", "scenario": "encast.bench.timing:Timing"})
    with pytest.raises(InputError, match="unexpected keyword argument 'zork'"):
        make_scenario({"name": "odd", "scenario": "encast.bench.scenarios.closed_loop:Latency", "zork": 1})


@pytest.mark.parametrize("name", list(available(STUDY)))
def test_every_study_can_be_made(name: str) -> None:
    jobs = load_jobs([f"study={name}"])
    assert jobs
    assert all(len(job.backends) > 1 for job in jobs), "a study compares"


def test_what_is_given_beside_a_study_comes_after_its_own() -> None:
    (job,) = load_jobs(["study=production", "backend=encast-f32", "timing.seconds=1"])
    assert [backend.name for backend in job.backends] == ["encast-f32"]
    assert job.timing.seconds == 1
    assert job.scenario["name"] == "slo_throughput"


def test_what_is_given_takes_the_place_of_what_a_study_sweeps_over() -> None:
    whole = load_jobs(["study=sparse"])
    jobs = load_jobs(["study=sparse", "model.sparsity=0.8"])
    assert {job.model["sparsity"] for job in jobs} == {0.8}
    assert 3 * len(jobs) == len(whole)


def test_the_study_of_sparse_products_makes_the_paper_s_tables() -> None:
    jobs = load_jobs(["study=sparse"])
    tables = {(job.scenario["name"], job.model["sparsity"]) for job in jobs}
    assert tables == {
        (scenario, sparsity)
        for scenario in ("max_throughput", "latency", "slo_throughput")
        for sparsity in (0.7, 0.8, 0.9)
    }
    for job in jobs:
        assert (job.model["name"], job.model["layers"], job.model["hidden"]) == ("distilbert", 6, 768)
        assert job.model["pattern"] == "4x1"
        assert job.workload["length"] == list(range(16, 129, 16))
        assert {spec.name for spec in job.backends} >= {
            "encast-int8-sparse",
            "encast-int8",
            "onnxruntime-int8",
            "openvino-int8",
            "openvino-int8-sparse",
            "deepsparse-int8",
        }
        assert len(job.backends) <= job.timing.together, "all take turns with each other"
        # OpenVINO has a graph of its own for so many shapes.
        batches = job.scenario.get("batch", 1)
        assert isinstance(batches, int)
        assert len(job.workload["length"]) <= _STATIC_SHAPES
    limits = {job.scenario["limit_ms"] for job in jobs if job.scenario["name"] == "slo_throughput"}
    assert limits == {10.0}


def test_a_study_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    file = tmp_path / "study" / "mine.yaml"
    file.write_text("# Mine.\njobs:\n  - [model=minilm, 'workload.length=8,16']\n  - [model=distilbert]\n")
    jobs = load_jobs(["study=mine"], folders=[tmp_path])
    assert [(job.model["name"], job.workload["length"]) for job in jobs] == [
        ("minilm", 8),
        ("minilm", 16),
        ("distilbert", 128),
    ]
    for text in ("jobs: []", "jobs: [model=minilm]", "jobs:\n  - [1]", "works: []", "[", "- a"):
        file.write_text(text)
        with pytest.raises(InputError, match="a study holds"):
            load_jobs(["study=mine"], folders=[tmp_path])
    with pytest.raises(InputError, match="there is no study 'yours'; there are mine, "):
        load_jobs(["study=yours"], folders=[tmp_path])
