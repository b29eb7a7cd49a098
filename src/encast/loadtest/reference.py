"""Answers that are known: what ``encast run`` wrote for the same texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from encast.errors import InputError
from encast.loadtest.answers import Answers, BadAnswerError, Ranking, Vector, vector_of
from encast.loadtest.protocols import Protocol
from encast.loadtest.requests import Request, Source
from encast.measure.texts import read_whole

__all__ = ["Reference", "read_reference"]

_SHOWN = 80


class Reference:
    """``expected``: of every source a known answer a row. ``tolerance``: by how much numbers may differ; at 0 their
    bits as f32 must be equal. Scores of rankings may also be the sigmoid of the known ones: of a cross-encoder
    ``encast run`` writes the logits, and servers answer between 0 and 1."""

    def __init__(
        self, protocol: Protocol, sources: Sequence[Source], expected: Sequence[Sequence[Vector]], tolerance: float
    ) -> None:
        self._answer, self._sources, self._expected, self._tolerance = protocol.answer, sources, expected, tolerance

    def wrong(self, request: Request, answers: Answers) -> str:
        """Which answer is wrong, and how; empty when all are right. Raises ``BadAnswerError``."""
        expected = self._expected[request.source]
        for number, found in zip(request.rows, answers.found, strict=True):
            got = vector_of(self._answer, found)
            why = self._differs(got, expected[number])
            if why and (self._answer != "ranking" or self._differs(got, _sigmoid(expected[number]))):
                text = str(self._sources[request.source].rows[number])
                shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
                return f"{self._sources[request.source].name}, row {number + 1}, {shown!r}: {why}"
        return ""

    def _differs(self, got: Vector, expected: Vector) -> str:
        if got == expected:
            return ""
        if got[0] != expected[0]:
            return f"labels {', '.join(got[0])}; expected {', '.join(expected[0])}"
        if len(got[1]) != len(expected[1]):
            return f"{len(got[1]) // 4} numbers; expected {len(expected[1]) // 4}"
        one, other = (np.frombuffer(vector[1], "<f4").astype(np.float64) for vector in (got, expected))
        differences = np.abs(one - other)
        at = int(np.argmax(differences))  # of a NaN, if there is one
        if self._tolerance and differences[at] <= self._tolerance:
            return ""
        place = got[0][at] if got[0] else f"number {at + 1} of {len(one)}"
        return f"{place} is {one[at]:.9g}; expected {other[at]:.9g}"


def _sigmoid(scores: Vector) -> Vector:
    """As the server computes it, to the bit: of logits below -15 other formulas give other bits of f32."""
    numbers = np.frombuffer(scores[1], "<f4").astype(np.float64)
    return scores[0], (0.5 + 0.5 * np.tanh(0.5 * numbers)).astype("<f4").tobytes()


def read_reference(
    paths: Sequence[str], protocol: Protocol, sources: Sequence[Source], tolerance: float = 0.0
) -> Reference:
    """Of JSONL files as ``encast run`` writes them: a row an answer, in the order of the texts of all sources.

    Rows may also have their ``text``; then they are found by it, in any order. Raises ``InputError`` when a text has
    no answer.
    """
    field = protocol.answer
    if field == "ranking" and not all(isinstance(row, Ranking) for source in sources for row in source.rows):
        raise InputError(
            "--reference of rankings needs files with the columns query and documents, of which each row is a ranking"
        )

    def made(values: Mapping[str, Any], where: str) -> tuple[Any, Vector]:
        try:
            return values.get("text"), vector_of(field, values[field])
        except BadAnswerError as error:
            raise InputError(f"{where}: {error}") from None

    known = [row for path in paths for row in read_whole(path, [field], made, "jsonl")]
    by_text = {text: vector for text, vector in known if isinstance(text, str)}
    names = ", ".join(paths)
    if len(by_text) == 0:
        texts = sum(len(source.rows) for source in sources)
        if len(known) != texts:
            raise InputError(
                f"{names}: {len(known):,} answers to {texts:,} texts; give what `encast run` wrote for these texts, or "
                'rows that have their "text"'
            )
        vectors = iter([vector for _, vector in known])
        return Reference(protocol, sources, [[next(vectors) for _ in source.rows] for source in sources], tolerance)
    for source in sources:
        missing = next((row for row in source.rows if not isinstance(row, str) or row not in by_text), None)
        if missing is not None:
            raise InputError(f"{names}: no answer to {json.dumps(str(missing)[:_SHOWN])} of {source.name}")
    found = [[by_text[str(row)] for row in source.rows] for source in sources]
    return Reference(protocol, sources, found, tolerance)
