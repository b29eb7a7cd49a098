"""``encast inspect``: what an artifact holds, and the fusions that were promised against those made."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from encast import _core
from encast import artifact as artifacts
from encast.artifact import Artifact
from encast.crossover import GAIN, MANY_ROWS, MEASURED_ZEROS
from encast.errors import ArtifactError, StrictError
from encast.ir import Node
from encast.ir.blocks import BLOCK_OUTPUTS, GROUP_INPUTS, blocks_beside
from encast.ir.ops import ATTENTIONS
from encast.passes.report import OUTSIDE, FusionReport
from encast.quant import QuantSpec

__all__ = ["inspect_command", "metric_lines", "size", "summary"]


_SHOWN_ZEROS = 0.01
"""Of the blocks of a weight: fewer came by chance, and no table is shown for them."""


def inspect_command(
    artifact: Annotated[Path, typer.Argument(help="A compiled artifact (NAME.encast).")],
    graph: Annotated[bool, typer.Option("--graph", help="Print the graph instead, a line a value.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan for this machine instead.")] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Fail if a fusion that the config promises, or --sparse asks for, is missed."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what an artifact holds: fusions, dtypes, zeros, sizes, accuracy. Every checksum is verified."""
    opened = artifacts.open(artifact)
    opened.verify()
    report = FusionReport.from_json(_fact(opened, "fusions"))
    shown: dict[str, Any] = {}
    if graph:
        shown["graph"] = str(opened.graph)
    if plan:
        from encast.lower import Target, lower

        shown["plan"] = lower(opened.graph, opened.tensors, Target.here())
    if json:
        document = {"artifact": str(opened.path), "meta": opened.graph.meta.to_json(), "card": opened.card}
        document |= {"zeros": {"isa": _isa(opened), "products": list(_products(opened, report))}, **shown}
        typer.echo(json_module.dumps(document, indent=2))
    else:
        for text in shown.values():
            typer.echo(text.rstrip("\n"))
        if not shown:
            for line in summary(opened):
                typer.echo(line)
    if strict and report.misses:
        raise StrictError(report.describe_misses())


def _fact(opened: Artifact, *names: str) -> Any:
    """An entry of the card, which has a right checksum and may still come from another program."""
    value: Any = opened.card
    for name in names:
        if not isinstance(value, dict) or name not in value:
            raise ArtifactError(f"{opened.path}: the card lacks {'/'.join(names)}; compile the checkpoint again")
        value = value[name]
    return value


def summary(opened: Artifact) -> Iterator[str]:
    """The facts of an artifact for people, a line each; raises ``ArtifactError`` if its card lacks one."""
    meta = opened.graph.meta
    source = _fact(opened, "source", "source")
    adapter = opened.card["source"].get("adapter")
    yield f"{'source':<12}{source}" + (f", adapter {adapter}" if adapter else "")
    yield (
        f"{'model':<12}{meta.arch}, {meta.task}: {meta.layers} layers, hidden {meta.hidden}, "
        f"{meta.heads} heads, vocabulary {meta.vocab:,}, texts up to {opened.max_length} tokens"
    )
    outputs = [f"{name} {opened.graph.type_of(value)}" for name, value in opened.graph.outputs.items()]
    yield f"{'outputs':<12}{', '.join(outputs)}"
    yield f"{'numbers':<12}{_numbers(opened)}; {meta.math} math"
    if "quantised" in opened.card:
        yield from _stored(opened)
    yield f"{'size':<12}" + ", ".join(f"{name} {size(count)}" for name, count in _fact(opened, "sizes").items())
    yield f"{'weights':<12}" + ", ".join(f"{dtype} {size(count)}" for dtype, count in _weight_bytes(opened).items())
    if verified := opened.card.get("verified"):
        yield f"{'verified':<12}{_verified(verified)}"
    yield f"{'made':<12}{_fact(opened, 'created')} by encast {_fact(opened, 'encast_version')}"
    for name, result in dict(_fact(opened, "accuracy")).items():
        try:
            lines = [f"{name}: {result['task']}, {result['rows']:,} rows", *metric_lines(result)]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            lines = []
        if not lines or not all(map(str.isprintable, lines)):  # not by `encast eval`: as it stands
            shown = name if name.isprintable() else json_module.dumps(name)
            lines = [f"{shown}: {json_module.dumps(result, ensure_ascii=False)}"]
        lines[0] = f"{'accuracy':<12}{lines[0]}"
        yield from lines
    yield ""
    report = FusionReport.from_json(_fact(opened, "fusions"))
    yield from _fusion_table(opened, report)
    yield from _zeros_table(opened, report)
    if report.misses:
        yield ""
        yield from report.describe_misses().splitlines()


