"""A process that runs an ONNX file by ONNX Runtime: ``python -m encast.verify.runtime FILE TEXTS ANSWERS``.

It is apart because the file is anybody's: a loop that never ends, or memory without end, must not take a compilation
with it. ``TEXTS`` and ``ANSWERS`` are ``.npz`` files; a failure is one line on standard output and exit code 1.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from encast.launch.process import die_with_parent

__all__ = ["main"]

Array = np.ndarray[Any, Any]
_KILL = 9


def main(source: str, texts: str, answers: str) -> int:
    """The names of what ``answers`` holds go to standard output: every output with rows for tokens or for sequences.

    ``texts``: ``ids: i64[tokens]`` and ``types: i64[tokens]`` of all sequences one after the other, and their
    ``lengths``. Rows are f32, without those of padding.
    """
    die_with_parent(_KILL, os.getppid())
    given = np.load(texts)
    ends = np.cumsum(given["lengths"])[:-1]
    try:
        found = _run(source, np.split(given["ids"], ends), np.split(given["types"], ends))
    except Exception as error:  # whatever the runtime raises: its classes have no common base
        print(" ".join(f"{type(error).__name__}: {error}".split())[:300])
        return 1
    np.savez(answers, *found.values())
    print(json.dumps([*found]))
    return 0


def _run(source: str, ids: Sequence[Array], types: Sequence[Array]) -> dict[str, Array]:
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    # What the file says, and not what an optimiser makes of it: fused integer products round where the file does not.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    inputs = {one.name: np.int32 if "int32" in one.type else np.int64 for one in session.get_inputs()}
    shapes = {one.name: list(one.shape or ()) for one in session.get_outputs()}
    # Without a mask padding would count as text.
    groups = [[*range(len(ids))]] if "attention_mask" in inputs else [[index] for index in range(len(ids))]
    rows: dict[str, list[Array]] = {name: [] for name in shapes}
    for group in groups:
        lengths = [len(ids[index]) for index in group]
        shape = (len(group), max(lengths))
        feeds = {
            "input_ids": _padded([ids[index] for index in group], shape),
            "token_type_ids": _padded([types[index] for index in group], shape),
            "attention_mask": _padded([np.ones(length) for length in lengths], shape),
            "position_ids": np.broadcast_to(np.arange(shape[1]), shape),
        }
        given = {name: np.ascontiguousarray(feeds[name], dtype) for name, dtype in inputs.items()}
        for (name, declared), answer in zip(shapes.items(), session.run([*shapes], given), strict=True):
            array = np.asarray(answer, np.float32)
            # Two axes of which the file fixes the second are columns of sequences, however many those are.
            if array.shape[:2] == shape and (array.ndim > 2 or not isinstance(declared[-1], int)):
                rows[name] += [array[index, :length] for index, length in enumerate(lengths)]
            elif array.shape[:1] == shape[:1]:
                rows[name].append(array)
    return {name: np.concatenate(parts) for name, parts in rows.items() if parts}


def _padded(rows: Sequence[Array], shape: tuple[int, int]) -> Array:
    out = np.zeros(shape, np.int64)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
