"""Measures set-ups on cards, all in one process.

Set-ups of cards differ in the size of a batch alone, so one process has the artifact on every card for all of them. In
turns of processes each would hold weights and graphs of its own on the card, whose memory may not be enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encast.backends.groups import Setup
from encast.batch import Batch
from encast.tune.configuration import card_setup
from encast.tune.evaluate import LiveEvaluator, Opened
from encast.tune.process import Worker
from encast.tune.slo import Slo

__all__ = ["CardEvaluator"]

_READY_SECONDS = 900.0
"""Until the graphs of all batches of a set-up are captured; their kernels may have to be compiled first."""


class CardEvaluator(LiveEvaluator):
    """The ``search.Evaluator`` of ``devices``, in values of ``dtype`` (see ``encast.load``); a context manager.

    ``names``: what the cards are called. Raises the ``EncastError`` of an artifact or a card that cannot be opened.
    """

    def __init__(
        self,
        artifact: Path,
        requests: Batch,
        *,
        devices: Sequence[str],
        dtype: str | None,
        output: str,
        selects: bool,
        slo: Slo | None,
        prefix: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        """See ``LiveEvaluator``."""
        super().__init__(artifact, requests, output=output, selects=selects, slo=slo, prefix=prefix, seed=seed)
        self._job |= {"devices": list(devices), "dtype": dtype}
        self._devices = tuple(devices)
        self._worker: Worker | None = None
        self._used: Setup | None = None
        try:
            self.names = tuple(str(name) for name in self._running().opened["cards"])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process and removes what it read."""
        if self._worker is not None:
            self._worker.close()
        super().close()

    def probe(self, tokens: int, threads: int, instances: int) -> float:
        """See ``Evaluator.probe``; a card has no threads."""
        worker = self._running()
        worker.words = f"{tokens} tokens"
        return self._timed(worker, tokens, instances)

    def ask(self, setup: Setup, command: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """As ``Worker.ask``, of a set-up: what it needs is captured first, where another one was asked before."""
        worker = self._running()
        if self._used != setup:
            self._used = None
            worker.words = f"{setup.batch_tokens} tokens"
            worker.ask({"do": "use", "batch_tokens": setup.batch_tokens}, _READY_SECONDS)
            self._used = setup
        return worker.ask(command, seconds)

    def _open(self, setup: Setup) -> AbstractContextManager[Opened]:
        return nullcontext(_Turns(self, setup))

    def _running(self) -> Worker:
        """The process; a new one where it died."""
        if self._worker is None or self._worker.closed:
            every = card_setup(len(self._devices), 1)
            self._used = None
            self._worker = Worker(every, self._job, self._prefix, " and ".join(self._devices))
        return self._worker


@dataclass(frozen=True)
class _Turns:
    """A set-up's share of the process."""

    evaluator: CardEvaluator
    setup: Setup

    def ask(self, command: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        return self.evaluator.ask(self.setup, command, seconds)

    def memory_bytes(self) -> None:
        """None: what one set-up holds cannot be told from what others hold."""
