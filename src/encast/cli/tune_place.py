"""Where ``encast tune`` measures: on the cores of this machine, or on cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from encast.backends.groups import Setup
    from encast.tune.configuration import Cards
    from encast.tune.evaluate import LiveEvaluator
    from encast.tune.requests import Requests
    from encast.tune.space import Space

__all__ = ["Place", "on_cards", "on_cores"]


@dataclass(frozen=True)
class Place:
    """``evaluator``: of the set-ups of ``space``, to be closed. ``key``: what a search that is resumed shares with it.
    ``machine`` or ``cards``: of the configuration. ``first``: how long the timed runs may take, in words.
    """

    space: Space
    evaluator: LiveEvaluator
    key: Mapping[str, Any]
    machine: str | None = None
    cards: Cards | None = None
    first: str = "half a minute"
    legend: str = "instances x threads [up to the longest text, in tokens], ...; tokens of one run"
    devices: tuple[str, ...] = ()

    def words(self, setup: Setup) -> str:
        """A set-up in a few words, as ``legend`` explains them."""
        return setup.text if self.cards is None else f"{setup.batch_tokens} tokens"

    def row(self, trial: Mapping[str, Any]) -> dict[str, Any]:
        """A trial's row of the configuration file: a set-up of cards has no groups and no cores."""
        row = dict(trial)
        if self.cards is not None:
            row["setup"] = {"batch_tokens": row["setup"]["batch_tokens"]}
            del row["cores"]
        return row

    def usage(self, file: Path) -> str:
        """What takes the file."""
        if self.cards is None:
            return f"encast.load(ARTIFACT, config={str(file)!r})"
        options = [f"--device {name}" for name in self.devices]
        if self.cards.dtype is not None:
            options.append(f"--card-dtype {self.cards.dtype}")
        return f"encast serve ARTIFACT {' '.join(options)} --config {file}"


def on_cores(artifact: Path, requests: Requests, options: Mapping[str, Any]) -> Place:
    """``options``: of the evaluator."""
    from encast.machine import usable_cores
    from encast.tune.configuration import machine_fingerprint
    from encast.tune.evaluate import LiveEvaluator
    from encast.tune.space import make_space

    cores, machine = len(usable_cores()), machine_fingerprint()
    return Place(
        make_space(cores, requests.lengths),
        LiveEvaluator(artifact, requests.batch, **options),
        {"machine": machine, "cores": cores},
        machine=machine,
    )


def on_cards(
    artifact: Path, requests: Requests, options: Mapping[str, Any], devices: Sequence[str], dtype: str | None
) -> Place:
    """As ``on_cores``, on ``devices`` in values of ``dtype``. Raises the error of one that cannot be opened."""
    from encast.tune.cards import CardEvaluator
    from encast.tune.configuration import Cards
    from encast.tune.space import make_card_space

    space = make_card_space(len(devices), requests.lengths)
    evaluator = CardEvaluator(artifact, requests.batch, devices=devices, dtype=dtype, **options)
    return Place(
        space,
        evaluator,
        {"cards": list(evaluator.names), "dtype": dtype},
        cards=Cards(evaluator.names, dtype),
        first="minutes where kernels have to be compiled",
        legend="tokens of one batch",
        devices=tuple(devices),
    )
