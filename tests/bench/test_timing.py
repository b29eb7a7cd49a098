"""Warm-up, turns, noise and limits, on made-up clocks and files."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from lab import backends, measure_all

from encast.batch import Batch
from encast.bench.cache import cached, cached_place, seconds_to_make
from encast.bench.limit import Limit, Sizes, peak, peak_is_the_machine_s, quickest, settled_peak
from encast.bench.noise import Noise, NoiseLimits, NoiseMeter, rounds_suffice, spread, steady_place
from encast.bench.placement import PLACES, PlaceMeter
from encast.bench.timing import Round, Timing, take_turns, warm_up
from encast.errors import ResourceError

pytestmark = pytest.mark.serial("waits for real time and counts it")


class Cooling:
    """Bursts whose calls take the times of a list, and the last one from then on."""

    def __init__(self, *times: int) -> None:
        self.times = list(times)
        self.bursts = 0

    def burst(self, *, calls: int | None = None, seconds: float | None = None) -> list[list[int]]:
        time = self.times[min(self.bursts, len(self.times) - 1)]
        self.bursts += 1
        return [[time, time], [time // 2]]


def test_a_warm_up_ends_when_three_bursts_are_alike() -> None:
    cooling = Cooling(900, 500, 300, 200, 104, 100, 102)
    found = warm_up(cooling, Timing(stable=0.05))
    assert found.stable
    assert (cooling.bursts, found.calls) == (7, 21)


def test_a_warm_up_that_never_settles_ends() -> None:
    restless = Cooling(*[100 * (1 + number % 2) for number in range(10_000)])
    found = warm_up(restless, Timing(warm_up_seconds=0.02))
    assert not found.stable
    assert found.seconds >= 0.02


def turns(timing: Timing, ends: dict[str, int], places: Iterator[str]) -> tuple[list[str], list[Round]]:
    taken = []

    def take(number: int, name: str) -> bool:
        taken.append(f"{name}{number}")
        return ends.get(name) != number

    return taken, take_turns(["a", "b", "c"], take, timing, lambda: next(places))


def test_turns_are_taken_forwards_and_backwards() -> None:
    timing = Timing(seconds=1e-9, rounds_least=3)
    taken, rounds = turns(timing, {}, itertools.repeat("near"))
    assert taken == ["a0", "b0", "c0", "c1", "b1", "a1", "a2", "b2", "c2"]
    assert rounds == [Round(number, {0: "near", 1: "near", 2: "near"}) for number in range(3)]


def test_who_failed_is_left_out_and_the_others_go_on() -> None:
    timing = Timing(seconds=1e-9, rounds_least=3)
    taken, _ = turns(timing, {"b": 0}, itertools.repeat("near"))
    assert taken == ["a0", "b0", "c0", "c1", "a1", "a2", "c2"]
    taken, _ = turns(timing, {"a": 0, "b": 0, "c": 1}, itertools.repeat("near"))
    assert taken == ["a0", "b0", "c0", "c1"]


def test_rounds_end_at_the_most() -> None:
    timing = Timing(seconds=1e9, rounds_most=4)
    assert len(turns(timing, {}, itertools.repeat("near"))[1]) == 4


def test_more_time_is_given_once_when_rounds_are_not_enough() -> None:
    timing = Timing(seconds=0.002, rounds_least=1, rounds_most=10**6)
    asked = []

    def enough(rounds: Sequence[Round]) -> bool:
        asked.append(len(rounds))
        return False

    begin = time.perf_counter()
    take_turns(["a"], lambda number, name: True, timing, lambda: "near", enough)
    assert time.perf_counter() - begin >= 0.004
    assert asked


def test_few_rounds_that_take_long_are_given_as_long_again(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(seconds=1.0, rounds_least=5)
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def take(number: int, name: str) -> bool:
        now[0] += 2.0
        return True

    assert len(take_turns(["a"], take, timing, lambda: "near", lambda rounds: len(rounds) == 8)) == 8
    assert len(take_turns(["a"], take, timing, lambda: "near", lambda rounds: False)) == 10


def test_who_was_taken_while_the_processors_moved_says_so() -> None:
    timing = Timing(seconds=1e-9, rounds_least=2)
    _, rounds = turns(timing, {}, iter(["near", "near", "far", "far", "far", "near", "near"]))
    assert rounds == [Round(0, {0: "near", 1: "moved", 2: "far"}), Round(1, {2: "far", 1: "moved", 0: "near"})]


@pytest.mark.parametrize(
    ("places", "kept"),
    [
        ([("near", "near"), ("far", "far"), ("near", "near"), ("moved", "near")], "near"),
        ([("far", "far"), ("near", "near"), ("far", "far"), ("moved", "near")], "far"),
        ([("near", "far"), ("near", "far")], None),
        ([("near", "near"), ("far", "far"), ("moved", "moved")], None),
        ([("unknown", "unknown")] * 3, None),
        ([("near", "near"), ("far", "far")] * 2, "near"),
        ([("halved", "halved"), ("far", "far")] * 2, "far"),
        ([("halved", "halved"), ("far", "far"), ("halved", "halved")], "halved"),
        # Each has two rounds of near, and their ratio one: it is all that there is, unless there are two of far.
        ([("near", "moved"), ("near", "near"), ("moved", "near")], "near"),
        ([("halved", "halved"), ("near", "halved"), ("near", "near"), ("halved", "near")], "near"),
        ([("near", "far"), ("near", "near"), ("far", "near"), ("far", "far"), ("far", "far")], "far"),
        # Every two share two rounds, all three only one.
        ([("near", "near", "far"), ("near", "near", "near"), ("near", "far", "near"), ("far", "near", "near")], "near"),
        ([("near",), ("far",), ("near",)], "near"),
        ([("near",), ("far",), ("moved",)], None),
        ([(), ()], None),
    ],
)
def test_rounds_of_one_place_are_kept(places: list[tuple[str, ...]], kept: str | None) -> None:
    assert steady_place([dict(enumerate(one)) for one in places], 2) == kept


@pytest.mark.parametrize(
    ("places", "suffice"),
    [
        ([("near", "near")] * 2, True),
        ([("far", "far")] * 2, True),
        ([("near", "far"), ("near", "near")], False),
        ([("near", "moved"), ("near", "near"), ("moved", "near")], False),
        ([(), ()], False),
        ([("halved", "halved")] * 2, False),
        ([("unknown", "unknown")] * 2, True),
    ],
)
def test_more_time_is_for_what_it_may_better(places: list[tuple[str, ...]], suffice: bool) -> None:
    assert rounds_suffice([dict(enumerate(one)) for one in places], 2) == suffice


def test_the_place_of_processors_is_known_or_not() -> None:
    import os

    cpus = sorted(os.sched_getaffinity(0))
    assert PlaceMeter(cpus[:1]).read() == "unknown"
    assert PlaceMeter([0, 100_000]).read() == "unknown"
    if len(cpus) > 1:
        assert PlaceMeter(cpus).read() in PLACES


def test_what_a_processor_did_is_remembered_for_all_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meters = []

    def look(meter: PlaceMeter) -> str:
        meters.append(meter)
        return "near"

    monkeypatch.setattr(PlaceMeter, "read", look)
    rows = measure_all(backends(tmp_path, honest="Honest"), ["honest"], "timing.seconds=0.1", "workload.batch=[1,2]")
    assert len(rows) == 2
    assert all(meter is meters[0] for meter in meters)


def test_halved_rounds_are_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They last longer than the measurement was to take."""
    looks: list[float] = []

    def look(meter: PlaceMeter) -> str:
        looks.append(time.monotonic())
        return "halved" if looks[-1] - looks[0] < 2.2 else "near"

    monkeypatch.setattr(PlaceMeter, "read", look)
    (row,) = measure_all(backends(tmp_path, honest="Honest"), ["honest"], "timing.seconds=2")
    assert set(row["samples"]["place"]) == {"near"}, row["noise"]
    assert not any("each did half" in why for why in row["noise"]["why"])


