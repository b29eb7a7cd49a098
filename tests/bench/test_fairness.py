"""Cheating backends are caught and named, and honest ones are not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab import backends, measure, measure_all

from encast import _core
from encast.batch import Batch
from encast.bench import roofline
from encast.bench.agreement import Agreement, Reference
from encast.bench.fairness import Fairness, first_calls, fresh_batch, judge
from encast.bench.rows import Row
from encast.bench.system import Usage

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """One comparison: an honest system among cheats, each on a budget of one thread."""
    folder = backends(
        tmp_path_factory.mktemp("cheats"),
        honest="Honest",
        eight_threads={"peer": "ManyThreads", "running": 8},
        stray="Stray",
        first_half="FirstHalf",
        fewer_rows="FewerRows",
        same_answer="SameAnswer",
        kept_by_ids="KeptByIds",
        kept_by_call="KeptByCall",
        slow_clock="SlowClock",
        lazy="Lazy",
        not_a_number="NotANumber",
    )
    names = [path.stem for path in (folder / "backend").glob("*.yaml")]
    names.sort(key=lambda name: name != "honest")
    return measure(folder, names, "launcher=instances", "launcher.instances=1", "launcher.cores_per_instance=1",
                   "timing.together=20")  # fmt: skip


def test_the_honest_one_is_fair(rows: dict[str, Row]) -> None:
    row = rows["honest"]
    assert row["status"] == "ok", row["reason"]
    assert row["fairness"]["ok"]
    assert row["fairness"]["notes"] == []
    assert row["fairness"]["threads_budget"] == 1
    assert 0 < row["fairness"]["cpu_per_wall"] <= 1.1
    assert row["agreement"]["cosine_mean"] > 0.999999


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("eight-threads", "unfair", "threads at once"),
        ("first-half", "disagrees", "mean cosine"),
        ("fewer-rows", "failed", "for 32 tokens; a row for every token is needed"),
        ("same-answer", "disagrees", "mean cosine"),
        ("kept-by-ids", "unfair", "keeps answers"),
        ("kept-by-call", "unfair", "instruction peak"),
        ("slow-clock", "unfair", "its calls explain"),
        ("lazy", "failed", "a plain NumPy array, is needed"),
        ("not-a-number", "disagrees", "mean cosine 0.000000"),
    ],
)
def test_cheats_are_caught_and_named(rows: dict[str, Row], name: str, status: str, said: str) -> None:
    row = rows[name]
    assert row["status"] == status, row["reason"]
    assert name in row["reason"]
    assert said in row["reason"]
    assert row["backend"]["version"] == (None if status == "failed" else "1.0")


def test_eight_threads_are_counted(rows: dict[str, Row]) -> None:
    counted = re.search(r"ran (\d+) threads at once, .* on a budget of 1", rows["eight-threads"]["reason"])
    assert counted is not None
    assert 6 <= int(counted[1]) <= 9, "where processors are scarce, a look may miss one that has just ended"


def test_processors_that_were_not_given_are_seen(rows: dict[str, Row]) -> None:
    row = rows["stray"]
    if row["machine"]["cores"] * row["machine"]["threads_per_core"] == 1:
        pytest.skip("this machine has one processor: there is none to take")
    assert row["status"] == "unfair", row["reason"]
    assert "stray: gave itself processors" in row["reason"]


def test_nobody_is_compared_with_a_cheat(rows: dict[str, Row]) -> None:
    assert rows["honest"]["ratio_to"] == {}
    assert set(rows["eight-threads"]["ratio_to"]) == {"honest"}


def test_who_disturbs_others_is_named(tmp_path: Path) -> None:
    """And what was timed meanwhile counts as disturbed."""
    folder = backends(tmp_path, honest="Honest", idler={"peer": "BusyWhenIdle"})
    rows = measure(folder, ["honest", "idler"], "scenario.seconds=0.2", "launcher=instances", "launcher.instances=1",
                   "launcher.cores_per_instance=1")  # fmt: skip
    assert rows["idler"]["status"] == "unfair", rows["idler"]
    assert "processors' time while others were asked" in rows["idler"]["reason"]
    assert rows["honest"]["status"] == "ok", rows["honest"]["reason"]
    assert rows["honest"]["fairness"]["idle_cpu_per_wall"] < 0.1
    assert rows["honest"]["noise"]["noisy"]


def test_who_disagrees_late_and_cheats_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, looks = Reference.compare, itertools.count()

    def late(reference: Reference, outputs: Any, dtype: str) -> Agreement:
        found = real(reference, outputs, dtype)
        return replace(found, cosine_mean=0.5) if next(looks) else found

    monkeypatch.setattr(Reference, "compare", late)
    folder = backends(tmp_path, eight_threads={"peer": "ManyThreads", "running": 8})
    (row,) = measure_all(folder, ["eight-threads"], "launcher=instances", "launcher.instances=1",
                         "launcher.cores_per_instance=1", "price=0.36/h")  # fmt: skip
    assert row["status"] == "disagrees", row["reason"]
    assert "mean cosine 0.500000" in row["reason"]
    assert row["backend"]["version"] == "1.0"
    assert row["agreement"]["cosine_mean"] == 0.5
    assert len(row["samples"]["figure"]) >= 3, "it was measured"
    assert (row["metrics"], row["ratio_to"], row["limit"], row["cost"]) == ({}, {}, None, None)


def test_a_point_is_judged_by_its_own_bursts(tmp_path: Path) -> None:
    folder = backends(tmp_path, partly={"peer": "SlowClockFor", "lengths": [8, 16]})
    made = measure_all(folder, ["partly"], "workload.length=[8,16,32]")
    assert [row["status"] for row in made] == ["unfair", "unfair", "ok"], [row["reason"] for row in made]


def test_an_honest_one_is_no_cheat_by_a_spoilt_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples of the first seconds are a millionth of what the machine does."""
    real, looks = _core.peak_ops_per_second, itertools.count()

    def spoilt(dtype: str, threads: int, seconds: float) -> float:
        return real(dtype, threads, seconds) * (1e-6 if next(looks) < 10 else 1)

    monkeypatch.setattr(roofline, "_peaks", {})
    monkeypatch.setattr(_core, "peak_ops_per_second", spoilt)
    folder = backends(tmp_path, honest="Honest")
    (row,) = measure_all(folder, ["honest"], "launcher=instances", "launcher.instances=1",
                         "launcher.cores_per_instance=1")  # fmt: skip
    assert row["status"] == "ok", row["reason"]


