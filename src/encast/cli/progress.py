"""Progress of long work on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

__all__ = ["Progress"]


class Progress:
    """A context manager; ``quiet`` shows nothing."""

    _SECONDS = 5.0

    def __init__(self, what: str, *, quiet: bool = False, before: tuple[int, float] = (0, 0.0)) -> None:
        """``what`` names the things that are counted: "rows". ``before``: how many were done at an earlier time, and
        which part of the whole that is."""
        self._what, self._quiet = what, quiet
        self._before = before
        self._began = self._said = time.monotonic()
        self._bar: Any = None
        self._job: Any = None

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self._bar = Progress(
                BarColumn(),
                TextColumn("{task.fields[count]:,} {task.description}"),
                TextColumn("{task.fields[pace]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._job = self._bar.add_task(self._what, total=None, count=0, pace="")
            self._bar.start()
        return self

    def update(self, count: int, fraction: float | None) -> None:
        """``count`` are done, which is ``fraction`` of the whole (None: unknown)."""
        now = time.monotonic()
        rate = (count - self._before[0]) / max(now - self._began, 1e-9)
        if self._bar is not None:
            total = None if fraction is None else 1.0
            self._bar.update(self._job, total=total, completed=fraction or 0.0, count=count, pace=_pace(rate))
        elif not self._quiet and now - self._said >= self._SECONDS:
            self._said = now
            done = "" if fraction is None else f", {fraction:.0%}"
            if fraction is not None and fraction > self._before[1]:
                left = (now - self._began) * (1 - fraction) / (fraction - self._before[1])
                done += f", {timedelta(seconds=round(left))} left"
            what = self._what.removesuffix("s") if count == 1 else self._what
            print(f"encast: {count:,} {what}{done}, {_pace(rate)}", file=sys.stderr)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _pace(rate: float) -> str:
    """Of what takes longer than a second the seconds: 0 a second says nothing."""
    return f"{rate:,.0f} a second" if rate >= 1 or rate <= 0 else f"{1 / rate:,.0f} s each"