@pytest.fixture
def two_cpus() -> list[int]:
    import os

    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("one processor")
    return cpus


@pytest.mark.parametrize(
    ("looks", "places"),
    [
        ([(100, 100), (100, 100)], ["near", "near"]),
        ([(100, 50), (100, 50)], ["halved"]),
        ([(100, 50), (100, 100)], ["near"]),  # for a moment
        # Threads of a pool spin on the other processor: what this one does alone is halved too.
        ([(100, 100), (50, 50), (50, 50)], ["near", "halved"]),
        # The clock of a thread missed most of its time.
        ([(100, 100), (100, 100), (1000, 100), (math.inf, 100), (100, 100)], ["near"] * 5),
        ([(1000, 100), (100, 100)], ["near"]),
    ],
)
def test_two_processors_that_do_half_beside_each_other_are_halved(
    looks: list[tuple[float, float]], places: list[str], two_cpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``looks``: what the first does before the other is busy, and then."""
    import os
    import threading

    rates = itertools.chain.from_iterable(looks)
    busy = threading.Semaphore(0)
    beside = itertools.cycle([False, True])

    def rate(dtype: str, threads: int, seconds: float) -> float:
        (cpu,) = os.sched_getaffinity(0)
        if cpu == two_cpus[1]:
            busy.release()
            return 1.0
        assert cpu == two_cpus[0]
        assert not next(beside) or busy.acquire(timeout=10), "the other one was not busy"
        return next(rates)

    monkeypatch.setattr("encast.bench.placement.peak", rate)
    monkeypatch.setattr("encast.bench.placement._read_rate", lambda writer, reader: 1.0)
    meter = PlaceMeter(two_cpus)
    assert [meter.read() for _ in places] == places
    assert next(rates, None) is None, "not all looks were taken"


def test_a_peak_that_cannot_be_measured_is_an_error_and_no_hang(
    two_cpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(dtype: str, threads: int, seconds: float) -> float:
        raise ResourceError("no peak here")

    monkeypatch.setattr("encast.bench.placement.peak", fail)
    with pytest.raises(ResourceError, match="no peak here"):
        PlaceMeter(two_cpus).read()


def stat(path: Path, *cpus: tuple[int, ...]) -> Path:
    lines = [f"cpu{number} " + " ".join(map(str, ticks)) for number, ticks in enumerate(cpus)]
    path.write_text("cpu 1 2 3 4 5 6 7 8 9 10\n" + "\n".join(lines) + "\nintr 5\n")
    return path


def test_steal_and_other_processes_are_read(tmp_path: Path) -> None:
    path = stat(tmp_path / "stat", (0,) * 10, (0,) * 10, (0,) * 10)
    meter = NoiseMeter([0, 1], stat=path)
    # User, nice, system, idle, iowait, irq, softirq, steal: cpu2 is not ours.
    stat(path, (10, 0, 5, 0, 0, 1, 1, 3, 0, 0), (7, 0, 0, 0, 0, 0, 0, 0, 0, 0), (90,) * 10)
    began = meter._began
    meter._began = began - 0.5  # half a second has passed
    noise = meter.read(own_cpu_s=0.04)
    assert noise.steal is not None
    assert noise.other_cpu is not None
    assert noise.steal == pytest.approx(0.03 / (0.5 * 2), rel=0.1)
    assert noise.other_cpu == pytest.approx((0.24 - 0.04) / (0.5 * 2), rel=0.1)
    assert NoiseMeter([0], stat=tmp_path / "gone").read(0.0) == Noise(None, None)
    assert NoiseMeter([2, 6], stat=path).read(0.0) == Noise(None, None), "a container's file has processors 0 to 2"


def test_what_runs_beside_a_core_s_thread_counts(tmp_path: Path) -> None:
    """Processor 2 is the other hardware thread of processor 0's core: 0.9 s of others there, and steal of its own."""
    path = stat(tmp_path / "stat", (0,) * 10, (0,) * 10, (0,) * 10)
    meter = NoiseMeter([0, 1], [0, 2], path)
    stat(path, (10, *(0,) * 9), (10, *(0,) * 9), (90, 0, 0, 0, 0, 0, 0, 50, 0, 0))
    meter._began -= 1.0
    noise = meter.read(own_cpu_s=0.2)
    assert noise.other_cpu == pytest.approx(0.9 / 2, rel=0.1)
    assert noise.steal == 0


def test_a_noisy_row_says_why() -> None:
    limits = NoiseLimits(steal=0.02, other_cpu=0.05, spread=0.15)
    quiet = Noise(0.01, 0.02).record([100, 101, 102, 103], ["near"] * 4, limits)
    assert quiet["noisy"] is False
    assert quiet["why"] == []
    assert quiet["placement"] == "near"
    loud = Noise(0.1, 0.2).record([100, 150, 60, 200], ["near", "far", "near", "far"], limits)
    assert loud["noisy"]
    assert loud["placement"] == "mixed"
    assert len(loud["why"]) == 4
    halved = Noise(0.0, 0.0).record([50, 51, 50, 51], ["halved"] * 4, limits)
    assert halved["noisy"]
    assert halved["why"] == ["of two processors that were busy each did half, as threads of one core do"]
    assert "the host took 10.0% of the processors' time" in loud["why"]
    unknown = Noise(None, None).record([1.0], ["unknown"], limits)
    assert unknown == {"steal": None, "other_cpu": None, "spread": None, "placement": "unknown", "noisy": False,
                       "why": []}  # fmt: skip


def test_the_spread_is_the_quartiles_over_the_median() -> None:
    assert spread([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert spread([1, 2]) is None


def limit(instances: int, split: bool, read: float | None) -> Limit:
    return Limit(
        operations=1e9,
        sequences=8,
        weight_bytes=10**6,
        instances=instances,
        split=split,
        ops_per_second=1e11,
        read_bytes_per_second=read,
    )


def test_the_limit_is_arithmetic_or_weights() -> None:
    assert limit(1, False, None).sequences_per_second == pytest.approx(8 / 0.01)
    # Two instances share the arithmetic; a batch each.
    assert limit(2, False, None).sequences_per_second == pytest.approx(8 / 0.01)
    assert limit(2, True, None).sequences_per_second == pytest.approx(8 / 0.01)
    slow = limit(1, False, 10**7)
    assert slow.bound == "weights"
    assert slow.sequences_per_second == pytest.approx(8 / 0.1)
    # Each of two instances reads them for a batch of its own, or for its part of one.
    assert limit(2, False, 10**7).sequences_per_second == pytest.approx(16 / 0.2)
    assert limit(2, True, 10**7).sequences_per_second == pytest.approx(8 / 0.2)
    assert slow.record(40.0)["fraction"] == pytest.approx(0.5)


def test_where_the_peak_is_not_known_nobody_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    from encast import _core

    levels = [("scalar", "", "", True, ""), ("avx2", "avx2", "", True, ""), ("amx", "amxtile", "", False, "")]
    monkeypatch.delenv("ENCAST_ISA", raising=False)
    monkeypatch.setattr(_core, "isa_levels", lambda: levels)
    assert peak_is_the_machine_s()
    monkeypatch.setenv("ENCAST_ISA", "avx2")
    assert not peak_is_the_machine_s()
    monkeypatch.delenv("ENCAST_ISA")
    monkeypatch.setattr(_core, "isa_levels", lambda: levels[:1])
    assert not peak_is_the_machine_s()


def test_amx_has_a_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bf16 and int8 are bounded by the tiles, those of f32 by what bf16 tiles can make up for."""
    from encast import _core

    monkeypatch.delenv("ENCAST_ISA", raising=False)
    monkeypatch.setattr(_core, "isa_levels", lambda: [("scalar", "", "", True, ""), ("amx", "amxtile", "", True, "")])
    assert peak_is_the_machine_s()
    rates = {"f32": 200e9, "bf16": 3200e9, "int8": 6400e9}
    monkeypatch.setattr(_core, "peak_ops_per_second", lambda dtype, threads, seconds: threads * rates[dtype])
    assert [quickest(dtype, 2, 2) for dtype in rates] == [3200e9, 6400e9, 12800e9]
    assert peak("f32", 2) == 400e9, "what is shown as the limit of f32 is what its instructions reach"
    rates["bf16"] = 200e9
    assert quickest("f32", 1, 1) == 200e9


def test_two_processors_on_one_core_lower_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two threads reach together is half then; what a runtime does before or after is not."""
    from encast import _core

    monkeypatch.setattr(_core, "peak_ops_per_second", lambda dtype, threads, seconds: 100e9)
    assert peak("int8", 2) == 100e9
    assert quickest("int8", 2, 2) == 200e9
    assert quickest("f32", 2, 2) == 200e9
    assert quickest("int8", 2, 1) == 100e9, "two hardware threads of one core do what it does"


def test_a_limit_is_not_of_a_moment_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    from encast import _core

    together = iter([90e9, 100e9, 100e9, 95e9, 190e9])
    monkeypatch.setattr(
        _core, "peak_ops_per_second", lambda dtype, threads, seconds: 100e9 if threads == 1 else next(together)
    )
    waited: list[float] = []
    assert settled_peak("int8", 2, 2, waited.append) == 190e9
    assert len(waited) == 2
    together = iter([180e9, 190e9, 185e9])
    assert settled_peak("int8", 2, 2, waited.append) == 190e9, "nor of one that a neighbour disturbs a little"
    assert len(waited) == 2
    together = itertools.repeat(70e9)
    waited.clear()
    assert settled_peak("int8", 2, 1, waited.append) == 70e9
    assert len(waited) == 3, "three looks more are all it gets"


def test_operations_are_products_and_attention() -> None:
    sizes = Sizes(weights=1000, layers=2, hidden=16)
    assert sizes.operations(Batch.of([[1, 2, 3], [4]])) == 2 * 1000 * 4 + 4 * 2 * 16 * (9 + 1)


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        np.save(folder / "array.npy", np.arange(3))

    key = {"model": "m", "dtype": "f32"}
    first = cached(tmp_path, "kind", key, make)
    assert cached(tmp_path, "kind", dict(reversed(key.items())), make) == first == cached_place(tmp_path, "kind", key)
    assert len(made) == 1
    assert cached(tmp_path, "kind", {**key, "dtype": "int8"}, make) != first
    assert seconds_to_make(first) >= 0
    assert np.load(first / "array.npy").tolist() == [0, 1, 2]


def test_what_is_half_made_is_never_found(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("made")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached(tmp_path, "kind", {"a": 1}, fail)
    assert not cached_place(tmp_path, "kind", {"a": 1}).exists()
    assert [path for path in (tmp_path / "kind").iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot be written .*name another folder with cache=FOLDER"):
        cached(tmp_path / "file", "kind", {"a": 1}, lambda folder: None)
