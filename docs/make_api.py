"""Writes docs/api.md: the public names of encast, their signatures and their docstrings.

python docs/make_api.py
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import encast
from encast.knobs import KNOBS
from encast.tasks.answer import Answer
from encast.tasks.classify import Classification
from encast.tasks.fill_mask import Candidate
from encast.tasks.tag import Entity, Tagging, TokenLabel

PATH = Path(__file__).resolve().parent / "api.md"
FUNCTIONS = (encast.compile, encast.load)
PLAIN_DATA = (encast.Batch, encast.QuantSpec, Classification, Answer, Tagging, Entity, TokenLabel, Candidate)
WIDTH = 110


def literal(value: object) -> str:
    return repr(value).replace("'", '"')


def signature(name: str, function: Callable[..., Any]) -> str:
    """The call as one writes it; on lines of its own for each parameter when it is long."""
    shown = inspect.signature(function)
    parts, keyword_only = [], False
    for parameter in shown.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        text = f"{parameter.name}: {parameter.annotation}".replace("'", '"')
        parts.append(text if parameter.default is parameter.empty else f"{text} = {literal(parameter.default)}")
    result = f" -> {shown.return_annotation}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def text_of(documented: object) -> str:
    """The docstring as Markdown, or the one that it sends the reader to see."""
    doc = inspect.getdoc(documented)
    assert doc, f"{documented} has no docstring"
    seen = re.search(r"; see ``(encast\.[\w.]+)``", doc)
    if seen:
        module, _, name = seen[1].rpartition(".")
        return text_of(getattr(importlib.import_module(module), name))
    return doc.replace("``", "`")


def code(text: str) -> Iterator[str]:
    yield "```python"
    yield text
    yield "```"
    yield ""


def engine_lines() -> Iterator[str]:
    yield "## `encast.Engine`"
    yield ""
    yield text_of(encast.Engine)
    yield ""
    members = [(name, member) for name, member in vars(encast.Engine).items() if not name.startswith("_")]
    for name, member in members:
        getter = member.fget if isinstance(member, property) else None
        if getter is not None:
            yield f"### `Engine.{name}`"
            yield ""
            yield from code(f"{name}: {inspect.signature(getter).return_annotation}")
            yield text_of(member)
            yield ""
    for name, member in members:
        if inspect.isfunction(member):
            yield f"### `Engine.{name}`"
            yield ""
            yield from code(signature(f"engine.{name}", member))
            yield text_of(member)
            yield ""


def error_lines(cls: type[Exception], depth: int = 0) -> Iterator[str]:
    yield f"{'  ' * depth}- `{cls.__name__}`: {text_of(cls)}"
    # Those of the tree alone: other modules derive errors of their own, when they have been imported.
    public = [child for child in cls.__subclasses__() if child.__module__ == cls.__module__]
    for child in sorted(public, key=lambda one: one.__name__):
        yield from error_lines(child, depth + 1)


def render() -> str:
    lines = ["# Python API", "", "Written by `python docs/make_api.py` from the docstrings; do not edit.", ""]
    for function in FUNCTIONS:
        lines += [f"## `encast.{function.__name__}`", "", *code(signature(f"encast.{function.__name__}", function))]
        lines += [text_of(function), ""]
    lines += engine_lines()
    lines += ["## Plain data", "", "Requests and answers are frozen dataclasses.", ""]
    for cls in PLAIN_DATA:
        public = cls.__name__ in encast.__all__
        lines += [f"### `{'encast.' if public else ''}{cls.__name__}`", ""]
        fields = []
        for field in dataclasses.fields(cls):
            default = "" if field.default is dataclasses.MISSING else f" = {literal(field.default)}"
            fields.append(f"{field.name}: {field.type}{default}")
        lines += [*code("\n".join(fields)), text_of(cls), ""]
    lines += ["## Errors", "", *error_lines(encast.EncastError), ""]
    lines += ["## Environment", "", "Arguments go before these variables.", ""]
    lines += [f"- `{knob.name}` ({knob.accepts}): {knob.doc}" for knob in KNOBS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
