"""A process that runs an ONNX file by ONNX Runtime: ``python -m encast.verify.runtime FILE TEXTS ANSWERS TAKES``.

It is apart because the file is anybody's: a loop that never ends, or memory without end, must not take a compilation
with it. ``TEXTS`` and ``ANSWERS`` are ``.npz`` files, ``TAKES`` is a ``Takes`` in JSON; a failure is one line on
standard output and exit code 1.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from encast.launch.process import die_with_parent

__all__ = ["Takes", "main"]

Array = np.ndarray[Any, Any]
_KILL = 9


@dataclass(frozen=True)
class Takes:
    """``inputs``: by the file's names what its inputs are, in the words of transformers, for those that have others;
    ``sequences`` and ``positions``: how many a batch has, None where the file takes any number."""

    inputs: dict[str, str]
    sequences: int | None = None
    positions: int | None = None

    def dump(self) -> str:
        return json.dumps(asdict(self))


def main(source: str, texts: str, answers: str, takes: str) -> int:
    """The names of what ``answers`` holds go to standard output: every output with rows for tokens or for sequences.

    ``texts``: ``ids: i64[tokens]`` and ``types: i64[tokens]`` of all sequences one after the other, and their
    ``lengths``. Rows are f32, without those of padding.
    """
    die_with_parent(_KILL, os.getppid())
    given = np.load(texts)
    ends = np.cumsum(given["lengths"])[:-1]
    try:
        ids, types = (np.split(given[name], ends) for name in ("ids", "types"))
        found = _run(source, Takes(**json.loads(takes)), ids, types)
    except Exception as error:  # whatever the runtime raises: its classes have no common base
        print(" ".join(f"{type(error).__name__}: {error}".split())[:300])
        return 1
    np.savez(answers, *found.values())
    print(json.dumps([*found]))
    return 0


def _run(source: str, takes: Takes, ids: Sequence[Array], types: Sequence[Array]) -> dict[str, Array]:
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    # What the file says, and not what an optimiser makes of it: fused integer products round where the file does not.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    inputs = {one.name: np.int32 if "int32" in one.type else np.int64 for one in session.get_inputs()}
    alone = {one.name for one in session.get_inputs() if list(one.shape or ())[:1] == [1]}
    shapes = {one.name: list(one.shape or ()) for one in session.get_outputs()}
    rows: dict[str, list[Array]] = {name: [] for name in shapes}
    # Without a mask padding would count as text, where the length is not fixed.
    masked = takes.positions is not None or "attention_mask" in [takes.inputs.get(name, name) for name in inputs]
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
        given = {
            name: np.ascontiguousarray(feeds[takes.inputs.get(name, name)][: 1 if name in alone else None], dtype)
            for name, dtype in inputs.items()
        }
        for (name, declared), answer in zip(shapes.items(), session.run([*shapes], given), strict=True):
            array = np.asarray(answer, np.float32)
            by_token, by_sequence = _meanings(array.shape, shape, declared, takes)
            if by_token:
                rows[name] += [array[index, :length] for index, length in enumerate(lengths)]
            if by_sequence:
                key = f"{name} by sequence" if by_token else name
                rows.setdefault(key, []).append(array[: len(group)])
    return {name: np.concatenate(parts) for name, parts in rows.items() if parts}


def _meanings(
    found: tuple[int, ...], shape: tuple[int, int], declared: Sequence[Any], takes: Takes
) -> tuple[bool, bool]:
    """Whether an answer of the shape ``found`` may have rows of tokens, and whether of sequences."""
    if found[:2] != shape:
        return False, found[:1] == shape[:1]
    if len(found) > 2 or takes.positions is not None:
        return True, len(found) == 2  # as many columns as tokens, perhaps
    # Two axes of which the file fixes the second are columns of sequences, however many those are.
    columns = isinstance(declared[-1], int)
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
