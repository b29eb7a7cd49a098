"""How quiet the machine is: what is usual, and what becomes of a yardstick that ends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from encast.errors import ResourceError
from encast.tune.yardstick import Yardstick, noise


class Runs:
    """Stands for a worker whose runs take so many nanoseconds, look by look; it ends where that is 0."""

    def __init__(self, *nanoseconds: float) -> None:
        self.left, self.opened, self.closed = list(nanoseconds), 0, 0

    def open(self) -> Any:
        self.opened += 1
        return self

    def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert command["do"] == "probe"
        taken = self.left.pop(0)
        if taken == 0:
            raise ResourceError("the process ended")
        return {"nanoseconds": taken}

    def close(self) -> None:
        self.closed += 1


def test_what_is_usual_is_what_the_quicker_looks_say() -> None:
    yardstick = Yardstick(Runs(150, 150, 150, 100, 100, 100).open)
    looks = [yardstick.look() for _ in range(3)]
    assert yardstick.slower(looks) == 0  # nothing else is known yet
    looks += [yardstick.look() for _ in range(3)]
    assert yardstick.slower(looks[:2]) == pytest.approx(0.5)
    assert yardstick.slower(looks[3:]) == 0
    assert yardstick.slower([looks[3], looks[0]]) == pytest.approx(0.5)


def test_a_machine_that_stays_slower_becomes_usual() -> None:
    yardstick = Yardstick(Runs(*[100] * 64, *[110] * 64).open)
    looks = [yardstick.look() for _ in range(128)]
    assert yardstick.slower(looks[-1:]) == 0


def test_a_yardstick_that_ends_says_nothing_and_is_opened_again() -> None:
    runs = Runs(100, 0, 100, 0, 0, 100)
    yardstick = Yardstick(runs.open)
    looks = [yardstick.look() for _ in range(6)]
    assert looks == [100, math.inf, 100, math.inf, math.inf, math.inf]  # in vain too often
    assert (runs.opened, runs.closed) == (3, 3)
    assert yardstick.slower(looks[:2]) == math.inf
    assert yardstick.slower([100]) == 0


def test_what_a_trial_says_of_noise() -> None:
    assert noise(0.05) is None
    assert noise(0.2) == "the machine was 20% slower than usual around it"
    assert noise(math.inf) == "whether the machine was quiet around it is not known"
