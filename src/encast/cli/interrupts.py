"""SIGTERM, for verbs that keep what they have when they are interrupted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Terminated", "sigterm_interrupts"]


class Terminated(KeyboardInterrupt):
    """The interrupt was a SIGTERM."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, and leaves as ``Terminated``; one that is ignored stays so."""
    terminated = False

    def interrupt(number: int, _: object) -> None:
        nonlocal terminated
        terminated = True
        signal.signal(number, signal.SIG_IGN)  # what sends two, as `timeout` does, must not disturb the tidying up
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        if terminated:
            raise Terminated(*error.args) from None
        raise
    finally:
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, before)
