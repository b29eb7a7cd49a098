"""Every nanosecond of every thread is accounted for, once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encast.profile.account import account_of, mean_account

STEPS = 4


def _events(rows: list[tuple[int, ...]]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, 9)


def test_by_hand() -> None:
    # thread, step, chunk, first row, rows, begin, end, task of heads, dense rows
    events = _events(
        [
            (0, 0, 0, 0, 8, 10, 20, 0, 0),
            (0, 1, 0, 0, 8, 25, 40, 0, 0),
            (1, 0, 0, 8, 8, 12, 24, 0, 0),
            (1, 1, 0, 8, 8, 25, 30, 0, 0),
        ]
    )
    account = account_of(events, 50, 2, STEPS)
    assert account.busy.tolist() == [11, 10, 0, 0]
    # Thread 1 wakes up 2 later; after step 0 the threads wait 5 and 1; thread 1 waits 10 at the end.
    assert account.waiting.tolist() == [(2 + 5 + 1) / 2, 5, 0, 0]
    assert (account.idle, account.between, account.wall, account.events) == (0, 20, 50, 4)


def test_a_thread_without_work_is_idle() -> None:
    account = account_of(_events([(0, 0, 0, 0, 8, 10, 30, 0, 0)]), 40, 2, STEPS)
    assert (account.busy[0], account.waiting[0], account.idle, account.between) == (10, 0, 10, 20)


def test_nothing_ran() -> None:
    account = account_of(_events([]), 40, 2, STEPS)
    assert (account.busy.sum(), account.between) == (0, 40)


@st.composite
def traces(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    threads = draw(st.integers(1, 3))
    clock, rows, chunks = 0, [], draw(st.integers(1, 3))
    spans = []
    for chunk in range(chunks):
        begin = clock + draw(st.integers(0, 50))
        ends = [begin]
        for thread in range(threads):
            at = begin
            for step in draw(st.lists(st.integers(0, STEPS - 1), min_size=0, max_size=5)):
                start = at + draw(st.integers(0, 20))
                at = start + draw(st.integers(0, 100))
                rows.append((thread, step, chunk, 0, 1, start, at, 0, 0))
            ends.append(at)
        clock = max(ends)
        spans.append((begin, clock))
    rows.sort(key=lambda row: row[0])  # stable: each thread's stay in order
    return _events(rows), clock + draw(st.integers(1, 50)), threads


@given(traces())
def test_it_adds_up(trace: tuple[np.ndarray, int, int]) -> None:
    events, wall, threads = trace
    account = account_of(events, wall, threads, STEPS)
    total = account.busy.sum() + account.waiting.sum() + account.idle + account.between
    assert total == pytest.approx(wall)
    assert account.waiting.min() >= 0
    assert account.idle >= -1e-9
    assert account.between >= 0
    assert account.busy.sum() * threads == pytest.approx(float(np.sum(events[:, 6] - events[:, 5])))


def test_the_mean_adds_up() -> None:
    accounts = [account_of(_events([(0, 0, 0, 0, 8, 10, end, 0, 0)]), 50, 1, STEPS) for end in (20, 40)]
    mean = mean_account(accounts)
    assert mean.busy.tolist() == [20, 0, 0, 0]
    assert mean.busy.sum() + mean.waiting.sum() + mean.idle + mean.between == mean.wall == 50
