"""A process that runs an original: ``python -m encast.verify.runtime MODULE SOURCE TEXTS ANSWERS TAKES``.

It is apart because the file is anybody's: a loop that never ends, or memory without end, must not take a compilation
with it. ``MODULE`` is a key of ``RUNTIMES``, ``TEXTS`` and ``ANSWERS`` are ``.npz`` files, ``TAKES`` is a ``Takes`` in
JSON; a failure is one line on standard output and exit code 1. What is the same for all runtimes is here: the batches
that they are given, and what their answers are rows of.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from encast.launch.process import die_with_parent
from encast.verify.confine import can_confine, confine
from encast.verify.original import RUNTIMES, UNUSED, Takes
from encast.verify.session import Session

__all__ = ["main"]

Array = np.ndarray[Any, Any]
_KILL = 9


def main(module: str, source: str, texts: str, answers: str, reply: str, takes: str) -> int:
    """``reply`` gets the runtime's version and the names of what ``answers`` holds, in JSON: every output with rows for
    tokens or for sequences; or one line that says what failed.

    ``texts``: ``ids: i64[tokens]`` and ``types: i64[tokens]`` of all sequences one after the other, and their
    ``lengths``. Rows are f32, without those of padding.
    """
    die_with_parent(_KILL, os.getppid())
    try:
        if can_confine():
            confine(os.path.dirname(answers))
        given = np.load(texts)
        ends = np.cumsum(given["lengths"])[:-1]
        ids, types = (np.split(given[name], ends) for name in ("ids", "types"))
        taken = Takes(**json.loads(takes))
        session = importlib.import_module(RUNTIMES[module].session).open_session(source, taken)
        found = _run(session, taken, ids, types)
        np.savez(answers, *found.values())
    except Exception as error:  # whatever the runtime raises: its classes have no common base
        Path(reply).write_text(" ".join(f"{type(error).__name__}: {error}".split())[:300], encoding="utf-8")
        return 1
    Path(reply).write_text(json.dumps({"version": session.version, "names": [*found]}), encoding="utf-8")
    return 0


def _run(session: Session, takes: Takes, ids: Sequence[Array], types: Sequence[Array]) -> dict[str, Array]:
    rows: dict[str, list[Array]] = {name: [] for name in session.outputs}
    meanings = {name: takes.inputs.get(name, name) for name in session.inputs}
    # Without a mask padding would count as text, where the length is not fixed.
    masked = takes.positions is not None or "attention_mask" in meanings.values()
    for group in _groups(takes.sequences or len(ids) if masked else 1, len(ids)):
        lengths = [len(ids[index]) for index in group]
        # A batch that the file wants fuller than it is gets its last text again.
        filled = [*group, *group[-1:] * ((takes.sequences or 0) - len(group))]
        shape = (len(filled), takes.positions or max(lengths))
        feeds = {
            "input_ids": _padded([ids[index] for index in filled], shape),
            "token_type_ids": _padded([types[index] for index in filled], shape),
            "attention_mask": _padded([np.ones(len(ids[index])) for index in filled], shape),
            "position_ids": np.broadcast_to(np.arange(shape[1]), shape),
        }
        given = {}
        for name, one in session.inputs.items():
            array = _zeros(one.shape, shape) if meanings[name] == UNUSED else feeds[meanings[name]]
            # Positions may be one row for all sequences.
            given[name] = np.ascontiguousarray(array[:1] if list(one.shape[:1]) == [1] else array, one.dtype)
        for name, answer in session.run(given).items():
            if np.asarray(answer).dtype.kind in "OSU":  # names of labels
                continue
            array = np.asarray(answer, np.float32)
            by_token, by_sequence = _meanings(array.shape, shape, session.outputs[name], takes)
            if by_token:
                rows[name] += [array[index, :length] for index, length in enumerate(lengths)]
            if by_sequence:
                key = f"{name} by sequence" if by_token else name
                rows.setdefault(key, []).append(array[: len(group)])
    return {name: np.concatenate(parts) for name, parts in rows.items() if parts}


def _zeros(declared: Sequence[Any], shape: tuple[int, int]) -> Array:
    """``declared``: the input's shape, whose open sizes are those of the batch, in its order."""
    sizes = [*shape, *[1] * len(declared)]
    return np.zeros([one if isinstance(one, int) else size for one, size in zip(declared, sizes, strict=False)])


def _meanings(
    found: tuple[int, ...], shape: tuple[int, int], declared: Sequence[Any], takes: Takes
) -> tuple[bool, bool]:
    """Whether an answer of the shape ``found`` may have rows of tokens, and whether of sequences."""
    if found[:2] != shape:
        return False, found[:1] == shape[:1]
    if len(found) > 2 or takes.positions is not None:
        return True, len(found) == 2  # as many columns as tokens, perhaps
    # Two axes of which the file fixes the second are columns of sequences, however many those are.
    columns = bool(declared) and isinstance(declared[-1], int)
    return not columns, columns


def _groups(most: int, count: int) -> list[list[int]]:
    """Which texts run together."""
    return [[*range(start, min(start + most, count))] for start in range(0, count, most)]


def _padded(rows: Sequence[Array], shape: tuple[int, int]) -> Array:
    out = np.zeros(shape, np.int64)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
