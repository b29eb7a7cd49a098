"""The service in miniature: who takes what when, and that rates and waits are those of the queues."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from encast.backends.groups import InstanceGroup, Setup
from encast.batch import Batch
from encast.tune import queues
from encast.tune.queues import Service, _saturated

pytestmark = pytest.mark.serial("waits for real time and counts it")


def requests(*lengths: int) -> list[Batch]:
    return [Batch(np.full(length, length, np.int32), np.array([0, length], np.int32)) for length in lengths]


class Recorder:
    """Runs nothing, for ``seconds`` (of a run's tokens), and keeps the lengths that were run together."""

    def __init__(self, seconds: Any = lambda tokens: 0.0) -> None:
        self.runs: list[list[int]] = []
        self.inside = self.most = 0
        self._seconds = seconds
        self._lock = threading.Lock()

    def __call__(self, batch: Batch) -> None:
        lengths = np.diff(batch.cu_seqlens).tolist()
        assert batch.token_ids.tolist() == [length for length in lengths for _ in range(length)]
        with self._lock:
            self.runs.append(lengths)
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(self._seconds(batch.tokens))
        with self._lock:
            self.inside -= 1


FOREVER = 10**12


def test_one_run_is_told_of_however_late_it_is() -> None:
    """A machine that is stopped for a while has no time left when it goes on."""
    service = Service(Setup((InstanceGroup(2, 1),), 4), requests(4), Recorder(lambda tokens: 0.01))
    found = service.saturate(0.0, 0.0)
    assert found.texts >= 1
    assert 0 < found.rate < 1000


def test_what_waits_runs_together_up_to_the_bound() -> None:
    ran = Recorder()
    service = Service(Setup((InstanceGroup(1, 1),), 10), requests(4, 5, 3, 20, 1), ran)
    found = service.stream([0] * 10, FOREVER)
    assert not found.gave_up
    assert ran.runs == [[4, 5], [3], [20], [1, 4, 5], [3], [20], [1]]
    assert len(found.answered) == 10
    assert all(due == 0 <= begun <= ended for due, begun, ended in found.answered)


def test_nothing_runs_before_it_is_due() -> None:
    ran = Recorder()
    service = Service(Setup((InstanceGroup(3, 1),), 100), requests(4), ran)
    due = [0, 30_000_000, 30_000_000, 80_000_000]
    found = service.stream(due, FOREVER)
    assert [len(run) for run in ran.runs] == [1, 2, 1]
    assert [answer[0] for answer in found.answered] == due
    assert all(begun >= when for when, begun, _ in found.answered)


def test_groups_have_queues_of_their_own() -> None:
    ran = Recorder()
    setup = Setup((InstanceGroup(1, 1, 8), InstanceGroup(2, 1, 16), InstanceGroup(1, 2)), 1000)
    Service(setup, requests(8, 9, 16, 17, 1, 40), ran).stream([0] * 60, FOREVER)
    for run in ran.runs:
        assert len({(length > 8) + (length > 16) for length in run}) == 1, run
    assert sum(map(len, ran.runs)) == 60


def test_instances_of_a_group_work_side_by_side() -> None:
    ran = Recorder(lambda tokens: 0.02)
    Service(Setup((InstanceGroup(4, 1),), 4), requests(4), ran).stream([0] * 12, FOREVER)
    assert ran.most == 4


def test_a_stream_that_cannot_be_answered_is_given_up() -> None:
    ran = Recorder(lambda tokens: 0.05)
    service = Service(Setup((InstanceGroup(2, 1),), 4), requests(4), ran)
    found = service.stream([index * 1_000_000 for index in range(1000)], 100_000_000)
    assert found.gave_up
    assert 0 < len(found.answered) < 100


@pytest.mark.parametrize("work", ["stream", "saturate"])
def test_an_error_ends_all_threads_and_is_raised(work: str) -> None:
    def fail(batch: Batch) -> None:
        time.sleep(0.001)
        raise ValueError("broken")

    service = Service(Setup((InstanceGroup(3, 1),), 4), requests(4), fail)
    before = threading.active_count()
    works = {
        "stream": lambda: service.stream([*[0] * 100, 10**12], FOREVER),
        "saturate": lambda: service.saturate(0.1, 0.6),
    }
    with pytest.raises(ValueError, match="broken"):
        works[work]()
    assert threading.active_count() == before


def test_saturated_runs_are_full_and_in_the_proportion_of_the_workload() -> None:
    # The long texts are the bottleneck: were short ones not held back, they would be nearly all of what is answered.
    ran = Recorder(lambda tokens: 0.01 if tokens >= 100 else 0.0)
    setup = Setup((InstanceGroup(1, 1, 16), InstanceGroup(1, 1)), 100)
    found = Service(setup, requests(10, 10, 10, 100), ran).saturate(0.3, 1.8)
    short = sum(len(run) for run in ran.runs if 10 in run)
    long = sum(len(run) for run in ran.runs if 100 in run)
    assert 2.0 < short / long < 4.5
    assert found.texts > 0
    assert 0 < found.rate < 4 / 0.01 * 1.2

    alone = Recorder(lambda tokens: 0.002)
    Service(Setup((InstanceGroup(2, 1),), 64), requests(8), alone).saturate(0.2, 1.2)
    assert [len(run) for run in alone.runs[:-4]] == [8] * (len(alone.runs) - 4)


def test_rate_of_runs_that_are_known() -> None:
    millisecond = 1_000_000
    runs = [(index * 10 * millisecond, 9 * millisecond, 5) for index in range(1, 41)]
    found = _saturated(runs, 0, 400 * millisecond, window=20)
    assert found.rate == pytest.approx(500)
    assert set(found.runs_ns) == {9 * millisecond}
    # The first window is left out: here it was quicker.
    quick = [(index * millisecond, millisecond, 5) for index in range(1, 5)]
    later = [(4 * millisecond + end, length, texts) for end, length, texts in runs]
    assert _saturated([*quick, *later], 0, 404 * millisecond, window=20).rate == pytest.approx(500, rel=0.01)
    alone = _saturated([(2 * millisecond, millisecond, 7)], 0, 2 * millisecond + 1, window=20)
    assert alone.rate == pytest.approx(3500)
    assert alone.texts == 7


@pytest.mark.parametrize("window", [15, 20, 25])
@pytest.mark.parametrize("instances", [2, 3])
def test_runs_that_end_side_by_side_are_neither_one_too_many_nor_one_too_few(instances: int, window: int) -> None:
    runs = [(1000 * number + instance, 1000, 5) for number in range(1, 13) for instance in range(instances)]
    found = _saturated(runs, 0, 12_000, window=window)
    assert found.rate == pytest.approx(instances * 5 * 1e9 / 1000, rel=0.002)


def test_of_a_run_counts_what_was_done_of_it_in_time() -> None:
    # Half of the last run of the second instance is after the end, and the third begins then.
    runs = [(1000 * number, 1000, 5) for number in range(1, 9)] + [
        (1000 * number + 500, 1000, 5) for number in range(1, 9)
    ]
    found = _saturated([*runs, (9000, 999, 5)], 0, 8000, window=10)
    assert found.rate == pytest.approx(1e7)
    assert found.texts == 5 * (7 + 7)


@pytest.mark.parametrize("instances", [1, 2])
def test_runs_that_are_longer_than_the_measurement_have_their_rate(instances: int) -> None:
    ran = Recorder(lambda tokens: 0.2)
    found = Service(Setup((InstanceGroup(instances, 1),), 64), requests(8), ran).saturate(0.02, 0.12)
    assert found.rate == pytest.approx(instances * 8 / 0.2, rel=0.15)


def test_a_group_that_waits_for_a_long_run_of_another_does_not_raise_the_rate() -> None:
    ran = Recorder(lambda tokens: 0.6 if tokens >= 100 else 0.0)
    setup = Setup((InstanceGroup(1, 1, 16), InstanceGroup(1, 1)), 1000)
    found = Service(setup, requests(*[10] * 9, 100), ran).saturate(0.01, 0.06)
    # Its ten and more long texts take 0.6 s a run; nine times as many short ones take nothing.
    long = max(sum(length == 100 for length in run) for run in ran.runs)
    assert found.rate < 10 * long / 0.6 * 1.2


def test_all_instances_work_until_the_last_run_that_counts_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # Over at 450 ms, when the quick one ends a run and the slow one has 40 ms to go.
    known: dict[str, Any] = {}
    monkeypatch.setattr(queues, "_saturated", lambda runs, begin, end, window: known.update(runs=runs, end=end))
    threads: list[int] = []

    def run(batch: Batch) -> None:
        threads.append(threading.get_ident())
        time.sleep(0.07 if threads[-1] == threads[0] else 0.03)

    Service(Setup((InstanceGroup(2, 1),), 8), requests(8), run).saturate(0.44, 2.64)
    over = known["end"]
    spans = [(end - length, end) for end, length, _ in known["runs"]]
    last = max([end for begin, end in spans if begin < over < end], default=over)
    busy = sum(max(0, min(end, last) - max(begin, over)) for begin, end in spans)
    assert busy > 2 * (last - over) - 10_000_000
