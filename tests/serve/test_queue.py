"""The queue's decisions, under a simulated clock."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import (
    LATER,
    OUTPUT,
    OVERHEAD_S,
    TOKEN_S,
    first_come,
    job,
    mixed,
    on,
    percentile,
    queue_on,
    simulate,
    take_all,
)

from encast.backends.groups import InstanceGroup
from encast.serve.cost import CostModel
from encast.serve.queue import Job, Queue, QueueLimits

# Fairness


def test_queries_hardly_wait_beside_paragraphs() -> None:
    ours = simulate(queue_on(2), mixed(0.8, 2, 20_000))
    served = percentile(ours.of(12), 99)
    assert len(ours.latency) == 20_000
    assert served <= 3 * (OVERHEAD_S + 12 * TOKEN_S)
    assert 20 * served <= percentile(simulate(queue_on(2, QueueLimits(slowdown=0)), mixed(0.8, 2, 20_000)).of(12), 99)
    plain = first_come(mixed(0.8, 2, 20_000), 2)
    assert 20 * served <= percentile(plain.of(12), 99)
    # Nobody pays for it: paragraphs are no later, and the work takes no longer.
    assert percentile(ours.of(400), 99) <= 1.05 * percentile(plain.of(400), 99)
    assert ours.seconds <= 1.01 * plain.seconds


def test_overload_is_refused_at_once_and_the_rest_is_served_in_time() -> None:
    limits = QueueLimits()
    outcome = simulate(queue_on(2, limits), mixed(3.0, 2, 30_000))
    work = sum(job.tokens for job in outcome.latency) * TOKEN_S / 2
    assert work >= 0.95 * outcome.seconds
    assert not outcome.expired
    assert len(outcome.latency) + len(outcome.refused) == 30_000
    assert max(outcome.latency.values()) <= limits.max_wait_s
    # Texts that would be passed make room for those that pass them.
    assert percentile(outcome.of(12), 99) < percentile(outcome.of(400), 50) / 2
    assert sum(job.tokens == 12 for job in outcome.refused) < 0.02 * len(outcome.of(12))


@pytest.mark.parametrize("slowdown", [0.0, 100.0])
@pytest.mark.parametrize("rows", [1, 4, 32, 256])
def test_accepted_requests_of_many_texts_are_served_in_time_under_overload(rows: int, slowdown: float) -> None:
    """An answer has come when its last row has. 256 rows take half a second alone, more than a fifth of the limit."""
    limits, source = QueueLimits(slowdown=slowdown), random.Random(1)
    at, arrivals = 0.0, []
    while at < 12:
        at += source.expovariate(3 * 2 / (rows * 150 * TOKEN_S))
        arrivals.append((at, job(*[150] * rows, arrived=at)))
    outcome = simulate(queue_on(2, limits), arrivals)
    assert max(outcome.latency.values()) <= max(limits.max_wait_s, 0.8 * limits.max_wait_s + rows * 150 * TOKEN_S / 2)
    assert sum(job.tokens for job in outcome.latency) * TOKEN_S / 2 >= 0.95 * outcome.seconds
    # And no less is accepted than there is time for.
    assert percentile(list(outcome.latency.values()), 50) >= 0.6 * limits.max_wait_s


def test_accepted_requests_of_all_sizes_are_served_in_time_under_overload() -> None:
    limits, source = QueueLimits(), random.Random(2)
    at, arrivals = 0.0, []
    while at < 12:
        lengths = source.choices([12, 60, 150, 400], k=source.choice([1, 1, 1, 4, 16, 64]))
        arrivals.append((at, job(*lengths, arrived=at)))
        at += source.expovariate(3 * 2 / (14.5 * 155 * TOKEN_S))
    outcome = simulate(queue_on(2, limits), arrivals)
    assert len(outcome.refused) > 200
    assert max(outcome.latency.values()) <= limits.max_wait_s
    assert sum(job.tokens for job in outcome.latency) * TOKEN_S / 2 >= 0.95 * outcome.seconds


@pytest.mark.parametrize("texts", [1, 3])
def test_a_large_request_delays_a_query_by_one_batch_at_most(texts: int) -> None:
    """300 texts that all wait already, and queries among them."""
    large = [(0.0, job(*[400] * 300))]
    queries = [(0.03 * number, job(*[12] * texts, arrived=0.03 * number)) for number in range(1, 50)]
    outcome = simulate(queue_on(2), large + queries)
    longest = max(batch.tokens for batch in outcome.batches)
    assert longest <= 800
    assert max(outcome.of(12 * texts)) <= (longest + 12 * texts) * TOKEN_S + 0.001


def test_the_parts_of_a_large_request_do_not_overtake() -> None:
    """A part with ``before`` waits behind one that came later and had less."""
    queue = queue_on(1)
    queue.submit(job(100), 0.0)
    take_all(queue)
    second, fresh = job(40, before=1000), job(40, arrived=0.001)
    queue.submit(second, 0.001)
    queue.submit(fresh, 0.001)
    (running,) = queue._batches
    queue.finish(running, 0.002)
    batch = queue.take(0.002)
    assert batch is not None
    assert [part.job for part in batch.parts] == [fresh, second]


def test_equal_large_requests_share() -> None:
    one, other = job(*[300] * 200), job(*[300] * 200, arrived=0.01)
    outcome = simulate(queue_on(2), [(0.0, one), (0.01, other)])
    assert outcome.latency[other] <= 1.02 * outcome.latency[one] <= 1.05 * outcome.latency[other]
    half = [part.job for batch in outcome.batches[: len(outcome.batches) // 2] for part in batch.parts]
    assert 0.4 < half.count(one) / len(half) < 0.6


def test_nothing_starves_below_capacity() -> None:
    """A request of 200 long texts gets its share although queries never end."""
    source = random.Random(3)
    large = job(*[400] * 200)
    at, arrivals = 0.0, [(0.0, large)]
    while at < 8:
        at += source.expovariate(0.8 * 2 / (200 * TOKEN_S))
        arrivals.append((at, job(200, arrived=at, deadline=at + 30)))
    outcome = simulate(queue_on(2), arrivals)
    assert outcome.latency[large] < 8


# Batches


def test_a_batch_has_one_output_and_one_length_class() -> None:
    queue = queue_on(1)
    queue.submit(job(12, 300, 12, 300, 60), 0.0)
    queue.submit(job(12, output="last_hidden_state"), 0.0)
    seen = []
    while batch := queue.take(0.0):
        seen.append((batch.output, sorted(part.job.lengths[row] for part in batch.parts for row in part.rows)))
        queue.finish(batch, batch.expected)
    assert sorted(seen) == [(OUTPUT, [12, 12, 60]), (OUTPUT, [300]), (OUTPUT, [300]), ("last_hidden_state", [12])]


def test_first_come_first_served_is_one_line_of_all_lengths() -> None:
    queue = queue_on(1, QueueLimits(slowdown=0))
    jobs = [job(length, arrived=number / 10) for number, length in enumerate((100, 12, 300, 12))]
    for one in jobs:
        queue.submit(one, 0.3)
    order = []
    while batch := queue.take(0.3):
        order += [part.job for part in batch.parts]
        queue.finish(batch, 0.3 + batch.expected)
    assert order == jobs


@pytest.mark.parametrize(("lengths", "most"), [([10] * 10, 25), ([512, 10], 100), ([30, 30, 30], 64)])
def test_a_batch_is_bounded_and_a_longer_row_runs_alone(lengths: list[int], most: int) -> None:
    queue = queue_on(1, QueueLimits(batch_tokens=most))
    queue.submit(job(*lengths), 0.0)
    rows = 0
    while batch := queue.take(0.0):
        rows += len(batch.parts[0].rows)
        assert batch.tokens <= most or len(batch.parts[0].rows) == 1
        queue.finish(batch, batch.expected)
    assert rows == len(lengths)


def test_free_instances_share_what_waits() -> None:
    queue = queue_on(4)
    queue.submit(job(*[10] * 16), 0.0)
    assert [batch.tokens for batch in take_all(queue)] == [40] * 4


def test_a_batch_grows_only_while_that_pays() -> None:
    """With an overhead of five tokens, 5 % of a batch is reached with some 90; with a large one it may be full."""
    queue = queue_on(1)
    queue.submit(job(*[12] * 200), 0.0)
    (batch,) = take_all(queue)
    assert 70 <= batch.tokens <= 100
    heavy = on([InstanceGroup(1, 1)], [[[0]]], 1)
    for tokens in (10, 100, 1000):
        heavy.cost.observe(0, OUTPUT, tokens, 0.01 + tokens * 1e-5)
    heavy.submit(job(*[12] * 200), 0.0)
    (batch,) = take_all(heavy)
    assert batch.tokens == 1020


def test_max_delay_waits_for_companions_and_no_longer() -> None:
    queue = queue_on(1, QueueLimits(max_delay_s=0.005, batch_tokens=100))
    queue.submit(job(12), 1.0)
    assert queue.take(1.0) is None
    assert queue.due == pytest.approx(1.005)
    queue.submit(job(12, arrived=1.002), 1.002)
    assert queue.take(1.004) is None
    batch = queue.take(1.005)
    assert batch is not None
    assert batch.tokens == 24
    queue.finish(batch, 1.006)
    queue.submit(job(60, 60, arrived=1.006), 1.006)
    assert queue.take(1.006) is not None  # a full batch waits for nobody


# Instances


def test_a_lone_text_has_all_cores_and_two_have_one_each() -> None:
    queue = queue_on(2)
    queue.submit(job(400), 0.0)
    (batch,) = take_all(queue)
    assert batch.place.threads == 2
    queue.submit(job(12), 0.001)
    assert take_all(queue, 0.001) == []  # its cores are in use
    queue.submit(job(12), 0.001)
    queue.finish(batch, 0.01)
    assert [batch.place.threads for batch in take_all(queue, 0.01)] == [1, 1]


def test_a_short_text_takes_a_free_core_beside_a_long_one() -> None:
    queue = queue_on(2)
    queue.submit(job(512, 512), 0.0)
    long = queue.take(0.0)
    assert long is not None
    assert long.place.threads == 1
    queue.submit(job(12, arrived=0.0), 0.0)
    other = queue.take(0.0)
    assert other is not None
    assert other.tokens == 12
    assert other.place.cpus.isdisjoint(long.place.cpus)


def test_groups_of_a_tuned_setup() -> None:
    """Own cores for short texts, which also use the others' when those are free; long ones never use theirs."""
    queue = on([InstanceGroup(1, 1, 64), InstanceGroup(1, 1, None)], [[[0]], [[1]]])
    queue.submit(job(50, 50), 0.0)
    assert [batch.place.group for batch in take_all(queue)] == [0, 1]
    for batch in list(queue._batches):
        queue.finish(batch, 0.01)
    queue.submit(job(500, 500), 0.02)
    (batch,) = take_all(queue, 0.02)
    assert batch.place.group == 1
    queue.submit(job(12, arrived=0.02), 0.02)
    (batch,) = take_all(queue, 0.02)
    assert batch.place.group == 0


