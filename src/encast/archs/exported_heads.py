"""Which outputs of an export are heads, and which of them is meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from encast.archs.export_like import ExportLike, OutputLike
from encast.errors import UnsupportedModelError
from encast.ir import Graph, Node

__all__ = ["Candidates", "above", "candidates", "refuse_several"]

Candidates = list[tuple[OutputLike, list[str]]]


def candidates(export: ExportLike, meant: str | None) -> list[Candidates]:
    """Outputs, and the tasks that they may be of, in groups of which a later one counts where no earlier one fits.

    First come those that may be of the task ``meant``, then all heads, then bare encoders. Raises
    ``UnsupportedModelError`` for single columns that are no start and end.
    """
    found = list(_candidates(export))
    heads = [(one, tasks) for one, tasks in found if tasks != ["features"]]
    chosen = [(one, [meant]) for one, tasks in heads if meant is not None and meant in tasks]
    return [chosen, heads, [(one, tasks) for one, tasks in found if tasks == ["features"]]]


def refuse_several(export: ExportLike, heads: Sequence[tuple[OutputLike, str]]) -> None:
    """Raises ``UnsupportedModelError`` where there is more than one head, each given with its task."""
    if len(heads) < 2:
        return
    tasks = [task for _, task in heads]
    lone = sorted(task for task in tasks if tasks.count(task) == 1)
    shown = ", ".join(f"{one.name!r} ({task})" for one, task in heads[:8])
    what = "export the model with one of these outputs"
    if lone:
        what = f"ask for the task (--task) {' or '.join(map(repr, lone))}, or name it by architectures in config.json"
    raise UnsupportedModelError(
        f"{export.where}: several outputs are heads, {shown}, and an artifact has one: {what}, or take the encoder "
        "alone with the task 'features'"
    )


def _candidates(export: ExportLike) -> Iterator[tuple[OutputLike, list[str]]]:
    """Outputs, and the tasks that they may be of, heads before bare encoders, and the last of all layers first."""
    graph = export.graph
    layers = {
        one.value: sum(node.op == "attention_scores" for node in above(graph, one.value)) for one in export.outputs
    }
    outputs = sorted(export.outputs, key=lambda one: -layers[one.value])
    columns = [one for one in export.outputs if one.kind == "column"]
    if columns:
        if len(columns) == 2 and "end" in columns[0].name and "start" in columns[1].name:
            columns = columns[::-1]  # sorted by name, as TensorFlow does it
        if [one.column for one in columns] != [0, 1] or len({one.value for one in columns}) != 1:
            raise UnsupportedModelError(
                f"{export.where}: the outputs {[one.name for one in columns]} are single columns; question answering "
                "has two, the start and then the end of one product"
            )
        yield columns[0], ["answer"]
    for one in outputs:
        if one.kind == "sequences":
            pools = any(node.op == "pooling" for node in above(graph, one.value))
            if pools or graph.producer(one.value).op in ("normalize", "first_token"):  # type: ignore[union-attr]
                yield one, ["embed"]
    for one in outputs:
        if one.kind == "sequences":
            yield one, ["classify"]
    for one in outputs:
        if one.kind == "rows":
            yield one, ["fill_mask", "tag", "answer"]
    for one in outputs:
        if one.kind == "rows":
            yield one, ["features"]


def above(graph: Graph, value: str) -> list[Node]:
    """The nodes that a value depends on, in order."""
    needed = {value}
    kept = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return kept[::-1]
