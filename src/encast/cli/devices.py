"""The options that say which devices run a model, and in which dtype GPUs compute."""

from typing import Annotated

import typer

from encast.backends.devices import CARD_DTYPES

__all__ = ["Devices", "GpuDtype"]

Devices = Annotated[
    list[str] | None,
    typer.Option(
        help="cpu (the default); cuda, or cuda:1 for the second GPU, several times for several GPUs; torch-cpu: a "
        "GPU's steps on the CPU."
    ),
]

GpuDtype = Annotated[
    str | None,
    typer.Option(help=f"Of a GPU: what values are stored and multiplied in, {', '.join(CARD_DTYPES)}."),
]
