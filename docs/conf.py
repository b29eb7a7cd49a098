"""The documentation site: `make docs`. The source folder is the repository's root, so that a link between two Markdown
files leads to the same place on the site and on a code host."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.cli import get_docs_for_click

import encast
from encast.cli.main import VERBS
from encast.knobs import KNOBS

project = "encast"
author = "the encast authors"
release = encast.__version__
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
include_patterns = [
    "*.md",
    "docs/**.md",
    "benchmarks/**.md",
    "core/**/README.md",
    "src/encast/quant/README.md",
    "src/encast/serve/README.md",
    "src/encast/loadtest/README.md",
]
exclude_patterns = [".*", "build", "dist", "shared", "tests"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
templates_path = ["_templates"]
smartquotes = False  # they make one dash of the two of an option
html_theme = "furo"
html_title = "encast"
html_additional_pages = {"index": "to_docs.html"}
html_copy_source = False
html_show_sourcelink = False

default_role = "code"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_use_type_comments = False
python_maximum_signature_line_length = 100


def command_line() -> str:
    """Every verb with its arguments, options and help texts, as typer writes them."""
    pages = []
    for verb, (place, _) in VERBS.items():
        module, _, name = place.partition(":")
        app = typer.Typer(add_completion=False)
        app.command()(getattr(importlib.import_module(module), name))
        command = typer.main.get_command(app)
        page = get_docs_for_click(obj=command, ctx=typer.Context(command), name=f"encast {verb}")
        pages.append(page.replace("# ", "## ", 1).replace("```console", "```text"))
    return "\n".join(pages)


def environment() -> str:
    return "\n".join(f"`{knob.name}` ({knob.accepts})\n: {knob.doc}\n" for knob in KNOBS)


GENERATED = {"docs/reference/cli": command_line, "docs/reference/environment": environment}


def add_generated(app: Any, name: str, source: list[str]) -> None:
    if name in GENERATED:
        source[0] += "\n" + GENERATED[name]()


def setup(app: Any) -> None:
    app.connect("source-read", add_generated)
