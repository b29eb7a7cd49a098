"""Cheating backends are caught and named, and honest ones are not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab import backends, measure, measure_all

from encast.batch import Batch
from encast.bench import run
from encast.bench.agreement import Agreement, Reference
from encast.bench.contender import Usage
from encast.bench.fairness import Evidence, Fairness, first_calls, fresh_batches, judge, least_time
from encast.bench.rows import Row

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """One comparison: an honest contender among cheats, each on a budget of one thread."""
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
    assert row["agreement"]["cosine_mean"] == 0.5
    assert len(row["samples"]["figure"]) >= 3, "it was measured"
    assert (row["metrics"], row["ratio_to"], row["limit"], row["cost"]) == ({}, {}, None, None)


def test_a_point_is_judged_by_its_own_bursts(tmp_path: Path) -> None:
    folder = backends(tmp_path, partly={"peer": "SlowClockFor", "lengths": [8, 16]})
    made = measure_all(folder, ["partly"], "workload.length=[8,16,32]")
    assert [row["status"] for row in made] == ["unfair", "unfair", "ok"], [row["reason"] for row in made]


def evidence(**given: object) -> Evidence:
    honest = {
        "threads": 2,
        "watched": [2, 2, 1, 2],
        "usages": [Usage(cpu_s=0.39, wall_s=0.2, explained=0.95)],
        "rests": [Usage(cpu_s=0.001, wall_s=0.4, explained=None)],
        "strays": [],
        "known_ns": [1_000_000, 1_100_000, 900_000],
        "fresh_ns": [1_000_000, 1_200_000, 5_000_000],
        "typical_ns": 1_000_000.0,
        "least_ns": 500_000.0,
    }
    return Evidence(**{**honest, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"watched": [3, 3, 3, 3]}, "ran 3 threads at once, 3.0 on average, on a budget of 2"),
        ({"usages": [Usage(0.5, 0.2, 0.9)]}, "used 2.5 processors' time on a budget of 2"),
        ({"rests": [Usage(0.0, 0.4, None), Usage(0.2, 0.4, None)]}, "used 0.2 processors' time while others"),
        ({"strays": [3, 1]}, "gave itself processors [1, 3]"),
        ({"usages": [Usage(0.3, 0.2, 0.75)]}, "its calls explain 75% of the time"),
        ({"fresh_ns": [5_000_000] * 3}, "keeps answers: 5 ms for ids it had not seen, 1 ms for others"),
        ({"least_ns": 2_000_000.0}, "answers in 1 ms what takes 2 ms"),
    ],
)
def test_each_rule_alone(given: dict[str, object], said: str) -> None:
    verdict = judge(evidence(**given))
    assert not verdict.ok
    assert len(verdict.notes) == 1
    assert said in verdict.notes[0]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"watched": [2] * 9 + [3] * 3},  # a pool hands over
        {"watched": [], "usages": [], "known_ns": [], "fresh_ns": [], "least_ns": None},  # nothing was seen
        {"known_ns": [10_000] * 3, "fresh_ns": [60_000] * 3},  # microseconds are caches of the processor
        {"usages": [Usage(0.4, 0.2, None)]},
        {"rests": [Usage(0.03, 0.4, None)]},  # collects garbage
        {"rests": []},  # there is nobody else
        {"fresh_ns": [1_000_000, 9_000_000, 9_000_000]},  # interrupted
        {"least_ns": 1_200_000.0},  # the peak is only as exact as its clock
    ],
)
def test_what_is_left_to_chance(given: dict[str, object]) -> None:
    verdict = judge(evidence(**given))
    assert verdict.ok, verdict.notes


PAUSED, QUICK, SLOW = 13_000_000, 1_170_000, 14_000_000


def looked(*looks: list[tuple[int, int]]) -> tuple[list[int], list[int], list[float]]:
    """``first_calls`` of a backend that takes these times, one list a look, and the pauses before them."""
    left, waited = list(looks), []
    batch = Batch.of([list(range(100))])
    known, fresh = first_calls(batch, lambda batches: left.pop(0)[: len(batches)], waited.append)
    assert len(waited) == len(looks) - len(left)
    return known, fresh, waited


def test_a_pause_of_the_machine_accuses_nobody() -> None:
    """All five new texts were stopped, and one is not when it is asked again."""
    known, fresh, waited = looked([(QUICK, PAUSED)] * 5, [(QUICK, PAUSED), (QUICK, QUICK)])
    assert len(waited) == 2
    assert judge(evidence(known_ns=known, fresh_ns=fresh)).ok


def test_who_keeps_answers_does_so_whenever_it_is_asked() -> None:
    known, fresh, waited = looked(*[[(QUICK, SLOW)] * 5] * 4)
    assert len(known) == len(fresh) == 20
    assert waited == sorted(waited)
    assert "keeps answers: 14 ms" in judge(evidence(known_ns=known, fresh_ns=fresh)).notes[0]


def test_who_sleeps_through_some_kept_answers_is_not_acquitted() -> None:
    known, fresh, _ = looked(*[[(QUICK, PAUSED), (QUICK, SLOW), (PAUSED, SLOW)]] * 4)
    assert not judge(evidence(known_ns=known, fresh_ns=fresh)).ok


def looked_at_peaks(typical_ns: float, *rates: float) -> tuple[float, list[float]]:
    """``least_time`` of a million operations, where looks at the peak see these rates, and the pauses between them."""
    looks, waited, most = iter(rates), [], 0.0

    def quickest(anew: bool) -> float:
        nonlocal most
        assert anew == bool(most)
        most = max(most, next(looks))
        return most

    least = least_time(1e6, typical_ns, quickest, waited.append)
    assert next(looks, None) is None, "not all looks were taken"
    return least, waited


def test_a_peak_of_two_processors_on_one_core_accuses_nobody() -> None:
    least, waited = looked_at_peaks(1.1e6, 0.5e9, 0.5e9, 1e9)
    assert least == 1e6
    assert len(waited) == 2
    assert judge(evidence(typical_ns=1.1e6, least_ns=least)).ok


def test_who_does_not_compute_is_too_quick_for_every_peak() -> None:
    least, waited = looked_at_peaks(0.5e6, 0.9e9, 0.4e9, 1e9, 0.9e9, 0.9e9)
    assert least == 1e6
    assert len(waited) == 4
    assert "instruction peak" in judge(evidence(typical_ns=0.5e6, least_ns=least)).notes[0]


def test_an_honest_one_is_no_cheat_by_a_spoilt_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that is measured is a millionth of what the machine does."""
    measured: list[float] = []
    real = run.quickest

    def spoilt(dtype: str, threads: int, cores: int) -> float:
        assert cores == 1
        measured.append(real(dtype, threads, cores) * (1 if measured else 1e-6))
        return measured[-1]

    monkeypatch.setattr(run, "quickest", spoilt)
    folder = backends(tmp_path, honest="Honest")
    rows = measure_all(folder, ["honest"], "workload.length=[8,16]", "launcher=instances", "launcher.instances=1",
                       "launcher.cores_per_instance=1")  # fmt: skip
    assert [row["status"] for row in rows] == ["ok", "ok"], rows[0]["reason"]
    assert len(measured) == 2, "suspicion is looked into once, and not again with what was found"


def test_a_verdict_is_a_field_of_a_row() -> None:
    assert judge(evidence()).record() == {
        "threads_budget": 2,
        "threads_ran": 1.75,
        "cpu_per_wall": 1.95,
        "idle_cpu_per_wall": 0.003,
        "ok": True,
        "notes": [],
    }
    assert isinstance(judge(evidence()), Fairness)


def test_fresh_batches_have_the_shape_and_new_ids() -> None:
    batch = Batch.of([list(range(100)), list(range(100, 150))])
    fresh = fresh_batches(batch, 3)
    orders: set[Sequence[int]] = {tuple(one.token_ids.tolist()) for one in (*fresh, batch)}
    assert len(orders) == 4
    for one in fresh:
        assert np.array_equal(one.cu_seqlens, batch.cu_seqlens)
        assert sorted(one.token_ids) == sorted(batch.token_ids)
