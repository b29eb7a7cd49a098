"""The journal of a search: JSON lines with every probe and trial, from which a search that was ended goes on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from encast.backends.groups import Setup
from encast.errors import EncastError, InputError, ResourceError
from encast.files import lock
from encast.tune.measurement import Trial

__all__ = ["Journal"]


class Journal:
    """``probes``: seconds of the cost model's points. ``trials``: in their order."""

    def __init__(
        self, path: Path | None, setups: Container[Setup], *, key: Mapping[str, Any], resume: bool, held: ExitStack
    ) -> None:
        """Begins the file, or goes on with it; ``path`` None keeps it in memory.

        ``key``: what a search must share with the one that it resumes. No other search writes to the file until
        ``held`` is closed. Raises ``InputError`` for a journal that belongs to something else, is there without
        ``resume`` or is being written, ``ResourceError`` for one that cannot be read or written.
        """
        self.path = path
        self.probes: dict[str, float] = {}
        self.trials: list[Trial] = []
        self._file: IO[bytes] | None = None
        if path is None:
            return
        if resume and not path.exists():
            raise InputError(f"{path} does not exist, so there is nothing to resume; leave --resume out")
        try:
            self._file = held.enter_context(path.open("r+b" if resume else "xb", buffering=0))
        except FileExistsError:
            raise InputError(
                f"{path} holds the trials of an earlier search; go on with it by --resume, or remove it to begin anew"
            ) from None
        except OSError as error:
            raise self._unusable(error) from None
        lock(
            self._file.fileno(),
            InputError(f"another `encast tune` writes to {path}; wait for its end or name another --out"),
        )
        if not resume:
            try:
                self._write({"key": dict(key)})
            except ResourceError:
                path.unlink(missing_ok=True)
                raise
            return
        try:
            stored = self._read(self._file, setups)
        except OSError as error:
            raise self._unusable(error) from None
        except (ValueError, LookupError, TypeError, AttributeError, EncastError) as error:
            raise InputError(
                f"{path} is no journal of `encast tune` ({type(error).__name__}: {str(error)[:200]}); remove it, or "
                "name another --out"
            ) from None
        for name, value in key.items():
            if stored.get(name) != value:
                raise InputError(
                    f"{path} is of another search: its {name} is {stored.get(name)!r}, now it is {value!r}; resume "
                    "with the same arguments, machine and version of encast, or remove the file"
                )

    def add_probe(self, name: str, seconds: float) -> None:
        self.probes[name] = seconds
        self._write({"probe": name, "seconds": seconds})

    def add_trial(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._write({"trial": trial.to_json()})

    def _read(self, file: IO[bytes], setups: Container[Setup]) -> Mapping[str, Any]:
        """Fills probes and trials, and returns the key."""
        data = file.read()
        # A search that was killed may have left half a line at the end.
        whole = data[: data.rfind(b"\n") + 1]
        head, *entries = [json.loads(line) for line in whole.splitlines()] or [{}]
        stored: Mapping[str, Any] = {**head["key"]}
        for entry in entries:
            if "probe" in entry:
                name, seconds = str(entry["probe"]), entry["seconds"]
                if not 0 < seconds < math.inf:
                    raise ValueError(f"the probe {name} took {seconds} s")
                self.probes[name] = float(seconds)
            elif (trial := Trial.from_json(entry["trial"])).setup in setups:
                self.trials.append(trial)
        os.truncate(file.fileno(), len(whole))
        file.seek(len(whole))
        return stored

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(entry).encode() + b"\n")
            except OSError as error:
                raise ResourceError(
                    f"{self.path}: the journal of the search cannot be written ({error.strerror or error}); make room, "
                    "then --resume goes on with what was measured"
                ) from None

    def _unusable(self, error: OSError) -> ResourceError:
        return ResourceError(
            f"{self.path}: the journal of the search cannot be used ({error.strerror or error}); make room, or name "
            "another --out"
        )
