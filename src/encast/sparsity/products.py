"""Which weights zeros are put into: those of the products inside of the encoder layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from encast.archs import build_graph
from encast.errors import CheckpointError, InputError
from encast.importers import Checkpoint

__all__ = ["product_weights"]


def product_weights(checkpoint: Checkpoint, keep: Sequence[str] = (), names: Iterable[str] | None = None) -> list[str]:
    """The tensors that are weights of products in the encoder layers, each once, in their order, without those that
    match a pattern of ``keep`` (as a shell matches file names).

    ``names``: of tensors, to be found among others than the checkpoint's, which may have a prefix more. Raises
    ``InputError`` for a pattern that matches none, ``CheckpointError`` or ``UnsupportedModelError`` for a checkpoint
    that cannot be used.
    """
    found = list(_products(checkpoint, list(checkpoint.tensors if names is None else names)))
    unmatched = next((one for one in keep if not any(fnmatchcase(name, one) for name in found)), None)
    if unmatched is not None:
        raise InputError(f"the pattern {unmatched!r} in keep matches none of the {len(found)} weights, as {found[0]!r}")
    return [name for name in found if not any(fnmatchcase(name, one) for one in keep)]


def _products(checkpoint: Checkpoint, names: list[str]) -> Iterator[str]:
    graph = build_graph(checkpoint)
    # Of a tensor that holds several weights (Modules.parts) the constants are NAME[PART], of several tensors that are
    # one weight (Modules.stack) NAME+NAME.
    constants = [node.inputs[1] for node in graph.nodes if node.op == "linear" and node.layer >= 0]
    weights = dict.fromkeys(name for one in constants for name in one.partition("[")[0].split("+"))
    for weight in weights:
        # Constants have the checkpoint's names without the prefix of the encoder.
        found = [name for name in names if name == weight or name.endswith(f".{weight}")]
        if len(found) != 1:
            raise CheckpointError(
                f"{checkpoint.path}: {len(found)} tensors could be {weight!r}: {', '.join(found)}; save the model alone"
            )
        yield found[0]
