"""SIGTERM interrupts once, however often it is sent at once, and again later; some work it does not divide."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from encast.cli import interrupts
from encast.cli.interrupts import Terminated, sigterm_interrupts, uninterrupted


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the handler of before is back"
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_several_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now)
    tidied = []
    with pytest.raises(Terminated, match="kept"), sigterm_interrupts():  # noqa: PT012, one block is one command
        try:
            terminate()
        finally:
            terminate()
            tidied.append("whole")
            now = 5.0
            with pytest.raises(KeyboardInterrupt):
                terminate()
            raise KeyboardInterrupt("kept")
    assert tidied == ["whole"]


def test_another_interrupt_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, sigterm_interrupts():
        raise KeyboardInterrupt
    assert not isinstance(caught.value, Terminated)


def test_one_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with sigterm_interrupts():
        terminate()
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) == signal.SIG_IGN


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_what_must_not_be_divided_is_done_first(number: int, kind: type[BaseException]) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt) as caught, sigterm_interrupts():  # noqa: PT012, one block is one command
        with uninterrupted():
            os.kill(os.getpid(), number)
            done.append("first")
        done.append("second")
    assert (done, caught.type) == (["first"], kind)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", range(4))
def test_one_between_two_handlers_leaves_none_behind(place: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that stays would take every later Ctrl-C."""
    before, real, calls = signal.getsignal(signal.SIGINT), signal.signal, []

    def install(*arguments: Any) -> Any:
        found = real(*arguments)
        calls.append(arguments)
        if len(calls) == place + 1:
            os.kill(os.getpid(), number)
        return found

    try:
        with pytest.raises(KeyboardInterrupt), sigterm_interrupts():  # noqa: PT012, one block is one command
            monkeypatch.setattr(signal, "signal", install)
            try:
                with uninterrupted():
                    pass
            finally:
                monkeypatch.undo()
        assert signal.getsignal(signal.SIGINT) == before
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_an_interrupt_it_goes_on() -> None:
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
