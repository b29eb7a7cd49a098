"""Several cards: an artifact on each, whose runs a thread for each card computes, one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from encast.backends.base import Float32, SideBySide
from encast.backends.devices import RUNS_A_CARD, need_card
from encast.batch import Batch, Int32
from encast.errors import InputError, ResourceError, need_modules

if TYPE_CHECKING:
    from encast.artifact import Artifact

__all__ = ["CardError", "Cards", "card_error"]


class CardError(ResourceError):
    """A card failed in the middle of a run, and not for a want of memory."""


def card_error(name: str, error: RuntimeError) -> CardError:
    """What to say of an error of PyTorch in a run on the card ``name``."""
    from encast.backends.gpu.device import first_line

    return CardError(
        f"{name}: the card failed ({first_line(error)}); after an error of CUDA a process computes nothing more on its "
        "cards: start it again"
    )


class Cards(SideBySide):
    """A ``Runnable`` of one instance on each of the devices ``names``, in values of ``dtype`` (see ``encast.load``).

    A run goes to the card that is free first. Raises ``InputError``, ``ResourceError``, and ``UnsupportedModelError``
    for a graph that cards do not run.
    """

    def __init__(self, artifact: Artifact, names: Sequence[str], dtype: str | None = None) -> None:
        need_modules("cuda", "torch")
        from encast.backends.gpu.runnable import GpuRunnable

        artifact.verify()
        graph = artifact.load_graph()
        self._names = tuple(names)
        self._runnables = [GpuRunnable(graph, kind, index=index, dtype=dtype) for kind, index in map(need_card, names)]
        self.at_once = RUNS_A_CARD * len(names)
        cards = iter(range(len(names)))
        self._thread = threading.local()

        def choose_card() -> None:
            self._thread.card = next(cards)

        self._threads = ThreadPoolExecutor(len(names), "card", choose_card)
        self._closed = False
        self._pid = os.getpid()

    def run(self, output: str, batch: Batch, select: Int32 | None = None, *, instance: int | None = None) -> Float32:
        """See ``Runnable.run``. ``instance``: the card's number among ``names``, for a caller who knows which are free;
        the run is on the caller's thread then. Raises ``ResourceError`` besides; a ``CardError`` names the card.
        """
        if instance is None:
            return self.begin(output, batch, select).result()
        try:
            return self._runnables[instance].run(output, batch, select)
        except RuntimeError as error:  # out of memory is a ResourceError, a wrong request an InputError
            raise card_error(self._names[instance], error) from error

    def begin(self, output: str, batch: Batch, select: Int32 | None = None) -> Future[Float32]:
        """See ``SideBySide.begin``."""
        if os.getpid() != self._pid:
            raise ResourceError(
                f"this engine was loaded in process {self._pid}, and a forked child has none of its threads; load the "
                "artifact in the child, or start it with the method 'spawn'"
            )
        try:
            return self._threads.submit(self._on_thread, output, batch, select)
        except RuntimeError:
            if not self._closed:
                raise
            raise InputError("the model is closed; load the artifact again") from None

    def _on_thread(self, output: str, batch: Batch, select: Int32 | None) -> Float32:
        return self.run(output, batch, select, instance=self._thread.card)

    def report(self) -> list[str]:
        """What each card computes, and what it computes otherwise than compiled: a line each."""
        return [line for one in self._runnables for line in one.report()]

    def numbers(self) -> dict[str, str]:
        """See ``GpuRunnable.numbers``; of cards that differ all values."""
        of_each = [one.numbers() for one in self._runnables]
        return {name: " and ".join(sorted({one[name] for one in of_each})) for name in of_each[0]}

    def close(self) -> None:
        """Frees the weights, after the runs that have begun. In a forked child it frees nothing."""
        if os.getpid() == self._pid:
            self._closed = True
            self._threads.shutdown()
            for one in self._runnables:
                one.close()