def test_a_wide_instance_is_not_starved_by_narrow_ones() -> None:
    """Long texts need both cores; short ones end in turns and would never leave both free."""
    groups = [InstanceGroup(2, 1, 64), InstanceGroup(1, 2, None)]
    queue = on(groups, [[[0], [1]], [[0, 1]]], slowdown=0.0)
    queue.submit(job(60), 0.0)
    queue.submit(job(60), 0.0)
    first, second = take_all(queue)
    long = job(500, arrived=0.001)
    queue.submit(long, 0.001)
    for number in range(4):
        queue.submit(job(60, arrived=0.002 + number / 1e3), 0.002)
    queue.finish(first, 0.01)
    assert take_all(queue, 0.01) == []  # held for the text that came first
    queue.finish(second, 0.02)
    (batch,) = take_all(queue, 0.02)
    assert batch.parts[0].job is long


def test_instances_without_cores_of_their_own_are_counted() -> None:
    groups = [InstanceGroup(4, 1, 512), InstanceGroup(1, 4, None)]
    queue = on(groups, [[[]] * 4, [[]]], 3)
    queue.submit(job(*[60] * 9), 0.0)
    assert len(take_all(queue)) == 3


# Admission


def test_what_is_refused_and_when_to_come_back() -> None:
    queue = queue_on(1, QueueLimits(max_tokens=1000, max_wait_s=0.05))
    assert queue.submit(job(*[400] * 2), 0.0) is None
    refused = queue.submit(job(400), 0.0)
    assert refused is not None
    assert not refused.late
    assert refused.wait_s == pytest.approx(0.02, rel=0.1)
    assert refused.retry_after == pytest.approx(0.05)  # at least
    assert queue.submit(job(400, before=5000), 0.0) is None  # of an accepted request
    assert queue.tokens == 1200
    assert queue.counters.refused == 1
    patient = queue_on(1, QueueLimits(max_tokens=1000, max_wait_s=2.0))
    assert patient.submit(job(*[400] * 2), 0.0) is None
    refused = patient.submit(job(400), 0.0)
    assert refused is not None
    assert refused.retry_after == pytest.approx(0.2)  # a tenth of the limit
    slow = queue_on(1, QueueLimits(max_wait_s=0.05))
    assert slow.submit(job(*[400] * 10), 0.0) is None  # nothing waited
    refused = slow.submit(job(*[400] * 10), 0.0)
    assert refused is not None
    assert refused.wait_s == pytest.approx(0.2, rel=0.1)
    assert refused.retry_after == pytest.approx(0.2 - 0.035 - 0.1, rel=0.1)  # 0.7 of the limit and its own time
    assert slow.submit(job(12), 0.0) is None  # passes


