"""SIGTERM and Ctrl-C, for verbs that keep what they have when they are interrupted."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Terminated", "sigterm_interrupts", "uninterrupted"]

_SECOND_REQUEST_S = 1.0
"""`timeout` and service managers send several at once, which must not disturb the tidying up."""


class Terminated(KeyboardInterrupt):
    """The interrupt was a SIGTERM."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, and leaves as ``Terminated``; one that is ignored stays so."""
    terminated: float | None = None

    def interrupt(*_: object) -> None:
        nonlocal terminated
        if terminated is None or time.monotonic() - terminated > _SECOND_REQUEST_S:
            terminated = time.monotonic()
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        if terminated is not None:
            raise Terminated(*error.args) from None
        raise
    finally:
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGTERM and Ctrl-C wait for the end of what is inside: imports, say, of packages that catch whatever is raised
    meanwhile and then lack a part."""
    asked: list[int] = []
    # That of SIGTERM is the outer one, which ``sigterm_interrupts`` takes back where Ctrl-C comes between the two.
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in reversed(before.items()):
            signal.signal(number, handler)
        if asked:
            signal.raise_signal(asked[0])
