"""Warm-up, interleaved rounds, noise and the roofline, on made-up clocks and files."""

from __future__ import annotations

import dataclasses
import time
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint

from encast import _core
from encast.archs import build_graph
from encast.batch import Batch
from encast.bench import roofline as bounds
from encast.bench.cache import cached, cached_place, seconds_to_make
from encast.bench.fairness import least_time
from encast.bench.noise import NoiseMeter
from encast.bench.roofline import Sizes, card_limit, most, peak, peak_is_known, roofline
from encast.bench.scenarios.base import Point
from encast.bench.timing import interleave, warm_up
from encast.ceilings.card import CardCeilings
from encast.errors import ResourceError
from encast.importers import open_checkpoint
from encast.sparsity import Pattern, prune_checkpoint


class Cooling:
    """Bursts whose calls take the times of a list, and the last one from then on."""

    def __init__(self, *times: int) -> None:
        self.times = list(times)
        self.bursts = 0

    def burst(self, *, calls: int | None = None, seconds: float | None = None) -> list[list[int]]:
        time = self.times[min(self.bursts, len(self.times) - 1)]
        self.bursts += 1
        return [[time, time], [time // 2]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What ``time.perf_counter`` says."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_a_warm_up_ends_when_three_bursts_are_alike() -> None:
    cooling: Any = Cooling(900, 500, 300, 200, 104, 100, 102)
    found = warm_up(cooling, 10)
    assert found["stable"]
    assert (cooling.bursts, found["calls"]) == (7, 21)


def test_a_warm_up_that_never_settles_ends(clock: list[float]) -> None:
    class Restless(Cooling):
        def burst(self, *, calls: int | None = None, seconds: float | None = None) -> list[list[int]]:
            clock[0] += 1
            return super().burst()

    restless: Any = Restless(*[100 * (1 + number % 2) for number in range(100)])
    found = warm_up(restless, 7)
    assert not found["stable"]
    assert (found["seconds"], restless.bursts) == (8, 8)


def rounds(clock: list[float], seconds: float, each: float, ends: dict[str, int]) -> list[str]:
    taken = []

    def take(number: int, name: str) -> bool:
        taken.append(f"{name}{number}")
        clock[0] += each
        return ends.get(name) != number

    interleave(["a", "b", "c"], take, seconds)
    return taken


def test_every_other_round_is_in_reverse(clock: list[float]) -> None:
    assert "".join(rounds(clock, 6.0, 1.0, {})) == "a0b0c0c1b1a1a2b2c2c3b3a3a4b4c4c5b5a5"


def test_few_rounds_are_taken_although_they_take_long(clock: list[float]) -> None:
    assert len(rounds(clock, 6.0, 100.0, {})) == 3 * 5


def test_who_fails_is_left_out(clock: list[float]) -> None:
    assert "".join(rounds(clock, 2.0, 1.0, {"b": 1})) == "a0b0c0c1b1a1a2c2c3a3a4c4"
    assert rounds(clock, 2.0, 1.0, {"a": 0, "b": 0, "c": 0}) == ["a0", "b0", "c0"]


def stat(path: Path, *cpus: tuple[int, ...]) -> Path:
    lines = [f"cpu{number} " + " ".join(map(str, ticks)) for number, ticks in enumerate(cpus)]
    path.write_text("cpu 1 2 3 4 5 6 7 8 9 10\n" + "\n".join(lines) + "\nintr 5\n")
    return path


def test_steal_and_other_processes_are_read(tmp_path: Path, clock: list[float]) -> None:
    path = stat(tmp_path / "stat", (0,) * 10, (0,) * 10, (0,) * 10)
    meter = NoiseMeter([0, 1], stat=path)
    # User, nice, system, idle, iowait, irq, softirq, steal: cpu2 is not ours.
    stat(path, (10, 0, 5, 0, 0, 1, 1, 3, 0, 0), (7, 0, 0, 0, 0, 0, 0, 0, 0, 0), (90,) * 10)
    clock[0] += 0.5
    meter.stop(own_cpu_s=0.04)
    assert meter.steal == pytest.approx(0.03 / (0.5 * 2))
    assert meter.other_cpu == pytest.approx((0.24 - 0.04) / (0.5 * 2))


def test_what_the_file_does_not_say_is_not_known(tmp_path: Path) -> None:
    """A container's file has processors 0 to 2."""
    path = stat(tmp_path / "stat", (0,) * 10, (0,) * 10, (0,) * 10)
    for meter in (NoiseMeter([0], stat=tmp_path / "gone"), NoiseMeter([2, 6], stat=path)):
        meter.stop(0.0)
        assert (meter.steal, meter.other_cpu) == (None, None)


def test_what_runs_beside_a_core_s_thread_counts(tmp_path: Path, clock: list[float]) -> None:
    """Processor 2 is the other hardware thread of processor 0's core: 0.9 s of others there, and steal of its own."""
    path = stat(tmp_path / "stat", (0,) * 10, (0,) * 10, (0,) * 10)
    meter = NoiseMeter([0, 1], [0, 2], path)
    stat(path, (10, *(0,) * 9), (10, *(0,) * 9), (90, 0, 0, 0, 0, 0, 0, 50, 0, 0))
    clock[0] += 1.0
    meter.stop(own_cpu_s=0.2)
    assert meter.other_cpu == pytest.approx(0.9 / 2)
    assert meter.steal == 0


def test_a_noisy_row_says_why() -> None:
    meter = NoiseMeter([0])
    unknown = meter.record([1.0])
    assert unknown == {"steal": None, "other_cpu": None, "spread": None, "noisy": False, "why": []}
    meter.steal, meter.other_cpu = 0.01, 0.02
    quiet = meter.record([100, 101, 102, 103])
    assert quiet["noisy"] is False
    assert quiet["why"] == []
    meter.steal, meter.other_cpu = 0.1, 0.2
    loud = meter.record([100, 150, 60, 200])
    assert loud["noisy"]
    assert len(loud["why"]) == 3
    assert "the host took 10.0% of the processors' time" in loud["why"]


def test_the_spread_is_the_quartiles_over_the_median() -> None:
    assert NoiseMeter([0]).record([1, 2, 3, 4, 5])["spread"] == pytest.approx(2 / 3)
    assert NoiseMeter([0]).record([1, 2])["spread"] is None


@pytest.fixture
def made_up_peaks(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Of one thread, by dtype; each further one adds as much."""
    rates = {"f32": 200e9, "bf16": 3200e9, "int8": 6400e9}
    monkeypatch.delenv("ENCAST_ISA", raising=False)
    monkeypatch.setattr(bounds.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(_core, "peak_ops_per_second", lambda dtype, threads, seconds: threads * rates[dtype])
    monkeypatch.setattr(bounds, "_peaks", {})
    return rates


def test_the_limit_is_arithmetic_or_weights(made_up_peaks: dict[str, float]) -> None:
    made_up_peaks["int8"] = 1e9
    sizes, batch = Sizes(weights=10**6, layers=0, hidden=0), Batch.of([[1]] * 8)
    assert sizes.operations(batch) == 16e6

    def limit(instances: int, split: bool, read: float | None, rate: float | None = None) -> dict[str, object]:
        point = Point((batch,), instances, 1, {}, split)
        ceilings: Any = None if read is None else SimpleNamespace(threads=2, read=lambda nbytes, threads: read)
        return roofline(sizes, "int8", point, ceilings, rate)

    assert limit(1, False, None)["sequences_per_s"] == pytest.approx(8 / 0.016)
    # Two instances, two threads: a batch each, or one of which each has a part.
    assert limit(2, False, None)["sequences_per_s"] == pytest.approx(16 / 0.016)
    assert limit(2, True, None)["sequences_per_s"] == pytest.approx(8 / 0.008)
    slow = limit(1, False, 1e7, 40.0)
    assert slow["bound"] == "weights"
    assert slow["sequences_per_s"] == pytest.approx(8 / 0.1)
    assert slow["fraction"] == pytest.approx(0.5)
    # Each of two instances reads them for a batch of its own, or for its part of one.
    assert limit(2, False, 1e7)["sequences_per_s"] == pytest.approx(16 / 0.2)
    assert limit(2, True, 1e7)["sequences_per_s"] == pytest.approx(8 / 0.2)


def test_the_limit_of_a_card() -> None:
    """Of its products and its memory; instances share it."""
    batch = Batch.of([[1] * 10] * 8)
    sizes = Sizes(weights=1_000_000, layers=0, hidden=4)
    card = CardCeilings("card", datetime.now(timezone.utc), {"f16": 1.6e11, "f8": 3.2e11}, 2e9)
    one, two = (Point((batch,), instances, 4, {}) for instances in (1, 2))
    f16 = card_limit(sizes, "f16", one, card, 2000.0)
    assert f16 is not None
    assert (f16["bound"], f16["sequences_per_s"], f16["fraction"]) == (
        "arithmetic",
        pytest.approx(8000),
        pytest.approx(0.25),
    )
    shared = card_limit(sizes, "f16", two, card, None)
    assert shared is not None
    assert shared["sequences_per_s"] == pytest.approx(8000)
    bound = card_limit(sizes, "f8", one, dataclasses.replace(card, bytes_per_second=1e9), None)
    assert bound is not None
    assert (bound["bound"], bound["sequences_per_s"]) == ("weights", pytest.approx(8000))
    assert card_limit(sizes, "int8", one, card, None) is None


def test_zeros_of_a_pruned_checkpoint_are_no_work(tmp_path: Path) -> None:
    """What leaves them out is not accused of computing nothing."""
    dense = make_checkpoint(tmp_path / "dense", "bert", "features")
    prune_checkpoint(dense, tmp_path / "pruned", pattern=Pattern(4, 1), sparsity=0.75)
    every, left = (Sizes.of(build_graph(open_checkpoint(tmp_path / name))).weights for name in ("dense", "pruned"))
    assert left == pytest.approx(every / 4, rel=1e-3)


def test_where_the_peak_is_not_known_nobody_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [("scalar", "", "", True, ""), ("avx2", "avx2", "", True, ""), ("amx", "amxtile", "", False, "")]
    monkeypatch.delenv("ENCAST_ISA", raising=False)
    monkeypatch.setattr(_core, "isa_levels", lambda: levels)
    assert peak_is_known()
    monkeypatch.setenv("ENCAST_ISA", "avx2")
    assert not peak_is_known()
    monkeypatch.delenv("ENCAST_ISA")
    monkeypatch.setattr(_core, "isa_levels", lambda: levels[:1])
    assert not peak_is_known()


def test_amx_has_a_peak_of_its_own(made_up_peaks: dict[str, float]) -> None:
    """Products of bf16 and int8 are bounded by the tiles, those of f32 by what bf16 tiles can make up for."""
    assert [most(dtype, 2, 2) for dtype in made_up_peaks] == [3200e9, 6400e9, 12800e9]
    assert peak("f32", 2) == 400e9, "what is shown as the limit of f32 is what its instructions reach"
    bounds._peaks.clear()
    made_up_peaks["bf16"] = 200e9
    assert most("f32", 1, 1) == 200e9


def test_a_peak_is_the_best_of_some_samples(made_up_peaks: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that takes a processor away for a moment lowers no bound."""
    together = iter([90e9, 100e9, 190e9, 95e9, 90e9])
    rate = {1: lambda: 100e9, 2: lambda: next(together)}
    monkeypatch.setattr(_core, "peak_ops_per_second", lambda dtype, threads, seconds: rate[threads]())
    assert peak("int8", 2) == 190e9
    assert peak("int8", 2) == 190e9, "measured once"
    assert most("int8", 2, 2) == 200e9, "what both reach one by one is not beyond them"
    assert most("int8", 2, 1) == 190e9


def test_a_peak_is_measured_again_before_it_accuses(made_up_peaks: dict[str, float]) -> None:
    def least(typical_ns: float, *rates: float) -> float | None:
        """Of a million operations in int8, where each look at the peak sees the next rate."""
        bounds._peaks.clear()
        looks = iter(rates)

        def measured(again: bool) -> float:
            made_up_peaks["int8"] = next(looks)
            return 1e9 * 1e6 / most("int8", 1, 1, again)

        found = least_time(typical_ns, measured)
        assert next(looks, None) is None, "not all looks were taken"
        return found

    assert least(1.1e6, 1e9) == 1e6, "nobody is accused: one look is enough"
    # A host gave the processor to others for the first two seconds.
    assert least(1.1e6, 0.5e9, 0.4e9, 1e9) == 1e6
    # Who does not compute is too quick for every peak; the largest counts.
    assert least(0.5e6, 0.9e9, 0.4e9, 1e9, 0.8e9) == 1e6
    assert least_time(1.0, lambda again: None) is None


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