def metric_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """What ``encast eval`` found, a line a metric: points of 100, the other model's and the difference; agreement.

    And the budget that ``encast compile --max-drop`` kept to.
    """
    other: Mapping[str, Any] = result.get("against") or {"metrics": {}}
    for name, value in result["metrics"].items():
        line = f"  {name:<20} {value:8.3f}"
        if name in other["metrics"]:
            line += f"   against {other['metrics'][name]:8.3f}   {value - other['metrics'][name]:+.3f}"
        yield line
    for name, value in other.get("agreement", {}).items():
        yield f"  {name:<20} {value:8.6f}"
    if budget := result.get("budget"):
        yield (
            f"  chosen on these rows: {budget['metric']} at most {100 * budget['max_drop']:g} % below the "
            f"{budget['f32']:.3f} of f32"
        )


def _verified(found: Mapping[str, Any]) -> str:
    """As ``encast.verify`` writes it, or as it stands."""
    try:
        if "skipped" in found:
            line = f"not: {found['skipped']}"
        else:
            limit = "no limit: its ranges are fixed" if found["limit"] is None else f"limit {found['limit']:g}"
            line = (
                f"{found['output']} is {found['of']} of {found['runtime']} but for {found['relative']:.1e} of its size "
                f"(cosine {found['cosine']:.6f} at least, {found['tokens']} random tokens; "
                f"{limit})"
            )
            if narrow := found.get("narrow"):
                line += (
                    f"; {narrow['dtype']} is f32 but for {narrow['relative']:.1e} of its size "
                    f"(cosine {narrow['cosine']:.6f} at least)"
                )
    except (KeyError, TypeError, ValueError):
        line = ""
    return line if line and line.isprintable() else json_module.dumps(found)


def size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def _numbers(opened: Artifact) -> str:
    spec = QuantSpec.from_json(_fact(opened, "quant"))
    kept = "".join(f", {pattern} {dtype}" for pattern, dtype in spec.keep)
    if spec.dtype != "int8":
        return spec.dtype + kept
    zero = {"always": "with zero points", "never": "symmetric", "after_activation": "zero points after activations"}
    scales = "a scale a row" if spec.activations == "dynamic" else f"fixed scales ({_source_of_ranges(opened, spec)})"
    moved = "" if spec.move_outliers is None else f", outliers moved to weights ({spec.move_outliers:g})"
    return f"int8, weights a scale an output, activations {scales}, {zero[spec.zero_point]}{moved}{kept}"


def _source_of_ranges(opened: Artifact, spec: QuantSpec) -> str:
    ranges = opened.card["quantised"].get("ranges") if isinstance(opened.card.get("quantised"), dict) else None
    return "the checkpoint's" if isinstance(ranges, dict) and ranges.get("used") is True else spec.ranges


