"""The instances of an engine on cards: one on each, which computes one batch after the other."""

from __future__ import annotations

from collections.abc import Sequence

from encast.artifact import Artifact
from encast.backends import cards
from encast.backends.cpu import Pause
from encast.backends.devices import check_cards
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


class Cards(cards.Cards):
    """``backends.cards.Cards`` as a ``Grouped`` with one group, whose instance ``i`` is on device ``i``."""

    def __init__(self, artifact: Artifact, devices: Sequence[str], dtype: str | None) -> None:
        check_cards(devices, dtype, "a server")
        super().__init__(artifact, devices, dtype)
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

    def run(
        self, output: str, batch: Batch, select: Int32 | None = None, *, instance: int | None = None, group: int = 0,
        pause: Pause | None = None,
    ) -> F32:  # fmt: skip
        """As ``Runnable.run``, on one of the devices. Raises ``DeadCardError`` besides."""
        try:
            return super().run(output, batch, select, instance=instance)
        except cards.CardError as error:
            raise DeadCardError(str(error)) from error
