"""The instances of an engine on cards: one on each, which computes one batch after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from encast.artifact import Artifact
from encast.backends.cpu import Pause
from encast.backends.devices import check_cards, find_device
from encast.backends.groups import InstanceGroup, Setup
from encast.batch import Batch, Int32
from encast.engine import BATCH_TOKENS
from encast.tasks.session import F32

__all__ = ["Cards", "DeadCardError"]

_THREADS = 2
"""An instance counts as one of several threads, so that the queue asks none to stop for others in the middle: a card
has taken the whole batch by then."""


class DeadCardError(BaseException):
    """An error of CUDA, after which a process can compute nothing more on its cards. It is no error of a batch: it ends
    the thread, and with it the process, of which the supervisor starts another.
    """


_QUEUE_TOKENS = 1 << 22
"""That may wait for each card, about two seconds of a fast one."""


class Cards:
    """An artifact on ``devices``, in values of ``dtype`` (see ``encast.load``): a ``Grouped`` with one group, whose
    instance ``i`` is on device ``i``.

    Raises ``InputError``, ``ResourceError``, and ``UnsupportedModelError`` for a graph that cards do not run.
    """

    def __init__(self, artifact: Artifact, devices: Sequence[str], dtype: str | None) -> None:
        check_cards(devices, dtype, "a server")
        options = {} if dtype is None else {"dtype": dtype}
        self._runnables: list[Any] = [find_device(name, options).open(artifact, **options) for name in devices]
        self._words = f"{' and '.join(devices)}{'' if dtype is None else f' in {dtype}'}"
        self.cpus = (((),) * len(devices),)
        self.queue_tokens = _QUEUE_TOKENS * len(devices)

    @property
    def cores(self) -> int:
        """For ``Places``: so many that all instances run side by side."""
        return _THREADS * len(self._runnables)

    def setup(self, batch_tokens: int | None) -> tuple[Setup, str]:
        """The instances, and the same in a few words; ``batch_tokens`` of one run, by default those of an engine."""
        made = Setup((InstanceGroup(len(self._runnables), _THREADS),), batch_tokens or BATCH_TOKENS)
        return made, f"{self._words}, {made.batch_tokens} tokens"

    def report(self) -> list[str]:
        """What each card computes, and what it computes otherwise than compiled: a line each."""
        return [line for one in self._runnables for line in one.report()]

    def run(
        self, output: str, batch: Batch, select: Int32 | None = None, *, group: int, instance: int,
        pause: Pause | None = None,
    ) -> F32:  # fmt: skip
        """As ``Runnable.run``, on one of the devices. Raises ``DeadCardError`` besides."""
        try:
            rows: F32 = self._runnables[instance].run(output, batch, select)
        except RuntimeError as error:  # out of memory is a ResourceError, a wrong request an InputError
            raise DeadCardError(str(error)) from error
        return rows
