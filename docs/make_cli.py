"""Writes docs/cli.md: every verb of the command line with its arguments, options and help texts.

python docs/make_cli.py
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from typer.models import ArgumentInfo, ParameterInfo

from encast.cli.main import VERBS

PATH = Path(__file__).resolve().parent / "cli.md"
HEAD = """# Command line

Written by `python docs/make_cli.py` from the code; do not edit.

`encast VERB --help` prints the same. `encast --version` prints the version, and `encast --traceback VERB ...` shows
where an error arose. Exit codes: 0 done; 1 a defect of encast; 2 the request cannot be served, or wrong options; 3
done, but for bad rows (`run`); 130 interrupted; 141 the reader of standard output went away; 143 ended by SIGTERM
(`bench`, `launch`, `tune`).
"""


def parameters(function: Callable[..., Any]) -> Iterator[tuple[str, ParameterInfo, Any]]:
    """The names, what typer is told about them, and the defaults."""
    # Not typing.get_type_hints: before Python 3.11 it hides the annotation of a None default inside of an Optional.
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        yield name, typing.get_args(parameter.annotation)[1], parameter.default


def option_row(name: str, info: ParameterInfo, default: Any) -> str:
    # Inside of Annotated, typer keeps the first declared name where a default would stand.
    declared = [*([info.default] if isinstance(info.default, str) else []), *(info.param_decls or [])]
    names = ", ".join(f"`{one}`" for one in declared or [f"--{name.replace('_', '-')}"])
    shown = "" if default in (None, False, inspect.Parameter.empty) else f"`{default}`"
    return f"| {names} | {shown} | {info.help} |"


def verb_lines(verb: str, place: str) -> Iterator[str]:
    module, _, name = place.partition(":")
    function = getattr(importlib.import_module(module), name)
    rows = list(parameters(function))
    arguments = [row for row in rows if isinstance(row[1], ArgumentInfo)]
    options = [row for row in rows if not isinstance(row[1], ArgumentInfo)]
    words = [
        name.upper() if default is inspect.Parameter.empty else f"[{name.upper()}]" for name, _, default in arguments
    ]
    yield f"## `{' '.join(['encast', verb, *words])}`"
    yield ""
    yield (inspect.getdoc(function) or "").replace("``", "`")
    yield ""
    if arguments:
        yield "| argument | default | |"
        yield "| --- | --- | --- |"
        yield from (
            option_row(name, info, default).replace(f"`--{name}`", f"`{name.upper()}`", 1)
            for name, info, default in arguments
        )
        yield ""
    yield "| option | default | |"
    yield "| --- | --- | --- |"
    yield from (option_row(*row) for row in options)
    yield ""


def render() -> str:
    lines = [HEAD]
    for verb, (place, _) in VERBS.items():
        lines += verb_lines(verb, place)
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
