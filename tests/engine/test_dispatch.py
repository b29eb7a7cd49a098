"""Groups of instances: runs go to the group of their longest text, answers do not depend on it, cores stay apart."""

from __future__ import annotations

import json
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import open_case
from compiled import compiled_case, open_cpu, same_bits
from machines import MadeUp

import encast
from encast.backends.cpu import CpuRunnable
from encast.backends.groups import InstanceGroup, place_groups
from encast.batch import Batch
from encast.errors import InputError, StrictError
from encast.machine import Machine, quota_alone_limits, read_machine, this_machine, usable_cores

CASE = "bert-embed"
LENGTHS = (1, 3, 8, 9, 16, 17, 30, 5, 40, 2, 33)

SETUPS: dict[str, dict[str, Any]] = {
    "one": {"groups": [{"instances": 1, "threads": 1}]},
    "two-lengths": {
        "groups": [{"instances": 1, "threads": 1, "longest": 8}, {"instances": 1, "threads": 1, "longest": None}]
    },
    "shared": {
        "groups": [{"instances": 2, "threads": 1, "longest": 16}, {"instances": 1, "threads": 2}],
        "shared_cores": True,
        "batch_tokens": 32,
    },
    # In any order.
    "three": {
        "groups": [
            {"instances": 1, "threads": 2},
            {"instances": 2, "threads": 1, "longest": 2},
            {"instances": 1, "threads": 2, "longest": 9},
        ],
        "shared_cores": True,
    },
}


def two_cores() -> None:
    if len(usable_cores()) < 2:
        pytest.skip("this process may use one core; the set-ups need two")


def config(name: str) -> dict[str, Any]:
    return {"schema": 1, "chosen": SETUPS[name]}


