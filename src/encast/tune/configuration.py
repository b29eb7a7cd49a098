"""The file that ``encast tune`` writes and ``encast.load`` reads: ``NAME.tuned.json``.

Its fields: ``schema`` (1); ``artifact_sha`` and ``machine``, what it was tuned for and where; ``slo``
(``{"p99_ms": 10}`` or null); ``workload``, in words and by its hash; ``chosen``, the set-up; ``front``, the measured
set-ups of which no other is better in latency, throughput, memory and cost at once; ``trials``, all that were measured.
Only ``schema`` and ``chosen`` are needed, so that a file can be written by hand:

    {"schema": 1, "chosen": {"groups": [{"instances": 2, "threads": 1, "longest": 64},
                                        {"instances": 1, "threads": 2, "longest": null}], "shared_cores": true}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encast.artifact import Artifact, artifact_sha
from encast.artifact.strict_json import parse_json
from encast.backends.groups import Setup, read_setup, setup_to_json
from encast.ceilings.model import Fingerprint
from encast.data.output import OutputFile
from encast.errors import ArtifactError, InputError
from encast.tune.slo import Slo

__all__ = ["SCHEMA", "Configuration", "machine_fingerprint"]

SCHEMA = 1

_FIELDS = ("schema", "artifact_sha", "machine", "slo", "workload", "chosen", "front", "trials")
_MAX_BYTES = 1 << 24


def machine_fingerprint() -> str:
    """Of this machine: processor, allowed ISA levels, caches and all cores, however few a process is given."""
    return Fingerprint.of_all_cores().digest


@dataclass(frozen=True)
class Configuration:
    """A tuned configuration. ``where`` is the file it comes from, for messages; None where a field was not given."""

    chosen: Setup
    artifact_sha: str | None = None
    machine: str | None = None
    slo: Slo | None = None
    workload: Mapping[str, Any] | None = None
    front: tuple[Mapping[str, Any], ...] = ()
    trials: tuple[Mapping[str, Any], ...] = ()
    where: str = field(default="config", compare=False)

    @staticmethod
    def of(source: str | os.PathLike[str] | Mapping[str, Any], *, batch_tokens: int) -> Configuration:
        """From a file's path or from its content; ``batch_tokens`` is for one that says none.

        Raises ``InputError`` naming the file and the field. Nothing in it is trusted.
        """
        if isinstance(source, Mapping):
            return Configuration._parse(source, "config", batch_tokens)
        path = Path(source)
        return Configuration._parse(_read(path), str(path), batch_tokens)

    @staticmethod
    def _parse(document: object, where: str, batch_tokens: int) -> Configuration:
        if not isinstance(document, Mapping):
            raise InputError(f"{where}: a JSON object with {', '.join(_FIELDS)} is needed; `encast tune` writes one")
        schema = document.get("schema")
        if type(schema) is not int or schema != SCHEMA:
            raise InputError(
                f"{where}: schema is {schema!r}, this version reads {SCHEMA}; run `encast tune` again, or use the "
                "version that wrote the file"
            )
        for name in document:
            if name not in _FIELDS:
                raise InputError(f"{where} has the unknown field {name!r}; known are {', '.join(_FIELDS)}")
        if "chosen" not in document:
            raise InputError(f"{where} lacks 'chosen', the set-up that an engine takes; `encast tune` writes it")
        workload = document.get("workload")
        if workload is not None and not isinstance(workload, Mapping):
            raise InputError(f"{where}: workload is {workload!r}; an object or null is needed")
        return Configuration(
            chosen=read_setup(document["chosen"], f"{where}: chosen", batch_tokens=batch_tokens),
            artifact_sha=_text(document, "artifact_sha", where),
            machine=_text(document, "machine", where),
            slo=Slo.from_json(document.get("slo"), f"{where}: slo"),
            workload=workload,
            front=_rows(document, "front", where),
            trials=_rows(document, "trials", where),
            where=where,
        )

    def mismatches(self, artifact: Artifact) -> list[str]:
        """Why what was tuned may not be best here: another artifact, another machine. Empty when all is as it was."""
        found = []
        if self.artifact_sha is not None and self.artifact_sha != artifact_sha(artifact):
            found.append(f"tuned for another artifact than {artifact.path}")
        if (elsewhere := self.elsewhere()) is not None:
            found.append(elsewhere)
        return found

    def elsewhere(self) -> str | None:
        """Why it may not be best on this machine; None where it was tuned here, whatever cores were allowed."""
        if self.machine is None or self.machine == machine_fingerprint():
            return None
        return "tuned on another machine, or with other ISA levels allowed"

    def to_json(self) -> dict[str, Any]:
        """The document of the file."""
        return {
            "schema": SCHEMA,
            "artifact_sha": self.artifact_sha,
            "machine": self.machine,
            "slo": None if self.slo is None else self.slo.to_json(),
            "workload": None if self.workload is None else dict(self.workload),
            "chosen": setup_to_json(self.chosen),
            "front": [dict(row) for row in self.front],
            "trials": [dict(row) for row in self.trials],
        }

    def write(self, path: Path, option: str = "--out") -> None:
        """Writes the file as a whole or not at all; raises ``ResourceError``."""
        file = OutputFile(path, option)
        try:
            file.append((json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n").encode())
            file.finish()
        finally:
            file.discard()


def _text(document: Mapping[str, Any], name: str, where: str) -> str | None:
    value = document.get(name)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{where}: {name} is {value!r}; a text or null is needed")
    return value


def _rows(document: Mapping[str, Any], name: str, where: str) -> tuple[Mapping[str, Any], ...]:
    rows = document.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise InputError(f"{where}: {name} is no list of objects")
    return tuple(rows)


def _read(path: Path) -> object:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: cannot be read ({reason}); give the file that `encast tune` wrote") from None
    if len(data) > _MAX_BYTES:
        raise InputError(f"{path}: more than {_MAX_BYTES} bytes are no configuration; `encast tune` writes one")
    try:
        document: object = parse_json(data, str(path))
    except ArtifactError as error:
        raise InputError(f"{error}; give the file that `encast tune` wrote") from None
    return document
