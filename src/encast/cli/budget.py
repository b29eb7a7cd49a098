"""``encast compile --max-drop``: the fastest artifact whose metric is within a budget."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from encast import artifact as artifacts
from encast.cli.columns import columns_of
from encast.cli.interrupts import sigterm_interrupts
from encast.cli.progress import Progress
from encast.data.datasets import Dataset, open_dataset
from encast.importers import checkpoint_name

if TYPE_CHECKING:
    from encast.budget import Candidate, Found

__all__ = ["compile_within"]

_SHOWN_LAYERS = 10


@sigterm_interrupts()
def compile_within(
    source: str,
    out: Path | None,
    *,
    max_drop: float,
    data: Path,
    metric: str | None,
    resume: bool,
    task: str | None,
    columns: Mapping[str, str | None],
    sparse: str,
    exact: bool,
    adapter: str | None,
    json: bool,
) -> None:
    """Searches, and prints what was found; the exit code is 0 also where nothing but f32 keeps the budget."""
    from encast.budget import find

    begin = time.perf_counter()
    target = out or Path(f"{checkpoint_name(source)}.encast")
    rows = _open(source, data, task, columns, adapter)
    with Progress("layers", quiet=json) as progress:

        def heard(step: str, done: int, total: int | None) -> None:
            if total is not None:
                progress.update(done, done / total)
            elif not json:
                print(f"encast: {step}", file=sys.stderr)

        found = find(
            source,
            rows,
            out=target,
            task=task,
            metric=metric,
            max_drop=max_drop,
            journal=target.with_name(target.name + ".journal"),
            resume=resume,
            sparse=sparse,
            exact=exact,
            adapter=adapter,
            progress=heard,
        )
    seconds = time.perf_counter() - begin
    if json:
        card = artifacts.open(found.artifact).card
        print(json_module.dumps({"seconds": round(seconds, 3), **found.to_json(), "card": card}, indent=2))
        return
    for line in _lines(found, seconds):
        print(line)


def _open(source: str, data: Path, task: str | None, columns: Mapping[str, str | None], adapter: str | None) -> Dataset:
    if not any(columns.values()):
        return open_dataset(data)
    from encast.archs import build_graph
    from encast.importers import open_checkpoint

    return open_dataset(
        data, columns_of(build_graph(open_checkpoint(source, adapter=adapter), task).meta.task, columns)
    )


def _lines(found: Found, seconds: float) -> Iterator[str]:
    least = found.reference * (1 - found.max_drop)
    yield (
        f"{found.metric} of f32 on {found.data}: {found.reference:.3f} ({found.rows:,} rows); with a drop of "
        f"{100 * found.max_drop:g} % at most it is {least:.3f} at least"
    )
    if found.layers:
        yield from ("", *_layers(found))
    yield from ("", *_candidates(found))
    if found.missed is not None:
        yield from ("", *_missed(found))
    yield ""
    speed = "" if found.chosen.speed is None else f", {found.chosen.speed:.2f} times as fast as f32"
    yield f"{found.artifact}: {found.chosen.text}{speed}; found in {seconds:.1f} s"
    yield "the rows decided, so this metric flatters: measure the artifact on others with `encast eval`"


def _layers(found: Found) -> Iterator[str]:
    """The worst, and all that stay wide."""
    wide = dict(found.chosen.plan.wide)
    shown = [layer for number, layer in enumerate(found.layers) if number < _SHOWN_LAYERS or layer.name in wide]
    width = max(len(layer.name) for layer in shown)
    yield f"{'layer':<{width}} {'share of the loss':>17}  dtype"
    for layer in shown:
        share = "failed" if layer.share is None else f"{layer.share:.1%}"
        yield f"{layer.name:<{width}} {share:>17}  {layer.dtype}"
    if rest := [layer for layer in found.layers if layer not in shown]:
        share = f"{sum(layer.share or 0.0 for layer in rest):.1%}"
        yield f"{f'{len(rest)} others':<{width}} {share:>17}  {found.chosen.plan.dtype}"


def _candidates(found: Found) -> Iterator[str]:
    width = max(len(candidate.text) for candidate in found.candidates)
    yield f"{'candidate':<{width}} {found.metric:>12} {'drop':>8} {'speed':>6}"
    for candidate in found.candidates:
        value = "-" if candidate.metrics is None else f"{candidate.metrics[found.metric]:.3f}"
        drop = "-" if candidate.drop is None else f"{candidate.drop:.2%}"
        speed = "-" if candidate.speed is None else f"{candidate.speed:.2f}"
        yield f"{candidate.text:<{width}} {value:>12} {drop:>8} {speed:>6}  {_verdict(candidate, found)}".rstrip()


def _verdict(candidate: Candidate, found: Found) -> str:
    if candidate.failed is not None:
        return f"failed: {candidate.failed}"
    if candidate == found.chosen:
        return "chosen"
    return "" if candidate.within else "over the budget"


def _missed(found: Found) -> Iterator[str]:
    missed = found.missed
    assert missed is not None
    yield "nothing narrower than f32 keeps the budget"
    if missed.nearest is not None and missed.nearest.drop is not None and missed.over is not None:
        yield (
            f"the nearest, {missed.nearest.text}, drops {missed.nearest.drop:.2%}, which is {missed.over:.2%} over; "
            "give a wider budget, or more rows"
        )
    if missed.layers:
        yield f"the most is lost in {', '.join(missed.layers)}"
