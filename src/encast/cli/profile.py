"""``encast profile``: where the time of a forward goes, against what this machine can do."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from encast import artifact as artifacts
from encast import ceilings as machine_ceilings
from encast import engine as engines
from encast._core import Plan
from encast.backends.cpu import CpuRunnable
from encast.backends.devices import CARD_DTYPES, need_card
from encast.ceilings import Ceilings
from encast.ceilings.card import find_card
from encast.data import FORMATS
from encast.data.output import OutputFile
from encast.data.texts import read_texts
from encast.engine import BATCH_TOKENS, Engine
from encast.errors import InputError, need_modules
from encast.measure.lengths import MOST_SEQUENCES, read_histogram
from encast.pages.document import PACKAGES
from encast.profile.ablate import Ablated
from encast.profile.ablate import ablate as run_ablations
from encast.profile.document import chrome_trace, to_document
from encast.profile.measure import Runner, measure
from encast.profile.plot import to_page
from encast.profile.report import Kernel, Profile, build_profile, step_kernels
from encast.profile.table import ablation_lines, table_lines
from encast.profile.workload import Workload, of_batches, of_lengths
from encast.tasks.embed_tokens import token_rows
from encast.tasks.table import file_task

if TYPE_CHECKING:
    from encast.profile.card import CardProfile

__all__ = ["profile_command"]


def profile_command(
    artifact: Annotated[Path, typer.Argument(help="A compiled artifact (NAME.encast).")],
    batch: Annotated[
        int | None, typer.Option(min=1, max=MOST_SEQUENCES, help="Sequences of random ids; default: 8.")
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of each of them; default: 128.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="A histogram instead: LENGTH:COUNT,... or a JSON or CSV file of such pairs."),
    ] = None,
    texts: Annotated[
        str | None, typer.Option(help="A file of texts instead, as `encast run` reads it; - is standard input.")
    ] = None,
    input_format: Annotated[
        str, typer.Option(help=f"Of --texts: {', '.join(FORMATS)}; auto: by the name of the file, else text.")
    ] = "auto",
    text_column: Annotated[str | None, typer.Option(help="The column of the text (question, query).")] = None,
    pair_column: Annotated[str | None, typer.Option(help="The column of the second text, if there is one.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one run of the model.")] = BATCH_TOKENS,
    output: Annotated[
        str | None, typer.Option(help="The output to compute; default: the head's, else last_hidden_state.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads; default: the usable cores.")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, max=3600.0, help="How long to measure, after warming up.")] = 3.0,
    repeats: Annotated[int | None, typer.Option(min=1, help="Rounds to measure, instead of --seconds.")] = None,
    device: Annotated[str | None, typer.Option(help="A card: cuda, cuda:1, ...; default: the processor.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"With --device, of values: {', '.join(CARD_DTYPES)}; default: as compiled.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random ids.")] = 0,
    layers: Annotated[bool, typer.Option("--layers", help="A row for every layer's steps, not one for all.")] = False,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write everything as JSON; - is standard output, instead of the table."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write one run as a trace for chrome://tracing or Perfetto; - likewise."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a roofline plot as one HTML file; - likewise.")
    ] = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Leave out one optimisation at a time, and show what each is worth.")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="For --ablate, what the artifact was compiled from; default: where its card says it was."),
    ] = None,
) -> None:
    """Show where the time of a forward goes: every step beside its bound.

    A step's bound is the larger of its operations at the measured instruction peak and its bytes at the measured
    bandwidth of the level of memory in which they live (`encast doctor --measure`).
    """
    paths = {
        option: path for option, path in (("--json", json), ("--trace", trace), ("--plot", plot)) if path is not None
    }
    if checkpoint is not None and not ablate:
        raise InputError("--checkpoint is for --ablate; give both or neither")
    if device is None and dtype is not None:
        raise InputError("--dtype is for cards; give --device too")
    if device is not None:
        need_card(device)
        others = {"--threads": threads, "--trace": trace, "--plot": plot, "--ablate": ablate or None}
        if given := [option for option, value in others.items() if value is not None]:
            raise InputError(f"{given[0]} is for the processor; leave it out with --device")
    if len(set(paths.values())) < len(paths):
        raise InputError(f"{' and '.join(paths)} need a file each; two of them name the same one")
    if plot is not None:
        need_modules("plot", *PACKAGES)  # said before anything is measured
    quiet = "-" in paths.values()
    with ExitStack() as stack:
        # Tried before any work.
        files: dict[str, OutputFile] = {}
        for option, path in paths.items():
            files[option] = OutputFile(path, option)
            stack.callback(files[option].discard)
        engine = stack.enter_context(
            engines.load(artifact, device=device or "cpu", dtype=dtype, threads=threads, batch_tokens=batch_tokens)
        )
        source = input_format, text_column, pair_column
        if device is not None:
            workload = _workload(engine, batch, length, lengths, texts, source, batch_tokens, seed)
            found = _profile_card(artifact, engine, device, output, workload, seconds, repeats, layers)
            if not quiet:
                for line in found.lines():
                    typer.echo(line)
            for file in files.values():
                file.append(_json_text(found.document()).encode())
                file.finish()
            return
        runnable = engine.runnable
        assert isinstance(runnable, CpuRunnable)
        plan = Plan(runnable.plan)
        chosen = _output(plan.outputs, output)
        workload = _workload(engine, batch, length, lengths, texts, source, batch_tokens, seed)
        ceilings, note = _ceilings()
        profile = _profile(artifact, runnable, plan, chosen, workload, ceilings, note, seconds, repeats, layers)
        if not quiet:
            for line in table_lines(profile):
                typer.echo(line)
        ablations = None
        if ablate:
            runner = _runner(runnable, plan, chosen, workload)
            ablations = _ablations(artifact, runner, plan, checkpoint, seconds, repeats, quiet=quiet)
        texts_of = {
            "--json": lambda: _json_text(to_document(profile, ablations)),
            "--trace": lambda: _json_text(chrome_trace(profile)),
            "--plot": lambda: to_page(profile),
        }
        for option, file in files.items():
            file.append(texts_of[option]().encode("utf-8", "replace"))
            file.finish()
        wrong = [one.name for one in ablations or [] if one.wrong]
        if wrong:
            raise RuntimeError(f"answers move by more than arithmetic explains without {', '.join(wrong)}")


def _ablations(
    artifact: Path,
    runner: Runner,
    plan: Plan,
    checkpoint: Path | None,
    seconds: float,
    repeats: int | None,
    quiet: bool,
) -> list[Ablated]:
    terminal = sys.stderr.isatty()

    def say(what: str) -> None:
        if terminal:
            typer.echo(f"\r\033[Kwithout {what}", err=True, nl=False)

    selected = plan.outputs[runner.output].rows == "selected"
    found = list(
        run_ablations(
            artifacts.open(artifact),
            runner,
            selected=selected,
            checkpoint=checkpoint,
            seconds=seconds,
            rounds=repeats,
            say=say,
        )
    )
    if terminal:
        typer.echo("\r\033[K", err=True, nl=False)
    if not quiet:
        typer.echo("")
        for line in ablation_lines(found):
            typer.echo(line)
    return found


def _json_text(document: Mapping[str, Any]) -> str:
    return json_module.dumps(document, indent=None if "traceEvents" in document else 2) + "\n"


def _output(known: Collection[str], wanted: str | None) -> str:
    if wanted is None:
        return next((name for name in known if name != "last_hidden_state"), "last_hidden_state")
    if wanted not in known:
        raise InputError(f"--output is {wanted!r}; this artifact has {', '.join(known)}")
    return wanted


def _workload(
    engine: Engine,
    batch: int | None,
    length: int | None,
    lengths: str | None,
    texts: str | None,
    source: tuple[str, str | None, str | None],
    batch_tokens: int,
    seed: int,
) -> Workload:
    if sum(((batch, length) != (None, None), lengths is not None, texts is not None)) > 1:
        raise InputError("--batch and --length, --lengths, and --texts each say what to run; give one of them")
    if texts is not None:
        return _of_texts(engine, texts, *source)
    if lengths is not None:
        drawn = read_histogram(lengths)
        return of_lengths(f"{len(drawn)} sequences by {lengths[:60]}", drawn, engine.meta, batch_tokens, seed)
    batch, length = batch or 8, length or 128
    # One batch, however many tokens: it is what was asked for.
    return of_lengths(f"{batch}x{length}", [length] * batch, engine.meta, max(batch_tokens, batch * length), seed)


def _of_texts(engine: Engine, path: str, format: str, text_column: str | None, pair_column: str | None) -> Workload:
    spec = file_task(engine.task)
    columns = [text_column or spec.text, *([pair_column] if pair_column else [])]
    session = engine.session
    prompt = session.prompt(None) if engine.meta.can("embed", "embed_sparse", "embed_tokens") else ""
    rows: list[str | tuple[str, str]] = []
    for text in read_texts(path, columns, format):
        rows.append(prompt + text if isinstance(text, str) else text)
        if len(rows) > MOST_SEQUENCES:
            raise InputError(f"{path}: more than {MOST_SEQUENCES} texts; give some of them")
    if session.token_form is None:
        pieces = session.stream(rows)
    else:
        texts = [row for row in rows if isinstance(row, str)]
        pieces = session.id_pieces(token_rows(session.tokenizer, session.token_form, "document", texts))
    return of_batches(f"{len(rows)} texts of {path}", (piece.batch for piece in pieces))


def _ceilings() -> tuple[Ceilings, str | None]:
    kept = machine_ceilings.find()
    if kept.ceilings is not None:
        return kept.ceilings, None
    if sys.stderr.isatty():
        typer.echo("encast: measuring this machine's ceilings", err=True)
    problem = "" if kept.problem is None else f" ({kept.problem})"
    note = f"ceilings were measured just now{problem}; to measure them once and keep them: encast doctor --measure"
    return machine_ceilings.measure(), note


def _runner(runnable: CpuRunnable, plan: Plan, output: str, workload: Workload) -> Runner:
    return Runner(runnable, output, workload, selected=plan.outputs[output].rows == "selected")


def _profile(
    artifact: Path,
    runnable: CpuRunnable,
    plan: Plan,
    output: str,
    workload: Workload,
    ceilings: Ceilings,
    note: str | None,
    seconds: float,
    repeats: int | None,
    layers: bool,
) -> Profile:
    from encast import _core

    catalog = {row["name"]: Kernel(row["name"], row["isa"], row["min_rows"]) for row in _core.kernels()}
    kernels = step_kernels([names for _, names in runnable.kernels()], catalog)
    runner = _runner(runnable, plan, output, workload)
    measured = measure(runner, len(plan.steps), seconds=seconds, repeats=repeats)
    return build_profile(
        str(artifact),
        output,
        plan,
        kernels,
        workload,
        ceilings,
        runnable.threads,
        measured,
        layers=layers,
        ceilings_note=note,
    )


def _profile_card(
    artifact: Path,
    engine: Engine,
    device: str,
    output: str | None,
    workload: Workload,
    seconds: float,
    repeats: int | None,
    layers: bool,
) -> CardProfile:
    # Here: they import PyTorch.
    from encast.backends.gpu.card import measure as measure_card
    from encast.backends.gpu.device import card_name
    from encast.backends.gpu.runnable import GpuRunnable
    from encast.profile.card import profile_card

    runnable = engine.runnable
    assert isinstance(runnable, GpuRunnable)
    chosen = _output(runnable.outputs, output)
    ceilings, problem = find_card(card_name(runnable.device))
    if ceilings is None:
        why = "" if problem is None else f" ({problem})"
        typer.echo(
            f"encast: measuring the card's ceilings{why}; to measure them once and keep them: encast doctor --measure "
            f"--device {device}",
            err=True,
        )
        ceilings = measure_card(*need_card(device))
    return profile_card(
        str(artifact), runnable, chosen, workload, ceilings, seconds=seconds, repeats=repeats, layers=layers
    )
