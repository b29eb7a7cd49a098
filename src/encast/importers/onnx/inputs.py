"""The inputs of an export: what they are, and which of their sizes the file fixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import quote
from encast.importers.model_inputs import INPUTS, OTHER_NAMES, Inputs, meaning
from encast.importers.onnx.model import Model
from encast.importers.onnx.reader import Probe

__all__ = ["FEEDS", "INTEGERS", "LONGEST", "SHORTEST", "check_inputs"]

FEEDS: dict[str, Callable[[Probe], np.ndarray[Any, Any]]] = {
    "input_ids": lambda probe: probe.ids,
    "attention_mask": lambda probe: probe.mask,
    "token_type_ids": lambda probe: probe.types,
    "position_ids": lambda probe: np.broadcast_to(np.arange(probe.ids.shape[1]), probe.ids.shape),
}
"""What a probe has for each of ``INPUTS``."""

INTEGERS = {6: np.int32, 7: np.int64}
SHORTEST, LONGEST = 5, 2048
"""Positions of a probe: of the first one, and the most that a file may fix or have a table for."""
_MOST_SEQUENCES = 1024
_MOST_PAIRS = 1 << 24
"""Of a query and a key, in all sequences of a batch: masks are arrays of them."""


def check_inputs(model: Model) -> Inputs:
    """Raises ``UnsupportedModelError`` for inputs of other names, types or sizes than an encoder's, and
    ``CheckpointError`` where one input has other sizes than another."""
    names: dict[str, str] = {}
    fixed: list[int | None] = [None, None]
    for one in model.inputs:
        if one.name in model.initializers:
            continue
        what = meaning(one.name)
        if what is None:
            others = ", ".join(f"{name} for {meant}" for name, meant in OTHER_NAMES.items())
            raise UnsupportedModelError(
                f"{model.where}: has an input {quote(one.name)}; the inputs of an encoder are {', '.join(INPUTS)}, or "
                f"{others}: give the export these input_names"
            )
        if what in names.values():
            raise UnsupportedModelError(
                f"{model.where}: {quote(one.name)} is a second input for {what}; an encoder has one"
            )
        if one.dtype not in INTEGERS or (one.shape is not None and len(one.shape) != 2):
            raise UnsupportedModelError(
                f"{model.where}: the input {quote(one.name)} is of data type {one.dtype} and shape {one.shape}; "
                "integers [batch, sequence] are needed"
            )
        names[one.name] = what
        for axis, size in enumerate(one.shape or ()):
            if what == "position_ids" and axis == 0 and size == 1:
                continue  # the same for every sequence
            if size is not None and fixed[axis] not in (None, size):
                raise CheckpointError(
                    f"{model.where}: the input {quote(one.name)} has the shape {one.shape}, an input before it "
                    f"{fixed[axis]} in the place of {size}; the file is damaged"
                )
            fixed[axis] = fixed[axis] if size is None else size
    sequences, positions = fixed
    if positions is not None and not SHORTEST <= positions <= LONGEST:
        raise UnsupportedModelError(
            f"{model.where}: the inputs have the fixed length {positions}; {SHORTEST} to {LONGEST} are read: export "
            "the model with a dynamic axis for the sequence, or for texts of such a length"
        )
    if sequences is not None and not 1 <= sequences <= _MOST_SEQUENCES:
        raise UnsupportedModelError(
            f"{model.where}: the inputs have the fixed batch {sequences}; 1 to {_MOST_SEQUENCES} are read: export the "
            "model with a dynamic axis for the batch"
        )
    if sequences is not None and positions is not None and sequences * positions**2 > _MOST_PAIRS:
        raise UnsupportedModelError(
            f"{model.where}: the inputs have the fixed sizes [{sequences}, {positions}]; up to "
            f"{_MOST_PAIRS // positions**2} sequences of that length are read: export the model with a dynamic axis "
            "for the batch"
        )
    return Inputs(names, sequences, positions)