def sequences(meta: Any) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, meta.vocab, min(length, meta.max_len)).tolist() for length in LENGTHS]


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_bits_do_not_depend_on_the_groups(name: str, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    two_cores()
    path = compiled_case(CASE, dtype, tmp_path_factory)
    with encast.load(path, threads=2) as whole:
        ids = sequences(whole.meta)
        expected = whole.forward(ids)
        vectors = whole.embed(["a b", "the cat sat on the mat " * 9, "c"])
    with encast.load(path, config=config(name)) as engine:
        for states, wanted in zip(engine.forward(ids), expected, strict=True):
            assert same_bits(states, wanted)
        for one, wanted in zip(ids, expected, strict=True):
            assert same_bits(engine.forward([one])[0], wanted)
        assert same_bits(engine.embed(["a b", "the cat sat on the mat " * 9, "c"]), vectors)


def test_callers_of_all_groups_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    two_cores()
    path = compiled_case(CASE, "int8", tmp_path_factory)
    with encast.load(path, config=config("shared")) as engine:
        ids = sequences(engine.meta)
        expected = engine.forward(ids)
        wrong: list[int] = []

        def call(seed: int) -> None:
            for index in np.random.default_rng(seed).permutation(len(ids) * 8) % len(ids):
                same = same_bits(engine.forward([ids[index]])[0], expected[index])
                wrong.extend([] if same else [int(index)])

        callers = [threading.Thread(target=call, args=(seed,)) for seed in range(5)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert not wrong


class _Named:
    """Stands for the executors of one group."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def run(self, output: str, ids: Any, *rest: Any) -> Any:
        self.calls.append(self.name)
        return np.zeros((len(ids), 1), np.float32)

    def close(self) -> None:
        self.calls.append(f"close {self.name}")


def test_a_run_goes_to_the_first_group_that_covers_its_longest_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    two_cores()
    groups = (InstanceGroup(1, 1, 8), InstanceGroup(1, 1, 16), InstanceGroup(1, 2))
    cpu = open_cpu(CASE, "int8", tmp_path_factory, groups=groups, shared_cores=True)
    calls: list[str] = []
    cpu._executors = [[_Named(name, calls)] for name in ("short", "middle", "long")]
    for lengths in ([1], [8], [8] * 5, [9], [1, 9], [16], [17], [17, 1], [48]):
        cpu.run("last_hidden_state", Batch.of([[1] * length for length in lengths]))
    assert calls == ["short"] * 3 + ["middle"] * 3 + ["long"] * 3
    cpu.close()
    assert calls[-3:] == ["close short", "close middle", "close long"]


def test_a_caller_may_name_the_group(tmp_path_factory: pytest.TempPathFactory) -> None:
    two_cores()
    groups = (InstanceGroup(1, 1, 8), InstanceGroup(1, 1, 16), InstanceGroup(1, 2))
    cpu = open_cpu(CASE, "int8", tmp_path_factory, groups=groups, shared_cores=True)
    calls: list[str] = []
    cpu._executors = [[_Named(name, calls)] for name in ("short", "middle", "long")]
    for length, group in ((8, 0), (8, 1), (16, 1), (1, 2), (48, 2)):
        cpu.run("last_hidden_state", Batch.of([[1], [1] * length]), group=group)
    assert calls == ["short", "middle", "middle", "long", "long"]
    for length, group, message in (
        (9, 0, "group 0 is for texts of at most 8 tokens, the batch's longest has 9; give group 1 or a later one"),
        (17, 1, "group 1 is for texts of at most 16 tokens.* give group 2"),
        (1, 3, "group is 3; there are groups 0 to 2"),
        (1, -1, "group is -1"),
    ):
        with pytest.raises(InputError, match=message):
            cpu.run("last_hidden_state", Batch.of([[1], [1] * length]), group=group)
    assert len(calls) == 5
    cpu.close()
    cpu = open_cpu(CASE, "int8", tmp_path_factory)
    batch = Batch.of([[1, 2, 3], [4]])
    assert same_bits(cpu.run("last_hidden_state", batch, group=0), cpu.run("last_hidden_state", batch))
    with pytest.raises(InputError, match="group is 1; there are groups 0 to 0"):
        cpu.run("last_hidden_state", batch, group=1)
    cpu.close()


def test_malformed_batches_are_refused_as_ever(tmp_path_factory: pytest.TempPathFactory) -> None:
    two_cores()
    cpu = open_cpu(CASE, "int8", tmp_path_factory, groups=(InstanceGroup(1, 1, 8), InstanceGroup(1, 1)))
    ids = np.ones(3, np.int32)
    for cu_seqlens in ([0, 2], [0, 4, 3], [0, 3, 3], [3, 0], [0, 1 << 30], [-5, 3]):
        with pytest.raises(InputError):
            cpu.run("last_hidden_state", Batch(ids, np.array(cu_seqlens, np.int32)))


I32 = np.int32
REFUSED: dict[str, tuple[str, Batch, Any]] = {
    "id": ("last_hidden_state", Batch.of([[1, 2], [3, 10**6]]), None),
    "type": ("last_hidden_state", Batch.of([[1, 2]], [[0, 9]]), None),
    "types": ("last_hidden_state", Batch(np.ones(2, I32), np.array([0, 2], I32), np.zeros(1, I32)), None),
    "length": ("last_hidden_state", Batch.of([[1], [1] * 49]), None),
    "rises": ("last_hidden_state", Batch(np.ones(2, I32), np.array([0, 1, 1, 2], I32)), None),
    "tokens": ("last_hidden_state", Batch(np.ones(2, I32), np.array([0, 1], I32)), None),
    "no offsets": ("last_hidden_state", Batch(np.ones(2, I32), np.empty(0, I32)), None),
    "nested": ("last_hidden_state", Batch(np.ones((1, 2), I32), np.array([0, 2], I32)), None),
    "output": ("pooled", Batch.of([[1]]), None),
    "no select": ("logits", Batch.of([[1]]), None),
    "select": ("logits", Batch.of([[1]]), np.array([1, 0], I32)),
    "wide select": ("logits", Batch.of([[1]]), np.array([0], np.int64)),
    "needless select": ("last_hidden_state", Batch.of([[1]]), np.array([0], I32)),
    "wide ids": ("last_hidden_state", Batch(np.array([1 + (1 << 32)]), np.array([0, 1], I32)), None),
    "real ids": ("last_hidden_state", Batch(np.array([1.7]), np.array([0, 1], I32)), None),  # type: ignore[arg-type]
    "wide offsets": ("last_hidden_state", Batch(np.ones(1, I32), np.array([0, 1])), None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_core_refuses_in_the_words_of_the_reference(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = compiled_case("bert-fill_mask", "f32", tmp_path_factory)
    messages = []
    for device in ("cpu", "reference"):
        with encast.load(path, device=device) as engine, pytest.raises(InputError) as raised:
            engine.runnable.run(*REFUSED[name])
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_forward_names_the_token_that_it_refuses(tmp_path_factory: pytest.TempPathFactory) -> None:
    with encast.load(compiled_case(CASE, "f32", tmp_path_factory), threads=1) as engine:
        with pytest.raises(
            InputError, match=r"token_ids\[3\] \(token 1 of sequence 1\) is 1000000; the model takes 0 to"
        ):
            engine.forward([[1, 2], [3, 10**6]])
        with pytest.raises(InputError, match=r"sequence 0 has 49 tokens; the model takes at most 48: truncate"):
            engine.forward_packed([1] * 49, [0, 49])


def test_groups_read_one_mapping_of_the_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    two_cores()
    path = compiled_case(CASE, "f32", tmp_path_factory)

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(path / "weights.safetensors"))

    before = mappings()
    with encast.load(path, config=config("three")):
        assert mappings() == before + 1
    assert mappings() == before


def test_batch_tokens_and_the_argument_that_overrules_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    two_cores()
    path = compiled_case(CASE, "f32", tmp_path_factory)
    with encast.load(path, config=config("shared")) as engine:
        assert engine.session.batch_tokens == 32
    with encast.load(path, config=config("shared"), batch_tokens=48) as engine:
        assert engine.session.batch_tokens == 48
    with encast.load(path, config=config("one")) as engine:
        assert engine.session.batch_tokens == 8192


GROUP = {"instances": 1, "threads": 1}
BAD: dict[str, tuple[Any, str]] = {
    "schema": ({"schema": 2, "chosen": {}}, r"schema is 2, this version reads 1"),
    "no-schema": ({"chosen": SETUPS["one"]}, r"schema is None"),
    "schema-true": ({"schema": True, "chosen": SETUPS["one"]}, r"schema is True"),
    "field": ({"schema": 1, "chosen": SETUPS["one"], "colour": 1}, r"unknown field 'colour'; known are schema,"),
    "no-chosen": ({"schema": 1}, r"lacks 'chosen'"),
    "chosen": ({"schema": 1, "chosen": [1]}, r"chosen is \[1\]; an object"),
    "chosen-field": ({"schema": 1, "chosen": {"groups": [], "x": 1}}, r"chosen has the unknown field 'x'"),
    "no-groups": ({"schema": 1, "chosen": {"groups": []}}, r"chosen.groups is \[\]; a list of at least one"),
    "group-field": (
        {"schema": 1, "chosen": {"groups": [{"instances": 1, "threads": 1, "cores": 2}]}},
        r"groups\[0\] has the unknown field 'cores'; known are instances, threads, longest",
    ),
    "threads": (
        {"schema": 1, "chosen": {"groups": [{"instances": 1, "threads": 0}]}},
        r"groups\[0\].threads is 0; a whole number from 1",
    ),
    "instances": (
        {"schema": 1, "chosen": {"groups": [{"instances": True, "threads": 1}]}},
        r"groups\[0\].instances is True",
    ),
    "cores": (
        {"schema": 1, "chosen": {"groups": [{"instances": 40, "threads": 100}]}},
        r"a group of 40 x 100 threads needs 4000 cores, and this process may use \d+",
    ),
    "cores-together": (
        {
            "schema": 1,
            "chosen": {
                "groups": [{"instances": len(usable_cores()), "threads": 1, "longest": 4}, GROUP],
            },
        },
        r"the groups need \d+ cores together, .* shared_cores: true",
    ),
    "uncovered": (
        {"schema": 1, "chosen": {"groups": [{"instances": 1, "threads": 1, "longest": 16}]}},
        r"longest are \[16\], and this model takes texts of up to 48 tokens, which no group covers",
    ),
    "twice": (
        {
            "schema": 1,
            "chosen": {"groups": [{"instances": 1, "threads": 1, "longest": None}] * 2, "shared_cores": True},
        },
        r"longest are \[null, null\]; each must be greater",
    ),
    "longest": (
        {"schema": 1, "chosen": {"groups": [{"instances": 1, "threads": 1, "longest": "64"}]}},
        r"longest is '64'; a whole number .*or null for any length",
    ),
    "tokens": (
        {"schema": 1, "chosen": {**SETUPS["one"], "batch_tokens": -1}},
        r"chosen.batch_tokens is -1; a whole number from 1 to 2147483647",
    ),
    "shared": ({"schema": 1, "chosen": {**SETUPS["one"], "shared_cores": 1}}, r"shared_cores is 1; true or false"),
    "slo": ({"schema": 1, "chosen": SETUPS["one"], "slo": {"p200_ms": 1}}, r"the percentile 200 is not between"),
    "machine": ({"schema": 1, "chosen": SETUPS["one"], "machine": 7}, r"machine is 7; a text or null"),
    "trials": ({"schema": 1, "chosen": SETUPS["one"], "trials": [1]}, r"trials is no list of objects"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("as_file", [False, True])
def test_bad_configurations_say_what_is_wrong(
    name: str, as_file: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = compiled_case(CASE, "f32", tmp_path_factory)
    document, reason = BAD[name]
    source: Any = document
    if as_file:
        source = tmp_path / "bad.tuned.json"
        source.write_text(json.dumps(document))
    with pytest.raises(InputError, match=reason) as raised:
        encast.load(path, config=source)
    if as_file and name not in ("cores", "cores-together", "uncovered", "twice"):
        assert str(source) in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "nonsense", '{"schema": 1, "schema": 1}', "[" * 100_000, "\x00"])
def test_files_that_are_no_configuration(text: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = compiled_case(CASE, "f32", tmp_path_factory)
    file = tmp_path / "bad.tuned.json"
    file.write_text(text)
    with pytest.raises(InputError, match=re.escape(str(file))):
        encast.load(path, config=file)
    with pytest.raises(InputError, match="cannot be read"):
        encast.load(path, config=tmp_path / "absent.json")
    with pytest.raises(InputError, match="cannot be read"):
        encast.load(path, config=tmp_path)


def test_config_and_threads_exclude_each_other(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = compiled_case(CASE, "f32", tmp_path_factory)
    for options in ({"threads": 1}, {"instances": 2}):
        with pytest.raises(InputError, match="leave threads and instances out"):
            encast.load(path, config=config("one"), **options)


def test_a_device_takes_its_own_options(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = compiled_case(CASE, "f32", tmp_path_factory)
    for option, value in {"threads": 1, "instances": 2, "pin": False, "config": config("one")}.items():
        with pytest.raises(InputError, match=f"device 'reference' does not take {option}; leave it out"):
            encast.load(path, device="reference", **{option: value})


def test_a_configuration_of_something_else_is_visible(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = compiled_case(CASE, "f32", tmp_path_factory)
    strange = {**config("one"), "artifact_sha": "0" * 64, "machine": "f" * 16}
    with pytest.warns(UserWarning, match=r"tuned for another artifact .*; tuned on another machine.*; run "):
        encast.load(path, config=strange).close()
    with pytest.raises(StrictError, match="tuned for another artifact"):
        encast.load(path, config=strange, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encast.load(path, config=config("one"), strict=True).close()


# Where instances lie


def made_up_machine(root: Path, nodes: int, cores: int, domain: int) -> Machine:
    """``nodes`` memory nodes of ``cores`` cores, of which each ``domain`` share a last-level cache."""
    total = nodes * cores
    files = {
        "sys/devices/system/cpu/online": f"0-{total - 1}",
        "proc/self/status": f"Cpus_allowed_list:\t0-{total - 1}\n",
    }
    for cpu in range(total):
        first = cpu // domain * domain
        base = f"sys/devices/system/cpu/cpu{cpu}"
        files[f"{base}/topology/thread_siblings_list"] = str(cpu)
        files[f"{base}/topology/physical_package_id"] = str(cpu // cores)
        files[f"{base}/cache/index3/level"] = "3"
        files[f"{base}/cache/index3/type"] = "Unified"
        files[f"{base}/cache/index3/size"] = "32768K"
        files[f"{base}/cache/index3/shared_cpu_list"] = f"{first}-{first + domain - 1}"
    for node in range(nodes):
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{node * cores}-{(node + 1) * cores - 1}"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_machine(root)


GROUPS = (
    (InstanceGroup(24, 1, 64), InstanceGroup(3, 8)),
    (InstanceGroup(8, 2, 32), InstanceGroup(2, 16)),
    (InstanceGroup(6, 4, 32), InstanceGroup(4, 6)),
    (InstanceGroup(1, 12, 32), InstanceGroup(1, 12, 64), InstanceGroup(1, 24)),
)


@pytest.mark.parametrize("groups", GROUPS)
def test_no_core_has_two_instances_and_none_straddles_nodes(groups: tuple[InstanceGroup, ...], tmp_path: Path) -> None:
    machine = made_up_machine(tmp_path, 2, 24, 24)
    placed = place_groups(groups, machine, shared_cores=False)
    cpus = [cpu for group in placed for instance in group for cpu in instance]
    assert len(cpus) == len(set(cpus)) == sum(group.cores for group in groups)
    for group, instances in zip(groups, placed, strict=True):
        assert [len(instance) for instance in instances] == [group.threads] * group.instances
        for instance in instances:
            assert len({cpu // 24 for cpu in instance}) == 1, placed


def test_instances_keep_to_a_last_level_cache(tmp_path: Path) -> None:
    machine = made_up_machine(tmp_path, 2, 16, 4)
    placed = place_groups((InstanceGroup(4, 3, 8), InstanceGroup(4, 4)), machine, shared_cores=False)
    for instance in (*placed[0], *placed[1]):
        assert len({cpu // 4 for cpu in instance}) == 1, placed


def test_an_instance_wider_than_a_node_spreads(tmp_path: Path) -> None:
    machine = made_up_machine(tmp_path, 2, 8, 8)
    ((wide,), single) = place_groups((InstanceGroup(1, 12, 8), InstanceGroup(4, 1)), machine, shared_cores=False)
    assert len(set(wide)) == 12
    assert not {cpu for (cpu,) in single} & set(wide)


def test_sharing_groups_meet_on_as_few_cores_as_can_be(tmp_path: Path) -> None:
    machine = made_up_machine(tmp_path, 1, 8, 8)
    small, large = place_groups((InstanceGroup(5, 1, 8), InstanceGroup(1, 5)), machine, shared_cores=True)
    assert large == ((0, 1, 2, 3, 4),)
    assert [cpu for (cpu,) in small] == [7, 6, 5, 4, 3]
    whole = place_groups((InstanceGroup(8, 1, 8), InstanceGroup(1, 8)), machine, shared_cores=True)
    assert {cpu for (cpu,) in whole[0]} == set(whole[1][0])


def test_too_few_cores_leave_instances_unpinned(tmp_path: Path) -> None:
    machine = made_up_machine(tmp_path, 1, 4, 4)
    assert place_groups((InstanceGroup(3, 2),), machine, shared_cores=False) == (((), (), ()),)


@pytest.mark.parametrize(("quota", "pinned"), [("300000 100000", False), ("400000 100000", True)])
def test_a_quota_for_fewer_cores_leaves_instances_unpinned(quota: str, pinned: bool) -> None:
    """Engines of other containers would be pinned to the same cores."""
    machine = MadeUp(cores=4, quota=quota).read()
    placed = place_groups((InstanceGroup(2, 1, 8), InstanceGroup(1, 1)), machine, shared_cores=False)
    assert placed == ((((0,), (1,)), ((2,),)) if pinned else (((), ()), ((),)))
    limited = MadeUp(cores=4, quota=quota, cpuset="2-3").read()
    assert place_groups((InstanceGroup(2, 1),), limited, shared_cores=False) == (((2,), (3,)),)


def test_groups_are_pinned_as_placed(tmp_path_factory: pytest.TempPathFactory) -> None:
    two_cores()
    if quota_alone_limits(this_machine()):
        pytest.skip("under this quota nothing is pinned")
    groups = (InstanceGroup(2, 1, 8), InstanceGroup(1, 2))
    cpu = open_cpu(CASE, "f32", tmp_path_factory, groups=groups, shared_cores=True)
    first, second = usable_cores()[:2]
    assert cpu.groups == groups
    assert len(usable_cores()) > 2 or (set(cpu.cpus[1][0]), {*cpu.cpus[0]}) == ({first, second}, {(first,), (second,)})
    free = open_cpu(CASE, "f32", tmp_path_factory, groups=groups, shared_cores=True, pin=False)
    assert free.cpus == (((), ()), ((),))
    assert isinstance(cpu, CpuRunnable)
    with pytest.raises(InputError, match="leave threads and instances out"):
        open_cpu(CASE, "f32", tmp_path_factory, groups=groups, threads=1)


def test_lengths_of_the_case(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the tests above take for granted."""
    meta = open_case(CASE, tmp_path_factory).graph.meta
    assert meta.max_len == 48


def test_apart_a_caller_names_the_instance(tmp_path_factory: pytest.TempPathFactory) -> None:
    two_cores()
    groups = (InstanceGroup(2, 1, 8), InstanceGroup(1, 2))
    cpu = open_cpu(CASE, "int8", tmp_path_factory, groups=groups, shared_cores=True, apart=True)
    batch = Batch.of([[1, 2], [3] * 8])
    places = [(0, 0), (0, 1), (1, 0)]
    answers = {cpu.run("last_hidden_state", batch, group=at, instance=one).tobytes() for at, one in places}
    assert len(answers) == 1
    calls: list[str] = []
    cpu._executors[0] = [_Named("first", calls), _Named("second", calls)]
    for instance in (1, 0, 1):
        cpu.run("last_hidden_state", batch, group=0, instance=instance)
    assert calls == ["second", "first", "second"]
    with pytest.raises(InputError, match="instance is 2; a caller may name instances 0 to 1 of this group"):
        cpu.run("last_hidden_state", batch, group=0, instance=2)
    cpu.close()
