"""``encast eval``: a task's metrics on a labelled data set, alone or against another model."""

from __future__ import annotations

import json as json_module
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from encast import engine as engines
from encast.cli.columns import columns_of
from encast.cli.devices import Devices, GpuDtype
from encast.cli.inspect import metric_lines
from encast.cli.progress import Progress
from encast.data.datasets import DATASETS, Dataset, open_dataset
from encast.errors import InputError
from encast.scoring import Scored, compare, score

__all__ = ["eval_command"]


def eval_command(
    artifact: Annotated[Path, typer.Argument(help="A compiled artifact (NAME.encast).")],
    dataset: Annotated[Path, typer.Argument(help=f"Labelled rows: {DATASETS}.")],
    task: Annotated[str, typer.Option(help="The artifact's task, to be sure of it; auto: whichever it is.")] = "auto",
    metric: Annotated[str, typer.Option(help="One metric of the task; auto: all of them.")] = "auto",
    text_column: Annotated[
        str | None, typer.Option(help="The column of the text (question, words), if not called so; for tables.")
    ] = None,
    pair_column: Annotated[str | None, typer.Option(help="The column of the second text (context).")] = None,
    label_column: Annotated[str | None, typer.Option(help="The column of the class (answers, labels).")] = None,
    score_column: Annotated[
        str | None, typer.Option(help="The column of the score, a number (embed, regression), instead of a class.")
    ] = None,
    null_threshold: Annotated[
        float | None,
        typer.Option(
            help="Answer '' where having none scores higher than the best one by more than this; default: 0 for "
            "questions of which some have no answer, else all are answered."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Another artifact, or a checkpoint (measured in exact f32), to compare with; it runs on the CPU."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: the usable cores.")] = None,
    device: Devices = None,
    dtype: GpuDtype = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Measure an artifact on a data set; metrics are points of 100, and go to the artifact's card."""
    from encast.artifact import open as open_artifact
    from encast.artifact import update_card

    named = {"text": text_column, "pair": pair_column, "label": label_column, "score": score_column}
    data = open_dataset(dataset, columns_of(open_artifact(artifact).graph.meta.task, named))
    if limit is not None:
        data = replace(data, rows=data.rows[:limit])
    devices = device or ["cpu"]
    place: dict[str, Any] = {"threads": threads, "device": devices, "dtype": dtype}
    own = _measure(artifact, data, task, metric, null_threshold, place, quiet=json)
    result: dict[str, Any] = _entry(own)
    name = data.short_name
    if devices != ["cpu"]:
        kind = devices[0].partition(":")[0]
        result |= {"device": kind, "dtype": dtype}
        name += f" on {kind}, {dtype or 'as compiled'}"
    if against is not None:
        with _artifact_of(against, own.task) as other_path:
            other = _measure(other_path, data, own.task, metric, null_threshold, {"threads": threads}, quiet=json)
        result["against"] = {"source": against, **_entry(other), **compare(own, other)}
    # Shown before it is written: the card may lie in a folder that is read only.
    if json:
        print(json_module.dumps({"artifact": str(artifact), "dataset": str(dataset), **result}))
    else:
        _show(artifact, name, own, result)
    measured = dict(open_artifact(artifact).card.get("accuracy") or {})
    if "budget" in (before := measured.get(name) or {}):
        result["budget"] = before["budget"]  # these rows chose the artifact, which whoever reads the figure must know
    update_card(artifact, accuracy={**measured, name: result})


def _measure(
    path: Path,
    data: Dataset,
    task: str,
    metric: str,
    null_threshold: float | None,
    place: dict[str, Any],
    *,
    quiet: bool,
) -> Scored:
    """``place``: options of ``encast.load``."""
    began = time.monotonic()
    with engines.load(path, **place) as engine, Progress("rows", quiet=quiet) as progress:
        if task not in ("auto", engine.task):
            raise InputError(f"--task is {task!r}, {path} was compiled for {engine.task!r}")
        found = score(
            engine, data, lambda done: progress.update(done, done / len(data.rows)), null_threshold=null_threshold
        )
    if metric != "auto":
        if metric not in found.metrics:
            raise InputError(f"--metric is {metric!r}; {found.task} on this data set has {', '.join(found.metrics)}")
        found = replace(found, metrics={metric: found.metrics[metric]})
    return replace(found, seconds=time.monotonic() - began)


@contextmanager
def _artifact_of(source: str, task: str) -> Iterator[Path]:
    """The artifact at ``source``, or a checkpoint compiled to exact f32 for as long as this lasts."""
    path = Path(source)
    if (path / "card.json").is_file() or (path / "graph.json").is_file():
        yield path
        return
    from encast.compile import compile

    print(f"encast: compiling {source} to exact f32 to compare with", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="encast-") as folder:
        yield compile(source, Path(folder) / "against.encast", dtype="f32", task=task, exact=True)


def _entry(scored: Scored) -> dict[str, Any]:
    return {
        "task": scored.task,
        "rows": scored.rows,
        "metrics": {name: round(value, 4) for name, value in scored.metrics.items()},
        "seconds": round(scored.seconds, 3),
    }


def _show(artifact: Path, name: str, own: Scored, result: dict[str, Any]) -> None:
    print(f"{artifact} on {name}: {own.task}, {own.rows:,} rows, {own.seconds:.1f} s")
    for line in metric_lines(result):
        print(line)