def test_what_passes_a_backlog_is_not_refused_for_it() -> None:
    queue = queue_on(1, QueueLimits(max_tokens=1 << 30))
    assert queue.submit(job(*[400] * 2000), 0.0) is None  # 20 s, and nothing waited
    assert queue.backlog_s(0.0) == pytest.approx(20, rel=0.1)
    assert queue.submit(job(400), 0.0) is None
    assert queue.submit(job(*[400] * 20), 0.0) is None
    refused = queue.submit(job(*[400] * 2000), 0.0)
    assert refused is not None
    assert refused.wait_s == pytest.approx(40, rel=0.1)


def test_what_could_not_be_in_time_is_refused_at_once() -> None:
    queue = queue_on(1)
    queue.submit(job(*[400] * 20), 0.0)
    assert queue.submit(job(12, deadline=0.5), 0.0) is None
    assert queue.submit(job(12, deadline=0.1), 0.0) is None  # it passes
    refused = queue.submit(job(*[400] * 20, deadline=0.15), 0.0)
    assert refused is not None
    assert refused.late


def test_cancelled_and_expired_jobs_leave_at_once() -> None:
    queue = queue_on(1)
    running = job(*[400] * 3)
    queue.submit(running, 0.0)
    batch = queue.take(0.0)
    assert batch is not None
    jobs = [job(*[10] * 5, 300, deadline=1.0 + number) for number in range(4)]
    for one in jobs:
        queue.submit(one, 0.0)
    queue.cancel(jobs[0])
    queue.cancel(jobs[0])
    assert queue.expire(0.9) == []
    assert queue.expire(2.5) == jobs[1:2] or queue.expire(2.5) == []
    queue.cancel(running)
    assert queue.counters.cancelled == 2
    assert queue.finish(batch, 3.0) == []
    assert queue.rows == sum(len(one.lengths) for one in jobs if not one.over)
    for one in jobs:
        queue.cancel(one)
    assert (queue.rows, queue.tokens, queue.idle, queue.take(3.0)) == (0, 0, True, None)


