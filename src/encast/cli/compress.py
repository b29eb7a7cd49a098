"""``encast compress``: a checkpoint and labelled rows in, a smaller and faster model out, by a recipe."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from encast.cli.columns import columns_of
from encast.cli.interrupts import sigterm_interrupts, uninterrupted
from encast.cli.progress import Progress
from encast.data.datasets import DATASETS, Dataset, Labelled, Question, open_dataset
from encast.data.datasets.table import text_names
from encast.data.readers import format_of, open_rows
from encast.data.rows import Row
from encast.data.texts import read_texts
from encast.errors import InputError, ResourceError, need_modules
from encast.files import write_whole
from encast.importers import open_checkpoint

if TYPE_CHECKING:
    from encast.compress.forecast import Forecast

__all__ = ["compress_command"]


@sigterm_interrupts()
def compress_command(
    source: Annotated[str, typer.Argument(help="A checkpoint folder in the Hugging Face layout, or a hub id.")],
    task: Annotated[str, typer.Option(help="classify (classes or a number), tag, answer or embed.")],
    data: Annotated[
        Path, typer.Option(help=f"A folder with a train and a dev file, or the file of the training rows: {DATASETS}.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The new folder: checkpoints, artifact, result.json.")],
    recipe: Annotated[
        str, typer.Option(help="fine-tune, sparse70, sparse80, sparse90, auto, or a YAML file.")
    ] = "fine-tune",
    dev: Annotated[
        Path | None, typer.Option(help="The file of the rows that decide; default: the folder's dev file.")
    ] = None,
    unlabelled: Annotated[
        Path | None,
        typer.Option(help="More rows, without labels (.jsonl, .csv, .parquet, lines), for stages that distil."),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="What decides, as `encast eval` names it.")] = None,
    text_column: Annotated[str | None, typer.Option(help="The column of the text (question, words).")] = None,
    pair_column: Annotated[str | None, typer.Option(help="The column of the second text (context).")] = None,
    label_column: Annotated[str | None, typer.Option(help="The column of the class (answers, labels).")] = None,
    score_column: Annotated[str | None, typer.Option(help="The column of the score, a number.")] = None,
    train_rows: Annotated[
        int | None, typer.Option(min=1, help="Only so many training rows, chosen at random by --seed.")
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="The share of the metric that may be lost, 0.01 for 1 %, over all stages.")
    ] = None,
    price: Annotated[
        str | None, typer.Option(help="Of this machine: dollars an hour (0.17/h), or a name of the table of prices.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of new heads, the order of rows, dropout.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: the usable cores.")] = None,
    device: Annotated[str | None, typer.Option(help="Of torch: cpu, cuda, cuda:1; default: cuda if there.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was ended: the same bits.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what will be done, how long it takes here, and the disk it needs.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print result.json (with --dry-run: the stages).")] = False,
) -> None:
    """Fine-tune, prune, distil and quantise a model, by a recipe of stages.

    Each stage that trains ends in an ordinary checkpoint with a record of what was done. States are saved every two
    minutes; --resume goes on from the last one. docs/compression.md has the form of a recipe.
    """
    need_modules("train", "torch", "transformers", "msgspec", "yaml", "scipy", "jinja2", "vl_convert")
    with uninterrupted():
        from encast.compress.forecast import forecast
        from encast.compress.pipeline import compress, prepare
        from encast.compress.recipe import load_recipe
        from encast.compress.report import lines, to_page
        from encast.measure.price import parse_price

    stages = load_recipe(recipe) if max_drop is None else load_recipe(recipe).within(max_drop)
    paid = None if price is None else parse_price(price).usd_per_hour
    named = {"text": text_column, "pair": pair_column, "label": label_column, "score": score_column}
    columns = columns_of(task, named)
    train = _sample(open_dataset(data, columns, "train"), train_rows, seed)
    judged = open_dataset(dev or data, columns, "dev") if dev is not None or data.is_dir() else None
    texts = None if unlabelled is None else _unlabelled(unlabelled, train, text_column, pair_column)
    if dry_run:
        context = prepare(
            open_checkpoint(source), stages, task, train, judged, texts, metric, seed, threads, device, paid
        )
        _show_forecast(forecast(source, stages, context), json)
        return
    with ExitStack() as stack:
        shown = _Shown(stack, quiet=json)
        result = compress(
            source, out, task=task, recipe=stages, train=train, dev=judged, unlabelled=texts, metric=metric,
            seed=seed, threads=threads, device=device, usd_per_hour=paid, resume=resume, progress=shown,
        )  # fmt: skip
    page = result.out / "report.html"
    try:
        write_whole(page, to_page(result))
    except OSError as error:
        raise ResourceError(
            f"{page} cannot be written ({error.strerror}); all else is done: make room, and --resume writes it"
        ) from None
    if json:
        typer.echo((result.out / "result.json").read_text(encoding="utf-8"), nl=False)
        return
    for line in lines(result):
        typer.echo(line)


def _unlabelled(path: Path, train: Dataset, text: str | None, pair: str | None) -> Dataset:
    """Rows of the form of the training rows."""
    from encast.compress.checks import need_texts_taught

    need_texts_taught(str(path), train)
    first = train.rows[0]
    if isinstance(first, Question):
        columns = [text or "question", pair or "context"]
    else:
        known = text_names(1 if isinstance(first, Labelled) and isinstance(first.text, str) else 2)
        columns = _columns_of(path, known) if text is None and pair is None else [text or "text", pair or "pair"]
        columns = columns[: len(known[0])]
    rows = list(read_texts(path, columns))
    if not rows:
        raise InputError(f"{path}: holds no rows")
    return Dataset(str(path), "texts", rows)


def _columns_of(path: Path, known: Sequence[tuple[str, ...]]) -> list[str]:
    """Those of the known names that the file's first row has; the usual ones where it has none of them, or no names."""
    present: Mapping[str, object] = {}
    if format_of(path) in ("jsonl", "csv", "parquet"):
        with open_rows(path, []) as rows:
            first = next(iter(rows), None)
        present = first.values if isinstance(first, Row) else present
    return list(next((names for names in known if all(name in present for name in names)), known[0]))