def _stored(opened: Artifact) -> Iterator[str]:
    """What became of the integers and fixed ranges of a checkpoint that is quantised already."""
    int8 = QuantSpec.from_json(_fact(opened, "quant")).dtype == "int8"
    kept, ranges = _fact(opened, "quantised", "kept"), _fact(opened, "quantised", "ranges")
    try:
        pairs = [(int(rows), int(of)) for rows, of in kept.values()]
        fixed, values, used = int(ranges["stored"]), int(ranges["values"]), bool(ranges["used"])
        left_out = int(_fact(opened, "quantised", "left_out"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{opened.path}: the card's quantised is malformed: {error}") from None
    whole, parts = sum(rows == of for rows, of in pairs), [pair for pair in pairs if 0 < pair[0] < pair[1]]
    said = [f"the checkpoint's in {whole} of {len(pairs)} int8 products" if int8 else "the checkpoint's, dequantised"]
    if parts:
        said.append(f"in {sum(rows for rows, _ in parts)} of {sum(of for _, of in parts)} outputs of {len(parts)} more")
    yield f"{'integers':<12}{', '.join(said)}{'; the others rounded anew' if whole < len(pairs) else ''}"
    if fixed and int8:
        took = "and all are used" if used else "which are not used"
        yield f"{'ranges':<12}the checkpoint fixes those of {fixed} of {values} values that products read, {took}"
    if left_out:
        yield f"{'left out':<12}{left_out} roundings of the checkpoint that no product with a weight reads"


def _weight_bytes(opened: Artifact) -> Counter[str]:
    counts: Counter[str] = Counter()
    for tensor in opened.tensors.values():
        counts[tensor.dtype] += tensor.nbytes
    return counts


def _fusion_table(opened: Artifact, report: FusionReport) -> Iterator[str]:
    """A row a layer: fusions made of fusions expected, and the dtypes of the layer's products."""
    products: dict[int, Counter[str]] = {}
    for node in opened.graph.nodes:
        if node.op in ATTENTIONS:
            products.setdefault(node.layer, Counter())[f"{node.attrs['products']} attention"] += 1
        if node.op.startswith("linear"):
            products.setdefault(node.layer, Counter())[_dtype_of(node)] += 1
    layers = sorted({layer for rows in report.counts.values() for layer in rows} | set(products), key=_outside_last)
    rows = [["layer", *report.counts, "products"]]
    for layer in layers:
        cells = ["outside" if layer == OUTSIDE else str(layer)]
        for fusion in report.counts:
            expected, actual = report.counts[fusion].get(layer, (0, 0))
            cells.append(f"{actual}/{expected}{' MISSED' if actual < expected else ''}" if expected or actual else "-")
        shown = [
            f"{count} {dtype}{_left(opened, layer, dtype) if 'sparse' in dtype else ''}"
            for dtype, count in products.get(layer, {}).items()
        ]
        cells.append(", ".join(shown) or "-")
        rows.append(cells)
    yield "fusions made / expected, and the dtypes of products"
    yield from _aligned(rows)


def _dtype_of(node: Node) -> str:
    """``f32``, ``int8``, ``sparse_int8``, or ``int8+sparse_int8`` for a product that has both forms."""
    dtype = node.op.removeprefix("linear").removeprefix("_") or "f32"
    return f"{dtype}+sparse_int8" if _form(node) == "both" else dtype


def _form(node: Node) -> str:
    if node.op == "linear_sparse_int8":
        return "sparse"
    return "both" if node.op == "linear_int8" and blocks_beside(node.inputs) else "dense"


def _left(opened: Artifact, layer: int, dtype: str) -> str:
    """The share of their products that a layer's linears of a sparse ``dtype`` compute without zeros."""
    type_of = opened.graph.type_of
    sparse = [node for node in opened.graph.nodes if node.op.startswith("linear") and node.layer == layer]
    sparse = [node for node in sparse if _dtype_of(node) == dtype]
    values = [(blocks_beside(node.inputs) if _form(node) == "both" else node.inputs[1:])[0] for node in sparse]
    left = sum(int(type_of(name).shape[0]) * BLOCK_OUTPUTS * GROUP_INPUTS for name in values)
    whole = sum(int(type_of(node.inputs[0]).shape[1]) * int(type_of(node.outputs[0]).shape[1]) for node in sparse)
    return f" ({left / whole:.0%} left)"


def _isa(opened: Artifact) -> str:
    """The level that ``--sparse auto`` decided for, or this machine's."""
    return str(opened.card.get("sparse_for") or _core.isa_best())


def _products(opened: Artifact, report: FusionReport) -> Iterator[dict[str, Any]]:
    """Of every int8 product its zeros, whether it leaves them out, and what that is expected to bring: the worst and
    the best shape, or None where nothing was measured."""
    gain, type_of = GAIN.get(_isa(opened)), opened.graph.type_of
    for node in opened.graph.nodes:
        found = report.zeros.get(node.name)
        if node.op not in ("linear_int8", "linear_sparse_int8") or found is None:
            continue
        few, many = (None, None) if gain is None else gain.expected(found.zero)
        yield {
            "name": node.name,
            "layer": node.layer,
            "outputs": int(type_of(node.outputs[0]).shape[1]),
            "inputs": int(type_of(node.inputs[0]).shape[1]),
            **found._asdict(),
            "sparse": _form(node) != "dense",
            "form": _form(node),
            "gain_few_rows": few,
            "gain_many_rows": many,
        }


def _zeros_table(opened: Artifact, report: FusionReport) -> Iterator[str]:
    """A row an int8 product; nothing where zeros were neither asked for nor are worth a look."""
    products = list(_products(opened, report))
    if not any(one["sparse"] or one["zero"] >= _SHOWN_ZEROS for one in products):
        return
    isa = _isa(opened)
    gain = GAIN.get(isa)
    yield ""
    yield (
        f"zeros: blocks of {BLOCK_OUTPUTS} outputs x 1 input, and how many times as fast as the dense product the "
        f"sparse one is expected to be, at {isa}{'' if gain else ', which was not measured'}"
    )
    heads = [] if gain is None else [f"{gain.few_rows} rows", f"{MANY_ROWS:,} rows"]
    rows = [["product", "outputs x inputs", "zero", "left", "is", *heads]]
    for one in products:
        times = [] if gain is None else [_times(one["zero"], one[f"gain_{rows}_rows"]) for rows in ("few", "many")]
        shape = f"{one['outputs']}x{one['inputs']}"
        rows.append([one["name"], shape, f"{one['zero']:.1%}", f"{one['left']:.1%}", one["form"], *times])
    yield from _aligned(rows)


def _times(zero: float, ends: tuple[float, float]) -> str:
    """``1.7 to 2.3``; outside of what was measured the nearest figure, as a bound."""
    if zero < MEASURED_ZEROS[0]:
        return f"below {ends[1]:.1f}"
    if zero > MEASURED_ZEROS[-1]:
        return f"above {ends[0]:.1f}"
    return f"{ends[0]:.1f} to {ends[1]:.1f}"


def _outside_last(layer: int) -> tuple[bool, int]:
    return layer == OUTSIDE, layer


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
