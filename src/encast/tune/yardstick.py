"""How quiet the machine is: an instance on every core runs the same batch, now and then.

One moment says nothing, so looks are kept and those around a measurement are judged when it is over, by the quicker
ones of late: a search may begin on a machine that is disturbed for seconds, and the first looks are then all slow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from encast.errors import EncastError
from encast.tune.process import Worker

__all__ = ["NOISY", "Yardstick", "noise"]

NOISY = 0.05
"""Slower than usual by more than this share is disturbed."""

_SECONDS = 0.1
_TOKENS = 256
_MOST_FAILURES = 3
_LATELY = 64
_QUICKER = 25.0
"""The percentile of late looks that is usual: what disturbs only ever slows."""


class Yardstick:
    """``open_worker`` starts the process that runs the batch. Close it."""

    def __init__(self, open_worker: Callable[[], Worker]) -> None:
        self._open_worker = open_worker
        self._worker: Worker | None = None
        self._looks: deque[float] = deque(maxlen=_LATELY)
        self._failures = 0

    def look(self) -> float:
        """Nanoseconds of a run at this moment; infinite when it cannot run, which says nothing of the machine.

        The next look opens another process, unless that has been in vain too often.
        """
        if self._failures == _MOST_FAILURES:
            return math.inf
        try:
            if self._worker is None:
                self._worker = self._open_worker()
            answer = self._worker.ask({"do": "probe", "tokens": _TOKENS, "seconds": _SECONDS}, 120)
        except EncastError:
            self.close()
            self._failures += 1
            return math.inf
        self._looks.append(float(answer["nanoseconds"]))
        return self._looks[-1]

    def slower(self, looks: Sequence[float]) -> float:
        """By how much the machine was slower at the slowest of the looks than it usually is: 0.1 for 10 %.

        Infinite where one of them says nothing.
        """
        slowest = max(looks)
        return slowest / float(np.percentile(self._looks, _QUICKER)) - 1 if slowest < math.inf else math.inf

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def noise(slower: float) -> str | None:
    """What a trial says of the machine around it."""
    if slower <= NOISY:
        return None
    if slower == math.inf:
        return "whether the machine was quiet around it is not known"
    return f"the machine was {slower:.0%} slower than usual around it"
