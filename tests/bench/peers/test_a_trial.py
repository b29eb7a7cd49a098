"""The trial between equal ways takes the faster one, on a clock of its own."""

from __future__ import annotations

import numpy as np
import pytest

from encast.bench.peers import openvino
from encast.bench.peers.base import States
from encast.bench.peers.openvino import fastest


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def takes(self, name: str, *seconds: float) -> States:
        turns = iter(seconds)

        def call() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            self.now += next(turns, seconds[-1])
            self.calls.append(name)
            return np.zeros((1, 1, 1), np.float32)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(openvino.time, "perf_counter", lambda: made.now)
    return made


def test_the_quicker_one_wins(clock: Clock) -> None:
    """One call in which compiling or waking threads took long decides nothing."""
    assert fastest({"slow": clock.takes("slow", 0.02), "fast": clock.takes("fast", 5, 5, 5, 0.01)}) == "fast"


def test_a_neighbour_that_slows_most_calls_decides_nothing(clock: Clock) -> None:
    # Of a turn's two calls the second is timed: two of five here, 0.01 s, are undisturbed.
    disturbed = [seconds for timed in (0.01, 0.03, 0.03, 0.01, 0.03) * 40 for seconds in (0.01, timed)]
    assert fastest({"slow": clock.takes("slow", 0.02), "fast": clock.takes("fast", 0.01, *disturbed)}) == "fast"
    assert clock.calls.count("slow") > 40


def test_every_candidate_gets_turns(clock: Clock) -> None:
    assert fastest({"a": clock.takes("a", 10.0), "b": clock.takes("b", 20.0)}) == "a"
    assert clock.calls.count("a") == clock.calls.count("b") >= 3
