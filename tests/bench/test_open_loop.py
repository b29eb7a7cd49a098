"""Streams against a queue whose waits theory knows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scenario_fakes import FakeSystem, exponential

from encast.batch import Batch
from encast.measure.arrivals import Responses, poisson

ONE = [Batch.of([[1]])]


def test_a_stall_shows_in_an_open_loop_and_hides_in_a_closed_one() -> None:
    """1 ms a call, one stall of 200 ms, 500 requests a second: a fifth of a second of requests waits.

    Of the closed loop's calls one in a thousand is slow; of the requests due, a fifth of a second and its backlog.
    """

    def stalling(instance: int, call: int, sequences: int) -> float:
        return 200e6 if call == 400 else 1e6

    system = FakeSystem(stalling)
    system.bind(ONE)
    (closed,) = system.burst(calls=1000)
    assert np.percentile(closed, 99.5) == 1e6
    responses = Responses.of(system.stream([number * 2_000_000 for number in range(1000)], ONE))
    late = responses.latency > 2e6
    assert np.percentile(responses.service, 99.5) == 1e6, "the services themselves look as in the closed loop"
    assert late.sum() == pytest.approx(200, abs=2)
    assert np.percentile(responses.latency, 99) > 170e6
    assert (responses.latency == responses.wait + responses.service).all()


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_the_wait_of_a_queue_that_theory_knows(load: float) -> None:
    """M/M/1: the mean time in the system is the mean service over one minus the load, its p95 three times that."""
    system = FakeSystem(exponential(1.0, seed=2))
    responses = Responses.of(system.stream(poisson(1000 * load, 200, seed=3), ONE)).after(1e9)
    expected = 1.0 / (1 - load)
    assert responses.latency.mean() / 1e6 == pytest.approx(expected, rel=0.12)
    assert np.percentile(responses.latency, 95) / 1e6 == pytest.approx(-math.log(0.05) * expected, rel=0.12)
    assert responses.utilisation(1) == pytest.approx(load, rel=0.03)
