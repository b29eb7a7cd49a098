"""The journal of a tuning: every probe and trial."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import encast.journal as journals
from encast.backends.groups import Setup
from encast.tune.measurement import Trial

__all__ = ["Journal"]


_PROBE_SECONDS = 1e-9, 1e6
"""What a probe may take: the clock tells no less apart, and a worker is given up before the most."""


class Journal(journals.Journal):
    """``probes``: seconds of the cost model's points. ``trials``: in their order. Both are on the disk."""

    _OWNER = "encast tune"

    def __init__(
        self, path: Path | None, setups: Container[Setup], *, key: Mapping[str, Any], resume: bool, held: ExitStack
    ) -> None:
        """As ``encast.journal.Journal``; ``path`` None keeps it in memory, trials of other ``setups`` are left out."""
        self.probes: dict[str, float] = {}
        self.trials: list[Trial] = []
        self._setups = setups
        super().__init__(path, key=key, resume=resume, held=held)

    def __bool__(self) -> bool:
        return bool(self.probes or self.trials)

    def add_probe(self, name: str, seconds: float) -> None:
        self._write({"probe": name, "seconds": seconds})
        self.probes[name] = seconds

    def add_trial(self, trial: Trial) -> None:
        self._write({"trial": trial.to_json()})
        self.trials.append(trial)

    def _take(self, entry: Mapping[str, Any]) -> None:
        if "probe" in entry:
            name, seconds = str(entry["probe"]), entry["seconds"]
            if not _PROBE_SECONDS[0] <= seconds <= _PROBE_SECONDS[1]:
                raise ValueError(f"the probe {name} took {seconds} s")
            self.probes[name] = float(seconds)
        elif (trial := Trial.from_json(entry["trial"])).setup in self._setups:
            self.trials.append(trial)