def test_an_answered_job_is_freed_at_once() -> None:
    class Owner:
        """Holds arrays."""

    queue, owner = queue_on(1), Owner()
    gone = weakref.ref(owner)
    one = Job(OUTPUT, [12, 300], 0.0, LATER, owner=owner)
    gc.disable()
    try:
        queue.submit(one, 0.0)
        while batch := queue.take(0.0):
            queue.finish(batch, 0.01)
        assert one.over
        del one, owner, batch
        assert gone() is None
    finally:
        gc.enable()


def test_a_disturbed_batch_teaches_the_cost_nothing() -> None:
    queue = queue_on(1)
    before = queue.cost.line(0, OUTPUT)
    queue.submit(job(12), 0.0)
    (batch,) = take_all(queue)
    (one,) = queue.finish(batch, 5.0, disturbed=True)
    assert one.over
    assert queue.cost.line(0, OUTPUT) == before


def test_memory_does_not_grow_by_what_was_withdrawn() -> None:
    queue = queue_on(1)
    queue.submit(job(400), 0.0)
    take_all(queue)
    for number in range(5000):
        one = job(12, 300, arrived=-number / 1e3)  # each before the last, so none reaches the head
        queue.submit(one, 0.0)
        queue.cancel(one)
    assert sum(len(line.heap) for line in queue._lines.values()) < 100
    assert len(queue._jobs) == 1


# Cost


def test_the_cost_model_finds_the_line_and_forgets_disturbances() -> None:
    model, source = CostModel(), random.Random(0)
    for number in range(300):
        tokens = source.choice([12, 100, 400, 1000])
        seconds = (2e-4 + 3e-5 * tokens) * source.uniform(0.97, 1.03)
        model.observe(0, OUTPUT, tokens, seconds * (20 if number % 40 == 39 else 1))
    for tokens in (12, 1000):
        assert model.seconds(0, OUTPUT, tokens) == pytest.approx(2e-4 + 3e-5 * tokens, rel=0.3)
    for _ in range(300):  # the machine has become slower
        tokens = source.choice([12, 1000])
        model.observe(0, OUTPUT, tokens, 4e-4 + 6e-5 * tokens)
    assert model.seconds(0, OUTPUT, 500) == pytest.approx(4e-4 + 6e-5 * 500, rel=0.1)
    assert model.seconds(1, "logits", 500) == model.seconds(0, OUTPUT, 500)  # nothing better is known


