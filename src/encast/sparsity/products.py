"""Which weights zeros are put into: those of the products inside of the encoder layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from encast.archs import build_graph
from encast.archs.modules import in_other_rows, tensors_of
from encast.errors import CheckpointError, InputError
from encast.importers import Checkpoint
from encast.ir import Graph

__all__ = ["product_rows", "product_weights"]

Array = np.ndarray[Any, Any]


def product_weights(checkpoint: Checkpoint, keep: Sequence[str] = (), names: Iterable[str] | None = None) -> list[str]:
    """The tensors that are weights of products in the encoder layers, each once, in their order, without those that
    match a pattern of ``keep`` (as a shell matches file names), whether name or pattern have the prefix of the encoder
    (``bert.``) or not.

    ``names``: of tensors, to be found among others than the checkpoint's, which may have a prefix more. Raises
    ``InputError`` for a pattern that matches none, ``CheckpointError`` or ``UnsupportedModelError`` for a checkpoint
    that cannot be used.
    """
    return list(product_rows(checkpoint, keep, names))


def product_rows(
    checkpoint: Checkpoint, keep: Sequence[str] = (), names: Iterable[str] | None = None
) -> dict[str, Array | None]:
    """Those of ``product_weights``, and for each row the place that it has in the product, None where that is its own:
    blocks of several outputs are rows that are neighbours there.
    """
    products = list(_products(checkpoint, list(checkpoint.tensors if names is None else names)))
    # Of every pattern the tensors that it matches, by their names or as the graph has them.
    matched = {
        one: {name for name, bare, _ in products if fnmatchcase(name, one) or _matches(bare, one)} for one in keep
    }
    unmatched = next((one for one, kept in matched.items() if not kept), None)
    if unmatched is not None:
        first = products[0][0]
        raise InputError(f"the pattern {unmatched!r} in keep matches none of the {len(products)} weights, as {first!r}")
    kept = {name for some in matched.values() for name in some}
    return {name: rows for name, _, rows in products if name not in kept}


def _matches(bare: str, pattern: str) -> bool:
    """Whether a pattern names a tensor, ``bare`` being its name without the prefix of the encoder, which the pattern
    may have: a checkpoint without a head has none, and gets one where it is trained."""
    prefix, _, rest = pattern.partition(".")
    # "encoder." behind it, so that the rest of "bert.*" is not taken for all there is.
    prefixed = prefix.isidentifier() and rest.partition(".")[0] == bare.partition(".")[0]
    return fnmatchcase(bare, pattern) or (prefixed and fnmatchcase(bare, rest))


def _products(checkpoint: Checkpoint, names: list[str]) -> Iterator[tuple[str, str, Array | None]]:
    """Of every product its tensor, the same without the prefix of the encoder, and ``product_rows``'s places."""
    graph = build_graph(checkpoint)
    # Of a tensor that holds several weights (Modules.parts) the constants are NAME[PART], of several tensors that are
    # one weight (Modules.stack) NAME+NAME.
    constants = dict.fromkeys(node.inputs[1] for node in graph.nodes if node.op == "linear" and node.layer >= 0)
    weights: dict[str, list[str]] = {}
    for one in constants:
        for name in one.partition("[")[0].split("+"):
            weights.setdefault(name, []).append(one)
    for weight, parts in weights.items():
        # Constants have the checkpoint's names without the prefix of the encoder.
        found = [name for name in names if name == weight or name.endswith(f".{weight}")]
        if len(found) != 1:
            raise CheckpointError(
                f"{checkpoint.path}: {len(found)} tensors could be {weight!r}: {', '.join(found)}; save the model alone"
            )
        yield found[0], weight, _places(graph, weight, parts) if any(map(in_other_rows, parts)) else None


def _places(graph: Graph, weight: str, parts: list[str]) -> Array:
    """Of every row of a tensor its place among the rows of the constants that are made of it."""
    ends = np.cumsum([0, *(graph.constants[part].type.shape[0] for part in parts)])
    numbers = {
        part: np.arange(begin, end)[:, None] for part, begin, end in zip(parts, ends[:-1], ends[1:], strict=True)
    }
    return tensors_of(numbers, heads=graph.meta.heads)[weight][:, 0]