def _show_forecast(forecasts: Iterator[Forecast], json: bool) -> None:
    """A line as soon as its stage was timed."""
    if json:
        typer.echo(json_module.dumps([vars(stage) for stage in forecasts], indent=2))
        return
    from encast.pages.numbers import size

    stages = []
    for stage in forecasts:
        stages.append(stage)
        time = "depends on what it finds" if stage.seconds is None else f"about {_duration(stage.seconds)}"
        steps = f", {stage.steps:,} steps, {stage.tokens:,} tokens" if stage.steps else ""
        typer.echo(f"{stage.name}: {stage.what}{steps}; {time}; leaves {size(stage.disk)}")
    total = sum(stage.seconds or 0.0 for stage in stages)
    most = sum(stage.disk for stage in stages) + max(stage.scratch for stage in stages)
    typer.echo(f"training takes about {_duration(total)} on this machine; {size(most)} of disk are needed at most")


def _duration(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3 h 20 min``."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class _Shown:
    """A progress bar for whatever the run is at."""

    def __init__(self, stack: ExitStack, *, quiet: bool) -> None:
        self._stack, self._quiet = stack, quiet
        self._at: tuple[str, str] | None = None
        self._bar: Progress | None = None

    def __call__(self, stage: str, what: str, done: int, total: int | None) -> None:
        if self._at != (stage, what) or self._bar is None:
            self._stack.close()
            self._at = stage, what
            # A run that goes on may report the thousandth step first.
            before = done, 0.0 if total is None else done / total
            self._bar = self._stack.enter_context(Progress(f"{what} of {stage}", quiet=self._quiet, before=before))
        self._bar.update(done, None if total is None else done / total)


def _sample(data: Dataset, rows: int | None, seed: int) -> Dataset:
    """So many of the rows, in their order, chosen by the seed."""
    if rows is None or rows >= len(data.rows):
        return data
    import numpy as np

    chosen = np.sort(np.random.default_rng(seed).choice(len(data.rows), rows, replace=False))
    return replace(data, rows=[data.rows[index] for index in chosen])
