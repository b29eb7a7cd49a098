"""The lines of progress that are written where stderr is no terminal."""

from contextlib import ExitStack

import pytest

from encast.cli.compress import _Shown
from encast.cli.progress import Progress


def test_what_takes_seconds_is_not_0_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("encast.cli.progress.time.monotonic", lambda: now)
    with Progress("trials") as progress:
        now = 6.0
        progress.update(1, 0.25)
        now = 12.0
        progress.update(36, None)
    assert capsys.readouterr().err == "encast: 1 trial, 25%, 0:00:18 left, 6 s each\nencast: 36 trials, 3 a second\n"


def test_the_pace_of_a_run_that_goes_on_is_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("encast.cli.progress.time.monotonic", lambda: now)
    with ExitStack() as stack:
        shown = _Shown(stack, quiet=False)
        shown("sparse70", "steps", 500, 1000)
        now = 10.0
        shown("sparse70", "steps", 600, 1000)
        shown("sparse80", "answers", 5, None)
        now = 20.0
        shown("sparse80", "answers", 25, None)
    assert capsys.readouterr().err == (
        "encast: 600 steps of sparse70, 60%, 0:00:40 left, 10 a second\nencast: 25 answers of sparse80, 2 a second\n"
    )
