"""Where instances are put, on made-up machines."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import ARTICLE, EPYC, HYBRID, MadeUp

from encast.errors import InputError
from encast.launch import PRESETS, Placement, place
from encast.machine import Machine, format_cpu_list


def cpus(placements: tuple[Placement, ...]) -> list[str]:
    return [format_cpu_list(placement.cpus) for placement in placements]


def nodes(placements: tuple[Placement, ...]) -> list[int | None]:
    return [placement.node for placement in placements]


@pytest.fixture(scope="module")
def article() -> Machine:
    return ARTICLE.read()


@pytest.fixture(scope="module")
def epyc() -> Machine:
    return EPYC.read()


def test_latency_is_an_instance_a_package_on_the_articles_machine(article: Machine) -> None:
    placements = place(article, preset="latency")
    assert cpus(placements) == ["0-23", "24-47"]
    assert nodes(placements) == [0, 1]
    assert [placement.threads for placement in placements] == [24, 24]
    assert placements == place(article)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"allowed": "1-47"}, ["1-23", "24-46"]),
        ({"offline": (30, 78)}, ["0-22", "24-29,31-47"]),
        ({"cpuset": "0-3,24-31"}, ["24-31"]),  # 4 each would keep as many busy
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_caches_that_differ_leave_few_cores_idle(changes: dict[str, Any], expected: list[str]) -> None:
    assert cpus(place(dataclasses.replace(ARTICLE, **changes).read())) == expected


def test_throughput_is_an_instance_a_core(article: Machine) -> None:
    placements = place(article, preset="throughput")
    assert cpus(placements) == [str(cpu) for cpu in range(48)]
    assert {placement.threads for placement in placements} == {1}


def test_siblings_come_only_when_asked_for(article: Machine) -> None:
    first, second = place(article, instances=2, cores_per_instance=2, smt=True)
    assert first == Placement((0, 1, 48, 49), 0, 4, smt=True)
    assert second == Placement((24, 25, 72, 73), 1, 4, smt=True)


def test_instances_share_the_machine_equally_and_stay_on_their_nodes(article: Machine) -> None:
    assert cpus(place(article, instances=1)) == ["0-23"]
    assert cpus(place(article, instances=2)) == ["0-23", "24-47"]
    # 16 each would fit the cores, but only one such instance fits a node.
    assert cpus(place(article, instances=3)) == ["0-11", "12-23", "24-35"]
    assert cpus(place(article, instances=5)) == ["0-7", "8-15", "16-23", "24-31", "32-39"]


def test_few_instances_spread_over_the_nodes(article: Machine) -> None:
    assert cpus(place(article, instances=2, cores_per_instance=4)) == ["0-3", "24-27"]
    assert cpus(place(article, cores_per_instance=10)) == ["0-9", "10-19", "24-33", "34-43"]


def test_an_instance_spans_nodes_only_when_asked(article: Machine) -> None:
    with pytest.raises(InputError) as caught:
        place(article, instances=1, cores_per_instance=48)
    assert str(caught.value) == (
        "1 instance of 48 cores does not fit: there are 24 cores on node 0 and 24 cores on node 1; 1 instance of 24 "
        "cores would; or let instances span memory nodes (--cross-node)"
    )
    # However many there should be.
    with pytest.raises(InputError, match=r"1 instance of 30 .*; 1 instance of 24 cores would; or .*--cross-node\)$"):
        place(article, cores_per_instance=30)
    with pytest.raises(InputError, match=r"1 instance of 49 cores does not fit: .*; 1 instance of 24 cores would$"):
        place(article, cores_per_instance=49)
    (whole,) = place(article, instances=1, cores_per_instance=48, cross_node=True)
    assert (format_cpu_list(whole.cpus), whole.node, whole.threads) == ("0-47", None, 48)
    # Asked for or not, an instance that fits a node stays there.
    assert nodes(place(article, instances=4, cores_per_instance=12, cross_node=True)) == [0, 0, 1, 1]


def test_errors_say_what_would_fit(article: Machine) -> None:
    with pytest.raises(InputError, match=r"2 instances of 16 cores or 3 instances of 12 cores would; or let instances"):
        place(article, instances=3, cores_per_instance=16)
    with pytest.raises(InputError, match=r"49 instances of 1 core do not fit: .*; 48 instances of 1 core would$"):
        place(article, instances=49)


def test_nodes_and_lists_of_cpus(article: Machine) -> None:
    assert cpus(place(article, nodes=[1])) == ["24-47"]
    assert cpus(place(article, preset="throughput", core_list=[0, 1, 24, 48])) == ["0", "1", "24"]
    # A hardware thread whose sibling was not named stands for its core.
    assert cpus(place(article, core_list=[50])) == ["50"]
    assert cpus(place(article, core_list=range(96), nodes=[0], instances=2)) == ["0-11", "12-23"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"core_list": [95, 96, 97]}, "there is no CPU 96-97; there are 0-95"),
        ({"core_list": []}, "the list of CPUs is empty; this process may use 0-95"),
        ({"nodes": [1, 2]}, "there is no memory node 2; there are 0-1"),
        ({"nodes": []}, "the list of nodes is empty; there are 0-1"),
        ({"nodes": [1], "core_list": [3]}, "no CPU of the list 3 is on memory node 1"),
        ({"instances": 0}, "instances is 0; it must be at least 1"),
        ({"cores_per_instance": -1}, "cores_per_instance is -1; it must be at least 1"),
        ({"preset": "speed"}, "the preset is 'speed'; latency and throughput are known"),
    ],
)
def test_wrong_requests(article: Machine, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        place(article, **options)


def test_instances_keep_to_a_last_level_cache(epyc: Machine) -> None:
    assert cpus(place(epyc, preset="latency")) == [f"{first}-{first + 7}" for first in range(0, 64, 8)]
    # Two fill each cache to six; the remaining two cores of each stay idle rather than make an instance over two.
    threes = place(epyc, cores_per_instance=3)
    assert len(threes) == 16
    assert all(len({cpu // 8 for cpu in placement.cpus}) == 1 for placement in threes)
    # Three for latency: a cache each. Three otherwise: as many cores as the node has.
    assert cpus(place(epyc, preset="latency", instances=3)) == ["0-7", "8-15", "16-23"]
    assert [placement.threads for placement in place(epyc, instances=3)] == [21, 21, 21]


def test_few_instances_take_a_cache_each(epyc: Machine) -> None:
    assert cpus(place(epyc, instances=4, cores_per_instance=2)) == ["0-1", "8-9", "16-17", "24-25"]


def test_instances_beyond_a_cache_take_few_of_them(epyc: Machine) -> None:
    twelves = place(epyc, instances=5, cores_per_instance=12)
    caches = [Counter(cpu // 8 for cpu in placement.cpus) for placement in twelves]
    assert [sorted(count.values()) for count in caches] == [[4, 8]] * 5


@pytest.mark.parametrize(
    ("numbering", "expected"),
    [("apart", ["0-3", "4-7"]), ("adjacent", ["0,2,4,6", "8,10,12,14"]), ("in_turn", ["0,2,4,6", "1,3,5,7"])],
)
def test_numbering_does_not_matter(numbering: str, expected: list[str]) -> None:
    machine = MadeUp(packages=2, cores=4, threads=2, numbering=numbering).read()
    assert cpus(place(machine)) == expected
    assert len(place(machine, preset="throughput")) == 8


def test_offline_cpus() -> None:
    # Core 0 lost its first hardware thread, core 1 both.
    machine = MadeUp(cores=4, threads=2, offline=(0, 1, 5)).read()
    assert machine.offline == (0, 1, 5)
    assert cpus(place(machine)) == ["2-4"]
    assert cpus(place(machine, smt=True)) == ["2-4,6-7"]
    with pytest.raises(InputError, match=r"CPU 0-1 is offline; this process may use 2-4,6-7"):
        place(machine, core_list=[0, 1, 2])


def test_cpusets_and_masks() -> None:
    machine = dataclasses.replace(EPYC, cpuset="4-11,68-75").read()
    assert cpus(place(machine)) == ["4-7", "8-11"]
    assert cpus(place(machine, instances=1)) == ["4-11"]
    with pytest.raises(InputError, match=r"CPU 0 lies outside of .* mask or cpuset; it may use 4-11,68-75"):
        place(machine, core_list=[0, 4])


def test_a_node_outside_of_the_mask() -> None:
    machine = dataclasses.replace(ARTICLE, allowed="0-3").read()
    with pytest.raises(InputError, match="memory node 1 has no CPU that this process may use; nodes 0 have"):
        place(machine, nodes=[1])


ALL, NODES = ["0-95"], ["0-23,48-71", "24-47,72-95"]


@pytest.mark.parametrize(
    ("quota", "latency", "reach", "throughput", "throughput_reach"),
    [
        ("50000 100000", [1], ALL, 1, ALL),
        ("100000 100000", [1], ALL, 1, ALL),
        ("150000 100000", [1], ALL, 2, NODES),  # an instance on each node
        ("250000 100000", [2], ALL, 3, ALL * 3),
        ("3600000 100000", [18, 18], NODES, 36, NODES),
    ],
)
def test_a_quota_bounds_the_threads_and_not_the_cpus(
    quota: str, latency: list[int], reach: list[str], throughput: int, throughput_reach: list[str]
) -> None:
    """Instances of other containers would be bound to the same CPUs."""
    machine = dataclasses.replace(ARTICLE, quota=quota).read()
    placements = place(machine, preset="latency")
    assert [placement.threads for placement in placements] == latency
    assert cpus(placements) == reach
    assert nodes(placements) == ([0, 1] if reach == NODES else [None])
    singles = place(machine, preset="throughput")
    assert [placement.threads for placement in singles] == [1] * throughput
    assert sorted({*cpus(singles)}) == sorted({*throughput_reach})
    assert not any(placement.bound for placement in (*placements, *singles))


@pytest.mark.parametrize("quota", ["4800000 100000", "9600000 100000"])
def test_a_quota_for_all_cores_binds(quota: str) -> None:
    machine = dataclasses.replace(ARTICLE, quota=quota).read()
    placements = place(machine)
    assert cpus(placements) == ["0-23", "24-47"]
    assert all(placement.bound for placement in placements)
    # As many as are asked for by name, or left by the cpuset.
    few = dataclasses.replace(ARTICLE, quota="200000 100000").read()
    assert place(few, core_list=[5, 6]) == (Placement((5, 6), 0, 2),)
    assert cpus(place(few, core_list=[5, 6, 30])) == ["5-6,30"]
    both = dataclasses.replace(ARTICLE, quota="200000 100000", cpuset="7,8").read()
    assert place(both) == (Placement((7, 8), 0, 2),)


def test_a_quota_bounds_what_is_asked_for() -> None:
    machine = dataclasses.replace(ARTICLE, quota="350000 100000").read()
    with pytest.raises(InputError) as caught:
        place(machine, instances=2, cores_per_instance=2)
    assert "the cgroup's CPU quota pays for 3 cores; 1 instance of 2 cores or 2 instances of 1 core" in str(
        caught.value
    )
    # Three hardware threads are a core and a half: one core's siblings may be used, within the quota.
    assert place(machine, smt=True) == (Placement((*range(96),), None, 2, smt=True, bound=False),)
    tight = dataclasses.replace(ARTICLE, quota="100000 100000").read()
    assert place(tight, smt=True) == (Placement((*range(96),), None, 1, smt=True, bound=False),)


def test_hybrid_processors() -> None:
    machine = HYBRID.read()
    assert sum(core.efficient for core in machine.cores) == 16
    quick = "0,2,4,6,8,10,12,14"
    assert cpus(place(machine)) == [quick]
    assert cpus(place(machine, preset="latency", instances=1)) == [quick]
    assert cpus(place(machine, preset="latency", instances=2)) == ["0,2,4,6", "8,10,12,14"]
    # A team waits for its slowest core: none is mixed while whole ones fit.
    kinds = {core.cpus[0]: core.efficient for core in machine.cores}
    for placement in place(machine, instances=6, cores_per_instance=4):
        assert len({kinds[cpu] for cpu in placement.cpus}) == 1
    assert len(place(machine, preset="throughput")) == 24


def test_one_cpu() -> None:
    machine = MadeUp(cores=1).read()
    for preset in (None, *PRESETS):
        assert place(machine, preset=preset) == (Placement((0,), 0, 1),)
    with pytest.raises(InputError, match=r"2 instances of 1 core do not fit: .*; 1 instance of 1 core would$"):
        place(machine, instances=2)


def test_a_node_without_memory_binds_nothing() -> None:
    machine = dataclasses.replace(ARTICLE, without_memory=(1,)).read()
    assert nodes(place(machine)) == [0, None]


def test_a_node_whose_memory_is_not_allowed_binds_nothing() -> None:
    machine = dataclasses.replace(ARTICLE, mems="0").read()
    assert cpus(place(machine)) == ["0-23", "24-47"]
    assert nodes(place(machine)) == [0, None]


def test_clusters_within_a_package_are_nodes() -> None:
    machine = MadeUp(packages=2, cores=24, threads=2, nodes_a_package=4).read()
    placements = place(machine, preset="latency")
    assert len(placements) == 8
    assert nodes(placements) == list(range(8))
    assert {placement.threads for placement in placements} == {6}


MACHINES = st.builds(
    MadeUp,
    packages=st.integers(1, 2),
    cores=st.integers(1, 6),
    threads=st.integers(1, 2),
    numbering=st.sampled_from(["apart", "adjacent", "in_turn"]),
    cores_a_cache=st.sampled_from([None, 0, 1, 2, 3, 4]),
    offline=st.sets(st.integers(1, 23), max_size=4),
    allowed=st.none()
    | st.sets(st.integers(0, 23), min_size=1, max_size=12).map(lambda cpus: format_cpu_list({0, *cpus})),
    quota=st.none() | st.sampled_from(["50000 100000", "150000 100000", "300000 100000", "700000 100000"]),
    virtual=st.booleans(),
)


@settings(max_examples=150)
@given(made_up=MACHINES, smt=st.booleans())
def test_by_default_no_other_size_of_an_instance_a_cache_keeps_more_cores_busy(made_up: MadeUp, smt: bool) -> None:
    machine = made_up.read()
    home = {cpu: (core.node, core.domain) for core in machine.cores for cpu in core.cpus}
    caches = Counter((core.node, core.domain) for core in machine.allowed_cores)
    wide = max(len(core.cpus) for core in machine.allowed_cores) if smt else 1
    quota = machine.cgroup.cpus
    most = len(machine.allowed_cores) if quota is None else max(1, int(quota) // wide)
    placements = place(machine, smt=smt)
    if not placements[0].bound:
        assume(not smt)  # whose threads do not tell the cores
        (size,) = {placement.threads for placement in placements}
    else:
        (size,) = {len({core for core in machine.allowed_cores if set(core.cpus) & set(p.cpus)}) for p in placements}
        assert [len({home[cpu] for cpu in placement.cpus}) for placement in placements] == [1] * len(placements)
        assert len({home[placement.cpus[0]] for placement in placements}) == len(placements), "instances share a cache"
    busy = {of: of * min(sum(count >= of for count in caches.values()), most // of) for of in range(1, 25)}
    assert size * len(placements) == max(busy.values())
    assert all(busy[of] < busy[size] for of in range(size + 1, 25))


@settings(max_examples=150)
@given(
    made_up=MACHINES,
    instances=st.none() | st.integers(1, 8),
    cores=st.none() | st.integers(1, 8),
    preset=st.sampled_from([None, *PRESETS]),
    smt=st.booleans(),
    cross_node=st.booleans(),
)
def test_placements_hold_what_they_promise(
    made_up: MadeUp, instances: int | None, cores: int | None, preset: str | None, smt: bool, cross_node: bool
) -> None:
    machine = made_up.read()
    options: dict[str, Any] = {"preset": preset, "smt": smt, "cross_node": cross_node}
    quota = machine.cgroup.cpus
    paid = len(machine.online) if quota is None else max(1, int(quota + (preset == "throughput") * 0.5))
    try:
        placements = place(machine, instances=instances, cores_per_instance=cores, **options)
    except InputError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        # For want of cores alone, and what is said to fit does.
        if cross_node and not smt:
            assert (instances or 1) * (cores or 1) > min(len(machine.allowed_cores), paid)
        offers = re.findall(r"(\d+) instances? of (\d+) cores?(?= or| would)", refusal)
        assert offers, refusal
        for count, size in offers:
            assert len(place(machine, instances=int(count), cores_per_instance=int(size), **options)) == int(count)
        return
    home = {cpu: core.node for core in machine.allowed_cores for cpu in core.cpus}
    for placement in placements:
        span = {home[cpu] for cpu in placement.cpus}
        assert placement.node == (span.pop() if len(span) == 1 else None)
        assert 1 <= placement.threads <= len(placement.cpus) == len(set(placement.cpus))
    assert sum(placement.threads for placement in placements) <= max(paid, len(placements))
    assert len(placements) <= paid
    if instances is not None:
        assert len(placements) == instances
    reaches = Counter(frozenset(placement.cpus) for placement in placements)
    if paid < len(machine.affinity if smt else machine.allowed_cores):
        assert not any(placement.bound for placement in placements)
        assert set().union(*reaches) == set(machine.affinity)
        assert sum(map(len, reaches)) == len(machine.affinity), "some CPUs are more instances' than others"
        return
    assert all(placement.bound for placement in placements)
    assert max(reaches.values()) == 1
    assert set().union(*reaches) <= set(machine.affinity)
    assert sum(map(len, reaches)) == len(set().union(*reaches)), "instances share a CPU"
    core_of = {cpu: number for number, core in enumerate(machine.allowed_cores) for cpu in core.cpus}
    owners = [{core_of[cpu] for cpu in placement.cpus} for placement in placements]
    assert sum(map(len, owners)) == len(set().union(*owners)), "instances share a core"
    if cores is not None:
        assert {len(own) for own in owners} == {cores}
    else:
        assert len({len(own) for own in owners}) == 1
    for placement, own in zip(placements, owners, strict=True):
        assert cross_node or len({home[cpu] for cpu in placement.cpus}) == 1
        if not smt:
            assert len(placement.cpus) == len(own)
