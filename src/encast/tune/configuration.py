"""The file that ``encast tune`` writes and ``encast.load`` reads: ``NAME.tuned.json``.

Its fields: ``schema`` (1); ``artifact_sha`` and ``machine``, what it was tuned for and where; ``slo``
(``{"p99_ms": 10}`` or null); ``workload``, in words and by its hash; ``chosen``, the set-up; ``front``, the measured
set-ups of which no other is better in latency, throughput, memory and cost at once; ``trials``, all that were measured.
Only ``schema`` and ``chosen`` are needed, so that a file can be written by hand:

    {"schema": 1, "chosen": {"groups": [{"instances": 2, "threads": 1, "longest": 64},
                                        {"instances": 1, "threads": 2, "longest": null}], "shared_cores": true}}

One for cards has ``cards``, what they are called and the dtype, in the place of ``machine``. Each card has one
instance, so a set-up is the tokens of a batch:

    {"schema": 1, "cards": {"names": ["NVIDIA H100 80GB HBM3"], "dtype": "f16"}, "chosen": {"batch_tokens": 4096}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from encast.artifact import Artifact, artifact_sha
from encast.artifact.strict_json import parse_json
from encast.backends.devices import CARD_DTYPES
from encast.backends.groups import InstanceGroup, Setup, read_setup, setup_to_json
from encast.ceilings.model import Fingerprint
from encast.data.output import OutputFile
from encast.errors import ArtifactError, InputError
from encast.tune.slo import Slo

__all__ = ["SCHEMA", "Cards", "Configuration", "card_setup", "machine_fingerprint"]

SCHEMA = 1

_FIELDS = ("schema", "artifact_sha", "machine", "cards", "slo", "workload", "chosen", "front", "trials")
_MAX_BYTES = 1 << 24
_MOST_TOKENS = 1 << 20
"""Of a batch on a card: what `encast serve --batch-tokens` takes."""


def machine_fingerprint() -> str:
    """Of this machine: processor, allowed ISA levels, caches and all cores, however few a process is given."""
    return Fingerprint.of_all_cores().digest


@dataclass(frozen=True)
class Cards:
    """``names``: what the cards are called, one for each instance. ``dtype``: that of ``encast.load``."""

    names: tuple[str, ...]
    dtype: str | None

    @property
    def text(self) -> str:
        """``NVIDIA L4, as compiled``, ``2 cards (NVIDIA L4), f16``."""
        kinds = " and ".join(dict.fromkeys(self.names))
        cards = kinds if len(self.names) == 1 else f"{len(self.names)} cards ({kinds})"
        return f"{cards}, {self.dtype or 'as compiled'}"


def card_setup(cards: int, batch_tokens: int) -> Setup:
    """Of one instance on each card."""
    return Setup((InstanceGroup(cards, 1),), batch_tokens)


@dataclass(frozen=True)
class Configuration:
    """A tuned configuration. ``where`` is the file it comes from, for messages; None where a field was not given."""

    chosen: Setup
    artifact_sha: str | None = None
    machine: str | None = None
    cards: Cards | None = None
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
        cards = _cards(document.get("cards"), f"{where}: cards")
        at, chosen = f"{where}: chosen", document["chosen"]
        return Configuration(
            chosen=read_setup(chosen, at, batch_tokens=batch_tokens)
            if cards is None
            else _read_card_setup(chosen, at, len(cards.names)),
            artifact_sha=_text(document, "artifact_sha", where),
            machine=_text(document, "machine", where),
            cards=cards,
            slo=Slo.from_json(document.get("slo"), f"{where}: slo"),
            workload=workload,
            front=_rows(document, "front", where),
            trials=_rows(document, "trials", where),
            where=where,
        )

    def need_kind(self, *, on_cards: bool) -> None:
        """Raises ``InputError`` for a configuration for cores where cards run, and the other way."""
        if on_cards and self.cards is None:
            raise InputError(
                f"{self.where} is for the processor: it says instances and threads, and a card has one instance; give "
                "what `encast tune --device` wrote, or batch_tokens alone"
            )
        if not on_cards and self.cards is not None:
            raise InputError(
                f"{self.where} is for a card ({self.cards.text}), and this is the processor; choose the device, or "
                "give what `encast tune` wrote without --device"
            )

    def mismatches(self, artifact: Artifact, cards: Cards | None = None) -> list[str]:
        """Why what was tuned may not be best here: another artifact, machine or card. Empty when all is as it was.

        ``cards``: those that are used where it is for cards.
        """
        found = []
        if self.artifact_sha is not None and self.artifact_sha != artifact_sha(artifact):
            found.append(f"tuned for another artifact than {artifact.path}")
        if self.cards is not None and cards is not None:
            if self.cards != cards:
                found.append(f"tuned on {self.cards.text}, and this is {cards.text}")
        elif (elsewhere := self.elsewhere()) is not None:
            found.append(elsewhere)
        return found

    def elsewhere(self) -> str | None:
        """Why it may not be best on this machine; None where it was tuned here, whatever cores were allowed."""
        if self.machine is None or self.machine == machine_fingerprint():
            return None
        return "tuned on another machine, or with other ISA levels allowed"

    def to_json(self) -> dict[str, Any]:
        """The document of the file."""
        cards = self.cards
        return {
            "schema": SCHEMA,
            "artifact_sha": self.artifact_sha,
            **({"machine": self.machine} if cards is None else {"cards": asdict(cards)}),
            "slo": None if self.slo is None else self.slo.to_json(),
            "workload": None if self.workload is None else dict(self.workload),
            "chosen": setup_to_json(self.chosen) if cards is None else {"batch_tokens": self.chosen.batch_tokens},
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


def _cards(document: object, where: str) -> Cards | None:
    if document is None:
        return None
    if isinstance(document, Mapping) and set(document) <= {"names", "dtype"}:
        names, dtype = document.get("names"), document.get("dtype")
        if isinstance(names, list) and names and all(map(_is_name, names)) and dtype in (None, *CARD_DTYPES):
            return Cards(tuple(names), dtype)
    raise InputError(
        f"{where} is {document!r}; the names of one card or more and their dtype are needed, null for as compiled: "
        '{"names": ["NVIDIA L4"], "dtype": "f16"}'
    )


def _is_name(value: object) -> bool:
    """A text that messages can show: one of a file may have escape sequences of a terminal in it."""
    return isinstance(value, str) and value != "" and value.isprintable()


def _read_card_setup(document: object, where: str, cards: int) -> Setup:
    tokens = document.get("batch_tokens") if isinstance(document, Mapping) and len(document) == 1 else None
    if type(tokens) is not int or not 1 <= tokens <= _MOST_TOKENS:
        raise InputError(
            f'{where} is {document!r}; of cards, which have one instance each, it is {{"batch_tokens": 4096}} or '
            f"another number from 1 to {_MOST_TOKENS}"
        )
    return card_setup(cards, tokens)


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
