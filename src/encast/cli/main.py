"""``encast``: finds the verb, and turns errors into messages and exit codes.

Exit codes: 0 done; 1 a defect of encast; 2 the request cannot be served (``EncastError``, wrong options); 3 done,
but for bad rows (``run``) or failed requests (``loadtest``); 130 interrupted; 141 the reader of standard output went
away; 143 ended by SIGTERM (``bench``, ``compile --max-drop``, ``compress``, ``launch``, ``loadtest``, ``run``,
``tune``).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from encast.cli.interrupts import Terminated
from encast.errors import EncastError

__all__ = ["VERBS", "main"]

VERBS = {
    "compile": ("encast.cli.compile:compile_command", "Turn a checkpoint into an artifact."),
    "prune": (
        "encast.cli.prune:prune_command",
        "Put zeros into a checkpoint's weights, for trials.",
    ),
    "compress": ("encast.cli.compress:compress_command", "Fine-tune, prune, distil and quantise, by a recipe."),
    "run": ("encast.cli.run:run_command", "Answer the rows of a file."),
    "eval": ("encast.cli.eval:eval_command", "Measure an artifact's accuracy on a labelled data set."),
    "inspect": ("encast.cli.inspect:inspect_command", "Show what an artifact holds and what was fused."),
    "profile": ("encast.cli.profile:profile_command", "Show where the time of a forward goes, against the limit."),
    "kernels": ("encast.cli.kernels:kernels", "List the kernels and what this machine would choose."),
    "doctor": ("encast.cli.doctor:doctor", "Show this machine, and what is wrong with it."),
    "serve": ("encast.cli.serve:serve_command", "Serve artifacts over HTTP and gRPC."),
    "bench": ("encast.cli.bench:bench_command", "Measure runtimes side by side."),
    "bench report": ("encast.cli.bench_report:report_command", "Make a page of what was measured, or compare two."),
    "launch": ("encast.cli.launch:launch_command", "Start instances of a command, each on cores of its own."),
    "tune": ("encast.cli.tune:tune_command", "Find instances, threads and batches for a latency limit."),
    "loadtest": ("encast.cli.loadtest:loadtest_command", "Ask a running server as many clients would."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not _have_streams():
        return 2
    show_traceback = arguments[:1] == ["--traceback"]
    arguments = arguments[1:] if show_traceback else arguments
    try:
        for words in (2, 1):  # "bench report" before "bench"
            verb = " ".join(arguments[:words])
            if verb in VERBS:
                return _run_verb(verb, arguments[words:], show_traceback)
        return _call(_overview(), arguments, "encast")
    except (KeyboardInterrupt, Exception) as error:
        return _report(error, show_traceback)


def _run_verb(verb: str, arguments: list[str], show_traceback: bool) -> int:
    # One app a verb: importing them all for the overview would make it slow.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    def load() -> Callable[..., Any]:
        module, name = VERBS[verb][0].split(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    try:
        function = load()
    except Exception as error:
        return _report(error, show_traceback)
    app.command()(_guarded(function, show_traceback))
    return _call(app, arguments, f"encast {verb}")


def _call(app: typer.Typer, arguments: list[str], name: str) -> int:
    try:
        app(args=arguments, prog_name=name)
    except SystemExit as exit:
        sys.stdout.flush()
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    return 0


def _guarded(function: Callable[..., Any], show_traceback: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except (KeyboardInterrupt, Exception) as error:
            if isinstance(error, (typer.Exit, typer.Abort, typer.BadParameter)):
                raise
            raise typer.Exit(_report(error, show_traceback)) from None

    return run


def _report(error: BaseException, show_traceback: bool) -> int:
    """Says on stderr what went wrong, and returns the exit code for it."""
    if isinstance(error, BrokenPipeError):
        _silence_stdout()
        return 141
    if show_traceback:
        _print("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, KeyboardInterrupt):
        word, code = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
        _say(f"{word}{''.join(f'; {note}' for note in error.args)}")
        return code
    if isinstance(error, EncastError):
        _say(f"error: {error}")
        return 2
    if isinstance(error, OSError):
        # What the machine refuses (a full disk behind standard output, say) is no defect.
        _say(f"error: {': '.join(str(part) for part in (error.filename, error.strerror or error) if part)}")
        if not _can_flush():
            _silence_stdout()
        return 2
    if isinstance(error, MemoryError):
        _say("error: out of memory; free some, or lower --batch-tokens or --instances")
        return 2
    _say(f"error: {type(error).__name__}: {error}")
    _say("this is a defect of encast, please report it; `encast --traceback VERB ...` shows where it happened")
    return 1


def _say(text: str) -> None:
    _print(f"encast: {text}")


def _print(text: str) -> None:
    # Names of files and texts of users may hold what stderr's encoding does not.
    encoding = sys.stderr.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)


def _have_streams() -> bool:
    """Stands in for closed standard streams, lest files get their numbers; False when answers have nowhere to go."""
    missing = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in missing:
        # The lowest free numbers come first, and those are the ones that are missing.
        descriptor = os.open(os.devnull, os.O_RDWR)
        if name == "stderr":
            sys.stderr = open(descriptor, "w")  # noqa: SIM115, for as long as the process lives
    if "stdout" in missing:
        _say("error: standard output is closed; leave it open, or redirect it to /dev/null")
    return "stdout" not in missing


def _can_flush() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _silence_stdout() -> None:
    """Nobody reads standard output: keeps the interpreter from complaining about it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _show_version(wanted: bool) -> None:
    if wanted:
        import encast

        typer.echo(encast.__version__)
        raise typer.Exit


def _overview() -> typer.Typer:
    app = typer.Typer(
        name="encast",
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        help="Compile BERT-family encoders and run them. `encast VERB --help` explains a verb.",
    )

    @app.callback()
    def overview(
        version: Annotated[
            bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None:
        pass

    for verb, (_, text) in VERBS.items():
        app.command(verb, help=text)(lambda: None)
    return app


if __name__ == "__main__":
    sys.exit(main())