def test_the_cost_model_expects_what_batches_take_on_average() -> None:
    model, source = CostModel(), random.Random(0)
    total = {"found": 0.0, "expected": 0.0}
    for number in range(2000):
        tokens = source.choice([100, 400, 1000])
        # One in five loses its core for a while: what waits behind it waits for that too.
        seconds = (2e-4 + 3e-5 * tokens) * source.choice([1.0, 1.0, 1.0, 1.0, 2.5])
        if number >= 100:
            total["found"] += seconds
            total["expected"] += model.seconds(0, OUTPUT, tokens)
        model.observe(0, OUTPUT, tokens, seconds)
    assert total["expected"] == pytest.approx(total["found"], rel=0.05)


@pytest.mark.parametrize("tokens", [[100], [100, 100], [10, 1000]])
def test_the_cost_model_never_says_less_than_nothing(tokens: list[int]) -> None:
    model = CostModel()
    for number in range(50):
        model.observe(0, OUTPUT, tokens[number % len(tokens)], 1e-3 * (1 + number % 3))
    overhead, token = model.line(0, OUTPUT)
    assert overhead >= 0
    assert token > 0


# Everything at once

SETUPS = [
    ([InstanceGroup(2, 1, 512), InstanceGroup(1, 2, None)], [[[0], [1]], [[0, 1]]], 2),
    ([InstanceGroup(1, 1, 64), InstanceGroup(1, 1, None)], [[[0]], [[1]]], 2),
    ([InstanceGroup(3, 1, 64), InstanceGroup(1, 2, None)], [[[3], [2], [1]], [[0, 1]]], 4),
    ([InstanceGroup(2, 1, 64), InstanceGroup(1, 2, None)], [[[], []], [[]]], 2),
]


@settings(max_examples=200)
@given(st.data())
def test_every_row_runs_once_and_no_core_twice(data: st.DataObject) -> None:
    groups, cpus, cores = data.draw(st.sampled_from(SETUPS))
    queue = on(groups, cpus, cores, max_delay_s=data.draw(st.sampled_from([0.0, 0.01])))
    now, wanted, ran, whole = 0.0, [], {}, []
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.003]))
        what = data.draw(st.sampled_from(["submit", "submit", "finish", "cancel", "expire"]))
        if what == "submit":
            lengths = data.draw(st.lists(st.sampled_from([1, 12, 64, 65, 300, 512]), min_size=1, max_size=8))
            one = Job(OUTPUT, lengths, now, now + data.draw(st.sampled_from([0.004, 50.0])), 1)
            assert queue.submit(one, now) is None
            wanted.append(one)
        elif what == "finish" and queue._batches:
            whole += queue.finish(data.draw(st.sampled_from(queue._batches)), now)
        elif what == "cancel" and wanted:
            queue.cancel(data.draw(st.sampled_from(wanted)))
        elif what == "expire":
            queue.expire(now)
        _note(queue, now, ran, cores)
    while not queue.idle:
        now += 0.02
        for batch in list(queue._batches):
            whole += queue.finish(batch, now)
        _note(queue, now, ran, cores)
    for one in wanted:
        assert one.over
        rows = sorted(ran.get(one, []))
        assert rows == sorted(set(rows))
        if one in whole:
            assert rows == list(range(len(one.lengths)))
    assert len(whole) == len(set(whole))
    assert (queue.rows, queue.tokens) == (0, 0)


def _note(queue: Queue, now: float, ran: dict[Job, list[int]], cores: int) -> None:
    for batch in take_all(queue, now):
        for part in batch.parts:
            ran.setdefault(part.job, []).extend(part.rows)
            assert all(
                (queue.places.groups[batch.place.group].longest or 512) >= part.job.lengths[row] for row in part.rows
            )
    busy = [cpu for place in queue.places.running for cpu in place.cpus]
    assert len(busy) == len(set(busy))
    assert sum(place.threads for place in queue.places.running) <= cores
    # Nothing waits while every core is free.
    assert queue.places.running or not queue.rows or queue.due > now