def judged(**given: object) -> Fairness:
    honest: dict[str, Any] = {
        "threads": 2,
        "watched": [2, 2, 1, 2],
        "usages": [Usage(cpu_s=0.39, wall_s=0.2, explained=0.95)],
        "idle": [Usage(cpu_s=0.001, wall_s=0.4, explained=None)],
        "foreign_cpus": [],
        "known_ns": [1_000_000, 1_100_000, 900_000],
        "fresh_ns": [1_000_000, 1_200_000, 5_000_000],
        "typical_ns": 1_000_000.0,
        "least_ns": 500_000.0,
    }
    return judge(**{**honest, **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"watched": [3, 3, 3, 3]}, "ran 3 threads at once, 3.0 on average, on a budget of 2"),
        ({"usages": [Usage(0.5, 0.2, 0.9)]}, "used 2.5 processors' time on a budget of 2"),
        ({"idle": [Usage(0.0, 0.4, None), Usage(0.2, 0.4, None)]}, "used 0.2 processors' time while others"),
        ({"foreign_cpus": [3, 1]}, "gave itself processors [1, 3]"),
        ({"usages": [Usage(0.3, 0.2, 0.75)]}, "its calls explain 75% of the time"),
        ({"fresh_ns": [5_000_000] * 3}, "keeps answers: 5 ms for ids it had not seen, 1 ms for others"),
        ({"least_ns": 2_000_000.0}, "answers in 1 ms what takes 2 ms"),
    ],
)
def test_each_rule_alone(given: dict[str, object], said: str) -> None:
    fairness = judged(**given)
    assert not fairness.ok
    assert len(fairness.notes) == 1
    assert said in fairness.notes[0]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"watched": [2] * 9 + [3] * 3},  # a pool hands over
        {"watched": [], "usages": [], "known_ns": [], "fresh_ns": [], "least_ns": None},  # nothing was seen
        {"known_ns": [10_000] * 3, "fresh_ns": [60_000] * 3},  # microseconds are caches of the processor
        {"usages": [Usage(0.4, 0.2, None)]},
        {"idle": [Usage(0.03, 0.4, None)]},  # collects garbage
        {"idle": []},  # there is nobody else
        {"fresh_ns": [1_000_000, 9_000_000, 9_000_000]},  # interrupted
        {"least_ns": 1_200_000.0},  # the peak is only as exact as its clock
    ],
)
def test_what_is_left_to_chance(given: dict[str, object]) -> None:
    fairness = judged(**given)
    assert fairness.ok, fairness.notes


PAUSED, QUICK, SLOW = 13_000_000, 1_170_000, 14_000_000


class Asked:
    """A system whose pairs of first calls take these times, the last pair from then on."""

    def __init__(self, *pairs: tuple[int, int]) -> None:
        self.pairs = list(pairs)
        self.asked = 0

    def fresh_calls(self, batch: Batch, *, known_first: bool) -> tuple[int, int]:
        assert known_first == (self.asked % 2 == 0)
        self.asked += 1
        return self.pairs[min(self.asked, len(self.pairs)) - 1]


@pytest.mark.parametrize(
    ("pairs", "asked", "fair"),
    [
        ([(QUICK, QUICK)], 5, True),
        ([*[(QUICK, PAUSED)] * 6, (QUICK, QUICK)], 7, True),  # a pause of the machine
        ([(QUICK, SLOW)], 20, False),
        ([(QUICK, SLOW), (QUICK, PAUSED), (PAUSED, SLOW)] + [(QUICK, SLOW)] * 17, 20, False),  # it sleeps now and then
    ],
)
def test_who_keeps_answers_does_so_whenever_it_is_asked(
    pairs: list[tuple[int, int]], asked: int, fair: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encast.bench.fairness.time.sleep", lambda seconds: None)
    system: Any = Asked(*pairs)
    known, fresh = first_calls(system, Batch.of([list(range(100))]))
    assert system.asked == asked
    assert judged(known_ns=known, fresh_ns=fresh).ok is fair


def test_fairness_is_a_field_of_a_row() -> None:
    assert asdict(judged()) == {
        "threads_budget": 2,
        "threads_ran": 1.75,
        "cpu_per_wall": 1.95,
        "idle_cpu_per_wall": 0.003,
        "ok": True,
        "notes": (),
    }
    assert isinstance(judged(), Fairness)


def test_fresh_batches_have_the_shape_and_new_ids() -> None:
    batch = Batch.of([list(range(100)), list(range(100, 150))])
    fresh = [fresh_batch(batch) for _ in range(3)]
    orders: set[Sequence[int]] = {tuple(one.token_ids.tolist()) for one in (*fresh, batch)}
    assert len(orders) == 4
    for one in fresh:
        assert np.array_equal(one.cu_seqlens, batch.cu_seqlens)
        assert sorted(one.token_ids) == sorted(batch.token_ids)
