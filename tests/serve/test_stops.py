"""Batches that stop for others, under a simulated clock."""

from __future__ import annotations

import pytest
from simulation import OVERHEAD_S, TOKEN_S, job, on, queue_on, simulate, take_all

from encast.backends.groups import InstanceGroup
from encast.serve.places import Places
from encast.serve.queue import Batch, Queue, QueueLimits


def between(queue: Queue, outer: Batch, now: float) -> Batch:
    batch = queue.take_between(outer, now)
    assert batch is not None
    return batch


def test_a_batch_stops_for_short_work_and_goes_on() -> None:
    queue = queue_on(1)
    long, query = job(400), job(12, arrived=0.002)
    queue.submit(long, 0.0)
    (outer,) = take_all(queue)
    assert queue.stopping(0.001) == []
    queue.submit(query, 0.002)
    assert take_all(queue, 0.002) == []
    assert queue.stopping(0.002) == [outer]
    backlog = queue.backlog_s(0.002)
    inner = between(queue, outer, 0.002)
    assert (inner.outer, inner.place.threads, inner.place.cpus <= outer.place.cpus) == (outer, 1, True)
    assert queue.backlog_s(0.002) == pytest.approx(backlog, rel=0.02)
    queue.submit(job(12, arrived=0.0021), 0.0021)
    assert queue.stopping(0.0021) == []  # it has stopped already
    assert queue.take_between(inner, 0.0021) is None  # two levels, no more
    assert queue.finish(inner, 0.003) == [query]
    assert outer.left(0.003) == pytest.approx(outer.expected - 0.002)
    assert take_all(queue, 0.003) == []  # its cores are busy
    other = between(queue, outer, 0.003)
    queue.finish(other, 0.0038)
    assert outer.left(0.0039) == pytest.approx(outer.expected - 0.002)  # still not running
    assert queue.take_between(outer, 0.004) is None
    assert outer.left(0.005) == pytest.approx(outer.expected - 0.003)
    assert queue.finish(outer, outer.expected + 0.002) == [long]
    assert long.longest[0] == pytest.approx(outer.expected)
    assert sum(queue.counters.busy_s) == pytest.approx(outer.expected + 0.0018)
    assert queue.idle


def test_each_waiting_row_stops_one_batch_and_the_longest_first() -> None:
    queue = queue_on(2)
    queue.submit(job(400, 500), 0.0)
    short, long = sorted(take_all(queue), key=lambda batch: batch.tokens)
    queue.submit(job(12, arrived=0.001), 0.001)
    assert queue.stopping(0.001) == [long]
    queue.submit(job(12, arrived=0.001), 0.001)
    assert queue.stopping(0.001) == [long, short]
    # Whichever stops first takes both.
    assert between(queue, short, 0.001).tokens == 24
    assert queue.stopping(0.001) == []


@pytest.mark.parametrize(
    ("slowdown", "length", "arrived", "stops"),
    [
        (100.0, 12, 0.001, True),
        (0.0, 12, 0.001, False),  # first come, first served
        (100.0, 250, 0.001, False),  # over half of what is left
        (100.0, 12, 0.0098, False),
        (1.0, 64, 0.0095, False),  # due after it
    ],
)
def test_what_a_batch_stops_for(slowdown: float, length: int, arrived: float, stops: bool) -> None:
    queue = queue_on(1, QueueLimits(slowdown=slowdown))
    queue.submit(job(400), 0.0)
    (outer,) = take_all(queue)
    queue.submit(job(length, arrived=arrived), arrived)
    assert queue.stopping(arrived) == [outer] * stops
    assert (queue.take_between(outer, arrived) is not None) == stops


def test_a_batch_between_fits_in_half_of_what_is_left() -> None:
    queue = queue_on(1)
    queue.submit(job(200), 0.0)
    (outer,) = take_all(queue)
    queue.submit(job(*[10] * 20, arrived=0.001), 0.001)
    inner = between(queue, outer, 0.001)
    assert 0.4 * outer.left(0.001) < inner.expected <= 0.5 * outer.left(0.001)


def test_a_batch_waits_for_companions_although_another_could_stop() -> None:
    queue = queue_on(1, QueueLimits(max_delay_s=0.002))
    queue.submit(job(400), 0.0)
    (outer,) = take_all(queue, 0.002)
    queue.submit(job(12, arrived=0.003), 0.003)
    assert queue.stopping(0.003) == []
    assert queue.due == pytest.approx(0.005)
    assert queue.stopping(0.0051) == [outer]


@pytest.mark.parametrize("cores", [1, 8])
def test_a_batch_stops_for_no_longer_than_it_runs(cores: int) -> None:
    """Queries without end, and one long text that was there first."""
    queue = queue_on(cores)
    text = job(400)
    rate = 1.5 / (OVERHEAD_S + 12 * TOKEN_S)
    arrivals = [(0.0, text), *((at / rate, job(12, arrived=at / rate)) for at in range(1, 3000))]
    outcome = simulate(queue, arrivals)
    alone = simulate(queue_on(cores), [(0.0, job(400))])
    assert 1.5 * alone.seconds < outcome.latency[text] <= 2.1 * alone.seconds


def test_where_batches_run_while_others_stop() -> None:
    narrow, long, wide = InstanceGroup(2, 1, 64), InstanceGroup(2, 1, 256), InstanceGroup(1, 2)
    pinned = Places([narrow, long, wide], [[[0], [1]], [[0], [1]], [[0, 1]]], 2)
    for group in pinned.by_group[:2]:
        for place in group:
            assert pinned.between[place] is place
    assert pinned.between[pinned.by_group[2][0]] is pinned.by_group[0][0]
    free = Places([narrow, wide], [[[], []], [[]]], 2)
    assert all(free.between[place] is place for place in free.by_group[0])
    assert free.between[free.by_group[1][0]] is None


def test_nothing_stops_where_no_instance_of_one_thread_takes_the_text() -> None:
    for groups, cpus in (
        ([InstanceGroup(1, 2)], [[[0, 1]]]),
        ([InstanceGroup(2, 1, 8), InstanceGroup(1, 2)], [[[0], [1]], [[0, 1]]]),
    ):
        queue = on(groups, cpus)
        queue.submit(job(400), 0.0)
        (outer,) = take_all(queue)
        queue.submit(job(12, arrived=0.001), 0.001)
        assert queue.stopping(0.001) == []
        assert queue.take_between(outer, 0.001) is None
