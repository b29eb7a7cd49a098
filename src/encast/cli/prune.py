"""``encast prune``: a checkpoint in, the same one with zeros in its weights out."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from encast.cli.progress import Progress
from encast.importers import checkpoint_name
from encast.sparsity import Pattern, PrunedWeight, prune_checkpoint

__all__ = ["prune_command"]

_ACCURACY = "Nothing was trained: this is for trials of speed, and its answers are worth little until it is."


def prune_command(
    source: Annotated[str, typer.Argument(help="A checkpoint folder in the Hugging Face layout, or a hub id.")],
    sparsity: Annotated[float, typer.Option(help="The share of each weight that becomes zero, from 0 to 1.")],
    pattern: Annotated[
        str, typer.Option(help="Of the zeros: OUTPUTSxINPUTS of a block, as 4x1 or 1x4, or unstructured.")
    ] = "4x1",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The new folder; default: the checkpoint's name, pattern and sparsity."),
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="PATTERN: tensors of that name stay; may be given several times.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Put zeros into the products of the encoder layers, by magnitude, and say how many.

    The result is an ordinary checkpoint. Its accuracy is not looked at, and falls with the sparsity.
    """
    blocks = Pattern.parse(pattern)
    target = out or Path(f"{checkpoint_name(source)}-{pattern}-{sparsity:g}")
    with Progress("weights", quiet=json) as progress:
        pruned = prune_checkpoint(
            source, target, pattern=blocks, sparsity=sparsity, keep=keep or [],
            progress=lambda done, total: progress.update(done, done / total),
        )  # fmt: skip
    if json:
        weights = [vars(weight) for weight in pruned]
        document = {"checkpoint": str(target), "pattern": str(blocks), "sparsity": sparsity, "weights": weights}
        typer.echo(json_module.dumps(document, indent=2))
        return
    for line in _table(pruned):
        typer.echo(line)
    typer.echo("")
    typer.echo(f"{target}: {len(pruned)} weights, zeros in blocks of {blocks}. {_ACCURACY}")


def _table(pruned: Sequence[PrunedWeight]) -> Iterator[str]:
    """A line for the weights of all layers that have the same name in them."""
    kinds: dict[tuple[str, tuple[int, ...]], list[PrunedWeight]] = {}
    for weight in pruned:
        kinds.setdefault((re.sub(r"\.[0-9]+\.", ".*.", weight.tensor), weight.shape), []).append(weight)
    names = [f"{name} (x{len(own)})" for (name, _), own in kinds.items()]
    width = max(map(len, [*names, "weight"]))
    yield f"{'weight':<{width}}  {'shape':<10}  {'zeros before':>12}  {'after':>6}"
    for name, ((_, shape), own) in zip(names, kinds.items(), strict=True):
        before = sum(weight.zeros_before for weight in own) / len(own)
        after = sum(weight.zeros_after for weight in own) / len(own)
        yield f"{name:<{width}}  {'x'.join(map(str, shape)):<10}  {before:>12.1%}  {after:>6.1%}"
